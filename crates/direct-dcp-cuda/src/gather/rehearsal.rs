//! Gathers of bytes that the host has, in buffers of their own: for checks and benchmarks.
#![allow(unsafe_code)] // work on buffers that live here

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use direct_dcp_kernels::Shape;

use super::lane::{Held, Lane, LaunchError};
use super::route::{CallOptions, Delivery};
use super::rows::{DeviceRows, DeviceRowsMut};
use crate::buffer::DeviceBuffer;
use crate::context::Context;
use crate::copy;
use crate::error::{CudaError, Result};
use crate::event::Event;
use crate::graph::{CaptureMode, ExecutableGraph};
use crate::stream::Stream;

/// A lane with what a caller of it has: a stream, rows, room for the rows of all, a graph.
///
/// Everything it submits is on its one stream, and over when it is dropped. That is what makes its
/// methods safe: nothing outside can free or write what the device is still using.
pub struct Rehearsal {
    graph: Option<ExecutableGraph>,
    /// The last call, if it lent its slot.
    held: Option<Held>,
    marks: Vec<Event>,
    /// Events of marks that are gone, so that a mark in a timed loop creates none.
    spare: Vec<Event>,
    local: DeviceBuffer,
    out: DeviceBuffer,
    stream: Arc<Stream>,
    shape: Shape,
    lane: Arc<Lane>,
}

impl Rehearsal {
    /// Room for gathers of `shape` through `lane`, whose context this is.
    ///
    /// It allocates, for which drivers may wait until the device is idle: no rank may wait for this
    /// one meanwhile. The same goes for dropping it.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(context: &Context, lane: &Arc<Lane>, shape: Shape) -> Result<Self> {
        let too_large = || CudaError::invalid("rows", "a size that memory can hold", shape.rows);
        let slice = usize::try_from(shape.bytes()).map_err(|_| too_large())?;
        let ranks = lane.options().layout.world_size as usize;
        let all = slice.checked_mul(ranks).ok_or_else(too_large)?;
        Ok(Rehearsal {
            graph: None,
            held: None,
            marks: Vec::new(),
            spare: Vec::new(),
            local: DeviceBuffer::new(context, slice)?,
            out: DeviceBuffer::new(context, all)?,
            stream: Arc::new(Stream::new(context)?),
            shape,
            lane: lane.clone(),
        })
    }

    /// What a call gathers from this rank.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Sets this rank's rows, and waits.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for more bytes than a call gathers, else the driver's.
    pub fn set_rows(&mut self, rows: &[u8]) -> Result<()> {
        self.local.upload(&self.stream, 0, rows)
    }

    /// Fills the room for copied rows with one value.
    ///
    /// # Errors
    /// The driver's.
    pub fn fill_out(&mut self, value: u8) -> Result<()> {
        let (address, bytes) = (self.out.address(), self.out.bytes());
        // SAFETY: the buffer is this object's, whose work is all on this stream and over before it
        // is freed.
        unsafe { self.stream.fill_u8(address, value, bytes) }
    }

    /// Submits one call.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn call(
        &mut self,
        delivery: Delivery,
        call: CallOptions,
    ) -> std::result::Result<(), LaunchError> {
        // As a caller would: the rows of one call are let go before the next.
        self.held = None;
        // SAFETY: the buffer is this object's, written only by its methods on this stream, and not
        // freed before the stream has come to its end.
        let local = unsafe { DeviceRows::new(self.local.address(), self.local.bytes()) };
        match delivery {
            Delivery::CopyOut => {
                // SAFETY: as above; it is another buffer.
                let out = unsafe { DeviceRowsMut::new(self.out.address(), self.out.bytes()) };
                self.lane
                    .gather_into(&self.stream, self.shape, local, out, call)?;
            }
            Delivery::ZeroCopy => {
                let held = self.lane.gather(&self.stream, self.shape, local, call)?;
                self.held = Some(held);
            }
        }
        Ok(())
    }

    /// Captures `calls` calls into a graph, in place of an earlier one.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn record(
        &mut self,
        delivery: Delivery,
        calls: usize,
        call: CallOptions,
    ) -> std::result::Result<(), LaunchError> {
        // The one before may be under way.
        self.wait()?;
        self.graph = None;
        let stream = self.stream.clone();
        let capture = stream.begin_capture(CaptureMode::ThreadLocal)?;
        for _ in 0..calls {
            self.call(delivery, call)?;
        }
        self.graph = Some(capture.end()?.instantiate()?);
        Ok(())
    }

    /// Submits the calls that were captured, once more.
    ///
    /// # Errors
    /// [`CudaError::WrongOrder`] before a [`record`](Rehearsal::record), else the driver's.
    pub fn replay(&mut self) -> Result<()> {
        let graph = self.graph.as_ref().ok_or(CudaError::WrongOrder {
            what: "replay",
            needed: "calls to have been recorded",
        })?;
        // SAFETY: what was captured are calls on this object's buffers and lane, which stay until
        // the stream has come to its end.
        unsafe { graph.launch(&self.stream) }
    }

    /// Marks this point of the stream, for [`laps`](Rehearsal::laps).
    ///
    /// # Errors
    /// The driver's.
    pub fn mark(&mut self) -> Result<()> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => Event::with_timing(self.stream.context())?,
        };
        event.record(&self.stream)?;
        self.marks.push(event);
        Ok(())
    }

    /// Waits, and gives the times from each mark to the next. The marks are gone then.
    ///
    /// # Errors
    /// The driver's.
    pub fn laps(&mut self) -> Result<Vec<Duration>> {
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
    ///
    /// # Errors
    /// The driver's, among them the failure of an earlier launch.
    pub fn wait(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// Waits, and reads what the last call delivered: `[world_size · rows, row_bytes]`. After a
    /// zero-copy call that is the slot, so no peer may have gone on to the call after the next.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for a length that is not that of the rows of all ranks, else
    /// the driver's.
    pub fn read(&self, to: &mut [u8]) -> Result<()> {
        if to.len() != self.out.bytes() {
            let expected = format!("{} bytes", self.out.bytes());
            return Err(CudaError::invalid("gathered rows", expected, to.len()));
        }
        let Some(held) = &self.held else {
            return self.out.download(&self.stream, 0, to);
        };
        let address = match held.address() {
            Some(address) => address,
            None => {
                let mut word = [0; 8];
                // SAFETY: a word of the lane's state, which the guard keeps.
                unsafe { copy::download(&self.stream, &mut word, held.address_word()) }?;
                u64::from_ne_bytes(word)
            }
        };
        // SAFETY: the slot that the call delivered into, as large as the rows of all ranks, in
        // memory that the guard keeps.
        unsafe { copy::download(&self.stream, to, address) }
    }
}

impl fmt::Debug for Rehearsal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rehearsal")
            .field("lane", &self.lane)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl Drop for Rehearsal {
    fn drop(&mut self) {
        // The first wait may end early and tell of a failed launch. A second failure comes from a
        // context that executes nothing more.
        if self.wait().is_err() {
            let _ = self.wait();
        }
    }
}
