//! Gathers of rows that the host has: for checks and benchmarks.

use std::sync::Arc;
use std::time::Duration;

use direct_dcp_cuda::gather::{self, Delivery, Lane, LaunchError};

use super::gather::KvGather;
use crate::error::{GatherError, from_cuda, invalid};

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
        let inner = gather::Rehearsal::new(gather.workspace().context(), lane, shape);
        Ok(Rehearsal {
            gather,
            ubatch,
            lane,
            inner: inner.map_err(|error| from_cuda(&error))?,
        })
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

    fn explain(&self, error: LaunchError) -> GatherError {
        self.gather.explain(error, self.ubatch)
    }
}
