//! Final layout: each row straight to where its consumer wants it.

use std::fmt;
use std::ops::Range;

use direct_dcp_kernels::host::{self, Conversion, Held, MAX_PLANES, Placement};

use crate::format::{DType, RowFormat};
use crate::plan::{PlanError, RowMap};

/// Where every row of this rank goes, and how rows are split into planes: what a gather and the
/// passes that follow it elsewhere (copy out, drop padding, reorder, split) come to, in one store.
///
/// A layout is made once and used for any number of calls: for all layers of a model, say.
///
/// ```
/// use direct_dcp::plan::RowMap;
/// use direct_dcp::{DType, FinalLayout, RowFormat};
///
/// // Two ranks, of which this is rank 1; one request, 4 padded rows a rank, of which rank 1 has 3.
/// let map = RowMap::for_requests(&[4], &[[4, 3]], &[0], 1)?;
/// // Rows of 512 + 64 elements, split as latent attention has them.
/// let layout = FinalLayout::new(&map, RowFormat::new(DType::BF16, 576), &[512, 64])?;
/// assert_eq!((layout.local_rows(), layout.total_rows()), (4, 7));
/// # Ok::<(), direct_dcp::plan::PlanError>(())
/// ```
#[derive(Clone, Debug)]
pub struct FinalLayout {
    placement: Placement,
    format: RowFormat,
}

impl FinalLayout {
    /// The layout of `map`, whose rows, of `format`, are split after each of `planes` elements:
    /// one to four planes that make up a row. `&[format.dim()]` splits nothing.
    ///
    /// # Errors
    /// [`PlanError::InvalidArgument`] for planes that do not make up a row, or are too many or
    /// empty, or for rows of more bytes than 32 bits count.
    pub fn new(map: &RowMap, format: RowFormat, planes: &[usize]) -> Result<Self, PlanError> {
        let invalid = |what, expected: String, got: String| PlanError::InvalidArgument {
            what,
            expected,
            got,
        };
        let sum = planes
            .iter()
            .try_fold(0_usize, |sum, &width| sum.checked_add(width));
        let usable = planes.len() <= MAX_PLANES && !planes.contains(&0);
        if sum != Some(format.dim()) || !usable || planes.is_empty() {
            let expected = format!(
                "1 to {MAX_PLANES} positive widths that add up to {} {}",
                format.dim(),
                match format.dtype() {
                    DType::Bytes => "bytes",
                    _ => "elements",
                }
            );
            return Err(invalid("planes", expected, format!("{planes:?}")));
        }
        let narrow = |value: usize, what| {
            let too_large = |_| invalid(what, format!("at most {}", u32::MAX), value.to_string());
            u32::try_from(value).map_err(too_large)
        };
        let widths = planes
            .iter()
            .map(|&width| {
                narrow(
                    width.saturating_mul(format.dtype().size()),
                    "bytes of a plane",
                )
            })
            .collect::<Result<Vec<_>, _>>()?;
        let runs = map
            .runs()
            .iter()
            .map(|run| {
                Ok(host::Run {
                    src: narrow(run.src, "row")?,
                    dst: narrow(run.dst, "row")?,
                    len: narrow(run.len, "rows")?,
                })
            })
            .collect::<Result<Vec<_>, PlanError>>()?;
        // Ranks that split rows in other ways must not agree either.
        let digest = widths.iter().fold(map.digest(), |digest, &width| {
            (digest ^ u64::from(width)).wrapping_mul(0x100_0000_01b3)
        });
        let placement = Placement::new(
            &runs,
            narrow(map.local_rows(), "local rows")?,
            narrow(map.total_rows(), "rows of the result")?,
            &widths,
            // A small digest is that of an element type alone.
            digest | 1 << 62,
        )
        .map_err(|error| {
            invalid(
                "row map",
                "rows with a place each".into(),
                error.to_string(),
            )
        })?;
        Ok(FinalLayout { placement, format })
    }

    /// Rows that this rank passes to a call, padding included.
    #[must_use]
    pub fn local_rows(&self) -> usize {
        self.placement.local_rows() as usize
    }

    /// Rows of the result, over all ranks.
    #[must_use]
    pub fn total_rows(&self) -> usize {
        self.placement.total_rows() as usize
    }

    /// Bytes of a row in each plane.
    #[must_use]
    pub fn plane_bytes(&self) -> Vec<usize> {
        let widths = self.placement.planes().iter();
        widths.map(|&width| width as usize).collect()
    }

    /// The rows of the result.
    #[must_use]
    pub fn format(&self) -> RowFormat {
        self.format
    }

    /// Where each plane lies in a slot with room for `capacity_rows` rows, in bytes.
    pub(crate) fn spans(&self, capacity_rows: usize) -> Vec<Range<usize>> {
        let mut start = 0;
        let span = |width| {
            let plane = start..start + self.total_rows() * width;
            start += capacity_rows * width;
            plane
        };
        self.plane_bytes().into_iter().map(span).collect()
    }

    pub(crate) fn placement(&self) -> &Placement {
        &self.placement
    }
}

/// The rows that a rank contributes, and what becomes of them on their way.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    pub(crate) rows: host::Rows<'a>,
    pub(crate) conversion: Conversion,
}

/// How rows lie in the pages of a cache, in bytes. Pages and rows may be views of something wider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Rows of a page: the block size.
    pub page_rows: usize,
    /// Bytes from one page to the next.
    pub page_stride: usize,
    /// Bytes from one row of a page to the next.
    pub row_stride: usize,
}

impl Pages {
    /// Pages without gaps, of rows of `row_bytes` bytes.
    #[must_use]
    pub fn dense(page_rows: usize, row_bytes: usize) -> Self {
        Pages {
            page_rows,
            page_stride: page_rows.saturating_mul(row_bytes),
            row_stride: row_bytes,
        }
    }

    /// The slots of rows `rows` of a request, whose pages, in order, are those of `block_table`: row
    /// i is in slot `block_table[i / page_rows] * page_rows + i % page_rows`.
    ///
    /// # Errors
    /// [`PlanError::InvalidArgument`] where the table ends before the rows do, or a slot has no
    /// number of 32 bits.
    pub fn slots(&self, block_table: &[u32], rows: Range<usize>) -> Result<Vec<u32>, PlanError> {
        let invalid = |expected: String, row: usize| PlanError::InvalidArgument {
            what: "row of a paged request",
            expected,
            got: row.to_string(),
        };
        let page_of = |row: usize| {
            let end = || format!("below the {} pages of the block table", block_table.len());
            let page = row.checked_div(self.page_rows);
            page.and_then(|page| block_table.get(page))
                .ok_or_else(|| invalid(end(), row))
        };
        // At most as many as slots have numbers, and the last one has a page: before any is made.
        if let Some(last) = rows.clone().next_back() {
            page_of(last)?;
            if u32::try_from(rows.len()).is_err() {
                return Err(invalid(format!("one of at most {} rows", u32::MAX), last));
            }
        }
        rows.map(|row| {
            let page = page_of(row)?;
            let slot = (*page as usize)
                .checked_mul(self.page_rows)
                .and_then(|slot| slot.checked_add(row.checked_rem(self.page_rows)?));
            slot.and_then(|slot| u32::try_from(slot).ok())
                .ok_or_else(|| invalid(format!("one in a slot of at most {}", u32::MAX), row))
        })
        .collect()
    }
}

impl<'a> Rows<'a> {
    /// `[local_rows, row_bytes]`, one behind the other.
    #[must_use]
    pub fn dense(rows: &'a [u8]) -> Self {
        Rows {
            rows: host::Rows::Dense(rows),
            conversion: Conversion::None,
        }
    }

    /// Rows in the pages of `cache`: row i is in slot `slots[i]`, one for every local row. The slot
    /// of a row that is padding is not looked at.
    #[must_use]
    pub fn paged(cache: &'a [u8], pages: Pages, slots: &'a [u32]) -> Self {
        let paged = host::Paged {
            cache,
            // No page has more rows than slots have numbers; a call refuses pages without rows.
            page_rows: u32::try_from(pages.page_rows).unwrap_or(u32::MAX),
            page_stride: pages.page_stride,
            row_stride: pages.row_stride,
            slots,
        };
        Rows {
            rows: host::Rows::Paged(paged),
            conversion: Conversion::None,
        }
    }

    /// The rows are of f8e4m3 elements, and become bf16 ones, each multiplied by `scale` and
    /// rounded to the nearest, ties to even.
    #[must_use]
    pub fn dequantized(self, scale: f32) -> Self {
        Rows {
            conversion: Conversion::Dequantize(scale),
            ..self
        }
    }

    /// The type that elements of the result have, if these rows say so.
    pub(crate) fn becomes(&self) -> Option<DType> {
        match self.conversion {
            Conversion::None => None,
            Conversion::Dequantize(_) => Some(DType::BF16),
        }
    }
}

/// The result of a gather in its final layout, lent until this is dropped.
pub struct Planes {
    held: Held,
    /// Where each plane begins, and how many bytes of it were delivered.
    spans: Vec<Range<usize>>,
}

impl Planes {
    pub(crate) fn new(held: Held, layout: &FinalLayout, capacity_rows: usize) -> Self {
        let spans = layout.spans(capacity_rows);
        Planes { held, spans }
    }

    /// The call of its ubatch that delivered these rows, from 1.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.held.epoch()
    }

    /// Plane `index`, `[total_rows, plane_bytes]`; `None` for one that the layout does not have.
    #[must_use]
    pub fn plane(&self, index: usize) -> Option<&[u8]> {
        self.held.get(self.spans.get(index)?.clone())
    }

    /// The slot in which the planes lie: plane p begins where the planes before it would end if
    /// they had all the workspace's capacity, `capacity_rows · plane_bytes`. What no row was stored
    /// to is as the calls before left it.
    #[must_use]
    pub fn slot(&self) -> &[u8] {
        &self.held
    }

    /// All planes, in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.spans.len()).filter_map(|index| self.plane(index))
    }
}

impl fmt::Debug for Planes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Planes")
            .field("epoch", &self.epoch())
            .field("spans", &self.spans)
            .finish_non_exhaustive()
    }
}
