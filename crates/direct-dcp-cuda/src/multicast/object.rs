//! The object, and the gathering of its devices.

#![allow(unsafe_code)] // driver calls

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::MulticastTeam;
use crate::context::Context;
use crate::device::Device;
use crate::error::{CudaError, Result};
use crate::sys;
use crate::vmm::{self, FabricHandle, Granularity, HandleTypes};

/// A multicast object to which devices are being added.
///
/// See the [order](crate#multicast) of calls across ranks.
#[derive(Debug)]
pub struct MulticastObject {
    object: Object,
    added: Vec<Device>,
}

/// The driver's object, released on drop.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) context: Context,
    pub(super) handle: sys::CUmemGenericAllocationHandle,
    /// Devices of the whole team.
    pub(super) devices: u32,
    pub(super) bytes: usize,
    /// What offsets and sizes are a multiple of.
    pub(super) unit: usize,
    pub(super) shared_as: HandleTypes,
}

impl MulticastObject {
    /// What the size of such an object, and the offsets and sizes of binds, are a multiple of.
    ///
    /// # Errors
    /// The driver's; [`CudaError::is_unsupported`] tells a machine without multicast.
    pub fn granularity(
        context: &Context,
        devices: u32,
        bytes: usize,
        shared_as: HandleTypes,
        granularity: Granularity,
    ) -> Result<usize> {
        let properties = properties(devices, bytes, shared_as);
        let mut unit = 0;
        let api = context.driver().api();
        // SAFETY: reads one structure and writes one integer, both live through the call.
        unsafe { api.cuMulticastGetGranularity(&mut unit, &properties, granularity.option()) }?;
        if unit == 0 {
            return Err(CudaError::invalid(
                "multicast granularity",
                "at least 1 byte",
                0,
            ));
        }
        Ok(unit)
    }

    /// Creates an object for `devices` devices and `bytes` bytes on each, rounded up to the
    /// granularity: [`MulticastObject::bytes`] tells to what. One rank does this.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for zero bytes or fewer than two devices, else the driver's.
    pub fn create(
        context: &Context,
        devices: u32,
        bytes: usize,
        shared_as: HandleTypes,
        granularity: Granularity,
    ) -> Result<Self> {
        check_devices(devices)?;
        let round_to = Self::granularity(context, devices, bytes, shared_as, granularity)?;
        let rounded = bytes
            .checked_next_multiple_of(round_to)
            .filter(|rounded| *rounded > 0);
        let Some(rounded) = rounded else {
            let expected = format!("1 to {}", usize::MAX - round_to);
            return Err(CudaError::invalid(
                "bytes of a multicast object",
                expected,
                bytes,
            ));
        };
        let unit = Self::granularity(context, devices, rounded, shared_as, Granularity::Minimum)?;
        let properties = properties(devices, rounded, shared_as);
        let mut handle = 0;
        let api = context.driver().api();
        // SAFETY: reads one structure and writes one handle, both live through the call.
        unsafe { api.cuMulticastCreate(&mut handle, &properties) }?;
        let context = context.clone();
        Ok(Self::own(Object {
            context,
            handle,
            devices,
            bytes: rounded,
            unit,
            shared_as,
        }))
    }

    /// Imports an object that rank 0 exported. The descriptor stays open. `devices` and `bytes` are
    /// the exporter's.
    ///
    /// # Errors
    /// As [`MulticastObject::create`].
    pub fn import_fd(
        context: &Context,
        fd: BorrowedFd<'_>,
        devices: u32,
        bytes: usize,
    ) -> Result<Self> {
        let kind = HandleTypes::POSIX_FD;
        Self::import(context, devices, bytes, kind, || {
            vmm::import_fd(context.driver(), fd)
        })
    }

    /// Imports an object from a fabric handle; see [`MulticastObject::import_fd`].
    ///
    /// # Errors
    /// As [`MulticastObject::create`].
    pub fn import_fabric(
        context: &Context,
        fabric: &FabricHandle,
        devices: u32,
        bytes: usize,
    ) -> Result<Self> {
        let kind = HandleTypes::FABRIC;
        Self::import(context, devices, bytes, kind, || {
            vmm::import_fabric(context.driver(), fabric)
        })
    }

    fn import(
        context: &Context,
        devices: u32,
        bytes: usize,
        shared_as: HandleTypes,
        import: impl FnOnce() -> Result<sys::CUmemGenericAllocationHandle>,
    ) -> Result<Self> {
        check_devices(devices)?;
        let unit = Self::granularity(context, devices, bytes, shared_as, Granularity::Minimum)?;
        let handle = import()?;
        let context = context.clone();
        Ok(Self::own(Object {
            context,
            handle,
            devices,
            bytes,
            unit,
            shared_as,
        }))
    }

    fn own(object: Object) -> Self {
        Self {
            object,
            added: Vec::new(),
        }
    }

    /// Exports the object as a file descriptor.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] without [`HandleTypes::POSIX_FD`], else the driver's.
    pub fn export_fd(&self) -> Result<OwnedFd> {
        self.object
            .shared_as
            .require(HandleTypes::POSIX_FD, "HandleTypes::POSIX_FD")?;
        vmm::export_fd(self.object.context.driver(), self.object.handle)
    }

    /// Exports the object as a fabric handle.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] without [`HandleTypes::FABRIC`], else the driver's.
    pub fn export_fabric(&self) -> Result<FabricHandle> {
        self.object
            .shared_as
            .require(HandleTypes::FABRIC, "HandleTypes::FABRIC")?;
        vmm::export_fabric(self.object.context.driver(), self.object.handle)
    }

    /// Adds a device, for the life of the object. Each rank adds its own.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for a device added before or one too many, else the driver's.
    pub fn add_device(&mut self, device: &Device) -> Result<()> {
        if self.added.contains(device) {
            let expected = "a device that was not added yet";
            return Err(CudaError::invalid(
                "multicast device",
                expected,
                device.ordinal(),
            ));
        }
        if self.added.len() >= self.object.devices as usize {
            let expected = format!("no more than {} devices", self.object.devices);
            return Err(CudaError::invalid(
                "multicast device",
                expected,
                self.added.len() + 1,
            ));
        }
        // SAFETY: the object is live while `self` is.
        unsafe {
            self.object
                .context
                .driver()
                .api()
                .cuMulticastAddDevice(self.object.handle, device.raw())
        }?;
        self.added.push(device.clone());
        Ok(())
    }

    /// Goes on to binding, *after a barrier* at which every rank has said that it added its device.
    /// Without the barrier a bind may wait for ever, in the driver.
    ///
    /// # Errors
    /// [`CudaError::WrongOrder`] where this rank has added no device; the object is gone then.
    pub fn complete(self) -> Result<MulticastTeam> {
        if self.added.is_empty() {
            return Err(CudaError::WrongOrder {
                what: "MulticastObject::complete",
                needed: "add this rank's device first",
            });
        }
        Ok(MulticastTeam::new(Arc::new(self.object), self.added))
    }

    /// The size for each device in bytes, after rounding.
    pub fn bytes(&self) -> usize {
        self.object.bytes
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let driver = self.context.driver();
        // SAFETY: created or imported once, released only here; bindings and mappings hold the
        // `Arc` around `self`, so they are gone.
        driver.released(unsafe { driver.api().cuMemRelease(self.handle) });
    }
}

fn check_devices(devices: u32) -> Result<()> {
    if devices >= 2 {
        return Ok(());
    }
    Err(CudaError::invalid(
        "devices of a multicast object",
        "at least 2",
        devices,
    ))
}

fn properties(devices: u32, bytes: usize, shared_as: HandleTypes) -> sys::CUmulticastObjectProp {
    sys::CUmulticastObjectProp {
        num_devices: devices,
        size: bytes,
        handle_types: shared_as.bits().into(),
        flags: 0,
    }
}
