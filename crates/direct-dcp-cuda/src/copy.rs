//! Moving and filling bytes in stream order.

#![allow(unsafe_code)] // driver calls

use core::ffi::c_void;

use crate::error::{Result, check_span};
use crate::pinned::PinnedBuffer;
use crate::stream::Stream;
use crate::sys::{CU_MEMORYTYPE_UNIFIED, CUDA_MEMCPY2D};

/// Copies and fills that return before they have happened.
///
/// All are unsafe for one reason: the driver reads and writes the memory later, when no borrow of
/// it exists any more. The blocking forms ([`DeviceBuffer::upload`](crate::DeviceBuffer::upload),
/// [`Mapping::download`](crate::Mapping::download)) are safe.
///
/// # Safety
/// Common to all: each address range is accessible to the stream's context, or is valid host memory
/// for a host pointer, until the operation has finished on the stream (or, when captured, at each
/// replay), and nobody else writes it, or reads what is written, meanwhile without ordering.
/// A multicast mapping is never an operand.
impl Stream {
    /// Submits a copy from host memory to device memory. If the host's is not pinned, a driver may
    /// wait for the stream here, with a lock held that other threads need.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As said at this `impl`.
    pub unsafe fn copy_to_device(&self, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        self.context().with_current(|| {
            let api = self.context().driver().api();
            // SAFETY: the caller vouches for both ranges until the copy has finished.
            unsafe { api.cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw()) }
        })
    }

    /// Submits a copy from device memory to host memory. If the host's is not pinned, a driver may
    /// wait for the stream here, with a lock held that other threads need.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As said at this `impl`.
    pub unsafe fn copy_to_host(&self, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        self.context().with_current(|| {
            let api = self.context().driver().api();
            // SAFETY: the caller vouches for both ranges until the copy has finished.
            unsafe { api.cuMemcpyDtoHAsync_v2(to.cast::<c_void>(), from, bytes, self.raw()) }
        })
    }

    /// Submits a copy from device memory to device memory, of the same device or of a peer.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As said at this `impl`.
    pub unsafe fn copy_on_device(&self, to: u64, from: u64, bytes: usize) -> Result<()> {
        self.context().with_current(|| {
            let api = self.context().driver().api();
            // SAFETY: the caller vouches for both ranges until the copy has finished.
            unsafe { api.cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw()) }
        })
    }

    /// Submits a copy of `rows` pieces of `bytes` bytes from device memory to device memory, of the
    /// same device or of a peer: each a pitch of bytes, not below `bytes`, after the one before.
    ///
    /// # Errors
    /// The driver's, for pitches beyond the device's limit among them.
    ///
    /// # Safety
    /// As said at this `impl`.
    pub unsafe fn copy_rows_on_device(
        &self,
        (to, to_pitch): (u64, usize),
        (from, from_pitch): (u64, usize),
        bytes: usize,
        rows: usize,
    ) -> Result<()> {
        if (to_pitch, from_pitch) == (bytes, bytes) {
            let all = bytes.saturating_mul(rows);
            // SAFETY: the pieces lie one behind the other; the rest is the caller's promise.
            return unsafe { self.copy_on_device(to, from, all) };
        }
        let copy = CUDA_MEMCPY2D {
            src_x_in_bytes: 0,
            src_y: 0,
            src_memory_type: CU_MEMORYTYPE_UNIFIED,
            src_host: core::ptr::null(),
            src_device: from,
            src_array: core::ptr::null_mut(),
            src_pitch: from_pitch,
            dst_x_in_bytes: 0,
            dst_y: 0,
            dst_memory_type: CU_MEMORYTYPE_UNIFIED,
            dst_host: core::ptr::null_mut(),
            dst_device: to,
            dst_array: core::ptr::null_mut(),
            dst_pitch: to_pitch,
            width_in_bytes: bytes,
            height: rows,
        };
        self.context().with_current(|| {
            let api = self.context().driver().api();
            // SAFETY: the driver reads the description before it returns; the caller vouches for
            // both ranges until the copy has finished.
            unsafe { api.cuMemcpy2DAsync_v2(&copy, self.raw()) }
        })
    }

    /// Submits a fill of `bytes` bytes with one value.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As said at this `impl`.
    pub unsafe fn fill_u8(&self, to: u64, value: u8, bytes: usize) -> Result<()> {
        self.context().with_current(|| {
            let api = self.context().driver().api();
            // SAFETY: the caller vouches for the range until the fill has finished.
            unsafe { api.cuMemsetD8Async(to, value, bytes, self.raw()) }
        })
    }

    /// Submits a fill of `words` 32-bit words with one value; `to` is a multiple of 4.
    ///
    /// # Errors
    /// The driver's.
    ///
    /// # Safety
    /// As said at this `impl`.
    pub unsafe fn fill_u32(&self, to: u64, value: u32, words: usize) -> Result<()> {
        self.context().with_current(|| {
            let api = self.context().driver().api();
            // SAFETY: the caller vouches for the range until the fill has finished.
            unsafe { api.cuMemsetD32Async(to, value, words, self.raw()) }
        })
    }
}

/// Copies host bytes to a device address and waits.
///
/// It waits for what the stream has to do before it submits the copy: of memory that is not pinned,
/// a driver may wait for a copy's turn with a lock held that other threads need, to submit what that
/// turn depends on. The same goes for [`download`]. Other threads leave the stream alone meanwhile.
///
/// # Safety
/// `to` is `from.len()` bytes of memory that the stream's context can write, live through the call.
pub(crate) unsafe fn upload(stream: &Stream, to: u64, from: &[u8]) -> Result<()> {
    stream.synchronize()?;
    // SAFETY: the slice outlives the call, and the copy is over when the call returns; the caller
    // vouches for the device range.
    let submitted = unsafe { stream.copy_to_device(to, from.as_ptr(), from.len()) };
    submitted.and(settle(stream))
}

/// Copies bytes from a device address to the host and waits.
///
/// # Safety
/// `from` is `to.len()` bytes of memory that the stream's context can read, live through the call.
pub(crate) unsafe fn download(stream: &Stream, to: &mut [u8], from: u64) -> Result<()> {
    stream.synchronize()?;
    // SAFETY: the slice is borrowed mutably through the call, and the copy is over when the call
    // returns; the caller vouches for the device range.
    let submitted = unsafe { stream.copy_to_host(to.as_mut_ptr(), from, to.len()) };
    submitted.and(settle(stream))
}

/// Copies the 64-bit word at a device address to the first one of `through`, and waits. Other
/// threads may submit to the stream meanwhile, as `through` is pinned.
///
/// # Safety
/// `from` is a word that the stream's context can read, live through the call.
pub(crate) unsafe fn fetch_u64(stream: &Stream, through: &PinnedBuffer, from: u64) -> Result<u64> {
    let bytes = size_of::<u64>();
    check_span("fetch", 0, bytes, through.bytes())?;
    // SAFETY: the buffer has room, and the copy is over when the call returns; the caller vouches
    // for the word.
    let submitted = unsafe { stream.copy_to_host(through.as_ptr(), from, bytes) };
    submitted.and(settle(stream))?;
    through.load_u64(0)
}

/// Waits until the stream no longer touches the host slice of a blocking copy.
///
/// One failed wait may have returned early (an error of an earlier launch is reported once), so it
/// is repeated. A second failure comes from a context that is broken and executes nothing more.
fn settle(stream: &Stream) -> Result<()> {
    let first = stream.synchronize();
    if first.is_err() {
        let _ = stream.synchronize();
    }
    first
}
