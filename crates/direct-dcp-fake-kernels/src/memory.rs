//! Device memory, by address: addresses of the fake's devices are addresses of this process.

#![allow(unsafe_code)] // memory named by integers

use core::sync::atomic::{AtomicU32, AtomicU64};

/// A word that devices and the host share.
///
/// # Safety
/// `address` is a multiple of 4, of mapped memory that stays so while the result is used.
pub(crate) unsafe fn word(address: u64) -> &'static AtomicU32 {
    // SAFETY: the caller's.
    unsafe { AtomicU32::from_ptr(pointer(address).cast()) }
}

/// A double word that devices and the host share.
///
/// # Safety
/// As for [`word`], with a multiple of 8.
pub(crate) unsafe fn double(address: u64) -> &'static AtomicU64 {
    // SAFETY: the caller's.
    unsafe { AtomicU64::from_ptr(pointer(address).cast()) }
}

/// Copies bytes.
///
/// # Safety
/// Both spans are mapped, and nobody else writes them, or reads those that are written.
pub(crate) unsafe fn copy(to: u64, from: u64, bytes: u64) {
    // SAFETY: the caller's. The spans may be the same where a rank's own rows are in place.
    unsafe { core::ptr::copy(pointer(from).cast_const(), pointer(to), bytes as usize) }
}

/// Reads a plain value.
///
/// # Safety
/// There is one of this type, and nobody writes it meanwhile.
pub(crate) unsafe fn read<T: Copy>(address: u64) -> T {
    // SAFETY: the caller's.
    unsafe { pointer(address).cast::<T>().read_unaligned() }
}

fn pointer(address: u64) -> *mut u8 {
    core::ptr::with_exposed_provenance_mut(address as usize)
}
