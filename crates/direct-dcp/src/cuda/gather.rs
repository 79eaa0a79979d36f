//! The gather between GPUs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use direct_dcp_cuda::Stream;
use direct_dcp_cuda::gather::{
    CallOptions, Delivery, DeviceRows, DeviceRowsMut, Held, Lane, LaunchError, PlacedRows, Report,
    Route,
};
use direct_dcp_kernels::Shape;

use super::choice::route;
use super::layout::{FinalLayout, Planes};
use super::workspace::Workspace;
use crate::error::{GatherError, check_rank, failure, from_cuda, from_fault, invalid, shape};
use crate::format::{DType, RowFormat};
use crate::gather::{FIRST_TIMEOUT, Status, TIMEOUT};

/// Gathers KV rows over the ranks of a GPU workspace.
///
/// A call submits one launch to the caller's stream and returns. What goes wrong on the device,
/// later, is told by the next call, by [`check`](KvGather::check) or by [`wait`](KvGather::wait);
/// the context stays usable, and [`Group::rebuild`](crate::Group::rebuild) is the way on.
///
/// All ranks make the same calls in the same order, per ubatch. Calls on one ubatch are put in
/// order whatever streams they are on. Calls captured into a graph are the caller's to order: a
/// replay must not run beside other calls on the same ubatch, the stream of the next eager call
/// must come after it, and it must have finished before this is dropped.
#[derive(Debug)]
pub struct KvGather {
    workspace: Workspace,
    timeout: Duration,
    first_timeout: Duration,
    failure: Mutex<Option<GatherError>>,
}

impl KvGather {
    /// A gather over `workspace`.
    #[must_use]
    pub fn new(workspace: Workspace) -> Self {
        KvGather {
            workspace,
            timeout: TIMEOUT,
            first_timeout: FIRST_TIMEOUT,
            failure: Mutex::new(None),
        }
    }

    /// How long a call waits for its peers once it runs: 30 s by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long the first call of each ubatch waits for its peers: 300 s by default, and never less
    /// than [`timeout`](KvGather::timeout).
    #[must_use]
    pub fn first_timeout(mut self, timeout: Duration) -> Self {
        self.first_timeout = timeout;
        self
    }

    /// The memory it gathers in.
    #[must_use]
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// Submits a gather into `out`: `local` is `[T, row_bytes]`, `out` becomes `[world_size · T,
    /// row_bytes]`, rank by rank. T is the same on all ranks, and positive.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`], [`SlotInUse`](GatherError::SlotInUse),
    /// [`Busy`](GatherError::Busy), [`Unsupported`](GatherError::Unsupported) and
    /// [`Driver`](GatherError::Driver) for this call, which was not submitted then; else the error
    /// of an earlier call that failed on the device.
    pub fn gather_into(
        &self,
        ubatch: usize,
        stream: &Stream,
        local: DeviceRows,
        out: DeviceRowsMut,
    ) -> Result<(), GatherError> {
        let (lane, shape) = self.prepare(ubatch, local.bytes())?;
        let call = self.call(lane, Delivery::CopyOut, shape, stream)?;
        lane.gather_into(stream, shape, local, out, call)
            .map_err(|error| self.explain(error, ubatch))
    }

    /// Submits a gather without a copy out: the guard lends `[world_size · T, row_bytes]` in the
    /// slot where the peers store it, for work that comes later on the same stream.
    ///
    /// With S slots the guard must be dropped before the call S - 1 calls later is submitted.
    ///
    /// # Errors
    /// As [`gather_into`](KvGather::gather_into).
    pub fn gather(
        &self,
        ubatch: usize,
        stream: &Stream,
        local: DeviceRows,
    ) -> Result<Gathered, GatherError> {
        let (lane, shape) = self.prepare(ubatch, local.bytes())?;
        let call = self.call(lane, Delivery::ZeroCopy, shape, stream)?;
        lane.gather(stream, shape, local, call)
            .map(Gathered)
            .map_err(|error| self.explain(error, ubatch))
    }

    /// Submits a gather that stores each row of all ranks in its final place: the guard lends the
    /// planes of `layout`, for work that comes later on the same stream.
    ///
    /// The ranks' layouts come from one plan, or the call fails; a rank may have no rows. Bytes
    /// outside of the result stay as they were. By [`Way::CopyEngine`](crate::Way::CopyEngine) the
    /// host submits a copy for each run of rows, plane and rank.
    ///
    /// # Errors
    /// As [`gather_into`](KvGather::gather_into). [`GatherError::Unsupported`] by ways other than
    /// push and multicast; by the copy engines only for rows that are paged or converted, and in a
    /// graph. A row or a slot out of range, which only the device can see, fails the
    /// call there: [`GatherError::OutOfRange`].
    pub fn gather_final(
        &self,
        ubatch: usize,
        stream: &Stream,
        rows: &PlacedRows,
        layout: &FinalLayout,
    ) -> Result<Planes, GatherError> {
        let lane = self.ready(ubatch)?;
        self.check_final(layout.format(), rows.scale())?;
        let held = lane
            .place(stream, layout.placement(), rows, self.placing(lane))
            .map_err(|error| self.explain(error, ubatch))?;
        let spans = layout.spans(self.workspace.capacity_rows());
        Ok(Planes { held, spans })
    }

    /// Refuses a layout of rows that the workspace does not have, and a scale that none can have.
    pub(super) fn check_final(
        &self,
        format: RowFormat,
        scale: Option<f32>,
    ) -> Result<(), GatherError> {
        let ours = self.workspace.format();
        let becomes = scale.map(|_| RowFormat::new(DType::BF16, format.dim()));
        if format != ours || becomes.is_some_and(|becomes| becomes != ours) {
            let got = becomes.filter(|_| format == ours).unwrap_or(format);
            return Err(invalid(
                "row format",
                format!("{ours}, the workspace's"),
                got,
            ));
        }
        match scale.filter(|scale| !scale.is_finite()) {
            None => Ok(()),
            Some(scale) => Err(invalid("scale", "a finite number".into(), scale)),
        }
    }

    /// Whether all calls that have run so far delivered.
    ///
    /// # Errors
    /// What the first one that did not, on any ubatch, failed with.
    pub fn check(&self) -> Result<(), GatherError> {
        if let Some(error) = self.failure().clone() {
            return Err(error);
        }
        let report = |lane: &Arc<Lane>| lane.report();
        match self
            .lanes()
            .enumerate()
            .find_map(|(ubatch, lane)| Some((ubatch, report(lane)?)))
        {
            Some((ubatch, report)) => Err(self.fail(&report, ubatch)),
            None => Ok(()),
        }
    }

    /// Waits for the stream, then checks.
    ///
    /// # Errors
    /// As [`check`](KvGather::check), or [`GatherError::Driver`].
    pub fn wait(&self, stream: &Stream) -> Result<(), GatherError> {
        stream.synchronize().map_err(|error| from_cuda(&error))?;
        self.check()
    }

    /// Where this rank stands, after the work of `stream`.
    ///
    /// # Errors
    /// [`GatherError::Driver`], where the epochs cannot be read.
    pub fn status(&self, stream: &Stream) -> Result<Status, GatherError> {
        let epochs = self
            .lanes()
            .map(|lane| lane.epoch(stream))
            .collect::<Result<_, _>>();
        Ok(Status {
            generation: self.workspace.group().generation(),
            way: self.workspace.way(),
            epochs: epochs.map_err(|error| from_cuda(&error))?,
            failure: self.check().err().map(|error| error.to_string()),
        })
    }

    fn lanes(&self) -> impl Iterator<Item = &Arc<Lane>> {
        (0..self.workspace.ubatches()).filter_map(|ubatch| self.workspace.lane(ubatch))
    }

    fn failure(&self) -> MutexGuard<'_, Option<GatherError>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How a call goes.
    fn call(
        &self,
        lane: &Lane,
        delivery: Delivery,
        shape: Shape,
        stream: &Stream,
    ) -> Result<CallOptions, GatherError> {
        let eager = self.submission(lane, delivery, shape, false);
        // Most ways are those of captured calls, too, and the driver need not be asked.
        if eager.route == Route::CopyEngine && stream.is_capturing().map_err(|e| from_cuda(&e))? {
            return Ok(self.submission(lane, delivery, shape, true));
        }
        Ok(eager)
    }

    /// How a call goes that is captured or not.
    pub(super) fn submission(
        &self,
        lane: &Lane,
        delivery: Delivery,
        shape: Shape,
        captured: bool,
    ) -> CallOptions {
        let (way, blocks) = self.workspace.choice(delivery, shape.bytes(), captured);
        CallOptions {
            route: route(way),
            max_blocks: blocks,
            timeout: self.patience(lane),
        }
    }

    /// How a call goes that puts rows in their final places.
    pub(super) fn placing(&self, lane: &Lane) -> CallOptions {
        CallOptions {
            route: route(self.workspace.way()),
            max_blocks: self.workspace.max_blocks(),
            timeout: self.patience(lane),
        }
    }

    fn patience(&self, lane: &Lane) -> Duration {
        match lane.is_fresh() {
            true => self.first_timeout.max(self.timeout),
            false => self.timeout,
        }
    }

    /// The lane of a ubatch, and what a call of `bytes` local bytes gathers there.
    pub(super) fn prepare(
        &self,
        ubatch: usize,
        bytes: usize,
    ) -> Result<(&Arc<Lane>, Shape), GatherError> {
        let lane = self.ready(ubatch)?;
        let most = self.workspace.capacity_rows() / self.workspace.group().world_size();
        Ok((lane, shape(self.workspace.format(), bytes, most)?))
    }

    /// The lane of a ubatch, unless this generation is over.
    pub(super) fn ready(&self, ubatch: usize) -> Result<&Arc<Lane>, GatherError> {
        let lane = self.workspace.lane(ubatch).ok_or_else(|| {
            invalid(
                "ubatch",
                format!("below {}", self.workspace.ubatches()),
                ubatch,
            )
        })?;
        self.check()?;
        let control = self.workspace.group().control();
        check_rank(control)?;
        if let Some(by) = control.aborted_by() {
            // Not a call, so not the end of one: what is under way is ended by the watchers.
            let error = GatherError::Aborted { by };
            control.mark_failed(failure(&error, ubatch as u32, 0));
            return Err(self.failure().get_or_insert(error).clone());
        }
        Ok(lane)
    }

    pub(super) fn explain(&self, error: LaunchError, ubatch: usize) -> GatherError {
        match error {
            LaunchError::Busy => GatherError::Busy { ubatch },
            LaunchError::SlotInUse { epoch } => GatherError::SlotInUse { ubatch, epoch },
            LaunchError::Size {
                what,
                expected,
                got,
            } => invalid(what, expected, got),
            LaunchError::Capturing => GatherError::Unsupported {
                capability: "capture of this call into a graph",
                reason: "by the way that the group has taken, only the host knows a call's slot",
                instead: "push or pull",
            },
            LaunchError::Placing(reason) => GatherError::Unsupported {
                capability: "a final layout of these rows, by the way that the group has taken,",
                reason,
                instead: "push or multicast",
            },
            LaunchError::Failed(report) => self.fail(&report, ubatch),
            LaunchError::Cuda(error) => from_cuda(&error),
        }
    }

    /// Remembers the failure, and tells the peers.
    fn fail(&self, report: &Report, ubatch: usize) -> GatherError {
        let control = self.workspace.group().control();
        let waited = match report.fault.epoch {
            1 => self.first_timeout.max(self.timeout),
            _ => self.timeout,
        };
        let error = from_fault(&report.fault, &report.missing, waited, control);
        control.mark_failed(failure(&error, ubatch as u32, report.fault.epoch));
        self.failure().get_or_insert(error).clone()
    }
}

/// The rows of all ranks, in a slot of this rank's device that no rank stores into until this is
/// released.
///
/// Dropping it releases the slot for what comes after on the gather's own stream. Work on another
/// stream that reads the rows is waited for by [`release_after`](Gathered::release_after).
#[derive(Debug)]
pub struct Gathered(pub(super) Held);

impl Gathered {
    /// The call of its ubatch that delivers these rows, from 1. `None` where the call was captured:
    /// each replay is a call of its own.
    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        self.0.address().map(|_| self.0.epoch())
    }

    /// The device address of the rows, `[world_size · T, row_bytes]`. `None` where the call was
    /// captured: see [`address_word`](Gathered::address_word).
    #[must_use]
    pub fn address(&self) -> Option<u64> {
        self.0.address()
    }

    /// The device address of a u64 that holds the address of the rows after the call, and after
    /// each replay of it, for consumers in the same graph.
    #[must_use]
    pub fn address_word(&self) -> u64 {
        self.0.address_word()
    }

    /// The size of the rows.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    /// Releases the slot after what `stream` has to do so far.
    ///
    /// # Errors
    /// [`GatherError::Driver`]; the slot is released all the same, and the stream was waited for.
    pub fn release_after(self, stream: &Stream) -> Result<(), GatherError> {
        self.0
            .release_after(stream)
            .map_err(|error| from_cuda(&error))
    }
}
