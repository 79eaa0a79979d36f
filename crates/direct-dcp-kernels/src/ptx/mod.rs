//! The instance that runs on NVIDIA GPUs: entry points of the PTX modules.
//!
//! Compiled twice: `unicast`, for sm_80 and up, and with the feature `multicast` the module for
//! sm_90 and up whose stores reach all ranks at once.
#![allow(unsafe_code)]

mod copy;
mod instructions;
mod thread;

use crate::device::Arguments;
use crate::protocol;
use thread::Thread;

/// One gather. A grid of one dimension; every argument as [`Arguments`] says.
///
/// # Safety
/// The addresses in `arguments` are those of the memory that its fields describe, mapped on this
/// device, and stay so until the launch has ended. With `out` set, all blocks of the grid are
/// resident at once.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "ptx-kernel" fn direct_dcp_gather(arguments: Arguments) {
    if let Some(call) = thread::call(&arguments) {
        protocol::gather(&Thread::new(&arguments), &call);
    }
}
