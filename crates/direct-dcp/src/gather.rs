//! The gather: rows of every rank to every rank.

use std::fmt;
use std::ops::Deref;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use direct_dcp_kernels::host::{Held, LaunchError, Report};
use direct_dcp_kernels::{FaultCode, Shape};

use crate::workspace::{Way, Workspace};

/// How long a call waits for its peers unless told otherwise.
const TIMEOUT: Duration = Duration::from_secs(30);
/// How long the first call of a ubatch waits: peers may still be loading a model.
const FIRST_TIMEOUT: Duration = Duration::from_secs(300);

/// Gathers KV rows over the ranks of a workspace.
///
/// All ranks call the same operations in the same order, per ubatch. Different ubatches are
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

    /// How long the first call of each ubatch waits for its peers: 300 s by default.
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
    /// [`Busy`](GatherError::Busy) and [`Poisoned`](GatherError::Poisoned) before anything is
    /// written or published. [`Timeout`](GatherError::Timeout),
    /// [`PeerLost`](GatherError::PeerLost), [`Mismatch`](GatherError::Mismatch),
    /// [`Desync`](GatherError::Desync) and [`Aborted`](GatherError::Aborted) poison the
    /// generation; of `out`, at most this rank's own rows were written.
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

    fn prepare(
        &self,
        ubatch: usize,
        local: &[u8],
    ) -> Result<(&std::sync::Arc<direct_dcp_kernels::host::Lane>, Shape), GatherError> {
        let lane = self.workspace.lane(ubatch).ok_or_else(|| {
            let ubatches = self.workspace.ubatches();
            invalid("ubatch", format!("below {ubatches}"), ubatch)
        })?;
        if let Some(cause) = self.failure().clone() {
            return Err(GatherError::Poisoned { cause });
        }
        let format = self.workspace.format();
        let row_bytes = format.row_bytes();
        if local.is_empty() || !local.len().is_multiple_of(row_bytes) {
            let expected = format!("one or more whole rows of {row_bytes} bytes ({format})");
            return Err(invalid("local bytes", expected, local.len()));
        }
        let rows = local.len() / row_bytes;
        let most = self.workspace.capacity_rows() / self.workspace.group().world_size();
        if rows > most {
            let expected = format!("at most {most} rows per rank, the workspace's capacity");
            return Err(invalid("local rows", expected, rows));
        }
        // Both fit: the workspace's geometry holds them in 32 bits.
        let shape = Shape {
            rows: rows as u32,
            row_bytes: row_bytes as u32,
            digest: format.dtype().code().into(),
        };
        Ok((lane, shape))
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
            LaunchError::Poisoned => {
                let cause = "an earlier call on this ubatch failed".to_string();
                return GatherError::Poisoned { cause };
            }
            LaunchError::Fault(report) => report,
        };
        let control = self.workspace.group().control();
        let error = self.describe(&report, started);
        *self.failure() = Some(error.to_string());
        control.mark_failed();
        error
    }

    fn describe(&self, report: &Report, started: Instant) -> GatherError {
        let fault = report.fault;
        let source = fault.source as usize;
        let mismatch = |field| GatherError::Mismatch {
            source_rank: source,
            field,
            ours: fault.ours,
            theirs: fault.theirs,
        };
        match fault.code {
            FaultCode::Timeout => {
                let mut missing: Vec<usize> =
                    report.missing.iter().map(|&rank| rank as usize).collect();
                missing.sort_unstable();
                GatherError::Timeout {
                    epoch: fault.epoch,
                    missing,
                    waited: started.elapsed(),
                }
            }
            FaultCode::Aborted => {
                // The word is set, or the wait would not have seen it.
                let by = self
                    .workspace
                    .group()
                    .control()
                    .aborted_by()
                    .unwrap_or_default();
                GatherError::Aborted { by }
            }
            FaultCode::PeerLost => GatherError::PeerLost { rank: source },
            FaultCode::Rows => mismatch("rows"),
            FaultCode::RowBytes => mismatch("row bytes"),
            FaultCode::Digest => mismatch("digest"),
            FaultCode::Ahead => GatherError::Desync {
                source_rank: source,
                expected: fault.ours,
                seen: fault.theirs,
            },
        }
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
    /// How rows travel.
    pub way: Way,
    /// Calls completed, per ubatch.
    pub epochs: Vec<u64>,
    /// The error that ended the generation on this rank, if one did.
    pub failure: Option<String>,
}

/// Why a gather did not deliver.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GatherError {
    /// An argument that cannot work; nothing was written or published.
    #[error("{what}: expected {expected}, got {got}")]
    InvalidArgument {
        /// The argument.
        what: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// A result of this ubatch is still held: drop it first, or use more slots.
    #[error(
        "ubatch {ubatch}: the result of call {epoch} is still held, and this call would let peers overwrite it; drop it first, or build the workspace with more slots"
    )]
    SlotInUse {
        /// The ubatch.
        ubatch: usize,
        /// The call whose result is held.
        epoch: u64,
    },
    /// Another thread is in a call on this ubatch: use one thread, or one ubatch each.
    #[error(
        "ubatch {ubatch}: another thread is in a call on it; calls on one ubatch must have one order on all ranks"
    )]
    Busy {
        /// The ubatch.
        ubatch: usize,
    },
    /// Some ranks did not take part in time.
    #[error(
        "call {epoch}: ranks {missing:?} did not arrive within {waited:.1?}; see why they are late or skipped the call, then rebuild the group"
    )]
    Timeout {
        /// The call.
        epoch: u64,
        /// The ranks that did not publish.
        missing: Vec<usize>,
        /// How long this rank waited.
        waited: Duration,
    },
    /// A rank died, left the group, or failed in this generation.
    #[error("rank {rank} died, left the group or failed; rebuild the group without it")]
    PeerLost {
        /// The rank.
        rank: usize,
    },
    /// Ranks gather different things.
    #[error(
        "rank {source_rank} gathers {field} {theirs}, this rank {ours}; all ranks must make the same call"
    )]
    Mismatch {
        /// The rank that differs.
        source_rank: usize,
        /// What differs.
        field: &'static str,
        /// This rank's value.
        ours: u64,
        /// That rank's value.
        theirs: u64,
    },
    /// A rank is at another call than this one.
    #[error(
        "rank {source_rank} is at call {seen} where this rank expected {expected}; ranks made different numbers of calls"
    )]
    Desync {
        /// The rank that differs.
        source_rank: usize,
        /// This rank's call.
        expected: u64,
        /// That rank's call.
        seen: u64,
    },
    /// An earlier call of this generation failed: rebuild the group.
    #[error("an earlier call failed ({cause}); rebuild the group")]
    Poisoned {
        /// The earlier error.
        cause: String,
    },
    /// The group was aborted.
    #[error("the group was aborted by rank {by}")]
    Aborted {
        /// The rank that aborted it.
        by: usize,
    },
}

fn invalid(what: &'static str, expected: String, got: impl fmt::Display) -> GatherError {
    GatherError::InvalidArgument {
        what,
        expected,
        got: got.to_string(),
    }
}
