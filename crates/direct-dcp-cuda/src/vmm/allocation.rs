//! Physical memory.

#![allow(unsafe_code)] // driver calls

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::share::{self, FabricHandle, HandleTypes};
use crate::context::Context;
use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::sys;

/// What sizes are rounded up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// The least that works: the smallest allocation.
    Minimum,
    /// What the driver finds best: larger pages, fewer misses of the address translation.
    Recommended,
}

impl Granularity {
    pub(crate) fn option(self) -> core::ffi::c_uint {
        match self {
            Self::Minimum => sys::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            Self::Recommended => sys::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        }
    }
}

/// Physical memory of one device, created here or imported. Released on drop, which gives it back
/// once no mapping, no multicast binding and no other process holds it.
#[derive(Debug)]
pub struct Allocation {
    context: Context,
    handle: sys::CUmemGenericAllocationHandle,
    bytes: usize,
    shared_as: HandleTypes,
    imported: bool,
}

impl Allocation {
    /// What sizes, offsets and addresses of such memory are a multiple of, in bytes.
    ///
    /// # Errors
    /// The driver's.
    pub fn granularity(
        context: &Context,
        shared_as: HandleTypes,
        granularity: Granularity,
    ) -> Result<usize> {
        let properties = properties(context.device(), shared_as);
        let mut bytes = 0;
        let api = context.driver().api();
        // SAFETY: reads one structure and writes one integer, both live through the call.
        unsafe {
            api.cuMemGetAllocationGranularity(&mut bytes, &properties, granularity.option())
        }?;
        if bytes == 0 {
            return Err(CudaError::invalid("granularity", "at least 1 byte", 0));
        }
        Ok(bytes)
    }

    /// Creates memory on the context's device. `bytes` is rounded up to the granularity:
    /// [`Allocation::bytes`] tells to what. The contents are undefined.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for zero bytes, else the driver's;
    /// [`CudaError::is_unsupported`] tells a machine that cannot share memory this way (a missing
    /// IMEX channel, for [`HandleTypes::FABRIC`]).
    pub fn create(
        context: &Context,
        bytes: usize,
        shared_as: HandleTypes,
        granularity: Granularity,
    ) -> Result<Arc<Self>> {
        let unit = Self::granularity(context, shared_as, granularity)?;
        let rounded = bytes
            .checked_next_multiple_of(unit)
            .filter(|rounded| *rounded > 0);
        let Some(rounded) = rounded else {
            let expected = format!("1 to {}", usize::MAX - unit);
            return Err(CudaError::invalid(
                "bytes of an allocation",
                expected,
                bytes,
            ));
        };
        let properties = properties(context.device(), shared_as);
        context.with_current(|| {
            let mut handle = 0;
            let api = context.driver().api();
            // SAFETY: reads one structure and writes one handle, both live through the call.
            unsafe { api.cuMemCreate(&mut handle, rounded, &properties, 0) }?;
            Ok(Self::own(context, handle, rounded, shared_as, false))
        })
    }

    /// Imports memory that another process, or this one, exported. The descriptor stays open.
    ///
    /// `bytes` is the exporter's [`Allocation::bytes`]: the driver does not tell it, but refuses to
    /// map more than there is.
    ///
    /// # Errors
    /// The driver's.
    pub fn import_fd(context: &Context, fd: BorrowedFd<'_>, bytes: usize) -> Result<Arc<Self>> {
        context.with_current(|| {
            let handle = share::import_fd(context.driver(), fd)?;
            Ok(Self::own(
                context,
                handle,
                bytes,
                HandleTypes::POSIX_FD,
                true,
            ))
        })
    }

    /// Imports memory from a fabric handle; see [`Allocation::import_fd`].
    ///
    /// # Errors
    /// The driver's.
    pub fn import_fabric(
        context: &Context,
        fabric: &FabricHandle,
        bytes: usize,
    ) -> Result<Arc<Self>> {
        context.with_current(|| {
            let handle = share::import_fabric(context.driver(), fabric)?;
            Ok(Self::own(context, handle, bytes, HandleTypes::FABRIC, true))
        })
    }

    fn own(
        context: &Context,
        handle: sys::CUmemGenericAllocationHandle,
        bytes: usize,
        shared_as: HandleTypes,
        imported: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            context: context.clone(),
            handle,
            bytes,
            shared_as,
            imported,
        })
    }

    /// Exports the memory as a file descriptor, which holds it until closed.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] without [`HandleTypes::POSIX_FD`], else the driver's.
    pub fn export_fd(&self) -> Result<OwnedFd> {
        self.shared_as
            .require(HandleTypes::POSIX_FD, "HandleTypes::POSIX_FD")?;
        share::export_fd(self.context.driver(), self.handle)
    }

    /// Exports the memory as a fabric handle.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] without [`HandleTypes::FABRIC`], else the driver's.
    pub fn export_fabric(&self) -> Result<FabricHandle> {
        self.shared_as
            .require(HandleTypes::FABRIC, "HandleTypes::FABRIC")?;
        share::export_fabric(self.context.driver(), self.handle)
    }

    /// The size in bytes, after rounding.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The ways in which it can be shared.
    pub fn shared_as(&self) -> HandleTypes {
        self.shared_as
    }

    /// The ordinal of the device on which the memory lies, as the driver tells it. Imported memory
    /// may lie on another device than the context's.
    ///
    /// # Errors
    /// The driver's.
    pub fn device_ordinal(&self) -> Result<i32> {
        let mut properties = properties(self.context.device(), self.shared_as);
        let api = self.context.driver().api();
        // SAFETY: the handle is live while `self` is; writes one structure.
        unsafe { api.cuMemGetAllocationPropertiesFromHandle(&mut properties, self.handle) }?;
        Ok(properties.location.id)
    }

    /// Whether it was imported.
    pub fn is_imported(&self) -> bool {
        self.imported
    }

    /// The context it was created in or imported into.
    pub fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn handle(&self) -> sys::CUmemGenericAllocationHandle {
        self.handle
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let driver = self.context.driver();
        // SAFETY: created or imported once, released only here; mappings and bindings hold the
        // `Arc` around `self`, so they are gone.
        driver.released(unsafe { driver.api().cuMemRelease(self.handle) });
    }
}

fn properties(device: &Device, shared_as: HandleTypes) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        kind: sys::CU_MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: shared_as.bits(),
        location: location(device),
        win32_handle_meta_data: core::ptr::null_mut(),
        alloc_flags: sys::CUmemAllocationFlags::default(),
    }
}

pub(super) fn location(device: &Device) -> sys::CUmemLocation {
    sys::CUmemLocation {
        kind: sys::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device.raw(),
    }
}
