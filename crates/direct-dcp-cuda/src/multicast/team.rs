//! Binding memory to a multicast object whose devices are complete.

#![allow(unsafe_code)] // driver calls

use std::sync::Arc;

use super::BoundMulticast;
use super::object::Object;
use crate::device::Device;
use crate::error::{CudaError, Result, check_multiple, check_span};
use crate::vmm::{Allocation, HandleTypes, Mapping};

/// A multicast object whose devices are complete, to which this rank binds its memory.
///
/// See the [order](crate#multicast) of calls across ranks.
#[derive(Debug)]
pub struct MulticastTeam {
    object: Arc<Object>,
    added: Vec<Device>,
    bindings: Vec<Binding>,
}

/// Memory of one device behind a part of the object. Unbound on drop; the memory and the object are
/// let go after that.
#[derive(Debug)]
pub(super) struct Binding {
    device: Device,
    offset: usize,
    bytes: usize,
    _memory: Bound,
    object: Arc<Object>,
}

/// Keeps what was bound.
#[derive(Debug)]
#[allow(dead_code)] // held, not read
enum Bound {
    Allocation(Arc<Allocation>),
    Mapping(Arc<Mapping>),
}

impl MulticastTeam {
    pub(super) fn new(object: Arc<Object>, added: Vec<Device>) -> Self {
        Self {
            object,
            added,
            bindings: Vec::new(),
        }
    }

    /// Binds `bytes` bytes of memory, from `memory_offset`, to the object at `offset`. All three
    /// are multiples of the granularity. The memory was created here, on a device added here, and
    /// is shareable if the object is.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] where that does not hold, else the driver's;
    /// [`CudaError::is_unsupported`] tells a fabric manager that is down.
    pub fn bind(
        &mut self,
        offset: usize,
        memory: &Arc<Allocation>,
        memory_offset: usize,
        bytes: usize,
    ) -> Result<()> {
        let device = self.check(offset, memory, memory_offset, bytes)?;
        let api = self.object.context.driver().api();
        // SAFETY: both handles are live; the spans lie inside them, by the check.
        unsafe {
            api.cuMulticastBindMem(
                self.object.handle,
                offset,
                memory.handle(),
                memory_offset,
                bytes,
                0,
            )
        }?;
        self.keep(device, offset, bytes, Bound::Allocation(Arc::clone(memory)));
        Ok(())
    }

    /// As [`MulticastTeam::bind`], with memory named by where it is mapped.
    ///
    /// # Errors
    /// As [`MulticastTeam::bind`].
    pub fn bind_mapping(
        &mut self,
        offset: usize,
        mapping: &Arc<Mapping>,
        mapping_offset: usize,
        bytes: usize,
    ) -> Result<()> {
        let Some(memory) = mapping.allocation() else {
            let expected = "a mapping of memory";
            return Err(CudaError::invalid("bind", expected, "a multicast mapping"));
        };
        check_span("bind", mapping_offset, bytes, mapping.bytes())?;
        let device = self.check(offset, memory, mapping_offset, bytes)?;
        let address = mapping.address() + mapping_offset as u64;
        let api = self.object.context.driver().api();
        // SAFETY: the object is live, the address lies inside the mapping, by the check.
        unsafe { api.cuMulticastBindAddr(self.object.handle, offset, address, bytes, 0) }?;
        self.keep(device, offset, bytes, Bound::Mapping(Arc::clone(mapping)));
        Ok(())
    }

    fn check(
        &self,
        offset: usize,
        memory: &Allocation,
        memory_offset: usize,
        bytes: usize,
    ) -> Result<Device> {
        let unit = self.object.unit;
        check_multiple("bind: offset into the multicast object", offset, unit)?;
        check_multiple("bind: offset into the memory", memory_offset, unit)?;
        check_multiple("bind: bytes", bytes, unit)?;
        if bytes == 0 {
            return Err(CudaError::invalid("bind: bytes", "at least 1", 0));
        }
        check_span(
            "bind: span of the multicast object",
            offset,
            bytes,
            self.object.bytes,
        )?;
        check_span(
            "bind: span of the memory",
            memory_offset,
            bytes,
            memory.bytes(),
        )?;
        let device = memory.context().device();
        if memory.is_imported() || !self.added.contains(device) {
            let expected = format!("memory created here on one of {:?}", self.added);
            let got = if memory.is_imported() {
                "imported memory"
            } else {
                "another device's"
            };
            return Err(CudaError::invalid("bind: memory", expected, got));
        }
        if self.object.shared_as.is_shareable() && memory.shared_as() == HandleTypes::NONE {
            let expected = "shareable memory, since the multicast object is";
            return Err(CudaError::invalid(
                "bind: memory",
                expected,
                "memory not shareable",
            ));
        }
        let end = offset + bytes;
        let overlaps = |b: &&Binding| b.offset < end && offset < b.offset + b.bytes;
        if self
            .bindings
            .iter()
            .filter(|b| b.device == *device)
            .any(|b| overlaps(&b))
        {
            let expected = "a span to which this device has bound nothing";
            return Err(CudaError::invalid(
                "bind",
                expected,
                format!("{offset}..{end}"),
            ));
        }
        Ok(device.clone())
    }

    fn keep(&mut self, device: Device, offset: usize, bytes: usize, memory: Bound) {
        let object = Arc::clone(&self.object);
        self.bindings.push(Binding {
            device,
            offset,
            bytes,
            _memory: memory,
            object,
        });
    }

    /// Goes on to mapping. Map *after a barrier* at which every rank has said that it bound its
    /// memory: a store to a replica that is not there is undefined.
    ///
    /// # Errors
    /// [`CudaError::WrongOrder`] where this rank has added a device and bound nothing for it; what
    /// was bound is unbound then.
    pub fn bound(self) -> Result<Arc<BoundMulticast>> {
        let has_memory = |device: &Device| self.bindings.iter().any(|b| b.device == *device);
        if !self.added.iter().all(has_memory) {
            return Err(CudaError::WrongOrder {
                what: "MulticastTeam::bound",
                needed: "bind memory of every device that was added here first",
            });
        }
        Ok(Arc::new(BoundMulticast::new(self.object, self.bindings)))
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        let driver = self.object.context.driver();
        // SAFETY: exactly the span that was bound for this device, unbound only here; a mapping of
        // the object holds all bindings, so there is none.
        driver.released(unsafe {
            driver.api().cuMulticastUnbind(
                self.object.handle,
                self.device.raw(),
                self.offset,
                self.bytes,
            )
        });
    }
}
