//! Why a gather fails, in the words of the user.

use std::fmt;
use std::time::Duration;

use direct_dcp_cuda::CudaError;
use direct_dcp_kernels::{COPY_OUT, Fault, FaultCode, Shape};

use crate::format::RowFormat;
use crate::group::{Control, Failure};

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
    /// A window was acquired a second time, or before one that was submitted earlier.
    #[error(
        "the window of call {epoch} is not the next to be acquired: {}; windows are acquired once each, in the order in which they were submitted",
        .next.map_or_else(|| "there is none".to_owned(), |next| format!("that of call {next} is"))
    )]
    OutOfTurn {
        /// The call whose window was asked for.
        epoch: u64,
        /// The call whose window is next, if any is left.
        next: Option<u64>,
    },
    /// Another thread is in a call on this ubatch, or a pipeline's call is under way: use one
    /// thread, or one ubatch each.
    #[error(
        "ubatch {ubatch}: another thread is in a call on it, or a call of a pipeline is under way; calls on one ubatch must have one order on all ranks"
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
    /// A table in device memory names a row or a slot that there is not; nothing was stored there.
    #[error(
        "call {epoch}: a row of this rank has {what} {got}, of {count}; correct the table, then rebuild the group"
    )]
    OutOfRange {
        /// The call.
        epoch: u64,
        /// What is out of range: the place in the result, or the slot in the cache.
        what: &'static str,
        /// Its number.
        got: u64,
        /// How many there are.
        count: u64,
    },
    /// An earlier call of this generation failed: rebuild the group.
    #[error("this generation is over ({cause}); rebuild the group, if that was not done")]
    Poisoned {
        /// The earlier error.
        cause: String,
    },
    /// The way that the group has taken cannot do this.
    #[error("{capability} cannot be had: {reason}; use {instead}")]
    Unsupported {
        /// What was asked.
        capability: &'static str,
        /// Why it cannot be had.
        reason: &'static str,
        /// What can.
        instead: &'static str,
    },
    /// The CUDA driver refused, or reports an earlier failure.
    #[error("{call} failed: {message}")]
    Driver {
        /// The driver's function, or what else failed.
        call: &'static str,
        /// The driver's code, where it gave one.
        code: Option<i32>,
        /// All that is known.
        message: String,
    },
    /// The group was aborted.
    #[error("the group was aborted by rank {by}")]
    Aborted {
        /// The rank that aborted it.
        by: usize,
    },
}

pub(crate) fn invalid(what: &'static str, expected: String, got: impl fmt::Display) -> GatherError {
    GatherError::InvalidArgument {
        what,
        expected,
        got: got.to_string(),
    }
}

/// Refuses calls of a process that was forked from a rank's, and those after the group was rebuilt.
pub(crate) fn check_rank(control: &Control) -> Result<(), GatherError> {
    if control.is_forked() {
        return Err(GatherError::Unsupported {
            capability: "a call in a forked process",
            reason: "only the process that it was forked from is a rank",
            instead: "a group of its own",
        });
    }
    if control.has_left() {
        return Err(GatherError::Poisoned {
            cause: "this generation ended when its group was rebuilt; use the new one".into(),
        });
    }
    Ok(())
}

/// What a call of `bytes` local bytes gathers, if it may: whole rows, `most` of them at most.
pub(crate) fn shape(format: RowFormat, bytes: usize, most: usize) -> Result<Shape, GatherError> {
    let row_bytes = format.row_bytes();
    if bytes == 0 || !bytes.is_multiple_of(row_bytes) {
        let expected = format!("one or more whole rows of {row_bytes} bytes ({format})");
        return Err(invalid("local bytes", expected, bytes));
    }
    let rows = bytes / row_bytes;
    if rows > most {
        let expected = format!("at most {most} rows per rank, the workspace's capacity");
        return Err(invalid("local rows", expected, rows));
    }
    // Both fit: the workspace's layout holds them in 32 bits.
    Ok(Shape {
        rows: rows as u32,
        row_bytes: row_bytes as u32,
        digest: format.dtype().code().into(),
    })
}

/// What a failed call leaves for the peers to know.
pub(crate) fn failure(error: &GatherError, ubatch: u32, epoch: u64) -> Failure {
    let blamed = match error {
        GatherError::PeerLost { rank } => Some(*rank),
        _ => None,
    };
    Failure {
        blamed,
        ubatch,
        epoch,
    }
}

/// The error that a fault of a launch is.
pub(crate) fn from_fault(
    fault: &Fault,
    missing: &[u32],
    waited: Duration,
    control: &Control,
) -> GatherError {
    let source = fault.source as usize;
    let mismatch = |field| GatherError::Mismatch {
        source_rank: source,
        field,
        ours: fault.ours,
        theirs: fault.theirs,
    };
    let out_of_range = |what| GatherError::OutOfRange {
        epoch: fault.epoch,
        what,
        got: fault.ours,
        count: fault.theirs,
    };
    // A peer that saw the abort first counts as lost. The abort came before, and says more.
    if let (FaultCode::PeerLost, Some(by)) = (fault.code, control.aborted_by()) {
        return GatherError::Aborted { by };
    }
    match fault.code {
        FaultCode::Timeout => {
            let mut missing: Vec<usize> = missing.iter().map(|&rank| rank as usize).collect();
            missing.sort_unstable();
            GatherError::Timeout {
                epoch: fault.epoch,
                missing,
                waited,
            }
        }
        FaultCode::Aborted => {
            // The word is set, or the wait would not have seen it.
            GatherError::Aborted {
                by: control.aborted_by().unwrap_or_default(),
            }
        }
        FaultCode::PeerLost => GatherError::PeerLost {
            rank: control.culprit(source),
        },
        FaultCode::Rows => mismatch("rows"),
        FaultCode::RowBytes => mismatch("row bytes"),
        FaultCode::Digest => {
            let form = |digest| u64::from(digest & COPY_OUT != 0);
            // An element type's code is small, and what a plan was made from is not.
            let type_only = |digest| digest & !COPY_OUT <= u8::MAX.into();
            match form(fault.ours) == form(fault.theirs) {
                true if type_only(fault.ours) && type_only(fault.theirs) => {
                    mismatch("element type")
                }
                true => mismatch("plan"),
                false => GatherError::Mismatch {
                    source_rank: source,
                    field: "form of call (0 zero-copy, 1 copy-out)",
                    ours: form(fault.ours),
                    theirs: form(fault.theirs),
                },
            }
        }
        FaultCode::Place => out_of_range("place"),
        FaultCode::CacheSlot => out_of_range("cache slot"),
        FaultCode::Ahead => GatherError::Desync {
            source_rank: source,
            expected: fault.ours,
            seen: fault.theirs,
        },
    }
}

/// The error that a failure of the driver is.
pub(crate) fn from_cuda(error: &CudaError) -> GatherError {
    let call = match error {
        CudaError::Driver { call, .. } => call,
        _ => "the CUDA driver",
    };
    GatherError::Driver {
        call,
        code: error.code(),
        message: error.to_string(),
    }
}
