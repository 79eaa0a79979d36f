//! The PTX memory consistency model (PTX ISA, chapter 8), for programs of a few dozen operations.
//!
//! Write a [`Program`], name an outcome (which write each read of interest returns), and ask
//! [`Model::allows`] whether any execution with that outcome satisfies the axioms. Reads that the
//! outcome does not mention may return any write.
//!
//! ```
//! use direct_dcp_litmus::model::{Block, Model, Program, Scope::Sys, Sem};
//!
//! let mut p = Program::new();
//! let (data, flag) = (p.location(), p.location());
//! let writer = p.thread(Block { gpu: 0, index: 0 });
//! p.store(writer, data, Sem::Weak);
//! let publish = p.store(writer, flag, Sem::Release(Sys));
//! let reader = p.thread(Block { gpu: 1, index: 0 });
//! let observe = p.load(reader, flag, Sem::Acquire(Sys));
//! let read = p.load(reader, data, Sem::Weak);
//!
//! assert!(!Model::default().allows(&p, &[observe.from(publish), read.initial()]));
//! ```
//!
//! # What is modelled
//!
//! Generic-proxy loads, stores and atomics of one size, fences, block barriers, virtual aliases with
//! `fence.proxy.alias`, and kernel boundaries. Left out: mixed-size accesses, vectors (the ISA makes
//! them several scalar accesses), clusters, asynchronous copies, textures.
//!
//! # How aliases are read
//!
//! The ISA says that operations *overlap* only when they name the same virtual address (8.2.1). Taken
//! everywhere, that would make its own rule for aliases (8.9.5) void, since no axiom would ever
//! relate two aliases. So *address* decides where the ISA speaks of moral strength and of
//! program order (8.7, 8.10.5), and *location* decides coherence and communication order.

mod axioms;
mod program;
mod relation;

pub use axioms::{Axiom, Model};
pub use program::{Address, Atom, Block, EventId, Program, ReadsFrom, Scope, Sem, ThreadId};
pub use relation::Relation;
