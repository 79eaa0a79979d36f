//! Devices and what they can do.

#![allow(unsafe_code)] // driver calls

use core::ffi::{CStr, c_char, c_int, c_uint};
use core::fmt;
use std::sync::Arc;

use crate::driver::Driver;
use crate::error::{CudaError, Result};
use crate::sys;

/// A device of the machine, as this process sees it (`CUDA_VISIBLE_DEVICES` applies).
#[derive(Clone)]
pub struct Device {
    driver: Arc<Driver>,
    ordinal: u32,
    raw: sys::CUdevice,
}

/// Something that a device is asked about; the discriminant is the driver's number for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
#[non_exhaustive]
pub enum DeviceAttribute {
    /// Threads a block may have.
    MaxThreadsPerBlock = 1,
    /// Bytes of shared memory a block may have without asking for more.
    MaxSharedMemoryPerBlock = 8,
    /// Streaming multiprocessors.
    MultiprocessorCount = 16,
    /// One address space for host and devices.
    UnifiedAddressing = 41,
    /// Threads that a multiprocessor holds at once.
    MaxThreadsPerMultiprocessor = 39,
    /// Compute capability, before the dot.
    ComputeCapabilityMajor = 75,
    /// Compute capability, after the dot.
    ComputeCapabilityMinor = 76,
    /// Atomics of the device on host memory are native.
    HostNativeAtomicSupported = 86,
    /// A registered host pointer is valid on the device as it is.
    CanUseHostPointerForRegisteredMem = 91,
    /// Virtual memory management (`cuMemCreate` and the rest).
    VirtualMemoryManagementSupported = 102,
    /// Memory can be exported as a POSIX file descriptor.
    HandleTypePosixFileDescriptorSupported = 103,
    /// Memory can be exported as a fabric handle. Creating one also needs an IMEX channel.
    HandleTypeFabricSupported = 128,
    /// Multicast objects.
    MulticastSupported = 132,
}

/// What one device can do with another's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerLink {
    /// Loads and stores of the peer's memory are possible.
    pub access: bool,
    /// Atomics on the peer's memory are native: true over NVLink, false over PCIe.
    pub native_atomics: bool,
    /// The driver's rank of the link, 0 is best.
    pub performance_rank: i32,
}

impl Device {
    /// How many devices this process sees.
    ///
    /// # Errors
    /// The driver's.
    pub fn count(driver: &Driver) -> Result<u32> {
        let mut count: c_int = 0;
        // SAFETY: writes one integer to a place that lives through the call.
        unsafe { driver.api().cuDeviceGetCount(&mut count) }?;
        Ok(count.unsigned_abs())
    }

    /// The device with this ordinal.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] where there are fewer devices.
    pub fn new(driver: &Arc<Driver>, ordinal: u32) -> Result<Self> {
        let count = Self::count(driver)?;
        let (Ok(number), true) = (c_int::try_from(ordinal), ordinal < count) else {
            let expected = format!("less than {count}, the number of devices");
            return Err(CudaError::invalid("device ordinal", expected, ordinal));
        };
        let mut raw = 0;
        // SAFETY: writes one integer to a place that lives through the call.
        unsafe { driver.api().cuDeviceGet(&mut raw, number) }?;
        Ok(Self {
            driver: Arc::clone(driver),
            ordinal,
            raw,
        })
    }

    /// Every device, by ordinal.
    ///
    /// # Errors
    /// The driver's.
    pub fn all(driver: &Arc<Driver>) -> Result<Vec<Self>> {
        (0..Self::count(driver)?)
            .map(|ordinal| Self::new(driver, ordinal))
            .collect()
    }

    /// The driver this device belongs to.
    pub fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// The ordinal.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// The marketing name, for example `NVIDIA H200`.
    ///
    /// # Errors
    /// The driver's.
    pub fn name(&self) -> Result<String> {
        text::<256>(|buffer, len| {
            // SAFETY: writes at most `len` bytes to a buffer of that length.
            unsafe { self.driver.api().cuDeviceGetName(buffer, len, self.raw) }
        })
    }

    /// The PCI address, for example `0000:1B:00.0`.
    ///
    /// # Errors
    /// The driver's.
    pub fn pci_bus_id(&self) -> Result<String> {
        text::<32>(|buffer, len| {
            // SAFETY: writes at most `len` bytes to a buffer of that length.
            unsafe { self.driver.api().cuDeviceGetPCIBusId(buffer, len, self.raw) }
        })
    }

    /// The UUID, the same in every process; of a MIG slice, the slice's own.
    ///
    /// # Errors
    /// The driver's.
    pub fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = sys::CUuuid::default();
        // SAFETY: writes one structure to a place that lives through the call.
        unsafe { self.driver.api().cuDeviceGetUuid_v2(&mut uuid, self.raw) }?;
        Ok(uuid.bytes)
    }

    /// An attribute's value.
    ///
    /// # Errors
    /// The driver's; one that does not know the attribute answers `CUDA_ERROR_INVALID_VALUE`.
    pub fn attribute(&self, attribute: DeviceAttribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: writes one integer to a place that lives through the call.
        unsafe {
            self.driver
                .api()
                .cuDeviceGetAttribute(&mut value, attribute as c_uint, self.raw)
        }?;
        Ok(value)
    }

    /// Whether an attribute is there and not zero.
    ///
    /// # Errors
    /// The driver's, except that a driver which does not know the attribute means `false`.
    pub fn supports(&self, attribute: DeviceAttribute) -> Result<bool> {
        match self.attribute(attribute) {
            Ok(value) => Ok(value != 0),
            Err(error) if error.code() == Some(sys::CUDA_ERROR_INVALID_VALUE) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Compute capability: (9, 0) is sm_90.
    ///
    /// # Errors
    /// The driver's.
    pub fn compute_capability(&self) -> Result<(i32, i32)> {
        Ok((
            self.attribute(DeviceAttribute::ComputeCapabilityMajor)?,
            self.attribute(DeviceAttribute::ComputeCapabilityMinor)?,
        ))
    }

    /// Memory of the device, in bytes.
    ///
    /// # Errors
    /// The driver's.
    pub fn total_memory(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: writes one integer to a place that lives through the call.
        unsafe { self.driver.api().cuDeviceTotalMem_v2(&mut bytes, self.raw) }?;
        Ok(bytes)
    }

    /// Whether this device can load and store the peer's memory. A device can reach itself.
    ///
    /// Some machines say yes and drop the writes (PCIe ACS, IOMMU): write and verify before use.
    ///
    /// # Errors
    /// The driver's.
    pub fn can_access_peer(&self, peer: &Self) -> Result<bool> {
        if self.raw == peer.raw {
            return Ok(true);
        }
        let mut can = 0;
        // SAFETY: writes one integer to a place that lives through the call.
        unsafe {
            self.driver
                .api()
                .cuDeviceCanAccessPeer(&mut can, self.raw, peer.raw)
        }?;
        Ok(can != 0)
    }

    /// What this device can do with the peer's memory.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for a device and itself, else the driver's.
    pub fn peer_link(&self, peer: &Self) -> Result<PeerLink> {
        if self.raw == peer.raw {
            return Err(CudaError::invalid("peer", "another device", self.ordinal));
        }
        let ask = |attribute| {
            let mut value = 0;
            // SAFETY: writes one integer to a place that lives through the call.
            unsafe {
                self.driver
                    .api()
                    .cuDeviceGetP2PAttribute(&mut value, attribute, self.raw, peer.raw)
            }?;
            Ok(value)
        };
        Ok(PeerLink {
            access: ask(sys::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? != 0,
            native_atomics: ask(sys::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? != 0,
            performance_rank: ask(sys::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)?,
        })
    }

    pub(crate) fn raw(&self) -> sys::CUdevice {
        self.raw
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw && Arc::ptr_eq(&self.driver, &other.driver)
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.ordinal).finish()
    }
}

/// Runs a call that fills a buffer of `N` bytes with a string.
fn text<const N: usize>(fill: impl FnOnce(*mut c_char, c_int) -> Result<()>) -> Result<String> {
    let mut buffer = [0_u8; N];
    fill(
        buffer.as_mut_ptr().cast(),
        c_int::try_from(N).unwrap_or(c_int::MAX),
    )?;
    let text = CStr::from_bytes_until_nul(&buffer).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}
