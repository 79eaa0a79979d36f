//! Where the rows of a rank come from, and where in the result each of them goes.

use std::fmt;

use crate::convert::bf16_from_e4m3;

/// The most planes of a result.
pub const MAX_PLANES: usize = crate::device::PLANES;

/// For each row of one rank its place in the result, and how the result's rows are split into
/// planes. Checked once, and used for any number of calls.
///
/// Plane p holds, for each row of the result, the bytes of the p-th of `planes`; the planes of a
/// slot lie one behind the other, each with room for the slot's capacity.
#[derive(Clone, Debug)]
pub struct Placement {
    runs: Box<[Run]>,
    local_rows: u32,
    total_rows: u32,
    planes: Box<[u32]>,
    digest: u64,
}

/// Rows that follow one another here and there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first of them among the rank's rows.
    pub src: u32,
    /// Its place in the result.
    pub dst: u32,
    /// How many there are.
    pub len: u32,
}

/// Why a placement cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misplaced;

impl fmt::Display for Misplaced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a row lies outside, or twice, or there are no planes or too many")
    }
}

impl std::error::Error for Misplaced {}

impl Placement {
    /// The placement of `local_rows` rows, of which those outside of `runs` are padding, in a
    /// result of `total_rows`, whose rows are split after each of `planes` bytes. `digest` is the
    /// same on all ranks of a call.
    ///
    /// # Errors
    /// [`Misplaced`] where a row or a place is outside or is used twice, where there are no planes,
    /// more than [`MAX_PLANES`], or an empty one, or for more rows than 31 bits count.
    pub fn new(
        runs: &[Run],
        local_rows: u32,
        total_rows: u32,
        planes: &[u32],
        digest: u64,
    ) -> Result<Self, Misplaced> {
        let planes_work = !planes.is_empty() && planes.len() <= MAX_PLANES && !planes.contains(&0);
        if !planes_work || i32::try_from(total_rows).is_err() {
            return Err(Misplaced);
        }
        for (first, limit) in [
            ((|run: &Run| run.src) as fn(&Run) -> u32, local_rows),
            (|run: &Run| run.dst, total_rows),
        ] {
            let mut spans: Vec<_> = runs.iter().map(|run| (first(run), run.len)).collect();
            spans.sort_unstable();
            let mut next = 0;
            for (start, len) in spans.into_iter().filter(|span| span.1 > 0) {
                let end = start.checked_add(len).filter(|&end| end <= limit);
                next = end.filter(|_| start >= next).ok_or(Misplaced)?;
            }
        }
        Ok(Placement {
            runs: runs.iter().filter(|run| run.len > 0).copied().collect(),
            local_rows,
            total_rows,
            planes: planes.into(),
            digest,
        })
    }

    /// Rows of this rank, padding included.
    #[must_use]
    pub fn local_rows(&self) -> u32 {
        self.local_rows
    }

    /// Rows of the result.
    #[must_use]
    pub fn total_rows(&self) -> u32 {
        self.total_rows
    }

    /// Bytes of a row in each plane.
    #[must_use]
    pub fn planes(&self) -> &[u32] {
        &self.planes
    }

    /// Bytes of a row of the result.
    #[must_use]
    pub fn row_bytes(&self) -> u64 {
        self.planes.iter().copied().map(u64::from).sum()
    }

    /// What the ranks of a call compare.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// For each local row its place in the result, or -1 for padding.
    #[must_use]
    pub fn places(&self) -> Vec<i32> {
        let mut places = vec![-1; self.local_rows as usize];
        for run in &self.runs {
            let rows = places
                .iter_mut()
                .skip(run.src as usize)
                .take(run.len as usize);
            // All fit: a result has at most as many rows as 31 bits count.
            for (place, dst) in rows.zip(run.dst.cast_signed()..) {
                *place = dst;
            }
        }
        places
    }

    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }
}

/// The rows of a rank, as bytes.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// One behind the other.
    Dense(&'a [u8]),
    /// In the pages of a cache.
    Paged(Paged<'a>),
}

/// Rows in the pages of a cache: row i is at place `slots[i] % page_rows` of page
/// `slots[i] / page_rows`.
#[derive(Clone, Copy, Debug)]
pub struct Paged<'a> {
    /// The cache.
    pub cache: &'a [u8],
    /// Rows of a page.
    pub page_rows: u32,
    /// Bytes from one page to the next.
    pub page_stride: usize,
    /// Bytes from one row of a page to the next.
    pub row_stride: usize,
    /// The place of each row in the cache.
    pub slots: &'a [u32],
}

impl Paged<'_> {
    /// Where a row of `row_bytes` bytes begins, if the cache has all of it.
    fn at(&self, slot: u32, row_bytes: usize) -> Option<usize> {
        let page = slot.checked_div(self.page_rows)? as usize;
        let row = slot.checked_rem(self.page_rows)? as usize;
        let start = page
            .checked_mul(self.page_stride)?
            .checked_add(row.checked_mul(self.row_stride)?)?;
        let end = start.checked_add(row_bytes)?;
        (end <= self.cache.len()).then_some(start)
    }
}

/// What a row becomes on its way.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Conversion {
    /// The same bytes.
    None,
    /// e4m3 elements become bf16 ones, multiplied by this.
    Dequantize(f32),
}

impl Conversion {
    /// Bytes of the row that becomes one of `row_bytes` bytes.
    pub(super) fn source_bytes(self, row_bytes: usize) -> usize {
        match self {
            Conversion::None => row_bytes,
            Conversion::Dequantize(_) => row_bytes / 2,
        }
    }

    /// What a row becomes; `room` is where, if it becomes something else.
    pub(super) fn convert<'a>(self, row: &'a [u8], room: &'a mut Vec<u8>) -> &'a [u8] {
        match self {
            Conversion::None => row,
            Conversion::Dequantize(scale) => {
                let bytes = |&element: &u8| bf16_from_e4m3(element, scale).to_ne_bytes();
                room.clear();
                room.extend(row.iter().flat_map(bytes));
                room
            }
        }
    }
}

impl Rows<'_> {
    /// Rows of `row_bytes` bytes each, or `None` for a part of one.
    pub(super) fn count(&self, row_bytes: usize) -> Option<usize> {
        match self {
            Rows::Dense(bytes) => bytes
                .len()
                .is_multiple_of(row_bytes)
                .then(|| bytes.len() / row_bytes),
            Rows::Paged(paged) => Some(paged.slots.len()),
        }
    }

    /// The first row of the runs that is not whole in the cache, and its slot.
    pub(super) fn outside(&self, runs: &[Run], row_bytes: usize) -> Option<(u32, u32)> {
        let Rows::Paged(paged) = self else {
            return None;
        };
        runs.iter()
            .flat_map(|run| run.src..run.src + run.len)
            .filter_map(|row| Some((row, *paged.slots.get(row as usize)?)))
            .find(|&(_, slot)| paged.at(slot, row_bytes).is_none())
    }

    /// The bytes of a row; `None` where [`count`](Rows::count) or [`outside`](Rows::outside) has
    /// said no.
    pub(super) fn row(&self, index: u32, row_bytes: usize) -> Option<&[u8]> {
        match self {
            Rows::Dense(bytes) => bytes
                .get(index as usize * row_bytes..)
                .and_then(|rest| rest.get(..row_bytes)),
            Rows::Paged(paged) => {
                let start = paged.at(*paged.slots.get(index as usize)?, row_bytes)?;
                paged.cache.get(start..start + row_bytes)
            }
        }
    }

    /// The bytes of neighbouring rows, where they are neighbours in memory.
    pub(super) fn block(&self, first: u32, len: u32, row_bytes: usize) -> Option<&[u8]> {
        match self {
            Rows::Dense(bytes) => bytes
                .get(first as usize * row_bytes..)
                .and_then(|rest| rest.get(..len as usize * row_bytes)),
            Rows::Paged(_) => None,
        }
    }
}
