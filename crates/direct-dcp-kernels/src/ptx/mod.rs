//! The instance that runs on NVIDIA GPUs: entry points of the PTX modules.
//!
//! Compiled twice: `unicast`, for sm_80 and up, and with the feature `multicast` the module for
//! sm_90 and up whose stores reach all ranks at once. Every width of access and every kind of
//! delivery is a kernel of its own, so that none carries code that it does not run.
#![allow(unsafe_code)]

mod copy;
mod instructions;
#[cfg(not(feature = "multicast"))]
mod staged;
mod thread;

use crate::device::Arguments;
use crate::protocol;
use instructions::Quad;
#[cfg(not(feature = "multicast"))]
use instructions::{Byte, Double, Half, Word};
use thread::Thread;

/// Defines the kernel of one access and one kind of delivery.
macro_rules! gather {
    ($name:ident, $unit:ty, $copy_out:literal) => {
        /// One gather. A grid of one dimension.
        ///
        /// # Safety
        /// The addresses in `arguments` are those of the memory that its fields describe, mapped
        /// on this device, and stay so until the launch has ended; they and the sizes are
        /// multiples of the unit. If it copies out, all blocks of the grid are resident at once.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "ptx-kernel" fn $name(arguments: Arguments) {
            let thread = Thread::<$unit, $copy_out>::new(&arguments);
            if let Some(call) = thread.call() {
                protocol::gather(&thread, &call);
            }
        }
    };
}

gather!(direct_dcp_gather_16, Quad, false);
gather!(direct_dcp_gather_into_16, Quad, true);
#[cfg(not(feature = "multicast"))]
gather!(direct_dcp_gather_8, Double, false);
#[cfg(not(feature = "multicast"))]
gather!(direct_dcp_gather_into_8, Double, true);
#[cfg(not(feature = "multicast"))]
gather!(direct_dcp_gather_4, Word, false);
#[cfg(not(feature = "multicast"))]
gather!(direct_dcp_gather_into_4, Word, true);
#[cfg(not(feature = "multicast"))]
gather!(direct_dcp_gather_2, Half, false);
#[cfg(not(feature = "multicast"))]
gather!(direct_dcp_gather_into_2, Half, true);
#[cfg(not(feature = "multicast"))]
gather!(direct_dcp_gather_1, Byte, false);
#[cfg(not(feature = "multicast"))]
gather!(direct_dcp_gather_into_1, Byte, true);
