//! Handles that cross process boundaries, of memory and of multicast objects alike.

#![allow(unsafe_code)] // driver calls, file descriptors

use core::ffi::{c_int, c_uint, c_void};
use core::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::driver::Driver;
use crate::error::{CudaError, Result};
use crate::sys;

/// How memory, or a multicast object, is going to be shared. Chosen at creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HandleTypes(c_uint);

impl HandleTypes {
    /// Not at all.
    pub const NONE: Self = Self(sys::CU_MEM_HANDLE_TYPE_NONE);
    /// As a file descriptor, within one machine.
    pub const POSIX_FD: Self = Self(sys::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    /// As 64 bytes, across machines of one NVLink domain. Needs an IMEX channel
    /// (`/dev/nvidia-caps-imex-channels`).
    pub const FABRIC: Self = Self(sys::CU_MEM_HANDLE_TYPE_FABRIC);

    /// Both this and the other way.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether every way in `other` is in this.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether it can be shared at all.
    pub const fn is_shareable(self) -> bool {
        self.0 != 0
    }

    pub(crate) const fn bits(self) -> c_uint {
        self.0
    }

    /// Refuses an export that was not asked for at creation.
    pub(crate) fn require(self, wanted: Self, name: &'static str) -> Result<()> {
        if self.contains(wanted) {
            return Ok(());
        }
        Err(CudaError::invalid(
            "export",
            format!("an object created with {name}"),
            "one without",
        ))
    }
}

/// 64 bytes that name memory across the machines of one NVLink domain.
///
/// Whoever has them can map the memory: they are a secret between the ranks, so `Debug` does not
/// show them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct FabricHandle(pub [u8; 64]);

impl fmt::Debug for FabricHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FabricHandle(..)")
    }
}

/// Exports a handle as a file descriptor that closes on exec.
pub(crate) fn export_fd(
    driver: &Driver,
    handle: sys::CUmemGenericAllocationHandle,
) -> Result<OwnedFd> {
    let mut raw: c_int = -1;
    let place = core::ptr::from_mut(&mut raw).cast::<c_void>();
    let kind = sys::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: the handle is live; for this kind the driver writes one `int` to the place.
    unsafe {
        driver
            .api()
            .cuMemExportToShareableHandle(place, handle, kind, 0)
    }?;
    if raw < 0 {
        return Err(CudaError::Descriptor {
            reason: format!("the driver exported {raw}"),
        });
    }
    // SAFETY: the driver has just opened the descriptor for us; nobody else knows it.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    // The driver's descriptor would be inherited by a program that this process starts; a clone
    // made by the standard library is not.
    fd.try_clone().map_err(|error| CudaError::Descriptor {
        reason: error.to_string(),
    })
}

/// Imports a handle from a file descriptor, which stays the caller's.
///
/// The driver takes the descriptor as the bits of a pointer and refuses null, so descriptor 0 goes
/// in as a clone, whose number is never 0.
pub(crate) fn import_fd(
    driver: &Driver,
    fd: BorrowedFd<'_>,
) -> Result<sys::CUmemGenericAllocationHandle> {
    if fd.as_raw_fd() == 0 {
        let clone = fd.try_clone_to_owned();
        let clone = clone.map_err(|error| CudaError::Descriptor {
            reason: error.to_string(),
        })?;
        return import_fd(driver, clone.as_fd());
    }
    let number = usize::try_from(fd.as_raw_fd())
        .map_err(|_| CudaError::invalid("descriptor", "an open one", fd.as_raw_fd()))?;
    let shareable = core::ptr::without_provenance_mut::<c_void>(number);
    let mut handle = 0;
    let kind = sys::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    // SAFETY: the descriptor is open through the call; the driver takes its own reference and
    // refuses one that is not its own; writes one handle.
    unsafe {
        driver
            .api()
            .cuMemImportFromShareableHandle(&mut handle, shareable, kind)
    }?;
    Ok(handle)
}

/// Exports a handle as a fabric handle.
pub(crate) fn export_fabric(
    driver: &Driver,
    handle: sys::CUmemGenericAllocationHandle,
) -> Result<FabricHandle> {
    let mut fabric = sys::CUmemFabricHandle { data: [0; 64] };
    let place = core::ptr::from_mut(&mut fabric).cast::<c_void>();
    let kind = sys::CU_MEM_HANDLE_TYPE_FABRIC;
    // SAFETY: the handle is live; for this kind the driver writes 64 bytes to the place.
    unsafe {
        driver
            .api()
            .cuMemExportToShareableHandle(place, handle, kind, 0)
    }?;
    Ok(FabricHandle(fabric.data))
}

/// Imports a handle from a fabric handle.
pub(crate) fn import_fabric(
    driver: &Driver,
    fabric: &FabricHandle,
) -> Result<sys::CUmemGenericAllocationHandle> {
    let mut fabric = sys::CUmemFabricHandle { data: fabric.0 };
    let place = core::ptr::from_mut(&mut fabric).cast::<c_void>();
    let mut handle = 0;
    let kind = sys::CU_MEM_HANDLE_TYPE_FABRIC;
    // SAFETY: for this kind the driver reads 64 bytes from the place, and refuses bytes that it did
    // not make; writes one handle.
    unsafe {
        driver
            .api()
            .cuMemImportFromShareableHandle(&mut handle, place, kind)
    }?;
    Ok(handle)
}
