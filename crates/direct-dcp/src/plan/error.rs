//! Why there is no plan, or no map.

use std::fmt;

/// Why something cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// An argument that cannot work.
    #[error("{what}: expected {expected}, got {got}")]
    InvalidArgument {
        /// The argument.
        what: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// A map sends a row past the end of the result, or to a negative row other than -1.
    #[error("row {row} of the result is out of range: it has {total_rows} rows")]
    OutOfRange {
        /// The row of the result.
        row: i64,
        /// The rows that the result has.
        total_rows: usize,
    },
    /// A map sends two local rows to one row of the result.
    #[error("row {row} of the result is the destination of two rows of one rank")]
    Duplicate {
        /// The row of the result.
        row: usize,
    },
    /// The maps of a group leave a row of the result without a source.
    #[error("request {request} has a gap: no rank delivers row {row} of the result")]
    Gap {
        /// The request whose row it is.
        request: usize,
        /// The row of the result.
        row: usize,
    },
    /// The maps of a group deliver a row of the result twice.
    #[error(
        "request {request} has an overlap: ranks {first} and {second} both deliver row {row} of the result"
    )]
    Overlap {
        /// The request whose row it is.
        request: usize,
        /// The row of the result.
        row: usize,
        /// One of the ranks.
        first: usize,
        /// The other.
        second: usize,
    },
}

pub(super) fn invalid(
    what: &'static str,
    expected: impl Into<String>,
    got: impl fmt::Display,
) -> PlanError {
    PlanError::InvalidArgument {
        what,
        expected: expected.into(),
        got: got.to_string(),
    }
}
