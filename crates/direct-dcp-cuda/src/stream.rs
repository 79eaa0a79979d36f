//! Streams: our own, and a caller's that are only borrowed.

#![allow(unsafe_code)] // driver calls

use core::ffi::c_void;

use crate::context::Context;
use crate::error::{CudaError, Result};
use crate::event::Event;
use crate::sys;

/// A queue of work for the device, executed in order.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    raw: sys::CUstream,
    owned: bool,
}

impl Stream {
    /// Creates a stream that has no implicit ordering with the legacy default stream.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(context: &Context) -> Result<Self> {
        context.with_current(|| {
            let mut raw = sys::CUstream::NULL;
            let api = context.driver().api();
            // SAFETY: writes one handle to a place that lives through the call.
            unsafe { api.cuStreamCreate(&mut raw, sys::CU_STREAM_NON_BLOCKING) }?;
            Ok(Self {
                context: context.clone(),
                raw,
                owned: true,
            })
        })
    }

    /// The legacy default stream (0 in most programs), which every blocking stream is ordered with.
    pub fn legacy_default(context: &Context) -> Self {
        Self::borrowed(context, sys::CU_STREAM_LEGACY)
    }

    /// The calling thread's own default stream: which one is decided at each use, by the thread
    /// that uses it.
    pub fn per_thread_default(context: &Context) -> Self {
        Self::borrowed(context, sys::CU_STREAM_PER_THREAD)
    }

    /// Uses a caller's stream without owning it: it is never destroyed here.
    ///
    /// `raw` is a `CUstream` or `cudaStream_t` as an integer, as PyTorch's
    /// `torch.cuda.current_stream().cuda_stream` gives it; 0 is the default stream.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] where the stream belongs to another context.
    ///
    /// # Safety
    /// `raw` is a live stream, or 0, 1 or 2, and stays live for as long as the result is used.
    pub unsafe fn borrow(context: &Context, raw: u64) -> Result<Self> {
        let address = usize::try_from(raw)
            .map_err(|_| CudaError::invalid("stream", "a pointer", format!("{raw:#x}")))?;
        let stream = Self::borrowed(context, address);
        if address > sys::CU_STREAM_PER_THREAD {
            let mut owner = sys::CUcontext::NULL;
            // SAFETY: the caller says that the stream is live; writes one handle to a place that
            // lives through the call.
            unsafe {
                context
                    .driver()
                    .api()
                    .cuStreamGetCtx(stream.raw, &mut owner)
            }?;
            if owner != context.raw() {
                return Err(CudaError::invalid(
                    "stream",
                    format!(
                        "a stream of the primary context of device {}",
                        context.device().ordinal()
                    ),
                    "a stream of another context",
                ));
            }
        }
        Ok(stream)
    }

    fn borrowed(context: &Context, raw: usize) -> Self {
        let raw = sys::CUstream(core::ptr::without_provenance_mut::<c_void>(raw));
        Self {
            context: context.clone(),
            raw,
            owned: false,
        }
    }

    /// The context the stream belongs to.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The `CUstream` as an integer, for a library that takes one.
    pub fn as_raw(&self) -> u64 {
        self.raw.0.addr() as u64
    }

    /// Waits until everything submitted so far has finished.
    ///
    /// # Errors
    /// The driver's, among them the failure of an earlier launch.
    pub fn synchronize(&self) -> Result<()> {
        self.context.with_current(|| {
            // SAFETY: the stream is live while `self` is.
            unsafe { self.context.driver().api().cuStreamSynchronize(self.raw) }
        })
    }

    /// Whether everything submitted so far has finished.
    ///
    /// # Errors
    /// The driver's, among them the failure of an earlier launch.
    pub fn is_idle(&self) -> Result<bool> {
        self.context.with_current(|| {
            // SAFETY: the stream is live while `self` is.
            ready(unsafe { self.context.driver().api().cuStreamQuery(self.raw) })
        })
    }

    /// Makes what is submitted later wait for the event's last record. The host does not wait.
    ///
    /// # Errors
    /// The driver's.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.context.with_current(|| {
            // SAFETY: both handles are live while their owners are borrowed.
            unsafe {
                self.context
                    .driver()
                    .api()
                    .cuStreamWaitEvent(self.raw, event.raw(), 0)
            }
        })
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.raw
    }
}

impl Drop for Stream {
    /// Destroys an owned stream. Work that is still queued is finished by the driver first.
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        if let Some(_entered) = self.context.enter_to_release() {
            let driver = self.context.driver();
            // SAFETY: created by `Stream::new`, destroyed only here.
            driver.released(unsafe { driver.api().cuStreamDestroy_v2(self.raw) });
        }
    }
}

/// Turns the answer of a query into "finished?".
pub(crate) fn ready(answer: Result<()>) -> Result<bool> {
    match answer {
        Ok(()) => Ok(true),
        Err(error) if error.code() == Some(sys::CUDA_ERROR_NOT_READY) => Ok(false),
        Err(error) => Err(error),
    }
}
