//! The C types, written independently of the code under test.

#![allow(unsafe_code)] // reading and writing through the C caller's pointers

use core::ffi::{c_char, c_int, c_uint, c_void};

use crate::code::{Code, Outcome};

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Location {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocationProp {
    pub(crate) kind: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location: Location,
    pub(crate) win32: *mut c_void,
    pub(crate) compression: u8,
    pub(crate) rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AccessDesc {
    pub(crate) location: Location,
    pub(crate) flags: c_uint,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Copy2d {
    pub(crate) from: End2d,
    pub(crate) to: End2d,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// The source or the destination of a `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct End2d {
    pub(crate) x: usize,
    pub(crate) y: usize,
    pub(crate) kind: c_uint,
    pub(crate) host: *mut c_void,
    pub(crate) device: u64,
    pub(crate) array: *mut c_void,
    pub(crate) pitch: usize,
}

/// `CUmulticastObjectProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MulticastProp {
    pub(crate) devices: c_uint,
    pub(crate) size: usize,
    pub(crate) handle_types: u64,
    pub(crate) flags: u64,
}

/// A place that the C caller wants written.
#[repr(transparent)]
pub(crate) struct Out<T>(pub(crate) *mut T);

impl<T> Out<T> {
    pub(crate) fn set(&self, value: T) -> Outcome {
        if self.0.is_null() || !self.0.is_aligned() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null and aligned; that it is a place for a `T` is the C caller's promise.
        unsafe { self.0.write(value) };
        Ok(())
    }
}

impl Out<c_char> {
    /// Writes text and a NUL, cut to `capacity` bytes.
    pub(crate) fn set_text(&self, text: &str, capacity: usize) -> Outcome {
        if self.0.is_null() || capacity == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let bytes = &text.as_bytes()[..text.len().min(capacity - 1)];
        // SAFETY: `bytes` and the NUL fit in the capacity, which is the C caller's promise.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), self.0, bytes.len()) };
        // SAFETY: one past the text, inside the capacity.
        let end = unsafe { self.0.add(bytes.len()) };
        // SAFETY: as above.
        unsafe { end.write(0) };
        Ok(())
    }
}

/// Values that the C caller wants read.
#[repr(transparent)]
pub(crate) struct In<T>(pub(crate) *const T);

impl<T: Copy> In<T> {
    pub(crate) fn get(&self) -> Outcome<T> {
        self.at(0)
    }

    /// Reads the element at an index.
    pub(crate) fn at(&self, index: usize) -> Outcome<T> {
        if self.0.is_null() || !self.0.is_aligned() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: that there is an element at the index is the C caller's promise.
        let element = unsafe { self.0.add(index) };
        // SAFETY: as above; `T` is plain data.
        Ok(unsafe { element.read() })
    }
}

impl In<c_char> {
    /// Reads a NUL-terminated string.
    pub(crate) fn text(&self) -> Outcome<String> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: that the string ends in NUL is the C caller's promise.
        let text = unsafe { core::ffi::CStr::from_ptr(self.0) };
        text.to_str()
            .map(str::to_owned)
            .map_err(|_| Code::INVALID_VALUE)
    }
}
