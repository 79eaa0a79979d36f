//! Memory, or a multicast object, seen through an address range.

#![allow(unsafe_code)] // driver calls

use std::sync::Arc;

use super::allocation::location;
use super::range::Span;
use super::{AddressRange, Allocation};
use crate::copy;
use crate::device::Device;
use crate::error::{CudaError, Result, check_span};
use crate::multicast::BoundMulticast;
use crate::stream::Stream;
use crate::sys;

/// Memory at an address. Unmapped on drop; the memory and the addresses are let go after that.
///
/// Life cycle: [`AddressRange::reserve`], [`Allocation::create`] or an import,
/// [`Mapping::new`] (map and give access), use, drop. The fields are dropped in the order in which
/// they are written, which is the order that the driver wants.
#[derive(Debug)]
pub struct Mapping {
    backing: Backing,
    span: Span,
}

/// What a mapping shows.
#[derive(Debug)]
pub(crate) enum Backing {
    /// Memory of one device.
    Memory(Arc<Allocation>),
    /// All replicas of a multicast object at once, from an offset into it.
    Multicast(Arc<BoundMulticast>, usize),
}

impl Mapping {
    /// Maps the first `bytes` bytes of the memory at `offset` of the range, and lets `devices` read
    /// and write it. `offset` and `bytes` are multiples of the memory's granularity.
    ///
    /// Drivers map memory only from its beginning, so there is no offset into it.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for no device, zero bytes, more than the memory or the range
    /// has, or addresses that are mapped already; else the driver's. Nothing stays mapped then.
    pub fn new(
        range: &Arc<AddressRange>,
        offset: usize,
        memory: &Arc<Allocation>,
        bytes: usize,
        devices: &[&Device],
    ) -> Result<Self> {
        check_span("mapping of an allocation", 0, bytes, memory.bytes())?;
        Self::of(
            range,
            offset,
            Backing::Memory(Arc::clone(memory)),
            bytes,
            devices,
        )
    }

    pub(crate) fn of(
        range: &Arc<AddressRange>,
        offset: usize,
        backing: Backing,
        bytes: usize,
        devices: &[&Device],
    ) -> Result<Self> {
        if bytes == 0 {
            return Err(CudaError::invalid("bytes of a mapping", "at least 1", 0));
        }
        if devices.is_empty() {
            return Err(CudaError::invalid("devices of a mapping", "at least 1", 0));
        }
        let span = range.take(offset, bytes)?;
        range.context().with_current(|| {
            map(&span, &backing)?;
            // From here on `drop` unmaps, also when giving access fails.
            let mapping = Self { backing, span };
            mapping.give_access(devices)?;
            Ok(mapping)
        })
    }

    fn give_access(&self, devices: &[&Device]) -> Result<()> {
        let access: Vec<_> = devices
            .iter()
            .map(|device| sys::CUmemAccessDesc {
                location: location(device),
                flags: sys::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            })
            .collect();
        let api = self.span.range.context().driver().api();
        // SAFETY: the span is mapped by `self`; reads as many descriptions as the vector has.
        unsafe { api.cuMemSetAccess(self.address(), self.bytes(), access.as_ptr(), access.len()) }
    }

    /// The address of the first byte. Of a multicast mapping, only `multimem` instructions may use
    /// it: an ordinary load or store is undefined.
    pub fn address(&self) -> u64 {
        self.span.address()
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.span.bytes
    }

    /// Whether it shows a multicast object.
    pub fn is_multicast(&self) -> bool {
        matches!(self.backing, Backing::Multicast(..))
    }

    /// The address range.
    pub fn range(&self) -> &Arc<AddressRange> {
        &self.span.range
    }

    /// The memory it shows; `None` for a multicast mapping.
    pub fn allocation(&self) -> Option<&Arc<Allocation>> {
        match &self.backing {
            Backing::Memory(memory) => Some(memory),
            Backing::Multicast(..) => None,
        }
    }

    /// Writes host bytes at an offset, in stream order, and waits.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] where the bytes do not fit or the mapping is multicast, else
    /// the driver's.
    pub fn upload(&self, stream: &Stream, offset: usize, from: &[u8]) -> Result<()> {
        self.check_copy("upload", offset, from.len())?;
        // SAFETY: the span lies inside the mapping, which is live while `self` is borrowed.
        unsafe { copy::upload(stream, self.address() + offset as u64, from) }
    }

    /// Reads bytes at an offset, in stream order, and waits.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] where the bytes do not fit or the mapping is multicast, else
    /// the driver's.
    pub fn download(&self, stream: &Stream, offset: usize, to: &mut [u8]) -> Result<()> {
        self.check_copy("download", offset, to.len())?;
        // SAFETY: the span lies inside the mapping, which is live while `self` is borrowed.
        unsafe { copy::download(stream, to, self.address() + offset as u64) }
    }

    fn check_copy(&self, what: &'static str, offset: usize, bytes: usize) -> Result<()> {
        if self.is_multicast() {
            let got = "a multicast mapping, which only multimem instructions may use";
            return Err(CudaError::invalid(what, "a mapping of memory", got));
        }
        check_span(what, offset, bytes, self.bytes())
    }
}

/// Maps the backing; access is given separately.
fn map(span: &Span, backing: &Backing) -> Result<()> {
    let (handle, inside) = match backing {
        Backing::Memory(memory) => (memory.handle(), 0),
        Backing::Multicast(object, inside) => (object.handle(), *inside),
    };
    let api = span.range.context().driver().api();
    // SAFETY: the span lies inside the reserved range and is free, by `AddressRange::take`; the
    // handle is held by `backing`.
    unsafe { api.cuMemMap(span.address(), span.bytes, inside, handle, 0) }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let driver = self.span.range.context().driver();
        // SAFETY: exactly the span that `map` mapped, unmapped only here. Whoever gave the address
        // to a kernel promised to keep the mapping until the kernel has finished.
        driver.released(unsafe { driver.api().cuMemUnmap(self.address(), self.bytes()) });
    }
}
