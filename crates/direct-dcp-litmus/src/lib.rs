//! Two small checkers that decide whether the gather protocol is correct, with no GPU.
//!
//! - [`model`] answers "may this read still return the old value?" for a handful of instructions:
//!   it enumerates the candidate executions of a program and applies the axioms of the PTX memory
//!   consistency model (PTX ISA, chapter 8) to each.
//! - [`slots`] answers "may a peer overwrite what I am still reading?" for whole sequences of calls:
//!   it explores every interleaving of a few ranks over a few slots. It assumes that publishing and
//!   observing a signal order memory, which is what [`model`] establishes.
//!
//! A protocol change is argued here first: the tests spell out the instruction sequences of the
//! kernels, and beside each the mistakes that must be caught.

pub mod model;
pub mod slots;
