//! Plain device memory.

#![allow(unsafe_code)] // driver calls

use crate::context::Context;
use crate::copy;
use crate::error::{CudaError, Result, check_span};
use crate::stream::Stream;

/// Device memory of one context, freed on drop. It cannot be shared with another process: for that
/// there is [`Allocation`](crate::Allocation).
///
/// The contents are undefined until written.
#[derive(Debug)]
pub struct DeviceBuffer {
    context: Context,
    address: u64,
    bytes: usize,
}

impl DeviceBuffer {
    /// Allocates `bytes` bytes, aligned to 256.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for zero bytes, else the driver's.
    pub fn new(context: &Context, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(CudaError::invalid(
                "bytes of a device buffer",
                "at least 1",
                0,
            ));
        }
        context.with_current(|| {
            let mut address = 0;
            // SAFETY: writes one address to a place that lives through the call.
            unsafe { context.driver().api().cuMemAlloc_v2(&mut address, bytes) }?;
            Ok(Self {
                context: context.clone(),
                address,
                bytes,
            })
        })
    }

    /// The device address of the first byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Writes host bytes at an offset, in stream order, and waits.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] where the bytes do not fit, else the driver's.
    pub fn upload(&self, stream: &Stream, offset: usize, from: &[u8]) -> Result<()> {
        check_span("upload", offset, from.len(), self.bytes)?;
        // SAFETY: the span lies inside the buffer, which is live while `self` is borrowed.
        unsafe { copy::upload(stream, self.address + offset as u64, from) }
    }

    /// Makes every byte `value`, in stream order, and waits.
    ///
    /// # Errors
    /// The driver's.
    pub fn fill(&self, stream: &Stream, value: u8) -> Result<()> {
        // SAFETY: all of the buffer, which is live while `self` is borrowed.
        unsafe { stream.fill_u8(self.address, value, self.bytes) }?;
        stream.synchronize()
    }

    /// Reads bytes at an offset, in stream order, and waits.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] where the bytes do not fit, else the driver's.
    pub fn download(&self, stream: &Stream, offset: usize, to: &mut [u8]) -> Result<()> {
        check_span("download", offset, to.len(), self.bytes)?;
        // SAFETY: the span lies inside the buffer, which is live while `self` is borrowed.
        unsafe { copy::download(stream, to, self.address + offset as u64) }
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_release() {
            let driver = self.context.driver();
            // SAFETY: allocated by `DeviceBuffer::new`, freed only here. Whoever submitted work
            // that uses it promised to keep it until the work has finished.
            driver.released(unsafe { driver.api().cuMemFree_v2(self.address) });
        }
    }
}
