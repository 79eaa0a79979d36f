//! The KV gather protocol and its copy loops, written once.
//!
//! A gather is one *launch* of `blocks` blocks on every rank. [`protocol::gather`] is what one
//! thread of one block does, generic over the [`Machine`] it runs on:
//!
//! | machine | a block is | where |
//! | --- | --- | --- |
//! | CPU | one thread | [`host`] (feature `host`, on by default) |
//! | NVIDIA GPU | a thread block | `ptx`, compiled for `nvptx64-nvidia-cuda` and committed as text |
//! | model checker | a model thread | `tests/loom.rs` |
//!
//! Without the feature `host` the crate is `no_std`, allocates nothing, has no dependency and
//! contains no panic: that is what becomes PTX.
//!
//! The order of the steps, and why no other order will do, is in `docs/protocol.md`; each
//! acquire/release pair carries the same `SYNC` tag on both sides, and the tag is a heading there.
#![cfg_attr(not(any(test, feature = "host")), no_std)]
#![cfg_attr(
    target_arch = "nvptx64",
    feature(abi_ptx, stdarch_nvptx, asm_experimental_arch)
)]

mod convert;
pub mod device;
mod machine;
pub mod protocol;
#[cfg(target_arch = "nvptx64")]
mod ptx;
mod rotation;

#[cfg(feature = "host")]
pub mod host;

pub use convert::bf16_from_e4m3;
#[doc(inline)]
pub use machine::{COPY_OUT, Call, Fault, FaultCode, Interrupt, Machine, Shape};
pub use rotation::rotated;
