//! Gathers of rows that the host has: for checks and benchmarks.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use direct_dcp_cuda::CudaError;
use direct_dcp_cuda::gather::{self, Delivery, Lane, LaunchError, Pass};

use super::gather::KvGather;
use super::layout::upload;
use crate::error::{GatherError, from_cuda, invalid};
use crate::layout::FinalLayout;

/// A gather with what its callers have: a stream, device memory for rows, a graph of calls.
///
/// For programs that check or time gathers and hold their rows in host memory. Everything that it
/// submits is on one stream, and over when it is dropped.
///
/// ```no_run
/// # use direct_dcp::cuda::{Delivery, KvGather, Rehearsal};
/// # fn check(gather: &KvGather, rows: &[u8]) -> Result<Vec<u8>, direct_dcp::GatherError> {
/// let mut rehearsal = Rehearsal::new(gather, 0, rows.len())?;
/// rehearsal.set_rows(rows)?;
/// rehearsal.record(Delivery::ZeroCopy, 20)?; // a graph of 20 calls
/// rehearsal.mark()?;
/// rehearsal.replay()?;
/// rehearsal.mark()?;
/// println!("{:?} for 20 calls", rehearsal.laps()?);
/// rehearsal.read()
/// # }
/// ```
#[derive(Debug)]
pub struct Rehearsal<'a> {
    gather: &'a KvGather,
    ubatch: usize,
    lane: &'a Arc<Lane>,
    inner: gather::Rehearsal,
    /// Where each plane of the pass begins and ends.
    spans: Vec<Range<usize>>,
}

impl<'a> Rehearsal<'a> {
    /// Room for calls on `ubatch` that gather `bytes` bytes of each rank.
    ///
    /// Device memory is allocated here and freed on drop, and drivers may wait for an idle device
    /// for both: let the group meet at a [barrier](crate::Group::barrier) after this and before
    /// the drop, so that no rank's gather waits for this rank meanwhile.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`] or [`GatherError::Driver`].
    pub fn new(gather: &'a KvGather, ubatch: usize, bytes: usize) -> Result<Self, GatherError> {
        let (lane, shape) = gather.prepare(ubatch, bytes)?;
        let inner = gather::Rehearsal::new(lane, shape);
        Ok(Rehearsal {
            gather,
            ubatch,
            lane,
            inner: inner.map_err(|error| from_cuda(&error))?,
            spans: Vec::new(),
        })
    }

    /// Has each call followed by what a caller does with rows that arrive rank by rank: one launch
    /// that reads the rows of all ranks where the call delivered them, and copies each to its place
    /// in planes in other memory, which drops padding, puts the rows in order and splits them.
    /// `layout` is of world_size · T rows, those of rank after rank.
    ///
    /// It allocates, as [`new`](Rehearsal::new) does. Once zero-copy calls with a pass are recorded,
    /// nothing else makes calls on the ubatch: they are counted, to know which slot each has.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`] or [`GatherError::Driver`].
    pub fn set_pass(&mut self, layout: &FinalLayout) -> Result<(), GatherError> {
        let (ranks, format) = (
            self.gather.workspace().group().world_size(),
            self.gather.workspace().format(),
        );
        let rows = self.inner.shape().rows as usize * ranks;
        if layout.local_rows() != rows || layout.format() != format {
            let got = format!("{} of {}", layout.local_rows(), layout.format());
            return Err(invalid(
                "layout of rows",
                format!("{rows} of {format}"),
                got,
            ));
        }
        let pass = upload(self.lane.stream(), layout).and_then(|placement| {
            Pass::new(self.lane, placement, self.gather.workspace().max_blocks())
        });
        let set = pass.and_then(|pass| self.inner.set_pass(pass));
        set.map_err(|error| from_cuda(&error))?;
        self.spans = layout.spans(layout.total_rows());
        Ok(())
    }

    /// Sets this rank's rows, all of them.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`] or [`GatherError::Driver`].
    pub fn set_rows(&mut self, rows: &[u8]) -> Result<(), GatherError> {
        let bytes = self.inner.shape().bytes();
        if rows.len() as u64 != bytes {
            let expected = format!("{bytes}, as this was built for");
            return Err(invalid("local bytes", expected, rows.len()));
        }
        self.inner.set_rows(rows).map_err(|error| from_cuda(&error))
    }

    /// Fills the room for copied rows with one value.
    ///
    /// # Errors
    /// [`GatherError::Driver`].
    pub fn fill_out(&mut self, value: u8) -> Result<(), GatherError> {
        self.inner
            .fill_out(value)
            .map_err(|error| from_cuda(&error))
    }

    /// Submits one call.
    ///
    /// # Errors
    /// As [`KvGather::gather_into`].
    pub fn call(&mut self, delivery: Delivery) -> Result<(), GatherError> {
        self.gather.check()?;
        let shape = self.inner.shape();
        let call = self.gather.submission(self.lane, delivery, shape, false);
        let submitted = self.inner.call(delivery, call);
        submitted.map_err(|error| self.explain(error))
    }

    /// Captures `calls` calls into a graph, in place of an earlier one.
    ///
    /// # Errors
    /// As [`KvGather::gather_into`].
    pub fn record(&mut self, delivery: Delivery, calls: usize) -> Result<(), GatherError> {
        self.gather.check()?;
        let shape = self.inner.shape();
        let call = self.gather.submission(self.lane, delivery, shape, true);
        let recorded = self.inner.record(delivery, calls, call);
        recorded.map_err(|error| self.explain(error))
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

    /// Marks this point of the stream, for [`laps`](Rehearsal::laps).
    ///
    /// # Errors
    /// [`GatherError::Driver`].
    pub fn mark(&mut self) -> Result<(), GatherError> {
        self.inner.mark().map_err(|error| from_cuda(&error))
    }

    /// Waits, and gives the times on the device from each mark to the next. The marks are gone
    /// then.
    ///
    /// # Errors
    /// As [`KvGather::wait`].
    pub fn laps(&mut self) -> Result<Vec<Duration>, GatherError> {
        let laps = self.inner.laps().map_err(|error| from_cuda(&error))?;
        self.gather.check()?;
        Ok(laps)
    }

    /// Waits, and reads what the last call delivered: `[world_size · T, row_bytes]`. After a
    /// zero-copy call that is the slot, so no peer may be past the call that follows.
    ///
    /// # Errors
    /// As [`KvGather::wait`].
    pub fn read(&mut self) -> Result<Vec<u8>, GatherError> {
        self.inner.wait().map_err(|error| from_cuda(&error))?;
        self.gather.check()?;
        let ranks = self.gather.workspace().group().world_size();
        let mut rows = vec![0; self.inner.shape().bytes() as usize * ranks];
        self.inner
            .read(&mut rows)
            .map_err(|error| from_cuda(&error))?;
        Ok(rows)
    }

    /// Waits, and reads the planes that the last call's [pass](Rehearsal::set_pass) made, each
    /// `[total_rows, plane_bytes]`.
    ///
    /// # Errors
    /// As [`KvGather::wait`].
    pub fn read_planes(&mut self) -> Result<Vec<Vec<u8>>, GatherError> {
        self.inner.wait().map_err(|error| from_cuda(&error))?;
        self.gather.check()?;
        read_spans(&self.spans, |offset, to| self.inner.read_placed(offset, to))
    }

    fn explain(&self, error: LaunchError) -> GatherError {
        self.gather.explain(error, self.ubatch)
    }
}

/// The bytes of each span; where there is none, at least whether they could be read.
pub(super) fn read_spans(
    spans: &[Range<usize>],
    read: impl Fn(usize, &mut [u8]) -> Result<(), CudaError>,
) -> Result<Vec<Vec<u8>>, GatherError> {
    read(0, &mut []).map_err(|error| from_cuda(&error))?;
    let read = |span: &Range<usize>| {
        let mut plane = vec![0; span.len()];
        read(span.start, &mut plane).map_err(|error| from_cuda(&error))?;
        Ok(plane)
    };
    spans.iter().map(read).collect()
}
