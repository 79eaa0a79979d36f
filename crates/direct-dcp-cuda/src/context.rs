//! Primary contexts, and making one current without disturbing the caller.

#![allow(unsafe_code)] // driver calls

use core::marker::PhantomData;
use std::sync::Arc;

use crate::device::Device;
use crate::driver::Driver;
use crate::error::{CudaError, Result};
use crate::sys;

/// A device's primary context, retained. Clones share the one retention.
///
/// The primary context is the one that the CUDA runtime, and so PyTorch, uses: memory and streams
/// of theirs are valid here and the reverse. Everything that lives in a context holds a clone, so
/// the context is released after the last of them is gone.
#[derive(Clone, Debug)]
pub struct Context {
    retained: Arc<Retained>,
}

#[derive(Debug)]
struct Retained {
    device: Device,
    raw: sys::CUcontext,
}

impl Context {
    /// Retains the device's primary context, and creates it if nobody has.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(device: &Device) -> Result<Self> {
        let mut raw = sys::CUcontext::NULL;
        // SAFETY: writes one handle to a place that lives through the call.
        unsafe {
            device
                .driver()
                .api()
                .cuDevicePrimaryCtxRetain(&mut raw, device.raw())
        }?;
        Ok(Self {
            retained: Arc::new(Retained {
                device: device.clone(),
                raw,
            }),
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.retained.device
    }

    /// The driver.
    pub fn driver(&self) -> &Arc<Driver> {
        self.retained.device.driver()
    }

    /// Makes the context current on this thread until the guard is dropped; then the context that
    /// was current before is current again.
    ///
    /// # Errors
    /// The driver's.
    pub fn enter(&self) -> Result<Entered<'_>> {
        let mut current = sys::CUcontext::NULL;
        // SAFETY: writes one handle to a place that lives through the call.
        unsafe { self.driver().api().cuCtxGetCurrent(&mut current) }?;
        let pushed = current != self.retained.raw;
        if pushed {
            self.push()?;
        }
        Ok(Entered {
            context: self,
            pushed,
            thread_bound: PhantomData,
        })
    }

    /// As [`Context::enter`], for `Drop`: a first failure is remembered and tried once more, since
    /// nothing can be given back outside the context. Pushing a retained context twice is safe.
    pub(crate) fn enter_to_release(&self) -> Option<Entered<'_>> {
        let outcome = self.enter().or_else(|error| {
            self.driver().released(Err(error));
            self.enter()
        });
        match outcome {
            Ok(entered) => Some(entered),
            Err(error) => {
                self.driver().released(Err(error));
                None
            }
        }
    }

    /// Runs `body` with the context current; afterwards the one that was current before is again.
    ///
    /// # Errors
    /// The body's, or the driver's. If restoring fails after the body succeeded, what the body
    /// returned is dropped.
    pub fn with_current<R>(&self, body: impl FnOnce() -> Result<R>) -> Result<R> {
        let entered = self.enter()?;
        let outcome = body();
        let left = entered.leave();
        let value = outcome?;
        left.map(|()| value)
    }

    /// Waits until everything submitted to the context has finished.
    ///
    /// # Errors
    /// The driver's, among them the failure of an earlier launch.
    pub fn synchronize(&self) -> Result<()> {
        self.with_current(|| {
            // SAFETY: takes no argument; the context is current.
            unsafe { self.driver().api().cuCtxSynchronize() }
        })
    }

    /// Lets this context load and store the other context's plain device memory
    /// ([`DeviceBuffer`](crate::DeviceBuffer)). Mappings do not need it. It stays until the
    /// context ends; enabling twice is no error.
    ///
    /// # Errors
    /// The driver's.
    pub fn enable_peer_access(&self, peer: &Self) -> Result<()> {
        if self.retained.raw == peer.retained.raw {
            return Err(CudaError::invalid(
                "peer",
                "another device's context",
                "the same context",
            ));
        }
        self.with_current(|| {
            // SAFETY: the peer's context is retained through the call.
            match unsafe {
                self.driver()
                    .api()
                    .cuCtxEnablePeerAccess(peer.retained.raw, 0)
            } {
                Err(error) if error.code() == Some(sys::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) => {
                    Ok(())
                }
                outcome => outcome,
            }
        })
    }

    /// Bytes of device memory that are free, and that there are.
    ///
    /// # Errors
    /// The driver's.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        self.with_current(|| {
            let (mut free, mut total) = (0, 0);
            // SAFETY: writes two integers to places that live through the call.
            unsafe { self.driver().api().cuMemGetInfo_v2(&mut free, &mut total) }?;
            Ok((free, total))
        })
    }

    pub(crate) fn raw(&self) -> sys::CUcontext {
        self.retained.raw
    }

    fn push(&self) -> Result<()> {
        // SAFETY: the context is retained by `self`, so it is live.
        unsafe { self.driver().api().cuCtxPushCurrent_v2(self.retained.raw) }
    }
}

impl PartialEq for Context {
    fn eq(&self, other: &Self) -> bool {
        self.retained.raw == other.retained.raw
    }
}

impl Eq for Context {}

impl Drop for Retained {
    fn drop(&mut self) {
        let driver = self.device.driver();
        // SAFETY: balances the one retain of `Context::new`; nothing that lives in the context is
        // left, since each such object holds the `Arc` around `self`.
        driver.released(unsafe { driver.api().cuDevicePrimaryCtxRelease_v2(self.device.raw()) });
    }
}

/// The guard of [`Context::enter`]. It belongs to the thread that made it.
#[derive(Debug)]
pub struct Entered<'a> {
    context: &'a Context,
    pushed: bool,
    thread_bound: PhantomData<*const ()>,
}

impl Entered<'_> {
    /// Makes the context that was current before current again, and says whether that worked.
    ///
    /// # Errors
    /// The driver's.
    pub fn leave(mut self) -> Result<()> {
        self.pop()
    }

    fn pop(&mut self) -> Result<()> {
        if !core::mem::take(&mut self.pushed) {
            return Ok(());
        }
        let mut popped = sys::CUcontext::NULL;
        // SAFETY: writes one handle to a place that lives through the call; the guard cannot leave
        // the thread on whose stack of contexts it pushed.
        unsafe { self.context.driver().api().cuCtxPopCurrent_v2(&mut popped) }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let outcome = self.pop();
        self.context.driver().released(outcome);
    }
}
