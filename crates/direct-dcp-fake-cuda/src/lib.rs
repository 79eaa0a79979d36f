//! A `libcuda.so` that runs on the CPU, for testing driver code on a machine without a GPU.
//!
//! The shared library exports the C functions that direct-dcp's loader looks for. Behind them:
//!
//! - device memory is a `memfd`, and a device address is an address of this process, so virtual
//!   memory works as on a GPU, also between processes; what has no access yet is `PROT_NONE`;
//! - every stream has a thread, so kernels of several ranks run at once and may wait for each other;
//! - a kernel is a C function of the test, registered by the name of the PTX entry point;
//! - a multicast address cannot be touched by an ordinary load or store: kernels ask
//!   `fakeCudaMulticastReplicas` for the replicas behind it;
//! - a kernel whose blocks wait for each other says so, and its launch waits until multiprocessors
//!   have room for all of them beside those of other launches, as [`Fake::reside`] tells;
//! - what a stream does first may wait for the kernels that run on its device, as it does on some GPUs
//!   now and then;
//! - arguments, alignment, order of calls, captures and current contexts are checked more strictly
//!   than by a real driver, handles are never reused, and whatever is not given back is counted.
//!
//! What it cannot show: timing, memory ordering weaker than the CPU's, a real driver's tolerance.
//!
//! # Environment
//! | variable | meaning | default |
//! |---|---|---|
//! | `DIRECT_DCP_FAKE_DEVICES` | number of devices | 2 |
//! | `DIRECT_DCP_FAKE_SMS` | multiprocessors of a device | 132 |
//! | `DIRECT_DCP_FAKE_LATE_STREAMS` | 1: what a stream does first waits until no kernel runs on its device | 0 |
//! | `DIRECT_DCP_FAKE_WITHOUT` | comma-separated: `vmm`, `fd`, `fabric`, `imex`, `multicast`, `p2p` | nothing |
//! | `DIRECT_DCP_FAKE_FAIL` | `k` or `symbol:k`, each optionally `:code`: that call fails | none |
//!
//! From Rust, [`Fake`] opens the same library as the code under test and steers it.

mod abi;
mod api;
mod call;
mod capture;
mod code;
mod control;
mod memory;
mod module;
mod multicast;
mod residency;
mod state;
mod stream;

pub use control::{FailMode, Fake, Kernel, Resident, library_path};
