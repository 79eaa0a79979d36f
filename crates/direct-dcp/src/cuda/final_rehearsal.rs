//! Gathers in final layout of rows that the host has: for checks and benchmarks.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use direct_dcp_cuda::gather::{Lane, LaunchError, PlaceRehearsal, RowSource};

use super::gather::KvGather;
use super::layout::upload;
use super::rehearsal::read_spans;
use crate::error::{GatherError, from_cuda};
use crate::layout::{FinalLayout, Pages};

/// Gathers in final layout with what their callers have: a stream, device memory for rows or for the
/// cache that they are in, a layout for each of several calls, a graph. As
/// [`Rehearsal`](super::Rehearsal), for programs that hold their rows in host memory.
#[derive(Debug)]
pub struct FinalRehearsal<'a> {
    gather: &'a KvGather,
    ubatch: usize,
    lane: &'a Arc<Lane>,
    inner: PlaceRehearsal,
    /// Of each call, where its planes begin and end in a slot.
    spans: Vec<Vec<Range<usize>>>,
    last: usize,
}

impl<'a> FinalRehearsal<'a> {
    /// Room for `bytes` bytes of rows, for calls on `ubatch`.
    ///
    /// Device memory is allocated here and where calls are added, and freed on drop: let the group
    /// meet, as for [`Rehearsal::new`](super::Rehearsal::new).
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`] or [`GatherError::Driver`].
    pub fn new(gather: &'a KvGather, ubatch: usize, bytes: usize) -> Result<Self, GatherError> {
        let lane = gather.ready(ubatch)?;
        let inner = PlaceRehearsal::new(lane, bytes);
        Ok(FinalRehearsal {
            gather,
            ubatch,
            lane,
            inner: inner.map_err(|error| from_cuda(&error))?,
            spans: Vec::new(),
            last: 0,
        })
    }

    /// Sets the bytes that rows are in, from the first on.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`] for more than there is room for, or
    /// [`GatherError::Driver`].
    pub fn set_rows(&mut self, rows: &[u8]) -> Result<(), GatherError> {
        self.inner.set_rows(rows).map_err(|error| from_cuda(&error))
    }

    /// Adds a call that gathers by `layout` rows that lie one behind the other in `bytes`. Returns
    /// its number, from 0.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`] or [`GatherError::Driver`].
    pub fn add_dense(
        &mut self,
        layout: &FinalLayout,
        bytes: Range<usize>,
    ) -> Result<usize, GatherError> {
        self.add(layout, RowSource::Dense(bytes))
    }

    /// Adds a call that gathers by `layout` rows in `pages`, which begin with the first byte: row i is
    /// in slot `slots[i]`, one for every local row. Returns its number, from 0.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`] or [`GatherError::Driver`].
    pub fn add_paged(
        &mut self,
        layout: &FinalLayout,
        pages: Pages,
        slots: &[u32],
    ) -> Result<usize, GatherError> {
        let source = RowSource::Paged {
            // No page has more rows than slots have numbers.
            page_rows: u32::try_from(pages.page_rows).unwrap_or(u32::MAX),
            page_stride: pages.page_stride as u64,
            row_stride: pages.row_stride as u64,
            slots: slots.to_vec(),
        };
        self.add(layout, source)
    }

    fn add(&mut self, layout: &FinalLayout, source: RowSource) -> Result<usize, GatherError> {
        let workspace = self.gather.workspace();
        self.gather.check_final(layout.format(), None)?;
        let index = upload(self.lane.stream(), layout)
            .and_then(|placement| self.inner.add(placement, source))
            .map_err(|error| from_cuda(&error))?;
        self.spans.push(layout.spans(workspace.capacity_rows()));
        Ok(index)
    }

    /// Says of call `index` that its rows are of e4m3 elements, and become bf16 ones, each multiplied
    /// by `scale`.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`] for a call that there is not, for a workspace of other rows,
    /// and for a scale that is not finite.
    pub fn dequantize(&mut self, index: usize, scale: f32) -> Result<(), GatherError> {
        let format = self.gather.workspace().format();
        self.gather.check_final(format, Some(scale))?;
        self.inner
            .dequantize(index, scale)
            .map_err(|error| from_cuda(&error))
    }

    /// Submits call `index`.
    ///
    /// # Errors
    /// As [`KvGather::gather_final`].
    pub fn call(&mut self, index: usize) -> Result<(), GatherError> {
        self.gather.check()?;
        let options = self.gather.placing(self.lane);
        let submitted = self.inner.call(index, options);
        submitted.map_err(|error| self.explain(error))?;
        self.last = index;
        Ok(())
    }

    /// Captures call 0, `times` times, into a graph, in place of an earlier one.
    ///
    /// # Errors
    /// As [`KvGather::gather_final`].
    pub fn record(&mut self, times: usize) -> Result<(), GatherError> {
        self.gather.check()?;
        let options = self.gather.placing(self.lane);
        let recorded = self.inner.record(times, options);
        recorded.map_err(|error| self.explain(error))?;
        self.last = 0;
        Ok(())
    }

    /// Submits the calls that were captured, once more.
    ///
    /// # Errors
    /// [`GatherError::Driver`].
    pub fn replay(&mut self) -> Result<(), GatherError> {
        self.inner.replay().map_err(|error| from_cuda(&error))
    }

    /// Lets the slot of the last call go, for calls that others make on the same ubatch.
    pub fn release(&mut self) {
        self.inner.release();
    }

    /// Marks this point of the stream, for [`laps`](FinalRehearsal::laps).
    ///
    /// # Errors
    /// [`GatherError::Driver`].
    pub fn mark(&mut self) -> Result<(), GatherError> {
        self.inner.mark().map_err(|error| from_cuda(&error))
    }

    /// Waits, and gives the times on the device from each mark to the next. The marks are gone then.
    ///
    /// # Errors
    /// As [`KvGather::wait`].
    pub fn laps(&mut self) -> Result<Vec<Duration>, GatherError> {
        let laps = self.inner.laps().map_err(|error| from_cuda(&error))?;
        self.gather.check()?;
        Ok(laps)
    }

    /// Waits, and reads the planes of the last call, each `[total_rows, plane_bytes]`. They are in a
    /// slot, so no peer may be past the call that follows.
    ///
    /// # Errors
    /// As [`KvGather::wait`].
    pub fn read(&mut self) -> Result<Vec<Vec<u8>>, GatherError> {
        self.laps()?;
        let spans = self.spans.get(self.last).map_or(&[][..], Vec::as_slice);
        read_spans(spans, |offset, to| self.inner.read(offset, to))
    }

    /// Waits, and reads the whole slot of the last call, `capacity_rows · row_bytes`: the planes, where
    /// [`Planes::span`](super::Planes::span) says, and what earlier calls left beside them.
    ///
    /// # Errors
    /// As [`KvGather::wait`].
    pub fn read_slot(&mut self) -> Result<Vec<u8>, GatherError> {
        self.laps()?;
        let workspace = self.gather.workspace();
        let mut slot = vec![0; workspace.capacity_rows() * workspace.format().row_bytes()];
        self.inner
            .read(0, &mut slot)
            .map_err(|error| from_cuda(&error))?;
        Ok(slot)
    }

    fn explain(&self, error: LaunchError) -> GatherError {
        self.gather.explain(error, self.ubatch)
    }
}
