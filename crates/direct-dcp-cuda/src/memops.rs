//! Writing and waiting for a word in stream order, without a kernel.

#![allow(unsafe_code)] // driver calls

use crate::error::{CudaError, Result};
use crate::stream::Stream;
use crate::sys;

/// When a stream's wait for a word is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitCondition {
    /// The word equals the value.
    Equal,
    /// The word has reached the value, counted around: `(word - value) as i32 >= 0`.
    AtLeast,
}

impl Stream {
    /// Submits a write of a 32-bit word. What the stream did before is visible to whoever sees it.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for a misaligned address, [`CudaError::SymbolMissing`] from an
    /// old driver, else the driver's.
    ///
    /// # Safety
    /// The word is memory that the stream's context can write, until the write has happened.
    pub unsafe fn write_value_u32(&self, address: u64, value: u32) -> Result<()> {
        check_word(address)?;
        self.context().with_current(|| {
            let api = self.context().driver().api();
            let flags = sys::CU_STREAM_WRITE_VALUE_DEFAULT;
            // SAFETY: the caller vouches for the word.
            unsafe { api.cuStreamWriteValue32_v2(self.raw(), address, value, flags) }
        })
    }

    /// Submits a wait for a 32-bit word. It has no deadline: whoever is to write the word must.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for a misaligned address, [`CudaError::SymbolMissing`] from an
    /// old driver, else the driver's.
    ///
    /// # Safety
    /// The word is memory that the stream's context can read, until the wait is over.
    pub unsafe fn wait_value_u32(
        &self,
        address: u64,
        value: u32,
        condition: WaitCondition,
    ) -> Result<()> {
        check_word(address)?;
        let flags = match condition {
            WaitCondition::Equal => sys::CU_STREAM_WAIT_VALUE_EQ,
            WaitCondition::AtLeast => sys::CU_STREAM_WAIT_VALUE_GEQ,
        };
        self.context().with_current(|| {
            let api = self.context().driver().api();
            // SAFETY: the caller vouches for the word.
            unsafe { api.cuStreamWaitValue32_v2(self.raw(), address, value, flags) }
        })
    }
}

fn check_word(address: u64) -> Result<()> {
    if address != 0 && address.is_multiple_of(4) {
        return Ok(());
    }
    Err(CudaError::invalid(
        "word address",
        "a multiple of 4, not 0",
        format!("{address:#x}"),
    ))
}
