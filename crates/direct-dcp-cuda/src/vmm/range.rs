//! Address ranges, reserved and empty until something is mapped.

#![allow(unsafe_code)] // driver calls

use core::ops::Range;
use std::sync::{Arc, Mutex};

use crate::context::Context;
use crate::driver::lock;
use crate::error::{CudaError, Result, check_span};
use crate::sys;

/// Addresses, the same for every device of this process. Freed on drop.
#[derive(Debug)]
pub struct AddressRange {
    context: Context,
    address: sys::CUdeviceptr,
    bytes: usize,
    /// Spans under a mapping, as offsets, in no order.
    taken: Mutex<Vec<Range<usize>>>,
}

impl AddressRange {
    /// Reserves `bytes` addresses, a multiple of the granularity of what is to be mapped.
    ///
    /// `alignment` is a power of two, or 0 for the driver's own.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for zero bytes or an alignment that is no power of two, else
    /// the driver's.
    pub fn reserve(context: &Context, bytes: usize, alignment: usize) -> Result<Arc<Self>> {
        if bytes == 0 {
            return Err(CudaError::invalid(
                "bytes of an address range",
                "at least 1",
                0,
            ));
        }
        if alignment != 0 && !alignment.is_power_of_two() {
            return Err(CudaError::invalid(
                "alignment",
                "a power of two, or 0",
                alignment,
            ));
        }
        context.with_current(|| {
            let mut address = 0;
            let api = context.driver().api();
            // SAFETY: writes one address to a place that lives through the call.
            unsafe { api.cuMemAddressReserve(&mut address, bytes, alignment, 0, 0) }?;
            let taken = Mutex::default();
            Ok(Arc::new(Self {
                context: context.clone(),
                address,
                bytes,
                taken,
            }))
        })
    }

    /// The first address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Takes a span for a mapping; refuses one that overlaps another mapping's.
    pub(super) fn take(self: &Arc<Self>, offset: usize, bytes: usize) -> Result<Span> {
        check_span("mapping", offset, bytes, self.bytes)?;
        let span = offset..offset + bytes;
        let mut taken = lock(&self.taken);
        if let Some(other) = taken
            .iter()
            .find(|o| o.start < span.end && span.start < o.end)
        {
            let got = format!("{span:?}, which overlaps {other:?}");
            return Err(CudaError::invalid(
                "mapping",
                "a free span of the address range",
                got,
            ));
        }
        taken.push(span);
        Ok(Span {
            range: Arc::clone(self),
            offset,
            bytes,
        })
    }
}

/// A span of a range that belongs to one mapping, given back on drop. It keeps the range.
#[derive(Debug)]
pub(super) struct Span {
    pub(super) range: Arc<AddressRange>,
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

impl Span {
    pub(super) fn address(&self) -> u64 {
        self.range.address + self.offset as u64
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        lock(&self.range.taken).retain(|span| span.start != self.offset);
    }
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let driver = self.context.driver();
        // SAFETY: reserved by `reserve` with this length, freed only here; every mapping holds the
        // `Arc` around `self`, so nothing is mapped.
        driver.released(unsafe { driver.api().cuMemAddressFree(self.address, self.bytes) });
    }
}
