//! Windows in flight between GPUs: gathers that go on while earlier results are read.

use std::sync::Arc;

use direct_dcp_cuda::gather::DeviceRows;
use direct_dcp_cuda::{CudaError, Event, Stream};

use super::gather::{Gathered, KvGather};
use crate::error::{GatherError, from_cuda};
use crate::window::{Turn, Windows};

/// Gathers on one ubatch that overlap with the reading of earlier results: as
/// [`crate::Pipeline`], on a stream of the pipeline's own instead of a thread.
///
/// With S slots, a window must be released before the one S - 1 later is submitted. So three slots
/// let a window be gathered while the one before it is read.
///
/// ```no_run
/// use direct_dcp::cuda::{DeviceRows, KvGather, Pipeline, Stream, Workspace};
/// use direct_dcp::{DType, Group, RowFormat, WorkspaceOptions};
///
/// # fn rank(group: Group, rows: &[u64]) -> Result<(), Box<dyn std::error::Error>> {
/// let format = RowFormat::new(DType::BF16, 576);
/// let options = WorkspaceOptions::new(4096, format).slots(3);
/// let workspace = Workspace::new(&group, 0, options)?;
/// let stream = Stream::new(workspace.context())?;
/// let mut pipeline = Pipeline::new(KvGather::new(workspace), 0)?;
///
/// // Each of `rows` is the address of [128, 576] in device memory.
/// // SAFETY: the memory is there, and stays as it is until its window was acquired and read.
/// let local = |window: usize| unsafe { DeviceRows::new(rows[window], 128 * format.row_bytes()) };
/// let mut next = pipeline.submit(&stream, local(0))?;
/// for window in 1..rows.len() {
///     let ticket = next;
///     // Submitted before the reading of this window is, or it would come after it.
///     next = pipeline.submit(&stream, local(window))?;
///     let gathered = pipeline.acquire(&ticket, &stream)?;
///     // Submit what reads `gathered.address()`, [world_size · 128, 576], to `stream`.
///     gathered.release_after(&stream)?;
/// }
/// pipeline.acquire(&next, &stream)?.release_after(&stream)?;
/// pipeline.gather().wait(&stream)?;
/// # Ok(())
/// # }
/// ```
///
/// Gathers take multiprocessors and memory bandwidth from what reads the windows. Where that is slow
/// to begin with, a workspace of few [blocks](crate::WorkspaceOptions::blocks), 16 or so, lets the
/// two go on side by side.
///
/// What goes wrong on the device is told by the next `submit` or `acquire`, or by
/// [`KvGather::check`] and [`wait`](KvGather::wait), and ends the generation: no window can be
/// acquired any more, also of those that were gathered. Windows that were acquired before are
/// only known to be right after such a check.
///
/// Dropping the pipeline does not wait. What was submitted is gathered, or fails at its deadline,
/// for which the end of the workspace waits; what was acquired stays valid.
#[derive(Debug)]
pub struct Pipeline {
    gather: Arc<KvGather>,
    ubatch: usize,
    /// Where the gathers are.
    side: Stream,
    /// When the rows of the last window that was submitted were ready.
    ready: Event,
    windows: Windows<(Gathered, Event)>,
}

/// A window that was submitted.
///
/// Dropping the ticket gives the window up: it is gathered, and skipped in the order.
#[derive(Debug)]
#[must_use = "a window whose ticket is dropped cannot be acquired"]
pub struct Ticket(Turn);

impl Ticket {
    /// The call of its ubatch that delivers the window, from 1.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.0.epoch
    }
}

impl Pipeline {
    /// A pipeline on `ubatch`, with a stream of its own. Where ranks share a device, let them meet
    /// between this and their next gather: a new stream may have to wait for those of the others.
    ///
    /// # Errors
    /// [`GatherError::Driver`] where there is no stream to be had. A ubatch that the workspace does
    /// not have is refused by [`submit`](Pipeline::submit).
    pub fn new(gather: impl Into<Arc<KvGather>>, ubatch: usize) -> Result<Self, GatherError> {
        let gather = gather.into();
        let workspace = gather.workspace();
        let (side, ready) = workspace
            .new_stream()
            .and_then(|side| Ok((side, Event::new(workspace.context())?)))
            .map_err(|error| from_cuda(&error))?;
        Ok(Pipeline {
            gather,
            ubatch,
            side,
            ready,
            windows: Windows::new(),
        })
    }

    /// The gather that it uses.
    #[must_use]
    pub fn gather(&self) -> &KvGather {
        &self.gather
    }

    /// Submits the next window, `[world_size · T, row_bytes]`, rank by rank: `local` is `[T,
    /// row_bytes]`, ready once `stream` has done what was submitted to it so far, and stays as it is
    /// until a stream that has [acquired](Pipeline::acquire) the window comes there. T is the same
    /// on all ranks, and positive.
    ///
    /// The gather runs beside whatever is submitted to `stream` later. The host does not wait.
    ///
    /// # Errors
    /// As [`KvGather::gather`]: [`GatherError::SlotInUse`] where the window S - 1 before this one
    /// was not acquired and released. [`GatherError::Unsupported`] where `stream` is captured into a
    /// graph, in which a later gather would move the address of an earlier window.
    pub fn submit(&mut self, stream: &Stream, local: DeviceRows) -> Result<Ticket, GatherError> {
        self.submit_by(stream, |gather, ubatch, side| {
            gather.gather(ubatch, side, local)
        })
    }

    /// The same of a gather that `gather` submits.
    pub(super) fn submit_by(
        &mut self,
        stream: &Stream,
        gather: impl FnOnce(&KvGather, usize, &Stream) -> Result<Gathered, GatherError>,
    ) -> Result<Ticket, GatherError> {
        let cuda = |error: CudaError| from_cuda(&error);
        if stream.is_capturing().map_err(cuda)? {
            return Err(GatherError::Unsupported {
                capability: "windows in flight in a graph",
                reason: "each replay has slots of its own, and one word to say which",
                instead: "KvGather::gather",
            });
        }
        let done = Event::new(self.gather.workspace().context()).map_err(cuda)?;
        // Windows that were given up hold their slots no longer.
        self.windows.next();
        self.ready.record(stream).map_err(cuda)?;
        self.side.wait(&self.ready).map_err(cuda)?;
        let gathered = gather(&self.gather, self.ubatch, &self.side)?;
        if done.record(&self.side).is_err() {
            // The window is under way, and nobody could wait for it later.
            self.side.synchronize().map_err(cuda)?;
        }
        let epoch = gathered.epoch().unwrap_or_default();
        Ok(Ticket(self.windows.push(epoch, (gathered, done))))
    }

    /// Makes what is submitted to `stream` later wait for a window, and lends it to that work. The
    /// host does not wait.
    ///
    /// Windows are acquired once each, in the order in which they were submitted. The guard is
    /// released by [`Gathered::release_after`]. Just dropping it is enough where the window was read
    /// on the stream that the next windows are submitted from: they come after what was submitted
    /// to that.
    ///
    /// # Errors
    /// [`GatherError::OutOfTurn`], and [`GatherError::InvalidArgument`] for a ticket of another
    /// pipeline; the ticket stays good. What a gather failed with, this one or any other that has
    /// run, as [`KvGather::check`]. [`GatherError::Driver`]: the window was given up.
    pub fn acquire(&mut self, ticket: &Ticket, stream: &Stream) -> Result<Gathered, GatherError> {
        self.gather.check()?;
        let (gathered, done) = self.windows.take(&ticket.0)?;
        stream.wait(&done).map_err(|error| from_cuda(&error))?;
        Ok(gathered)
    }

    /// Makes what is submitted to `stream` later wait for every window that was submitted, also for
    /// those that were given up: their rows may be freed in its order. The host does not wait.
    ///
    /// # Errors
    /// [`GatherError::Driver`].
    pub fn join(&self, stream: &Stream) -> Result<(), GatherError> {
        let context = self.gather.workspace().context();
        Event::new(context)
            .and_then(|done| {
                done.record(&self.side)?;
                stream.wait(&done)
            })
            .map_err(|error| from_cuda(&error))
    }
}
