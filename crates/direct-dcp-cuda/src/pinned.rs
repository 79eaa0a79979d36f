//! Host memory that the device reads and writes in place.

#![allow(unsafe_code)] // driver calls, and words shared with the device

use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::context::Context;
use crate::error::{CudaError, Result, check_span};
use crate::sys;

/// Pinned host memory, mapped into every device's address space; zero at first.
///
/// Made for words that the host and a running kernel share: an abort flag, a status block. They are
/// read and written with acquire and release atomics rather than volatile accesses: the same
/// instructions, and no data race when two host threads poll the same word.
#[derive(Debug)]
pub struct PinnedBuffer {
    context: Context,
    pointer: NonNull<u8>,
    device_address: u64,
    bytes: usize,
}

// SAFETY: the pointer is owned, and valid on every thread until `drop`.
unsafe impl Send for PinnedBuffer {}
// SAFETY: all access through `&self` is atomic, or volatile by bytes that are documented as racy.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    /// Allocates `bytes` bytes, aligned to a page.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for zero bytes, else the driver's.
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(CudaError::invalid(
                "bytes of a pinned buffer",
                "at least 1",
                0,
            ));
        }
        context.with_current(|| {
            let api = context.driver().api();
            let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
            let mut raw: *mut c_void = core::ptr::null_mut();
            // SAFETY: writes one pointer to a place that lives through the call.
            unsafe { api.cuMemHostAlloc(&mut raw, bytes, flags) }?;
            let Some(pointer) = NonNull::new(raw.cast::<u8>()) else {
                return Err(CudaError::invalid("cuMemHostAlloc", "a pointer", "null"));
            };
            // From here on `drop` frees it, also when the next call fails.
            let mut buffer = Self {
                context: context.clone(),
                pointer,
                device_address: 0,
                bytes,
            };
            // SAFETY: the driver returned at least `bytes` bytes, and nobody else knows them yet.
            unsafe { pointer.as_ptr().write_bytes(0, bytes) };
            // SAFETY: the pointer came from `cuMemHostAlloc` with DEVICEMAP; writes one address.
            unsafe { api.cuMemHostGetDevicePointer_v2(&mut buffer.device_address, raw, 0) }?;
            Ok(buffer)
        })
    }

    /// The address under which devices see the first byte.
    pub fn device_address(&self) -> u64 {
        self.device_address
    }

    /// The host address of the first byte, for asynchronous copies.
    pub fn as_ptr(&self) -> *mut u8 {
        self.pointer.as_ptr()
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Loads the 32-bit word at a byte offset, with acquire ordering.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] where the offset is not a word of the buffer.
    pub fn load_u32(&self, offset: usize) -> Result<u32> {
        Ok(self.word_u32(offset)?.load(Ordering::Acquire))
    }

    /// Stores the 32-bit word at a byte offset, with release ordering.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] where the offset is not a word of the buffer.
    pub fn store_u32(&self, offset: usize, value: u32) -> Result<()> {
        self.word_u32(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// Loads the 64-bit word at a byte offset, with acquire ordering.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] where the offset is not a word of the buffer.
    pub fn load_u64(&self, offset: usize) -> Result<u64> {
        Ok(self.word_u64(offset)?.load(Ordering::Acquire))
    }

    /// Stores the 64-bit word at a byte offset, with release ordering.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] where the offset is not a word of the buffer.
    pub fn store_u64(&self, offset: usize, value: u64) -> Result<()> {
        self.word_u64(offset)?.store(value, Ordering::Release);
        Ok(())
    }

    /// Reads bytes at an offset, one volatile load each. Bytes that the device or another thread
    /// writes meanwhile may be old or new.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] where the span is not inside the buffer.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        check_span("read of a pinned buffer", offset, to.len(), self.bytes)?;
        for (index, byte) in to.iter_mut().enumerate() {
            // SAFETY: `offset + index` lies inside the buffer, by the check above.
            let from = unsafe { self.pointer.as_ptr().add(offset + index) };
            // SAFETY: in bounds, initialised by `new`, and every `u8` is valid.
            *byte = unsafe { from.read_volatile() };
        }
        Ok(())
    }

    fn word_u32(&self, offset: usize) -> Result<&AtomicU32> {
        let word = self.word(offset, size_of::<u32>())?.cast::<u32>();
        // SAFETY: in bounds and aligned by `word`, initialised, live while `self` is borrowed, and
        // accessed by the host only atomically.
        Ok(unsafe { AtomicU32::from_ptr(word) })
    }

    fn word_u64(&self, offset: usize) -> Result<&AtomicU64> {
        let word = self.word(offset, size_of::<u64>())?.cast::<u64>();
        // SAFETY: in bounds and aligned by `word`, initialised, live while `self` is borrowed, and
        // accessed by the host only atomically.
        Ok(unsafe { AtomicU64::from_ptr(word) })
    }

    /// A pointer to an aligned word inside the buffer.
    fn word(&self, offset: usize, bytes: usize) -> Result<*mut u8> {
        check_span("word of a pinned buffer", offset, bytes, self.bytes)?;
        // SAFETY: the offset lies inside the buffer, by the check above.
        let word = unsafe { self.pointer.as_ptr().add(offset) };
        if !word.addr().is_multiple_of(bytes) {
            let expected = format!("an offset that is a multiple of {bytes}");
            return Err(CudaError::invalid(
                "word of a pinned buffer",
                expected,
                offset,
            ));
        }
        Ok(word)
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_release() {
            let driver = self.context.driver();
            let pointer = self.pointer.as_ptr().cast::<c_void>();
            // SAFETY: allocated by `PinnedBuffer::new`, freed only here. Whoever gave the address
            // to a kernel promised to keep the buffer until the kernel has finished.
            driver.released(unsafe { driver.api().cuMemFreeHost(pointer) });
        }
    }
}
