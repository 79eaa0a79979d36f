//! The only place where addresses that Python passes become memory.
//!
//! The native module is private to the package, and its Python files see to what is promised here:
//! an address and a size are those of one object (a tensor, an exported buffer) that is contiguous,
//! of that size, on that device, writable where it is written, and held until the call returns, or
//! until a window that it was submitted for was acquired, or came before one that was. On devices, memory that is freed later is freed in the order of the stream, as torch's allocator
//! does it.
#![allow(unsafe_code)] // that promise

use direct_dcp::Rows;
use direct_dcp::cuda::{Context, CudaError, DeviceRows, DeviceRowsMut, PlacedRows, Stream};
use direct_dcp_cuda::gather::{GuestLane, GuestOptions, Kernel};
use pyo3::{FromPyObject, Py, PyAny, PyResult};

use crate::errors::invalid;
use crate::layout::{Paged, Source};

/// An address and a number of bytes.
#[derive(Clone, Copy, Debug, FromPyObject)]
pub(crate) struct Span(u64, usize);

impl Span {
    pub(crate) fn new(address: u64, bytes: usize) -> Self {
        Span(address, bytes)
    }

    /// Where bytes of this process are.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Span(bytes.as_ptr().expose_provenance() as u64, bytes.len())
    }

    pub(crate) fn parts(self) -> (u64, usize) {
        (self.0, self.1)
    }

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

/// Lends rows in host memory, one behind the other or in a cache, to `body`.
pub(crate) fn with_source<R>(source: Source, body: impl FnOnce(&Rows<'_>) -> R) -> R {
    let Source(memory, paged, scale) = source;
    let scaled = |rows: Rows<'_>| match scale {
        Some(scale) => body(&rows.dequantized(scale)),
        None => body(&rows),
    };
    with_rows(memory, |memory| match paged {
        None => scaled(Rows::dense(memory)),
        Some(paged) => {
            let slots = with_rows(paged.3, words);
            scaled(Rows::paged(memory, paged.pages(), &slots))
        }
    })
}

/// Whole numbers of 32 bits, as the machine has them.
pub(crate) fn words(bytes: &[u8]) -> Vec<u32> {
    let (words, _) = bytes.as_chunks();
    words.iter().map(|&word| u32::from_ne_bytes(word)).collect()
}

/// Rows in host memory that another thread reads: it holds their owner.
pub(crate) struct Kept {
    rows: Span,
    _owner: Py<PyAny>,
}

impl Kept {
    /// `owner` keeps `rows` where they are.
    pub(crate) fn new(rows: Span, owner: Py<PyAny>) -> Self {
        Kept {
            rows,
            _owner: owner,
        }
    }
}

impl AsRef<[u8]> for Kept {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the package's promise, for as long as the owner is held.
        unsafe { std::slice::from_raw_parts(self.rows.pointer(), self.rows.1) }
    }
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

/// Rows in device memory, one behind the other or in a cache: `count` of them.
pub(crate) fn placed_rows(source: Source, count: usize) -> PyResult<PlacedRows> {
    let Source(memory, paged, scale) = source;
    let memory = device_rows(memory);
    let rows = match paged {
        None => PlacedRows::dense(memory),
        Some(paged @ Paged(_, _, _, Span(address, bytes))) => {
            if bytes != count * size_of::<u32>() {
                let got = bytes / size_of::<u32>();
                return Err(invalid(format!("slots: expected {count}, got {got}")));
            }
            let pages = paged.pages();
            let page_rows = u32::try_from(pages.page_rows).unwrap_or(u32::MAX);
            let (page, row) = (pages.page_stride as u64, pages.row_stride as u64);
            // SAFETY: there are as many slots as rows, under the promise of `device_rows`.
            unsafe { PlacedRows::paged(memory, page_rows, page, row, address) }
        }
    };
    Ok(match scale {
        Some(scale) => rows.dequantized(scale),
        None => rows,
    })
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
