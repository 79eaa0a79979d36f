//! A stream with what a rehearsal does on it: points that are timed, and graphs of calls.
#![allow(unsafe_code)] // launches of graphs

use std::sync::Arc;
use std::time::Duration;

use crate::error::{CudaError, Result};
use crate::event::Event;
use crate::graph::{Capture, ExecutableGraph};
use crate::stream::Stream;

/// What is done on a stream, and graphs that are launched on no other. All that was submitted to the
/// stream is over when this is dropped, so it goes before everything that its work uses.
#[derive(Debug)]
pub(super) struct Timeline {
    graphs: Vec<ExecutableGraph>,
    marks: Vec<Event>,
    /// Events of marks that are gone, so that a mark in a timed loop creates none.
    spare: Vec<Event>,
    stream: Arc<Stream>,
}

impl Timeline {
    pub(super) fn new(stream: &Arc<Stream>) -> Self {
        Timeline {
            graphs: Vec::new(),
            marks: Vec::new(),
            spare: Vec::new(),
            stream: stream.clone(),
        }
    }

    pub(super) fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// Waits, and forgets the graphs.
    pub(super) fn forget(&mut self) -> Result<()> {
        self.wait()?;
        self.graphs.clear();
        Ok(())
    }

    /// Keeps what was captured, to be launched, beside what was kept before, and waits.
    pub(super) fn keep(&mut self, capture: Capture<'_>) -> Result<()> {
        let graph = capture.end()?.instantiate()?;
        // The first launch would, and allocate for it, when ranks may wait for each other.
        graph.upload(&self.stream)?;
        self.wait()?;
        self.graphs.push(graph);
        Ok(())
    }

    /// How many graphs there are.
    pub(super) fn graphs(&self) -> usize {
        self.graphs.len()
    }

    /// Submits a graph once more.
    ///
    /// # Safety
    /// What was captured uses memory that stays until this timeline is dropped, or forgets it.
    pub(super) unsafe fn replay(&self, index: usize) -> Result<()> {
        let graph = self.graphs.get(index).ok_or(CudaError::WrongOrder {
            what: "replay",
            needed: "calls to have been recorded",
        })?;
        // SAFETY: the caller's promise; `forget` and the drop wait for this stream.
        unsafe { graph.launch(&self.stream) }
    }

    /// Marks this point of the stream.
    pub(super) fn mark(&mut self) -> Result<()> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => Event::with_timing(self.stream.context())?,
        };
        event.record(&self.stream)?;
        self.marks.push(event);
        Ok(())
    }

    /// Waits, and gives the times from each mark to the next. The marks are gone then.
    pub(super) fn laps(&mut self) -> Result<Vec<Duration>> {
        self.wait()?;
        let marks = std::mem::take(&mut self.marks);
        let lap = |pair: &[Event]| {
            let milliseconds = pair[1].elapsed_ms_since(&pair[0])?;
            Ok(Duration::from_secs_f64(
                f64::from(milliseconds.max(0.0)) / 1e3,
            ))
        };
        let laps = marks.windows(2).map(lap).collect();
        self.spare.extend(marks);
        laps
    }

    /// Waits until everything submitted has finished.
    pub(super) fn wait(&self) -> Result<()> {
        self.stream.synchronize()
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        // The first wait may end early and tell of a failed launch. A second failure comes from a
        // context that executes nothing more.
        if self.wait().is_err() {
            let _ = self.wait();
        }
    }
}
