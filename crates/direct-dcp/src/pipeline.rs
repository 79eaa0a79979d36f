//! Windows in flight: gathers that go on while earlier results are read.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use direct_dcp_kernels::host::Lane;

use crate::error::GatherError;
use crate::gather::{Gathered, KvGather};
use crate::layout::{FinalLayout, Planes, Rows};
use crate::window::{Turn, Windows};

/// What the worker does for one window.
type Job = Box<dyn FnOnce() -> Result<(), GatherError> + Send>;

/// Gathers on one ubatch that overlap with the reading of earlier results.
///
/// The result of a gather is a *window*. [`submit`](Pipeline::submit) queues the next one for a
/// thread of the pipeline and returns; [`acquire`](Pipeline::acquire) waits for one and lends it.
/// All ranks submit the same windows in the same order; how far each has read is its own affair.
///
/// With S slots, a window must be released before the one S - 1 later is submitted. So three slots
/// let a window be gathered while the one before it is read, and a rank be two windows ahead of
/// another; two slots gather and read in turn.
///
/// ```
/// use direct_dcp::{DType, Group, KvGather, Pipeline, RowFormat, Workspace, WorkspaceOptions};
///
/// let format = RowFormat::new(DType::BF16, 8);
/// std::thread::scope(|scope| {
///     for group in Group::threads(2).unwrap() {
///         scope.spawn(move || {
///             let options = WorkspaceOptions::new(64, format).slots(3);
///             let workspace = Workspace::new(&group, options).unwrap();
///             let mut pipeline = Pipeline::new(KvGather::new(workspace), 0).unwrap();
///
///             // This rank's rows of a window, [3, 8]; those of all ranks are [2 · 3, 8].
///             let local = |window: u8| vec![window; 3 * format.row_bytes()];
///             let mut next = pipeline.submit(local(0)).unwrap();
///             for window in 0..5 {
///                 let ticket = next;
///                 next = pipeline.submit(local(window + 1)).unwrap();
///                 // While the next window is gathered, this one is read.
///                 let rows = pipeline.acquire(&ticket).unwrap();
///                 assert_eq!(*rows, vec![window; 2 * 3 * format.row_bytes()]);
///             }
///         });
///     }
/// });
/// ```
///
/// # When a window fails
///
/// Its `acquire` says why, and so does that of every later window. Windows before it can still be
/// acquired.
///
/// # Drop
///
/// Windows that were submitted are gathered all the same, for the peers' sake, unless one fails.
/// That takes at most the gather's timeout for each, S - 1 times in all; whoever cannot wait so long
/// [aborts](crate::AbortHandle) the group first. What was acquired stays valid.
#[derive(Debug)]
pub struct Pipeline {
    gather: Arc<KvGather>,
    ubatch: usize,
    lane: Arc<Lane>,
    /// The call of the last window that was submitted.
    submitted: u64,
    windows: Windows<()>,
    /// Windows that were acquired, and may be held.
    lent: Vec<u64>,
    /// None once the worker is to end.
    jobs: Option<SyncSender<Job>>,
    worker: Option<JoinHandle<Result<(), GatherError>>>,
    /// What ended the worker.
    failure: Option<GatherError>,
}

/// A window that was submitted: [`Gathered`] or [`Planes`], once it is acquired.
///
/// Dropping the ticket gives the window up: it is gathered, released at once, and skipped in the
/// order.
#[must_use = "a window whose ticket is dropped cannot be acquired"]
pub struct Ticket<R = Gathered> {
    // In this order: a result that nobody acquired is released before the window counts as given
    // up.
    result: Receiver<R>,
    turn: Turn,
}

impl<R> Ticket<R> {
    /// The call of its ubatch that delivers the window, from 1.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.turn.epoch
    }
}

impl<R> fmt::Debug for Ticket<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let epoch = self.epoch();
        f.debug_struct("Ticket")
            .field("epoch", &epoch)
            .finish_non_exhaustive()
    }
}

impl Pipeline {
    /// A pipeline on `ubatch`, with a thread of its own. No result of that ubatch is held, and
    /// nobody else makes calls on it meanwhile; other ubatches of a shared gather are free.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`] for a ubatch that the workspace does not have,
    /// [`GatherError::Poisoned`] and [`GatherError::Aborted`] in a generation that is over, and
    /// [`GatherError::Driver`] where there is no thread to be had.
    pub fn new(gather: impl Into<Arc<KvGather>>, ubatch: usize) -> Result<Self, GatherError> {
        let gather = gather.into();
        let lane = gather.ready(ubatch)?.clone();
        // As many as may be in flight. More can only be queued if windows were given up, and then
        // wait for the worker.
        let (jobs, queue) = sync_channel::<Job>(gather.workspace().slots() - 1);
        let worker = thread::Builder::new()
            .name("direct-dcp pipeline".into())
            .spawn(move || queue.into_iter().try_for_each(|job| job()))
            .map_err(|error| GatherError::Driver {
                call: "starting a thread",
                code: error.raw_os_error(),
                message: error.to_string(),
            })?;
        Ok(Pipeline {
            gather,
            ubatch,
            submitted: lane.epoch(),
            lane,
            windows: Windows::new(),
            lent: Vec::new(),
            jobs: Some(jobs),
            worker: Some(worker),
            failure: None,
        })
    }

    /// The gather that it uses.
    #[must_use]
    pub fn gather(&self) -> &KvGather {
        &self.gather
    }

    /// Queues the next window, `[world_size · T, row_bytes]`, rank by rank: `local` is `[T,
    /// row_bytes]`, and let go before the window can be acquired. T is the same on all ranks, and
    /// positive.
    ///
    /// Waits only where windows were given up, and then for the worker.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`]; [`GatherError::SlotInUse`] where the window S - 1 before
    /// this one was not acquired, or is held. Nothing was queued then, and the caller may go on.
    /// [`GatherError::Poisoned`], [`GatherError::Aborted`], or the error of an earlier window, where
    /// there will be no more of them.
    pub fn submit(
        &mut self,
        local: impl AsRef<[u8]> + Send + 'static,
    ) -> Result<Ticket, GatherError> {
        self.gather.prepare(self.ubatch, local.as_ref())?;
        let (gather, ubatch) = (self.gather.clone(), self.ubatch);
        self.queue(move || gather.gather(ubatch, local.as_ref()))
    }

    /// Queues the next window, in its final layout: `local` is `[local_rows, row_bytes]`, one row
    /// behind the other.
    ///
    /// # Errors
    /// As [`submit`](Pipeline::submit), and where [`KvGather::gather_final`] refuses.
    pub fn submit_final(
        &mut self,
        local: impl AsRef<[u8]> + Send + 'static,
        layout: Arc<FinalLayout>,
    ) -> Result<Ticket<Planes>, GatherError> {
        let rows = Rows::dense(local.as_ref());
        self.gather.check_final(self.ubatch, &rows, &layout)?;
        let (gather, ubatch) = (self.gather.clone(), self.ubatch);
        self.queue(move || gather.gather_final(ubatch, &Rows::dense(local.as_ref()), &layout))
    }

    /// Waits for a window, and lends it until the guard is dropped.
    ///
    /// Windows are acquired once each, in the order in which they were submitted.
    ///
    /// # Errors
    /// [`GatherError::OutOfTurn`], and [`GatherError::InvalidArgument`] for a ticket of another
    /// pipeline; the ticket stays good. Else what [`KvGather::gather`] failed with, for this window
    /// or an earlier one.
    pub fn acquire<R>(&mut self, ticket: &Ticket<R>) -> Result<R, GatherError> {
        self.windows.take(&ticket.turn)?;
        // Without a result there is no worker any more.
        let result = ticket.result.recv().map_err(|_| self.end())?;
        self.lent.push(ticket.epoch());
        Ok(result)
    }

    fn queue<R: Send + 'static>(
        &mut self,
        gather: impl FnOnce() -> Result<R, GatherError> + Send + 'static,
    ) -> Result<Ticket<R>, GatherError> {
        let epoch = self.submitted + 1;
        self.check_slots(epoch)?;
        let (sender, result) = sync_channel(1);
        let job = move || {
            // Whoever gave the window up does not want it.
            let _ = sender.send(gather()?);
            Ok(())
        };
        let queued = self.jobs.as_ref().map(|jobs| jobs.send(Box::new(job)));
        match queued {
            Some(Ok(())) => {}
            _ => return Err(self.end()),
        }
        self.submitted = epoch;
        let turn = self.windows.push(epoch, ());
        Ok(Ticket { result, turn })
    }

    /// Whether the slot rule permits call `epoch`. The lane asks again, but in the worker.
    fn check_slots(&mut self, epoch: u64) -> Result<(), GatherError> {
        self.lent.retain(|&lent| self.lane.holds(lent));
        let span = self.gather.workspace().slots() as u64 - 1;
        let oldest = self.windows.next();
        let oldest = oldest.into_iter().chain(self.lent.iter().copied()).min();
        match oldest.filter(|oldest| oldest + span <= epoch) {
            Some(epoch) => Err(GatherError::SlotInUse {
                ubatch: self.ubatch,
                epoch,
            }),
            None => Ok(()),
        }
    }

    /// Lets the worker end, and says what ended it.
    fn end(&mut self) -> GatherError {
        self.jobs = None;
        if let Some(worker) = self.worker.take() {
            if self.gather.workspace().group().control().is_forked() {
                // There is no such thread here, neither to wait for nor to let go.
                std::mem::forget(worker);
            } else {
                self.failure = worker.join().ok().and_then(Result::err);
            }
        }
        let unknown = || GatherError::Poisoned {
            cause: "the pipeline's thread ended".into(),
        };
        self.failure.clone().unwrap_or_else(unknown)
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.end();
    }
}
