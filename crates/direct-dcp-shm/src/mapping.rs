//! Shared memory in the address space: the one place that maps and unmaps.
#![allow(unsafe_code)]

use crate::error::failed;
use crate::{SharedMemory, ShmError};
use rustix::mm::{MapFlags, ProtFlags};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// [`SharedMemory`] mapped for reading and writing; unmapped when dropped.
///
/// Other threads, other mappings and other processes may write the bytes at any time. Safe code
/// therefore sees them only as atomics, [`atomic_u32`](Self::atomic_u32) and
/// [`atomic_u64`](Self::atomic_u64); everything else starts at [`as_ptr`](Self::as_ptr).
///
/// ```
/// use direct_dcp_shm::SharedMemory;
/// use std::sync::atomic::Ordering;
///
/// # fn main() -> Result<(), direct_dcp_shm::ShmError> {
/// let mapping = SharedMemory::create("counter", 64)?.map()?;
/// let counter = mapping.atomic_u64(8).expect("in bounds and aligned");
/// counter.fetch_add(1, Ordering::Relaxed);
/// assert!(mapping.atomic_u64(60).is_none()); // would end past the memory
/// assert!(mapping.atomic_u64(4).is_none()); // is not aligned
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Mapping {
    /// Start of the mapping, aligned to a page.
    start: NonNull<u8>,
    /// Bytes mapped, at most `isize::MAX`; the kernel rounds up to whole pages by itself.
    len: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread: any thread may use its addresses
// and any thread may unmap it.
unsafe impl Send for Mapping {}

// SAFETY: `&Mapping` gives out atomics, which threads may share, and a raw pointer, whose use is
// the caller's `unsafe`. Nothing about the mapping changes before it is dropped.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps all of `memory`, which is sealed and of the size it says.
    pub(crate) fn of(memory: &SharedMemory) -> Result<Mapping, ShmError> {
        // SAFETY: with a null hint and without MAP_FIXED the kernel picks an unused range, so no
        // existing object or reference is affected. References into the new range are made only
        // by `atomic`, to types that tolerate every change from outside.
        let start = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                memory.len(),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                memory.fd(),
                0,
            )
        }
        .map_err(failed("mmap"))?;
        match NonNull::new(start.cast()) {
            Some(start) => Ok(Mapping {
                start,
                len: memory.len(),
            }),
            // The kernel maps page 0 only on request.
            None => Err(failed("mmap")(rustix::io::Errno::FAULT)),
        }
    }

    /// Size in bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "an empty mapping cannot exist")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The first of [`len`](Self::len) bytes, aligned to a page. They may be read and written while
    /// the mapping lives.
    ///
    /// Whoever dereferences it promises what Rust cannot check: no access races with another one,
    /// in any thread or process, unless both are atomic. A reference to the bytes must not exist
    /// while anybody writes them.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The 32-bit word `offset` bytes into the memory, or `None` if it is not aligned to 4 bytes or
    /// not wholly inside.
    pub fn atomic_u32(&self, offset: usize) -> Option<&AtomicU32> {
        self.atomic(offset)
    }

    /// The 64-bit word `offset` bytes into the memory, or `None` if it is not aligned to 8 bytes or
    /// not wholly inside.
    pub fn atomic_u64(&self, offset: usize) -> Option<&AtomicU64> {
        self.atomic(offset)
    }

    fn atomic<T: Word>(&self, offset: usize) -> Option<&T> {
        let end = offset.checked_add(size_of::<T>())?;
        if end > self.len || !offset.is_multiple_of(align_of::<T>()) {
            return None;
        }
        // SAFETY: `offset` is less than `self.len`, so the sum stays inside the mapping.
        let word = unsafe { self.start.add(offset) }.cast::<T>();
        // SAFETY:
        // - Bounds: the word ends at `end`, within the mapping, whose pages exist and cannot be
        //   taken away: the memory is sealed against shrinking.
        // - Alignment: the start is page-aligned and `offset` is a multiple of T's alignment.
        // - Lifetime: the result borrows `self`, and only dropping `self` unmaps.
        // - Validity: T is an atomic integer (`Word` is private), for which every bit pattern is
        //   valid, so whatever another process stores is a value.
        // - Aliasing: an atomic has interior mutability, so it may change under a shared
        //   reference. Another thread or process that works on the same word, be it through
        //   another mapping of the same physical memory, does so by atomic instructions, to
        //   which the hardware's coherence gives one order per word. Inside this process a
        //   non-atomic access needs `as_ptr` and the `unsafe` of its user, who promises that it
        //   does not race. In another process it is outside of this program: it is seen here as
        //   some value, or some sequence of values, of an aligned word.
        Some(unsafe { word.as_ref() })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `start` and `len` are what `mmap` gave this object, which alone unmaps them, once.
        // Every reference into the range borrowed `self` and has ended.
        // Should the kernel refuse, the range stays mapped until the process ends: no harm done.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// The atomic integers that may be placed on shared memory.
trait Word {}
impl Word for AtomicU32 {}
impl Word for AtomicU64 {}
