//! Gathers in final layout of bytes that the host has, in buffers of their own: for checks and
//! benchmarks.
#![allow(unsafe_code)] // work on buffers that live here

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::lane::{Held, Lane, LaunchError};
use super::place::{DevicePlacement, PlacedRows};
use super::route::CallOptions;
use super::rows::DeviceRows;
use super::timeline::Timeline;
use crate::buffer::DeviceBuffer;
use crate::error::{CudaError, Result, check_span};
use crate::graph::CaptureMode;

/// How the rows of a call lie in the rehearsal's bytes.
#[derive(Clone, Debug)]
pub enum RowSource {
    /// One behind the other, in these bytes.
    Dense(Range<usize>),
    /// In pages that begin with the first byte.
    Paged {
        /// Rows of a page.
        page_rows: u32,
        /// Bytes from one page to the next.
        page_stride: u64,
        /// Bytes from one row of a page to the next.
        row_stride: u64,
        /// Of each local row, its page times `page_rows` plus its row of the page.
        slots: Vec<u32>,
    },
}

/// A lane with what a caller of it has that wants rows in their final places: a stream, rows or the
/// cache that they are in, a placement for each of several calls, a graph.
///
/// Everything it submits is on its one stream, and over when it is dropped, which makes its methods
/// safe.
pub struct PlaceRehearsal {
    timeline: Timeline,
    /// The last call.
    held: Option<Held>,
    calls: Vec<Call>,
    rows: DeviceBuffer,
    lane: Arc<Lane>,
}

/// What one call gathers.
struct Call {
    placement: DevicePlacement,
    rows: PlacedRows,
    /// In device memory, where there are any.
    _slots: Option<DeviceBuffer>,
}

impl PlaceRehearsal {
    /// Room for `bytes` bytes of rows, for gathers through `lane`, on the lane's stream.
    ///
    /// It allocates, as [`add`](PlaceRehearsal::add) does, for which drivers may wait until the
    /// device is idle: no rank may wait for this one meanwhile. The same goes for dropping it.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(lane: &Arc<Lane>, bytes: usize) -> Result<Self> {
        Ok(PlaceRehearsal {
            timeline: Timeline::new(lane.stream()),
            held: None,
            calls: Vec::new(),
            // A rank without rows has an address all the same.
            rows: DeviceBuffer::new(lane.context(), bytes.max(1))?,
            lane: lane.clone(),
        })
    }

    /// Sets the bytes that rows are in, from the first on, and waits.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for more bytes than there is room for, else the driver's.
    pub fn set_rows(&mut self, rows: &[u8]) -> Result<()> {
        self.rows.upload(self.timeline.stream(), 0, rows)
    }

    /// Adds a call that places rows of `source` by `placement`. Returns its number, from 0.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for rows outside of the bytes, or not a slot for each row;
    /// else the driver's.
    pub fn add(&mut self, placement: DevicePlacement, source: RowSource) -> Result<usize> {
        let (address, bytes) = (self.rows.address(), self.rows.bytes());
        let stream = self.timeline.stream();
        let (rows, slots) = match source {
            RowSource::Dense(Range { start, end }) => {
                let len = end.saturating_sub(start);
                check_span("rows", start, len, bytes)?;
                // SAFETY: bytes of the buffer, written only by this object's methods on this stream,
                // and freed after the timeline.
                let rows = unsafe { DeviceRows::new(address + start as u64, len) };
                (PlacedRows::dense(rows), None)
            }
            RowSource::Paged {
                page_rows,
                page_stride,
                row_stride,
                slots,
            } => {
                if slots.len() as u64 != u64::from(placement.local_rows()) {
                    let expected = format!("{}, one for each row", placement.local_rows());
                    return Err(CudaError::invalid("slots", expected, slots.len()));
                }
                let words: Vec<u8> = slots.iter().flat_map(|slot| slot.to_ne_bytes()).collect();
                let table = DeviceBuffer::new(stream.context(), words.len().max(4))?;
                table.upload(stream, 0, &words)?;
                // SAFETY: the buffer, as above.
                let cache = unsafe { DeviceRows::new(address, bytes) };
                // SAFETY: the table has a slot for each row, and goes with the call, after the
                // timeline.
                let rows = unsafe {
                    PlacedRows::paged(cache, page_rows, page_stride, row_stride, table.address())
                };
                (rows, Some(table))
            }
        };
        self.calls.push(Call {
            placement,
            rows,
            _slots: slots,
        });
        Ok(self.calls.len() - 1)
    }

    /// Says of call `index` that its rows are of e4m3 elements, and become bf16 ones, each multiplied
    /// by `scale`.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for a call that there is not.
    pub fn dequantize(&mut self, index: usize, scale: f32) -> Result<()> {
        let count = self.calls.len();
        let call = self.calls.get_mut(index);
        let call = call.ok_or_else(|| no_call(index, count))?;
        call.rows = call.rows.dequantized(scale);
        Ok(())
    }

    /// Submits call `index`.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn call(
        &mut self,
        index: usize,
        options: CallOptions,
    ) -> std::result::Result<(), LaunchError> {
        // As a caller would: the planes of one call are let go before the next.
        self.held = None;
        let call = self.calls.get(index);
        let call = call.ok_or_else(|| no_call(index, self.calls.len()))?;
        let stream = self.timeline.stream();
        let held = self
            .lane
            .place(stream, &call.placement, &call.rows, options)?;
        self.held = Some(held);
        Ok(())
    }

    /// Captures call 0, `times` times, into a graph, in place of an earlier one.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn record(
        &mut self,
        times: usize,
        options: CallOptions,
    ) -> std::result::Result<(), LaunchError> {
        let stream = self.timeline.stream().clone();
        self.timeline.forget()?;
        let capture = stream.begin_capture(CaptureMode::ThreadLocal)?;
        for _ in 0..times {
            self.call(0, options)?;
        }
        Ok(self.timeline.keep(capture)?)
    }

    /// Submits the calls that were captured, once more.
    ///
    /// # Errors
    /// [`CudaError::WrongOrder`] before a [`record`](PlaceRehearsal::record), else the driver's.
    pub fn replay(&mut self) -> Result<()> {
        // SAFETY: what was captured are calls on this object's buffers, placements and lane, which
        // go after the timeline.
        unsafe { self.timeline.replay(0) }?;
        if let Some(held) = &mut self.held {
            held.replayed();
        }
        Ok(())
    }

    /// Lets the slot of the last call go, for what others submit on the same lane.
    pub fn release(&mut self) {
        self.held = None;
    }

    /// Marks this point of the stream, for [`laps`](PlaceRehearsal::laps).
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

    /// Waits, and reads the slot of the last call from byte `offset` on. No peer may have gone on to
    /// the call after the next.
    ///
    /// # Errors
    /// [`CudaError::WrongOrder`] before the first call, [`CudaError::InvalidArgument`] past the
    /// slot's end, else the driver's.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<()> {
        let held = self.held.as_ref().ok_or(CudaError::WrongOrder {
            what: "read",
            needed: "a call to have been submitted",
        })?;
        held.read(self.timeline.stream(), offset, to)
    }
}

fn no_call(index: usize, count: usize) -> CudaError {
    CudaError::invalid("call", format!("below {count}"), index)
}

impl fmt::Debug for PlaceRehearsal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlaceRehearsal")
            .field("lane", &self.lane)
            .field("calls", &self.calls.len())
            .finish_non_exhaustive()
    }
}
