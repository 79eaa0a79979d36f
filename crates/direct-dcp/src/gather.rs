//! The gather: rows of every rank to every rank.

use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use direct_dcp_kernels::Shape;
use direct_dcp_kernels::host::{Conversion, Held, Lane, LaunchError};

use crate::error::{GatherError, check_rank, failure, from_fault, invalid, shape};
use crate::format::RowFormat;
use crate::layout::{FinalLayout, Planes, Rows};
use crate::options::Way;
use crate::workspace::Workspace;

/// How long a call waits for its peers unless told otherwise.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);
/// How long the first call of a ubatch waits: peers may still be loading a model.
pub(crate) const FIRST_TIMEOUT: Duration = Duration::from_secs(300);

/// Gathers KV rows over the ranks of a workspace.
///
/// All ranks call the same operations in the same order, per ubatch; in one call, all of them
/// [`gather_into`](KvGather::gather_into) or all of them [`gather`](KvGather::gather). Different ubatches are
/// independent and may be used by different threads at once.
///
/// Any [`GatherError`] that says so poisons this rank's end of the group: the peers learn of it,
/// later calls fail at once, and [`Group::rebuild`](crate::Group::rebuild) is the way on.
#[derive(Debug)]
pub struct KvGather {
    workspace: Workspace,
    timeout: Duration,
    first_timeout: Duration,
    failure: Mutex<Option<String>>,
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

    /// How long a call waits for its peers: 30 s by default.
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

    /// Gathers into `out`: `local` is `[T, row_bytes]`, `out` becomes `[world_size · T,
    /// row_bytes]`, rank by rank. T is the same on all ranks, and positive.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`], [`SlotInUse`](GatherError::SlotInUse),
    /// [`Busy`](GatherError::Busy), [`Poisoned`](GatherError::Poisoned), and in a process that was
    /// forked from the rank's [`Unsupported`](GatherError::Unsupported), before anything is written
    /// or published. [`Timeout`](GatherError::Timeout),
    /// [`PeerLost`](GatherError::PeerLost), [`Mismatch`](GatherError::Mismatch),
    /// [`Desync`](GatherError::Desync) and [`Aborted`](GatherError::Aborted) poison the
    /// generation, and leave in `out` whatever rows had come by then.
    pub fn gather_into(
        &self,
        ubatch: usize,
        local: &[u8],
        out: &mut [u8],
    ) -> Result<(), GatherError> {
        let (lane, shape) = self.prepare(ubatch, local)?;
        let started = Instant::now();
        lane.gather_into(shape, local, out, self.patience(lane.epoch()))
            .map_err(|error| self.explain(error, ubatch, started))
    }

    /// Gathers without a copy out: `local` is `[T, row_bytes]`, and the guard lends
    /// `[world_size · T, row_bytes]`, rank by rank, in the slot where the peers stored it.
    ///
    /// With S slots the guard must be dropped before the call S - 1 calls later is issued; that
    /// call returns [`GatherError::SlotInUse`] otherwise.
    ///
    /// # Errors
    /// As [`gather_into`](KvGather::gather_into).
    pub fn gather(&self, ubatch: usize, local: &[u8]) -> Result<Gathered, GatherError> {
        let (lane, shape) = self.prepare(ubatch, local)?;
        let started = Instant::now();
        lane.gather(shape, local, self.patience(lane.epoch()))
            .map(Gathered)
            .map_err(|error| self.explain(error, ubatch, started))
    }

    /// Gathers each row of all ranks to its final place: the guard lends the planes of `layout`.
    ///
    /// The ranks' layouts come from one plan: [`GatherError::Mismatch`] where their digests differ.
    /// A rank may have no rows, and so may all of them: the call counts all the same. Slots are lent
    /// as by [`gather`](KvGather::gather); bytes outside of the result stay as they were.
    ///
    /// # Errors
    /// As [`gather_into`](KvGather::gather_into); among arguments that cannot work are rows that do
    /// not fit the layout or the workspace, and a slot that the cache does not have.
    /// [`GatherError::Unsupported`] by [`Way::Pull`], where rows stay where they are.
    pub fn gather_final(
        &self,
        ubatch: usize,
        rows: &Rows<'_>,
        layout: &FinalLayout,
    ) -> Result<Planes, GatherError> {
        let lane = self.prepare_final(ubatch, rows, layout)?;
        let started = Instant::now();
        let timeout = self.patience(lane.epoch());
        lane.place(layout.placement(), rows.rows, rows.conversion, timeout)
            .map(|held| Planes::new(held, layout, self.workspace.capacity_rows()))
            .map_err(|error| self.explain(error, ubatch, started))
    }

    /// Where this rank stands.
    #[must_use]
    pub fn status(&self) -> Status {
        Status {
            generation: self.workspace.group().generation(),
            way: self.workspace.way(),
            epochs: (0..self.workspace.ubatches())
                .filter_map(|ubatch| self.workspace.lane(ubatch).map(|lane| lane.epoch()))
                .collect(),
            failure: self.failure().clone(),
        }
    }

    fn failure(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn patience(&self, epoch: u64) -> Duration {
        if epoch == 0 {
            self.first_timeout.max(self.timeout)
        } else {
            self.timeout
        }
    }

    /// The lane of a ubatch, and what a call of `local` gathers there.
    pub(crate) fn prepare(
        &self,
        ubatch: usize,
        local: &[u8],
    ) -> Result<(&Arc<Lane>, Shape), GatherError> {
        let lane = self.ready(ubatch)?;
        let most = self.workspace.capacity_rows() / self.workspace.group().world_size();
        let shape = shape(self.workspace.format(), local.len(), most)?;
        Ok((lane, shape))
    }

    /// Whether `rows` could be gathered to the places of `layout`, slots aside.
    pub(crate) fn check_final(
        &self,
        ubatch: usize,
        rows: &Rows<'_>,
        layout: &FinalLayout,
    ) -> Result<(), GatherError> {
        let lane = self.prepare_final(ubatch, rows, layout)?;
        lane.check_placement(layout.placement(), rows.rows, rows.conversion)
            .map_err(|error| self.explain(error, ubatch, Instant::now()))
    }

    /// The lane of a ubatch, if `rows` become what `layout` and the workspace are for.
    fn prepare_final(
        &self,
        ubatch: usize,
        rows: &Rows<'_>,
        layout: &FinalLayout,
    ) -> Result<&Arc<Lane>, GatherError> {
        let lane = self.ready(ubatch)?;
        let (format, ours) = (layout.format(), self.workspace.format());
        let asked = rows
            .becomes()
            .map_or(format, |dtype| RowFormat::new(dtype, format.dim()));
        if format != ours || asked != ours {
            let got = if format == ours { asked } else { format };
            return Err(invalid(
                "row format",
                format!("{ours}, the workspace's"),
                got,
            ));
        }
        if let Conversion::Dequantize(scale) = rows.conversion
            && !scale.is_finite()
        {
            return Err(invalid("scale", "a finite number".into(), scale));
        }
        Ok(lane)
    }

    /// The lane of a ubatch, unless this generation is over.
    pub(crate) fn ready(&self, ubatch: usize) -> Result<&Arc<Lane>, GatherError> {
        let lane = self.workspace.lane(ubatch).ok_or_else(|| {
            let ubatches = self.workspace.ubatches();
            invalid("ubatch", format!("below {ubatches}"), ubatch)
        })?;
        if let Some(cause) = self.failure().clone() {
            return Err(GatherError::Poisoned { cause });
        }
        let control = self.workspace.group().control();
        check_rank(control)?;
        if let Some(by) = control.aborted_by() {
            let error = GatherError::Aborted { by };
            *self.failure() = Some(error.to_string());
            control.mark_failed(failure(&error, ubatch as u32, lane.epoch() + 1));
            return Err(error);
        }
        Ok(lane)
    }

    /// Turns a launch's failure into ours; one that poisons is remembered and told to the peers.
    fn explain(&self, error: LaunchError, ubatch: usize, started: Instant) -> GatherError {
        let report = match error {
            LaunchError::Busy => return GatherError::Busy { ubatch },
            LaunchError::SlotInUse { epoch } => return GatherError::SlotInUse { ubatch, epoch },
            LaunchError::Size {
                what,
                expected,
                got,
            } => {
                return invalid(what, expected.to_string(), got);
            }
            LaunchError::OutsideCache { row, slot } => {
                let expected = "a slot within the cache".to_string();
                return invalid("slot", expected, format!("{slot} for row {row}"));
            }
            LaunchError::Pulled => {
                return GatherError::Unsupported {
                    capability: "a final layout",
                    reason: "rows that are pulled stay where they are",
                    instead: "shared-slot or push",
                };
            }
            LaunchError::Poisoned => {
                let cause = "an earlier call on this ubatch failed".to_string();
                return GatherError::Poisoned { cause };
            }
            LaunchError::Fault(report) => report,
        };
        let control = self.workspace.group().control();
        let error = from_fault(&report.fault, &report.missing, started.elapsed(), control);
        *self.failure() = Some(error.to_string());
        control.mark_failed(failure(&error, ubatch as u32, report.fault.epoch));
        error
    }
}

/// The rows of all ranks, `[world_size · T, row_bytes]` as bytes, lent until this is dropped.
#[derive(Debug)]
pub struct Gathered(Held);

impl Gathered {
    /// The call of its ubatch that delivered these rows, from 1.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.0.epoch()
    }
}

impl Deref for Gathered {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Where a rank stands.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// The generation of its group.
    pub generation: u64,
    /// How rows travel, as the workspace's `way` says.
    pub way: Way,
    /// Calls completed, per ubatch.
    pub epochs: Vec<u64>,
    /// The error that ended the generation on this rank, if one did.
    pub failure: Option<String>,
}
