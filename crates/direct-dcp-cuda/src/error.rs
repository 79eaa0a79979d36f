//! The one error type of this crate.

use crate::sys;

/// What went wrong, and what to do about it.
///
/// Every call of this crate returns it; nothing panics, a missing driver or a driver that is too
/// old included.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no NVIDIA driver on this machine, or it cannot be opened.
    #[error(
        "no NVIDIA driver: {tried}; install the driver, or have the ranks on CPUs, as threads or processes"
    )]
    LibraryMissing {
        /// Each file name tried and the loader's answer, in one line.
        tried: String,
    },
    /// The driver is there but older than this function.
    #[error(
        "the NVIDIA driver at {library} has no {symbol}: install a newer driver to use this feature"
    )]
    SymbolMissing {
        /// The C name of the function.
        symbol: &'static str,
        /// The file that was opened.
        library: String,
    },
    /// A driver call failed.
    #[error("{call} failed: {name} ({code}): {message}")]
    Driver {
        /// The C name of the function.
        call: &'static str,
        /// The `CUresult`.
        code: i32,
        /// Its name, for example `CUDA_ERROR_OUT_OF_MEMORY`.
        name: String,
        /// The driver's own sentence about it.
        message: String,
    },
    /// The driver could not compile a module's PTX.
    #[error("the driver refused the PTX: {name} ({code}): {log}")]
    Jit {
        /// The `CUresult`.
        code: i32,
        /// Its name, for example `CUDA_ERROR_INVALID_PTX`.
        name: String,
        /// The compiler's error log.
        log: String,
    },
    /// An argument was refused before any driver call.
    #[error("{what}: expected {expected}, got {got}")]
    InvalidArgument {
        /// Which argument.
        what: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What was passed.
        got: String,
    },
    /// A call came too early or too late in an object's life.
    #[error("{what}: {needed}")]
    WrongOrder {
        /// Which call.
        what: &'static str,
        /// What has to happen first.
        needed: &'static str,
    },
    /// A file descriptor could not be duplicated.
    #[error("file descriptor: {reason}")]
    Descriptor {
        /// The system's sentence.
        reason: String,
    },
}

/// The result of every call of this crate.
pub type Result<T> = core::result::Result<T, CudaError>;

impl CudaError {
    /// The driver's code, where the driver answered.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Driver { code, .. } | Self::Jit { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// Whether the machine, and not the program, is the reason: no driver, a driver without this
    /// function, or one that answers that the feature is unsupported, not permitted or not ready.
    ///
    /// A group that votes on a way to move bytes falls back on such an error and fails on others.
    pub fn is_unsupported(&self) -> bool {
        match self {
            Self::LibraryMissing { .. } | Self::SymbolMissing { .. } => true,
            Self::Driver { code, .. } => matches!(
                *code,
                sys::CUDA_ERROR_NO_DEVICE
                    | sys::CUDA_ERROR_NOT_PERMITTED
                    | sys::CUDA_ERROR_NOT_SUPPORTED
                    | sys::CUDA_ERROR_SYSTEM_NOT_READY
            ),
            _ => false,
        }
    }

    pub(crate) fn invalid(
        what: &'static str,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Self {
        Self::InvalidArgument {
            what,
            expected: expected.into(),
            got: got.to_string(),
        }
    }
}

/// Refuses a span that does not lie inside `len` bytes, overflow included.
pub(crate) fn check_span(
    what: &'static str,
    offset: usize,
    bytes: usize,
    len: usize,
) -> Result<()> {
    match offset.checked_add(bytes) {
        Some(end) if end <= len => Ok(()),
        _ => Err(CudaError::invalid(
            what,
            format!("offset + bytes <= {len}"),
            format!("offset {offset}, bytes {bytes}"),
        )),
    }
}

/// Refuses a zero or a value that is not a multiple of the granularity.
pub(crate) fn check_multiple(what: &'static str, value: usize, of: usize) -> Result<()> {
    if of != 0 && value.is_multiple_of(of) {
        Ok(())
    } else {
        Err(CudaError::invalid(
            what,
            format!("a multiple of {of}"),
            value,
        ))
    }
}
