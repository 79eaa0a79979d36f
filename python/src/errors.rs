//! The library's errors as the package's exceptions.

use std::time::Duration;

use direct_dcp::cuda::CudaError;
use direct_dcp::plan::{AgreementError, PlanError};
use direct_dcp::{GatherError, GroupError, WorkspaceError};
use pyo3::exceptions::{PyOverflowError, PyTypeError};
use pyo3::prelude::*;

/// The classes of `direct_dcp/errors.py`, which says what each carries.
mod classes {
    #![allow(missing_docs, reason = "documented in Python")]

    pyo3::import_exception!(direct_dcp.errors, Error);
    pyo3::import_exception!(direct_dcp.errors, InvalidArgument);
    pyo3::import_exception!(direct_dcp.errors, Timeout);
    pyo3::import_exception!(direct_dcp.errors, PeerLost);
    pyo3::import_exception!(direct_dcp.errors, Mismatch);
    pyo3::import_exception!(direct_dcp.errors, SlotInUse);
    pyo3::import_exception!(direct_dcp.errors, Aborted);
    pyo3::import_exception!(direct_dcp.errors, Unsupported);
    pyo3::import_exception!(direct_dcp.errors, Poisoned);
    pyo3::import_exception!(direct_dcp.errors, Excluded);
}

use classes::{
    Aborted, Error, Excluded, InvalidArgument, Mismatch, PeerLost, Poisoned, SlotInUse, Timeout,
    Unsupported,
};

pub(crate) fn invalid(message: impl Into<String>) -> PyErr {
    InvalidArgument::new_err((message.into(),))
}

/// No thread could be started.
pub(crate) fn thread(error: std::io::Error) -> PyErr {
    Error::new_err((format!("starting a thread that waits: {error}"),))
}

/// A thread that waited has ended without a result.
pub(crate) fn ended() -> PyErr {
    Error::new_err(("the thread that waited for the other ranks ended early",))
}

/// A number of ranks, of rows or of tokens, or the number of one.
pub(crate) fn count(what: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    value.extract().map_err(|error: PyErr| {
        if error.is_instance_of::<PyOverflowError>(value.py()) {
            invalid(format!("{what}: expected 0 or more, got {value}"))
        } else {
            let kind = value.get_type();
            PyTypeError::new_err(format!("{what}: expected a whole number, got {kind}"))
        }
    })
}

/// As many such numbers as there are.
pub(crate) fn counts(what: &str, values: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let values = values.try_iter()?;
    values.map(|value| count(what, &value?)).collect()
}

/// A number of seconds that Python passed.
pub(crate) fn seconds(what: &str, value: f64) -> Result<Duration, PyErr> {
    Duration::try_from_secs_f64(value)
        .map_err(|_| invalid(format!("{what}: expected seconds, 0 or more, got {value}")))
}

pub(crate) fn gather(error: GatherError) -> PyErr {
    let message = error.to_string();
    match error {
        GatherError::InvalidArgument { .. } | GatherError::OutOfTurn { .. } => {
            InvalidArgument::new_err((message,))
        }
        GatherError::SlotInUse { ubatch, epoch } => {
            let message = format!(
                "ubatch {ubatch}: the result of call {epoch} is still held, and this call would \
                 let peers overwrite it; leave its `with` block first, or build the gather with a \
                 larger `slots=`"
            );
            SlotInUse::new_err((message, ubatch, epoch))
        }
        GatherError::Timeout { epoch, missing, .. } => Timeout::new_err((message, missing, epoch)),
        GatherError::PeerLost { rank } => PeerLost::new_err((message, rank)),
        GatherError::Mismatch {
            source_rank,
            field,
            ours,
            theirs,
        } => Mismatch::new_err((message, source_rank, field, ours, theirs)),
        GatherError::Desync {
            source_rank,
            expected,
            seen,
        } => Mismatch::new_err((message, source_rank, "call", expected, seen)),
        GatherError::Aborted { by } => Aborted::new_err((message, by)),
        GatherError::Unsupported { .. } => Unsupported::new_err((message,)),
        GatherError::Poisoned { .. } => Poisoned::new_err((message,)),
        _ => Error::new_err((message,)),
    }
}

pub(crate) fn plan(error: PlanError) -> PyErr {
    invalid(error.to_string())
}

pub(crate) fn agreement(error: AgreementError) -> PyErr {
    let message = error.to_string();
    match error {
        AgreementError::Differs { rank, request } => {
            let field = format!("plan of request {request}");
            let unknown = None::<u64>;
            Mismatch::new_err((message, rank, field, unknown, unknown, request))
        }
        AgreementError::Group(error) => group(error),
        _ => Error::new_err((message,)),
    }
}

pub(crate) fn group(error: GroupError) -> PyErr {
    let message = error.to_string();
    match error {
        GroupError::InvalidArgument { .. } | GroupError::Environment { .. } => {
            InvalidArgument::new_err((message,))
        }
        GroupError::Timeout { missing, .. } => Timeout::new_err((message, missing, None::<u64>)),
        GroupError::PeerLost { rank }
        | GroupError::Rebuilding { rank }
        | GroupError::PeerFailed { rank, .. } => PeerLost::new_err((message, rank)),
        GroupError::Mismatch {
            source,
            field,
            ours,
            theirs,
        } => Mismatch::new_err((message, source, field, ours, theirs)),
        GroupError::Aborted { by } => Aborted::new_err((message, by)),
        GroupError::Unsupported { .. } => Unsupported::new_err((message,)),
        GroupError::Excluded => Excluded::new_err((message,)),
        _ => Error::new_err((message,)),
    }
}

pub(crate) fn workspace(error: WorkspaceError) -> PyErr {
    let message = error.to_string();
    match error {
        WorkspaceError::InvalidArgument { .. } => InvalidArgument::new_err((message,)),
        WorkspaceError::Mismatch {
            source_rank,
            field,
            ours,
            theirs,
        } => Mismatch::new_err((message, source_rank, field, ours, theirs)),
        WorkspaceError::Unsupported { .. } => Unsupported::new_err((message,)),
        WorkspaceError::Group(error) => group(error),
        _ => Error::new_err((message,)),
    }
}

pub(crate) fn cuda(error: CudaError) -> PyErr {
    let message = error.to_string();
    match error {
        CudaError::InvalidArgument { .. } => InvalidArgument::new_err((message,)),
        CudaError::LibraryMissing { .. } | CudaError::SymbolMissing { .. } => {
            Unsupported::new_err((message,))
        }
        _ => Error::new_err((message,)),
    }
}

/// The error of a call in an engine's memory, where ranks publish nothing but signals.
pub(crate) fn launch(error: direct_dcp_cuda::gather::LaunchError) -> PyErr {
    use direct_dcp_cuda::gather::LaunchError;
    match error {
        LaunchError::Failed(report) => fault(&report),
        LaunchError::Size {
            what,
            expected,
            got,
        } => invalid(format!("{what}: expected {expected}, got {got}")),
        LaunchError::Cuda(error) => cuda(error),
        error => Error::new_err((format!("{error:?}"),)),
    }
}

fn fault(report: &direct_dcp_cuda::gather::Report) -> PyErr {
    use direct_dcp_kernels::FaultCode;
    let fault = &report.fault;
    let (epoch, source) = (fault.epoch, fault.source);
    match fault.code {
        FaultCode::Timeout => {
            let missing = report.missing.clone();
            let message = format!(
                "direct DCP kv-gather: in call {epoch}, ranks {missing:?} did not arrive in time"
            );
            Timeout::new_err((message, missing, epoch))
        }
        FaultCode::Ahead => {
            let (ours, theirs) = (fault.ours, fault.theirs);
            let message = format!(
                "direct DCP kv-gather: rank {source} is at call {theirs} where this rank expected \
                 {ours}; ranks made different numbers of calls"
            );
            Mismatch::new_err((message, source, "call", ours, theirs))
        }
        FaultCode::Aborted => {
            let message = format!("direct DCP kv-gather: aborted in call {epoch}");
            Aborted::new_err((message, None::<usize>))
        }
        code => {
            let message = format!("direct DCP kv-gather: call {epoch} failed: {code:?}");
            Error::new_err((message,))
        }
    }
}
