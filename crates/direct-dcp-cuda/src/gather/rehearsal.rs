//! Gathers of bytes that the host has, in buffers of their own: for checks and benchmarks.
#![allow(unsafe_code)] // work on buffers that live here

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use direct_dcp_kernels::Shape;

use super::lane::{Held, Lane, LaunchError};
use super::pass::Pass;
use super::route::{CallOptions, Delivery};
use super::rows::{DeviceRows, DeviceRowsMut};
use super::timeline::Timeline;
use crate::buffer::DeviceBuffer;
use crate::error::{CudaError, Result};
use crate::graph::CaptureMode;

/// A lane with what a caller of it has: a stream, rows, room for the rows of all, a graph; and, if it
/// is to be rehearsed too, what the caller does with the rows then.
///
/// Everything it submits is on its one stream, and over when it is dropped. That is what makes its
/// methods safe: nothing outside can free or write what the device is still using.
pub struct Rehearsal {
    timeline: Timeline,
    /// The last call, if it lent its slot.
    held: Option<Held>,
    pass: Option<Pass>,
    local: DeviceBuffer,
    out: DeviceBuffer,
    shape: Shape,
    /// Calls of the lane: those before the graphs were recorded, and all.
    recorded: u64,
    calls: u64,
    /// Calls in a graph.
    length: usize,
    lane: Arc<Lane>,
}

impl Rehearsal {
    /// Room for gathers of `shape` through `lane`, on the lane's stream.
    ///
    /// It allocates, for which drivers may wait until the device is idle: no rank may wait for this
    /// one meanwhile. The same goes for dropping it.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(lane: &Arc<Lane>, shape: Shape) -> Result<Self> {
        let context = lane.context();
        let too_large = || CudaError::invalid("rows", "a size that memory can hold", shape.rows);
        let slice = usize::try_from(shape.bytes()).map_err(|_| too_large())?;
        let ranks = lane.options().layout.world_size as usize;
        let all = slice.checked_mul(ranks).ok_or_else(too_large)?;
        Ok(Rehearsal {
            timeline: Timeline::new(lane.stream()),
            held: None,
            pass: None,
            local: DeviceBuffer::new(context, slice)?,
            out: DeviceBuffer::new(context, all)?,
            shape,
            recorded: 0,
            calls: 0,
            length: 0,
            lane: lane.clone(),
        })
    }

    /// Has each call followed by a pass over what it delivered, the rows of all ranks.
    ///
    /// # Errors
    /// The driver's, also of what is under way.
    pub fn set_pass(&mut self, pass: Pass) -> Result<()> {
        self.timeline.forget()?;
        self.pass = Some(pass);
        Ok(())
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
        self.local.upload(self.timeline.stream(), 0, rows)
    }

    /// Fills the room for copied rows with one value.
    ///
    /// # Errors
    /// The driver's.
    pub fn fill_out(&mut self, value: u8) -> Result<()> {
        let (address, bytes) = (self.out.address(), self.out.bytes());
        // SAFETY: the buffer is this object's, whose work is all on this stream and over before it
        // is freed.
        unsafe { self.timeline.stream().fill_u8(address, value, bytes) }
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
        let stream = self.timeline.stream();
        self.calls += 1;
        // SAFETY: the buffer is this object's, written only by its methods on this stream, and not
        // freed before the stream has come to its end.
        let local = unsafe { DeviceRows::new(self.local.address(), self.local.bytes()) };
        let mut delivered = self.out.address();
        match delivery {
            Delivery::CopyOut => {
                // SAFETY: as above; it is another buffer.
                let out = unsafe { DeviceRowsMut::new(self.out.address(), self.out.bytes()) };
                self.lane
                    .gather_into(stream, self.shape, local, out, call)?;
            }
            Delivery::ZeroCopy => {
                let held = self.lane.gather(stream, self.shape, local, call)?;
                let counted = || self.lane.slot_address(self.calls);
                delivered = held.address().unwrap_or_else(counted);
                self.held = Some(held);
            }
        }
        if let Some(pass) = &mut self.pass {
            // SAFETY: the output, as above; or the slot, as large, which the guard keeps until the
            // next call on this stream.
            let rows = unsafe { DeviceRows::new(delivered, self.out.bytes()) };
            pass.submit(stream, rows)?;
        }
        Ok(())
    }

    /// Captures `calls` calls into a graph, in place of an earlier one. Where a pass follows what is
    /// lent, this object alone makes calls of the lane from now on: it counts them, to know in which
    /// slot the rows are, and has a graph for each slot that a replay may begin with.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn record(
        &mut self,
        delivery: Delivery,
        calls: usize,
        call: CallOptions,
    ) -> std::result::Result<(), LaunchError> {
        let stream = self.timeline.stream().clone();
        self.timeline.forget()?;
        self.recorded = self.lane.epoch(&stream)?;
        self.length = calls;
        let graphs = match (&self.pass, delivery) {
            (Some(_), Delivery::ZeroCopy) => self.lane.options().layout.slots,
            _ => 1,
        };
        for first in 0..u64::from(graphs) {
            self.calls = self.recorded + first;
            let capture = stream.begin_capture(CaptureMode::ThreadLocal)?;
            for _ in 0..calls {
                self.call(delivery, call)?;
            }
            self.timeline.keep(capture)?;
        }
        self.calls = self.recorded;
        Ok(())
    }

    /// Submits the calls that were captured, once more.
    ///
    /// # Errors
    /// [`CudaError::WrongOrder`] before a [`record`](Rehearsal::record), else the driver's.
    pub fn replay(&mut self) -> Result<()> {
        let graphs = self.timeline.graphs().max(1) as u64;
        let index = (self.calls - self.recorded) % graphs;
        // SAFETY: what was captured are calls on this object's buffers, pass and lane, which go
        // after the timeline; a pass is replaced only when the graphs were forgotten.
        unsafe { self.timeline.replay(index as usize) }?;
        self.calls += self.length as u64;
        if let Some(held) = &mut self.held {
            held.replayed();
        }
        if let Some(pass) = &mut self.pass {
            pass.replayed();
        }
        Ok(())
    }

    /// Lets the slot of the last call go, for what others submit on the same lane.
    pub fn release(&mut self) {
        self.held = None;
    }

    /// Marks this point of the stream, for [`laps`](Rehearsal::laps).
    ///
    /// # Errors
    /// The driver's.
    pub fn mark(&mut self) -> Result<()> {
        self.timeline.mark()
    }

    /// Waits, and gives the times from each mark to the next. The marks are gone then.
    ///
    /// # Errors
    /// The driver's.
    pub fn laps(&mut self) -> Result<Vec<Duration>> {
        self.timeline.laps()
    }

    /// Waits until everything submitted has finished.
    ///
    /// # Errors
    /// The driver's, among them the failure of an earlier launch.
    pub fn wait(&self) -> Result<()> {
        self.timeline.wait()
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
        let stream = self.timeline.stream();
        match &self.held {
            Some(held) => held.read(stream, 0, to),
            None => self.out.download(stream, 0, to),
        }
    }

    /// Waits, and reads what the pass of the last call has placed, from byte `offset` of the planes
    /// on, which lie one behind the other.
    ///
    /// # Errors
    /// [`CudaError::WrongOrder`] where there was no pass, [`CudaError::InvalidArgument`] past the
    /// planes' end, else the driver's.
    pub fn read_placed(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let pass = self.pass.as_ref().ok_or(CudaError::WrongOrder {
            what: "read",
            needed: "calls to be followed by a pass",
        })?;
        pass.read(self.timeline.stream(), offset, to)
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
