//! Graphs: work captured from a stream once and replayed often.

#![allow(unsafe_code)] // driver calls

use core::ffi::c_uint;
use core::marker::PhantomData;

use crate::context::Context;
use crate::error::{CudaError, Result};
use crate::stream::Stream;
use crate::sys;

/// Which calls of other threads are refused during a capture, because they could block it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CaptureMode {
    /// Unsafe calls of every thread.
    Global,
    /// Unsafe calls of the capturing thread.
    ThreadLocal,
    /// None.
    Relaxed,
}

/// Where a stream stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CaptureStatus {
    /// Not capturing: work is executed.
    None,
    /// Capturing: work becomes part of a graph.
    Active,
    /// A call that cannot be captured has spoilt the capture; it must still be ended.
    Invalidated,
}

impl Stream {
    /// Starts to capture what is submitted to the stream. [`Capture::end`] gives the graph.
    ///
    /// # Errors
    /// The driver's; the legacy default stream cannot be captured.
    pub fn begin_capture(&self, mode: CaptureMode) -> Result<Capture<'_>> {
        let mode = match mode {
            CaptureMode::Global => sys::CU_STREAM_CAPTURE_MODE_GLOBAL,
            CaptureMode::ThreadLocal => sys::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CaptureMode::Relaxed => sys::CU_STREAM_CAPTURE_MODE_RELAXED,
        };
        self.context().with_current(|| {
            // SAFETY: the stream is live while `self` is.
            unsafe {
                self.context()
                    .driver()
                    .api()
                    .cuStreamBeginCapture_v2(self.raw(), mode)
            }?;
            Ok(Capture {
                stream: self,
                open: true,
                thread_bound: PhantomData,
            })
        })
    }

    /// Whether the stream is being captured, by whomever.
    ///
    /// # Errors
    /// The driver's.
    pub fn capture_status(&self) -> Result<CaptureStatus> {
        self.context().with_current(|| {
            let mut status: c_uint = 0;
            // SAFETY: the stream is live while `self` is; writes one integer.
            unsafe {
                self.context()
                    .driver()
                    .api()
                    .cuStreamIsCapturing(self.raw(), &mut status)
            }?;
            Ok(match status {
                sys::CU_STREAM_CAPTURE_STATUS_NONE => CaptureStatus::None,
                sys::CU_STREAM_CAPTURE_STATUS_ACTIVE => CaptureStatus::Active,
                _ => CaptureStatus::Invalidated,
            })
        })
    }

    /// Whether work submitted now would be captured and not executed.
    ///
    /// # Errors
    /// The driver's.
    pub fn is_capturing(&self) -> Result<bool> {
        Ok(self.capture_status()? != CaptureStatus::None)
    }
}

/// A capture under way. Dropped without [`Capture::end`], it is ended and thrown away. It belongs
/// to its thread: the driver wants a capture ended where it began.
#[derive(Debug)]
pub struct Capture<'a> {
    stream: &'a Stream,
    open: bool,
    thread_bound: PhantomData<*const ()>,
}

impl Capture<'_> {
    /// Ends the capture and gives what was captured.
    ///
    /// # Errors
    /// The driver's; a capture that was invalidated ends with `CUDA_ERROR_STREAM_CAPTURE_*`.
    pub fn end(mut self) -> Result<Graph> {
        self.finish()
    }

    fn finish(&mut self) -> Result<Graph> {
        let context = self.stream.context();
        context.with_current(|| {
            let mut raw = sys::CUgraph::NULL;
            let api = context.driver().api();
            // SAFETY: the stream is live while it is borrowed; writes one handle.
            let ended = unsafe { api.cuStreamEndCapture(self.stream.raw(), &mut raw) };
            self.open = ended.is_err() && self.stream.is_capturing().unwrap_or(false);
            // Owned before the outcome is looked at: a driver that reports an earlier failure here
            // may have made the graph all the same.
            let graph = (raw != sys::CUgraph::NULL).then(|| Graph {
                context: context.clone(),
                raw,
            });
            ended?;
            graph.ok_or_else(|| CudaError::invalid("cuStreamEndCapture", "a graph", "null"))
        })
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.open {
            let outcome = self.finish().map(drop);
            self.stream.context().driver().released(outcome);
        }
    }
}

/// Captured work, not yet executable.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    raw: sys::CUgraph,
}

impl Graph {
    /// Makes it executable. The graph may be dropped afterwards.
    ///
    /// # Errors
    /// The driver's.
    pub fn instantiate(&self) -> Result<ExecutableGraph> {
        self.context.with_current(|| {
            let mut raw = sys::CUgraphExec::NULL;
            let api = self.context.driver().api();
            // SAFETY: the graph is live while `self` is; writes one handle.
            unsafe { api.cuGraphInstantiateWithFlags(&mut raw, self.raw, 0) }?;
            Ok(ExecutableGraph {
                context: self.context.clone(),
                raw,
            })
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_release() {
            let driver = self.context.driver();
            // SAFETY: came from `Capture::finish`, destroyed only here.
            driver.released(unsafe { driver.api().cuGraphDestroy(self.raw) });
        }
    }
}

/// A graph that can be launched.
#[derive(Debug)]
pub struct ExecutableGraph {
    context: Context,
    raw: sys::CUgraphExec,
}

impl ExecutableGraph {
    /// Brings the graph to the device, in order of the stream, so that no launch has to: the first one
    /// would allocate for it, which may wait until the device is idle.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for a stream of another context, else the driver's.
    pub fn upload(&self, stream: &Stream) -> Result<()> {
        self.check_stream(stream)?;
        self.context.with_current(|| {
            // SAFETY: both handles are live; nothing that was captured is executed.
            unsafe {
                self.context
                    .driver()
                    .api()
                    .cuGraphUpload(self.raw, stream.raw())
            }
        })
    }

    /// Submits the captured work to a stream. Two launches of one graph never overlap.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for a stream of another context, else the driver's.
    ///
    /// # Safety
    /// What each captured operation's own contract asks, again, at this launch: the memory, the
    /// modules and the events that were captured are still there, and ordered with others' use.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        self.check_stream(stream)?;
        self.context.with_current(|| {
            // SAFETY: both handles are live; the caller vouches for what was captured.
            unsafe {
                self.context
                    .driver()
                    .api()
                    .cuGraphLaunch(self.raw, stream.raw())
            }
        })
    }

    fn check_stream(&self, stream: &Stream) -> Result<()> {
        if *stream.context() == self.context {
            return Ok(());
        }
        Err(CudaError::invalid(
            "stream",
            "a stream of the graph's context",
            "a stream of another context",
        ))
    }
}

impl Drop for ExecutableGraph {
    fn drop(&mut self) {
        if let Some(_entered) = self.context.enter_to_release() {
            let driver = self.context.driver();
            // SAFETY: came from `Graph::instantiate`, destroyed only here. The driver lets a
            // launch that is under way finish.
            driver.released(unsafe { driver.api().cuGraphExecDestroy(self.raw) });
        }
    }
}
