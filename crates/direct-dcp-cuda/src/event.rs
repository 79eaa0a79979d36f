//! Events: points in a stream.

#![allow(unsafe_code)] // driver calls

use crate::context::Context;
use crate::error::{CudaError, Result};
use crate::stream::{Stream, ready};
use crate::sys;

/// A point in a stream that others wait for, or measure time from.
#[derive(Debug)]
pub struct Event {
    context: Context,
    raw: sys::CUevent,
    timing: bool,
}

impl Event {
    /// Creates an event for ordering: cheaper, cannot measure time.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(context: &Context) -> Result<Self> {
        Self::create(context, false)
    }

    /// Creates an event that can also measure time.
    ///
    /// # Errors
    /// The driver's.
    pub fn with_timing(context: &Context) -> Result<Self> {
        Self::create(context, true)
    }

    fn create(context: &Context, timing: bool) -> Result<Self> {
        context.with_current(|| {
            let flags = if timing {
                sys::CU_EVENT_DEFAULT
            } else {
                sys::CU_EVENT_DISABLE_TIMING
            };
            let mut raw = sys::CUevent::NULL;
            // SAFETY: writes one handle to a place that lives through the call.
            unsafe { context.driver().api().cuEventCreate(&mut raw, flags) }?;
            Ok(Self {
                context: context.clone(),
                raw,
                timing,
            })
        })
    }

    /// Moves the event to the present end of the stream.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for a stream of another context, else the driver's.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        if *stream.context() != self.context {
            return Err(CudaError::invalid(
                "event",
                format!("a stream of device {}", self.context.device().ordinal()),
                format!("a stream of device {}", stream.context().device().ordinal()),
            ));
        }
        self.context.with_current(|| {
            // SAFETY: both handles are live while their owners are borrowed.
            unsafe {
                self.context
                    .driver()
                    .api()
                    .cuEventRecord(self.raw, stream.raw())
            }
        })
    }

    /// Whether the work before the last record has finished. True if there was no record.
    ///
    /// # Errors
    /// The driver's, among them the failure of an earlier launch.
    pub fn is_done(&self) -> Result<bool> {
        self.context.with_current(|| {
            // SAFETY: the event is live while `self` is.
            ready(unsafe { self.context.driver().api().cuEventQuery(self.raw) })
        })
    }

    /// Waits until the work before the last record has finished.
    ///
    /// # Errors
    /// The driver's, among them the failure of an earlier launch.
    pub fn synchronize(&self) -> Result<()> {
        self.context.with_current(|| {
            // SAFETY: the event is live while `self` is.
            unsafe { self.context.driver().api().cuEventSynchronize(self.raw) }
        })
    }

    /// Milliseconds from `start` to `self`; both were recorded and are done.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for an event without timing, else the driver's.
    pub fn elapsed_ms_since(&self, start: &Self) -> Result<f32> {
        if !(self.timing && start.timing) {
            let got = "an event without timing";
            return Err(CudaError::invalid(
                "event",
                "two events made by with_timing",
                got,
            ));
        }
        self.context.with_current(|| {
            let mut milliseconds = 0.0;
            let api = self.context.driver().api();
            // SAFETY: both events are live; writes one number to a place that lives through the
            // call.
            unsafe { api.cuEventElapsedTime(&mut milliseconds, start.raw, self.raw) }?;
            Ok(milliseconds)
        })
    }

    pub(crate) fn raw(&self) -> sys::CUevent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_release() {
            let driver = self.context.driver();
            // SAFETY: created by `Event::create`, destroyed only here. Waits that were submitted
            // on it stay valid: the driver keeps what they need.
            driver.released(unsafe { driver.api().cuEventDestroy_v2(self.raw) });
        }
    }
}
