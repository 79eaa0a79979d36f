//! The only place where addresses that Python passes become memory.
//!
//! The native module is private to the package, and its Python files see to what is promised here:
//! an address and a size are those of one object (a tensor, an exported buffer) that is contiguous,
//! of that size, on that device, writable where it is written, and held until the call returns. On
//! devices, memory that is freed later is freed in the order of the stream, as torch's allocator
//! does it.
#![allow(unsafe_code)] // that promise

use direct_dcp::cuda::{Context, CudaError, DeviceRows, DeviceRowsMut, Stream};
use direct_dcp_cuda::gather::{GuestLane, GuestOptions, Kernel};
use pyo3::{FromPyObject, PyResult};

use crate::errors::invalid;

/// An address and a number of bytes.
#[derive(Clone, Copy, Debug, FromPyObject)]
pub(crate) struct Span(u64, usize);

impl Span {
    fn overlaps(self, other: Span) -> bool {
        let end = |span: Span| span.0.saturating_add(span.1 as u64);
        self.0 < end(other) && other.0 < end(self)
    }

    /// Refuses two spans that have a byte in common.
    fn apart(self, other: Span) -> PyResult<()> {
        match self.overlaps(other) {
            true => Err(invalid(
                "local and out: expected memory that does not overlap",
            )),
            false => Ok(()),
        }
    }

    fn pointer(self) -> *mut u8 {
        match self.1 {
            // An object without bytes may have no address.
            0 => std::ptr::NonNull::dangling().as_ptr(),
            _ => std::ptr::with_exposed_provenance_mut(self.0 as usize),
        }
    }
}

/// Lends `local` in host memory to `body`.
pub(crate) fn with_rows<R>(local: Span, body: impl FnOnce(&[u8]) -> R) -> R {
    // SAFETY: the package's promise, for the time of this call.
    body(unsafe { std::slice::from_raw_parts(local.pointer(), local.1) })
}

/// Lends `local` and `out` in host memory to `body`.
pub(crate) fn with_rows_and_room<R>(
    local: Span,
    out: Span,
    body: impl FnOnce(&[u8], &mut [u8]) -> R,
) -> PyResult<R> {
    local.apart(out)?;
    // SAFETY: the package's promise, for the time of this call; nothing else overlaps it.
    let room = unsafe { std::slice::from_raw_parts_mut(out.pointer(), out.1) };
    Ok(with_rows(local, |local| body(local, room)))
}

/// Rows in device memory.
pub(crate) fn device_rows(local: Span) -> DeviceRows {
    // SAFETY: the package's promise. Work on the stream comes before what frees the memory.
    unsafe { DeviceRows::new(local.0, local.1) }
}

/// Rows and room for rows in device memory.
pub(crate) fn device_rows_and_room(
    local: Span,
    out: Span,
) -> PyResult<(DeviceRows, DeviceRowsMut)> {
    local.apart(out)?;
    // SAFETY: as in `device_rows`; the two do not overlap.
    let room = unsafe { DeviceRowsMut::new(out.0, out.1) };
    Ok((device_rows(local), room))
}

/// A stream of the caller's, as the integer that torch has for it.
pub(crate) fn stream(context: &Context, raw: u64) -> Result<Stream, CudaError> {
    // SAFETY: the package passes a stream that is current, or that its caller holds, for the time
    // of the call. What is kept longer is torch's, whose streams are never destroyed.
    unsafe { Stream::borrow(context, raw) }
}

/// A lane in memory that the caller of an operator passes.
pub(crate) fn guest_lane(kernel: Kernel, options: GuestOptions) -> Result<GuestLane, CudaError> {
    // SAFETY: the operator has checked its tensors against these sizes. That the addresses of
    // peers and of multicast memory are what they are said to be is the engine's promise, which
    // only it can keep: they are integers in the operator's signature.
    unsafe { GuestLane::new(kernel, options) }
}
