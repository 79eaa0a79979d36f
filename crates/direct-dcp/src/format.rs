//! What a row is made of.

use std::fmt;

/// The type of a row's elements. Rows travel as bytes; the type fixes their size, and ranks that
/// disagree on it find out at set-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE half precision, 2 bytes.
    F16,
    /// bfloat16, 2 bytes.
    BF16,
    /// 8-bit float with 4 exponent and 3 mantissa bits (`e4m3fn`), 1 byte.
    F8E4M3,
    /// Plain bytes, for packed records.
    Bytes,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            DType::F16 | DType::BF16 => 2,
            DType::F8E4M3 | DType::Bytes => 1,
        }
    }

    pub(crate) const fn code(self) -> u8 {
        match self {
            DType::F16 => 1,
            DType::BF16 => 2,
            DType::F8E4M3 => 3,
            DType::Bytes => 4,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::F8E4M3 => "f8e4m3",
            DType::Bytes => "bytes",
        })
    }
}

/// A row: `dim` elements of one type, contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowFormat {
    dtype: DType,
    dim: usize,
}

impl RowFormat {
    /// Rows of `dim` elements. A `dim` of zero is refused where a workspace is built.
    #[must_use]
    pub const fn new(dtype: DType, dim: usize) -> Self {
        RowFormat { dtype, dim }
    }

    /// The type of the elements.
    #[must_use]
    pub const fn dtype(self) -> DType {
        self.dtype
    }

    /// Elements of one row.
    #[must_use]
    pub const fn dim(self) -> usize {
        self.dim
    }

    /// Bytes of one row, at most `usize::MAX`.
    #[must_use]
    pub const fn row_bytes(self) -> usize {
        self.dim.saturating_mul(self.dtype.size())
    }
}

impl fmt::Display for RowFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} × {}", self.dim, self.dtype)
    }
}
