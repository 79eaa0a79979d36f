//! The copy loop: read once, store to every receiver.

use core::num::NonZeroU64;

use super::instructions::Unit;

/// Units that a thread has in flight.
const BATCH: usize = 4;

/// What is copied, and which thread of which block this is.
#[derive(Clone, Copy)]
pub(super) struct Job {
    pub(super) from: u64,
    pub(super) len: u64,
    pub(super) thread: u32,
    pub(super) threads: u32,
    pub(super) block: u32,
    pub(super) blocks: u32,
    /// Places to store to.
    pub(super) count: u32,
    /// How many of them, the first ones, are multicast addresses.
    pub(super) everywhere: u32,
}

/// Copies this block's share, unit by unit: the share is one stretch, a whole number of turns of
/// the block's threads long, but for the last block's.
///
/// `target` is asked once the first loads are under way, and returned; where it is there,
/// `to(target, step)` is where the bytes go in step `step`.
///
/// # Safety
/// `from` and every `to` are addresses of `len` bytes of global memory, and multiples of the
/// unit, as is `len`.
#[inline(always)]
pub(super) unsafe fn copy<T: Unit, D>(
    job: Job,
    target: impl FnOnce() -> Option<D>,
    to: impl Fn(&D, u32) -> u64,
) -> Option<D> {
    let stride = u64::from(job.threads) * T::BYTES;
    let turn = stride * BATCH as u64;
    let share = turns(job.len, turn, job.blocks) * turn;
    let start = u64::from(job.block) * share;
    let job = Job {
        len: job.len.min(start + share),
        ..job
    };
    let mut at = start + u64::from(job.thread) * T::BYTES;
    // SAFETY: the caller's.
    let mut batch = unsafe { load::<T>(&job, at, stride) };
    let target = target()?;
    while at < job.len {
        for step in 0..job.count {
            let to = to(&target, step);
            for (index, unit) in (0_u64..).zip(&batch) {
                if let Some(unit) = unit {
                    // SAFETY: the unit was loaded, so it lies below `len`.
                    unsafe { unit.store(to + at + index * stride, step < job.everywhere) };
                }
            }
        }
        at += turn;
        // SAFETY: the caller's.
        batch = unsafe { load::<T>(&job, at, stride) };
    }
    Some(target)
}

/// Turns of `turn` bytes that each of `blocks` blocks takes, at most, to cover `len` bytes.
#[inline(always)]
fn turns(len: u64, turn: u64, blocks: u32) -> u64 {
    let divide = |a: u64, b: u64| match NonZeroU64::new(b) {
        Some(b) => (a + b.get() - 1) / b,
        None => 0,
    };
    divide(divide(len, turn), blocks.into())
}

/// A batch of units, those that lie below `len`.
///
/// # Safety
/// As for [`copy`].
#[inline(always)]
unsafe fn load<T: Unit>(job: &Job, at: u64, stride: u64) -> [Option<T>; BATCH] {
    [0_u64, 1, 2, 3].map(|index| {
        let at = at + index * stride;
        // SAFETY: it lies below `len`.
        (at < job.len).then(|| unsafe { T::load(job.from + at) })
    })
}
