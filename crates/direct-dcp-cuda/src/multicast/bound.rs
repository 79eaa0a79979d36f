//! A multicast object behind which this rank's memory lies.

use std::sync::Arc;

use super::object::Object;
use super::team::Binding;
use crate::device::Device;
use crate::error::{Result, check_multiple, check_span};
use crate::sys;
use crate::vmm::{AddressRange, Backing, Mapping};

/// A multicast object to which this rank has bound its memory; it can be mapped.
///
/// It keeps the bindings, and a mapping keeps it, so memory stays bound for as long as something is
/// mapped. The fields are dropped in the order in which they are written: unbind, release.
///
/// See the [order](crate#multicast) of calls across ranks.
#[derive(Debug)]
pub struct BoundMulticast {
    bindings: Vec<Binding>,
    object: Arc<Object>,
}

impl BoundMulticast {
    pub(super) fn new(object: Arc<Object>, bindings: Vec<Binding>) -> Self {
        Self { bindings, object }
    }

    /// Maps `bytes` bytes of the object, from `inside`, at `offset` of the range, and lets
    /// `devices` use them with `multimem` instructions. All three are multiples of the granularity.
    ///
    /// # Errors
    /// As [`Mapping::new`].
    pub fn map(
        self: &Arc<Self>,
        inside: usize,
        range: &Arc<AddressRange>,
        offset: usize,
        bytes: usize,
        devices: &[&Device],
    ) -> Result<Mapping> {
        let unit = self.object.unit;
        check_multiple("map: offset into the multicast object", inside, unit)?;
        check_multiple("map: offset into the address range", offset, unit)?;
        check_multiple("map: bytes", bytes, unit)?;
        check_span(
            "map: span of the multicast object",
            inside,
            bytes,
            self.object.bytes,
        )?;
        let backing = Backing::Multicast(Arc::clone(self), inside);
        Mapping::of(range, offset, backing, bytes, devices)
    }

    /// The size for each device in bytes.
    pub fn bytes(&self) -> usize {
        self.object.bytes
    }

    /// How many spans this rank has bound.
    pub fn bindings(&self) -> usize {
        self.bindings.len()
    }

    pub(crate) fn handle(&self) -> sys::CUmemGenericAllocationHandle {
        self.object.handle
    }
}
