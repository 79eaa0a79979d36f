//! The copy loop: read once, store to every receiver.

#[cfg(not(feature = "multicast"))]
use super::instructions::{Byte, Double, Half, Word};
use super::instructions::{Quad, Unit};

/// Units that a thread has in flight.
const BATCH: u64 = 4;

/// What a block copies, and which thread of it this is.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) from: u64,
    pub(super) len: u64,
    pub(super) thread: u32,
    pub(super) threads: u32,
    /// Places to store to.
    pub(super) count: u32,
    /// Whether the stores go to a multicast address.
    pub(super) everywhere: bool,
}

/// Copies with accesses of `width` bytes; `to(step)` is where the bytes go in step `step`.
///
/// # Safety
/// `from` and every `to(step)` are addresses of `len` bytes of global memory, and multiples of
/// `width`, as is `len`.
#[inline(always)]
pub(super) unsafe fn copy(job: Job, width: u32, to: impl Fn(u32) -> u64) {
    // SAFETY: the caller's, for each width.
    unsafe {
        #[cfg(feature = "multicast")]
        if width == 16 {
            copy_units::<Quad>(job, to);
        }
        #[cfg(not(feature = "multicast"))]
        match width {
            16 => copy_units::<Quad>(job, to),
            8 => copy_units::<Double>(job, to),
            4 => copy_units::<Word>(job, to),
            2 => copy_units::<Half>(job, to),
            _ => copy_units::<Byte>(job, to),
        }
    }
}

/// # Safety
/// As for [`copy`], with the unit's width.
#[inline(always)]
unsafe fn copy_units<T: Unit>(job: Job, to: impl Fn(u32) -> u64) {
    let stride = u64::from(job.threads) * T::BYTES;
    let mut at = u64::from(job.thread) * T::BYTES;
    while at + (BATCH - 1) * stride < job.len {
        let from = job.from + at;
        // SAFETY: the last of the four lies below `len`.
        let values = unsafe {
            [
                T::load(from),
                T::load(from + stride),
                T::load(from + 2 * stride),
                T::load(from + 3 * stride),
            ]
        };
        for step in 0..job.count {
            let to = to(step) + at;
            // SAFETY: as for the loads.
            unsafe {
                values[0].store(to, job.everywhere);
                values[1].store(to + stride, job.everywhere);
                values[2].store(to + 2 * stride, job.everywhere);
                values[3].store(to + 3 * stride, job.everywhere);
            }
        }
        at += BATCH * stride;
    }
    while at < job.len {
        // SAFETY: `at` lies below `len`, and both are multiples of the unit.
        let value = unsafe { T::load(job.from + at) };
        for step in 0..job.count {
            // SAFETY: as for the load.
            unsafe { value.store(to(step) + at, job.everywhere) };
        }
        at += stride;
    }
}
