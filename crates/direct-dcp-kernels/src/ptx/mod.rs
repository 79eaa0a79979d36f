//! The instance that runs on NVIDIA GPUs: entry points of the PTX modules.
//!
//! Compiled twice: `unicast`, for sm_80 and up, and with the feature `multicast` the module for
//! sm_90 and up whose stores reach all ranks at once. Every width of access and every kind of
//! delivery is a kernel of its own, so that none carries code that it does not run.
#![allow(unsafe_code)]

mod copy;
mod instructions;
mod place;
#[cfg(not(feature = "multicast"))]
mod staged;
mod thread;

use crate::device::{Arguments, PlaceArguments};
use crate::protocol;
#[cfg(not(feature = "multicast"))]
use instructions::{Byte, Half, Word};
use instructions::{Double, Quad};
use place::{Dequantize, Placed, Same};
use thread::{Slice, Thread};

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
            let thread = Thread::<$unit, $copy_out>::new(&arguments, Slice);
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

/// Defines the kernel that stores rows in their final places, for one kind of unit on its way.
macro_rules! place {
    ($name:ident, $convert:ty, $unit:ty) => {
        /// One gather. A grid of one dimension.
        ///
        /// # Safety
        /// As for a gather kernel; the address of every unit that the arguments describe is a
        /// multiple of it.
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "ptx-kernel" fn $name(arguments: PlaceArguments) {
            let placed = Placed::<$convert>::new(&arguments);
            let thread = Thread::<$unit, false, _>::new(&arguments.gather, placed);
            if let Some(call) = thread.call() {
                protocol::gather(&thread, &call);
            }
        }
    };
}

place!(direct_dcp_place_16, Same<Quad>, Quad);
place!(direct_dcp_dequantize_16, Dequantize<Double>, Quad);
#[cfg(not(feature = "multicast"))]
place!(direct_dcp_place_8, Same<Double>, Double);
#[cfg(not(feature = "multicast"))]
place!(direct_dcp_place_4, Same<Word>, Word);
#[cfg(not(feature = "multicast"))]
place!(direct_dcp_place_2, Same<Half>, Half);
#[cfg(not(feature = "multicast"))]
place!(direct_dcp_place_1, Same<Byte>, Byte);
#[cfg(not(feature = "multicast"))]
place!(direct_dcp_dequantize_2, Dequantize<Byte>, Half);
