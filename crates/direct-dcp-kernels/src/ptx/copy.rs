//! The copy loop: read once, store to every receiver.

use super::instructions::Unit;

/// Units that a thread has in flight.
const BATCH: u64 = 4;

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

impl Job {
    /// From a thread's unit to its next one: the threads of all blocks side by side, so that the
    /// launch as a whole moves through memory in order.
    #[inline(always)]
    fn stride<T: Unit>(&self) -> u64 {
        u64::from(self.threads) * u64::from(self.blocks) * T::BYTES
    }

    /// This thread's first unit.
    #[inline(always)]
    fn first<T: Unit>(&self) -> u64 {
        let threads = u64::from(self.threads);
        (u64::from(self.block) * threads + u64::from(self.thread)) * T::BYTES
    }
}

/// Copies this thread's share, unit by unit.
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
    let stride = job.stride::<T>();
    let reach = (BATCH - 1) * stride;
    let mut at = job.first::<T>();
    if at + reach >= job.len {
        // SAFETY: the caller's.
        let batch = unsafe { load_some::<T>(&job, at, stride) };
        let target = target()?;
        // SAFETY: the caller's.
        unsafe { store_some(&job, &batch, at, stride, |step| to(&target, step)) };
        return Some(target);
    }
    // SAFETY: the last of the batch lies below `len`.
    let mut batch = unsafe { load::<T>(&job, at, stride) };
    let target = target()?;
    loop {
        // SAFETY: as for the load.
        unsafe { store(&job, &batch, at, stride, |step| to(&target, step)) };
        at += BATCH * stride;
        if at + reach >= job.len {
            break;
        }
        // SAFETY: the last of the batch lies below `len`.
        batch = unsafe { load::<T>(&job, at, stride) };
    }
    if at < job.len {
        // SAFETY: the caller's.
        unsafe {
            let batch = load_some::<T>(&job, at, stride);
            store_some(&job, &batch, at, stride, |step| to(&target, step));
        }
    }
    Some(target)
}

/// The places of a batch, counted from its first.
const INDICES: [u64; BATCH as usize] = [0, 1, 2, 3];

/// A batch.
///
/// # Safety
/// As for [`copy`], and all of it lies below `len`.
#[inline(always)]
unsafe fn load<T: Unit>(job: &Job, at: u64, stride: u64) -> [T; BATCH as usize] {
    // SAFETY: the caller's.
    INDICES.map(|index| unsafe { T::load(job.from + at + index * stride) })
}

/// Those units of a batch that lie below `len`.
///
/// # Safety
/// As for [`copy`].
#[inline(always)]
unsafe fn load_some<T: Unit>(job: &Job, at: u64, stride: u64) -> [Option<T>; BATCH as usize] {
    INDICES.map(|index| {
        let at = at + index * stride;
        // SAFETY: it lies below `len`.
        (at < job.len).then(|| unsafe { T::load(job.from + at) })
    })
}

/// Stores a batch to every place.
///
/// # Safety
/// As for [`copy`], and all of it lies below `len`.
#[inline(always)]
unsafe fn store<T: Unit>(
    job: &Job,
    batch: &[T; BATCH as usize],
    at: u64,
    stride: u64,
    to: impl Fn(u32) -> u64,
) {
    for step in 0..job.count {
        let to = to(step) + at;
        for (index, unit) in (0_u64..).zip(batch) {
            // SAFETY: the caller's.
            unsafe { unit.stream(to + index * stride, step < job.everywhere) };
        }
    }
}

/// Stores those units of a batch that were loaded.
///
/// # Safety
/// As for [`copy`].
#[inline(always)]
unsafe fn store_some<T: Unit>(
    job: &Job,
    batch: &[Option<T>; BATCH as usize],
    at: u64,
    stride: u64,
    to: impl Fn(u32) -> u64,
) {
    for step in 0..job.count {
        let to = to(step) + at;
        for (index, unit) in (0_u64..).zip(batch) {
            if let Some(unit) = unit {
                // SAFETY: the unit was loaded, so it lies below `len`.
                unsafe { unit.stream(to + index * stride, step < job.everywhere) };
            }
        }
    }
}
