//! Row maps: where the rows of one rank go.

use super::digest::Digest;
use super::error::{PlanError, invalid};

/// What digests of maps start with: of requests, of counts, and of rows as the caller likes.
const REQUESTS: u64 = 4;
const COUNTS: u64 = 5;
const ROWS: u64 = 6;

/// Neighbouring local rows that are neighbours in the result too. Counted in rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// The first local row.
    pub src: usize,
    /// Its row in the result.
    pub dst: usize,
    /// How many there are. A map may have empty runs.
    pub len: usize,
}

impl Run {
    /// The first row behind it in the result. Does not overflow once the map is checked.
    const fn dst_end(&self) -> usize {
        self.dst + self.len
    }
}

/// For every row that one rank contributes to a gather, its place in the result, or that it is
/// padding. The result has at most `i32::MAX` rows, and no two rows of the rank share one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RowMap {
    /// In ascending order of local rows.
    runs: Vec<Run>,
    local_rows: usize,
    total_rows: usize,
    digest: u64,
}

impl RowMap {
    /// The map of `rank` for a gather of several requests: the result holds request after request,
    /// and of each the valid rows of rank after rank.
    ///
    /// Of request i every rank contributes `padded[i]` rows from row `local_start[i]` of its shard
    /// on. The shard of rank r has `lens[i][r]` rows, so that
    /// min(max(0, `lens[i][r]` − `local_start[i]`), `padded[i]`) of them are valid, and the others
    /// are padding. The map has one run for every request, empty where the rank has no valid row.
    ///
    /// The digest covers all arguments but `rank`, so it is equal on all ranks.
    ///
    /// # Errors
    /// [`PlanError::InvalidArgument`] for no requests, lists that differ in length, a rank that is
    /// none of the group's, and more than `i32::MAX` rows.
    pub fn for_requests(
        padded: &[usize],
        lens: &[impl AsRef<[usize]>],
        local_start: &[usize],
        rank: usize,
    ) -> Result<Self, PlanError> {
        let Some(first) = lens.first() else {
            return Err(invalid("requests", "at least one", 0));
        };
        let ranks = first.as_ref().len();
        check_rank(rank, ranks)?;
        for (what, found) in [
            ("padded rows", padded.len()),
            ("local starts", local_start.len()),
        ] {
            if found != lens.len() {
                let expected = format!("one for each of {} requests", lens.len());
                return Err(invalid(what, expected, found));
            }
        }
        let mut digest = Digest::of(REQUESTS).words([ranks]);
        let mut runs = Vec::with_capacity(padded.len());
        let (mut src, mut dst) = (0_usize, 0_usize);
        for ((&padded, lens), &start) in padded.iter().zip(lens).zip(local_start) {
            let lens = lens.as_ref();
            if lens.len() != ranks {
                let expected = format!("one for each of {ranks} ranks");
                return Err(invalid("lengths of a request", expected, lens.len()));
            }
            digest = digest.words([padded, start]).words(lens.iter().copied());
            let valid = |&len: &usize| len.saturating_sub(start).min(padded);
            for (source, len) in lens.iter().map(valid).enumerate() {
                if source == rank {
                    runs.push(Run { src, dst, len });
                }
                dst = within_i32("rows of the result", dst.checked_add(len))?;
            }
            src = within_i32("local rows", src.checked_add(padded))?;
        }
        Ok(RowMap {
            runs,
            local_rows: src,
            total_rows: dst,
            digest: digest.finish(),
        })
    }

    /// The map of `rank` for a gather of `counts[r]` rows from each rank r, in rank order, without
    /// padding. A count may be 0.
    ///
    /// The digest covers the counts, so it is equal on all ranks.
    ///
    /// # Errors
    /// [`PlanError::InvalidArgument`] for a rank that has no count, and more than `i32::MAX` rows.
    pub fn uneven(counts: &[usize], rank: usize) -> Result<Self, PlanError> {
        check_rank(rank, counts.len())?;
        let mut runs = Vec::with_capacity(1);
        let mut dst = 0_usize;
        for (source, &len) in counts.iter().enumerate() {
            if source == rank {
                runs.push(Run { src: 0, dst, len });
            }
            dst = within_i32("rows of the result", dst.checked_add(len))?;
        }
        Ok(RowMap {
            local_rows: runs.iter().map(|run| run.len).sum(),
            runs,
            total_rows: dst,
            digest: Digest::of(COUNTS).words(counts.iter().copied()).finish(),
        })
    }

    /// The map that sends local row i to row `dst_rows[i]` of a result of `total_rows` rows, or
    /// nowhere if that is -1.
    ///
    /// One rank's rows do not tell what the others have, so the digest covers `total_rows` alone;
    /// see [`with_digest`](Self::with_digest).
    ///
    /// # Errors
    /// [`PlanError::OutOfRange`] and [`PlanError::Duplicate`] for such rows,
    /// [`PlanError::InvalidArgument`] for more than `i32::MAX` rows.
    pub fn from_rows(dst_rows: &[i32], total_rows: usize) -> Result<Self, PlanError> {
        let mut runs: Vec<Run> = Vec::new();
        for (src, &row) in dst_rows.iter().enumerate() {
            if row == -1 {
                continue;
            }
            let dst = usize::try_from(row).map_err(|_| PlanError::OutOfRange {
                row: row.into(),
                total_rows,
            })?;
            match runs.last_mut() {
                Some(run) if run.src + run.len == src && run.dst_end() == dst => run.len += 1,
                _ => runs.push(Run { src, dst, len: 1 }),
            }
        }
        Self::from_runs(runs, dst_rows.len(), total_rows)
    }

    /// The map of these runs, in any order; local rows that are in none are padding. Empty runs are
    /// left out. The digest is that of [`from_rows`](Self::from_rows).
    ///
    /// # Errors
    /// As those of [`from_rows`](Self::from_rows), and [`PlanError::InvalidArgument`] for runs that
    /// share a local row or pass the last one.
    pub fn from_runs(
        mut runs: Vec<Run>,
        local_rows: usize,
        total_rows: usize,
    ) -> Result<Self, PlanError> {
        within_i32("local rows", Some(local_rows))?;
        within_i32("rows of the result", Some(total_rows))?;
        runs.retain(|run| run.len > 0);
        runs.sort_unstable_by_key(|run| run.src);
        let mut next = 0;
        for run in &runs {
            let end = run
                .src
                .checked_add(run.len)
                .filter(|&end| end <= local_rows);
            let Some(end) = end else {
                let expected = format!("within {local_rows} local rows");
                return Err(invalid("run", expected, format!("{run:?}")));
            };
            if run.src < next {
                let expected = format!("no local row before {next}, where another run ends");
                return Err(invalid("run", expected, format!("{run:?}")));
            }
            next = end;
            let end = run.dst.checked_add(run.len);
            if end.is_none_or(|end| end > total_rows) {
                return Err(PlanError::OutOfRange {
                    row: i64::try_from(run.dst.max(total_rows)).unwrap_or(i64::MAX),
                    total_rows,
                });
            }
        }
        let mut by_dst = runs.clone();
        by_dst.sort_unstable_by_key(|run| run.dst);
        let mut next = 0;
        for run in by_dst {
            if run.dst < next {
                return Err(PlanError::Duplicate { row: run.dst });
            }
            next = run.dst_end();
        }
        Ok(RowMap {
            runs,
            local_rows,
            total_rows,
            digest: Digest::of(ROWS).words([total_rows]).finish(),
        })
    }

    /// Replaces the digest by one of whatever the caller made the maps of all ranks from.
    #[must_use]
    pub fn with_digest(mut self, digest: u64) -> Self {
        self.digest = digest;
        self
    }

    /// Checks that the maps of a group, in rank order, deliver every row of a result once.
    /// `request_rows` are the rows of each request in it, in order.
    ///
    /// # Errors
    /// [`PlanError::Gap`] and [`PlanError::Overlap`] name the request and the first such row.
    /// [`PlanError::OutOfRange`] if a map's result has more rows than the requests,
    /// [`PlanError::InvalidArgument`] if the requests have more than `i32::MAX`.
    pub fn check_group(maps: &[RowMap], request_rows: &[usize]) -> Result<(), PlanError> {
        let sum = |sum: usize, &rows: &usize| sum.checked_add(rows);
        let total = request_rows.iter().try_fold(0, sum);
        let total_rows = within_i32("rows of the requests", total)?;
        let mut runs = Vec::new();
        for (rank, map) in maps.iter().enumerate() {
            if map.total_rows > total_rows {
                let row = i64::try_from(total_rows).unwrap_or(i64::MAX);
                return Err(PlanError::OutOfRange { row, total_rows });
            }
            let filled = map.runs.iter().filter(|run| run.len > 0);
            runs.extend(filled.map(|&run| (run, rank)));
        }
        runs.sort_unstable_by_key(|(run, _)| run.dst);
        let request = |row| {
            let ends = request_rows.iter().scan(0, |end, rows| {
                *end += rows;
                Some(*end)
            });
            ends.take_while(|&end| end <= row).count()
        };
        let gap = |row| PlanError::Gap {
            request: request(row),
            row,
        };
        let (mut next, mut first) = (0, 0);
        for (run, rank) in runs {
            if run.dst > next {
                return Err(gap(next));
            }
            if run.dst < next {
                return Err(PlanError::Overlap {
                    request: request(run.dst),
                    row: run.dst,
                    first,
                    second: rank,
                });
            }
            (next, first) = (run.dst_end(), rank);
        }
        match next < total_rows {
            true => Err(gap(next)),
            false => Ok(()),
        }
    }

    /// For every local row its row in the result, or -1 for padding.
    #[must_use]
    pub fn dst_rows(&self) -> Vec<i32> {
        let mut rows = vec![-1; self.local_rows];
        for run in &self.runs {
            let places = rows.iter_mut().skip(run.src).take(run.len);
            // All fit: the constructors bound the rows.
            for (place, dst) in places.zip(run.dst as i32..) {
                *place = dst;
            }
        }
        rows
    }

    /// The runs, in ascending order of local rows.
    #[must_use]
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// T, the rows that this rank contributes, padding included.
    #[must_use]
    pub const fn local_rows(&self) -> usize {
        self.local_rows
    }

    /// Rows of the result, over all ranks.
    #[must_use]
    pub const fn total_rows(&self) -> usize {
        self.total_rows
    }

    /// A fingerprint of what the maps of all ranks were made from, so that ranks can compare theirs:
    /// 64-bit FNV-1a over 64-bit little-endian words. Each constructor says what it covers.
    #[must_use]
    pub const fn digest(&self) -> u64 {
        self.digest
    }
}

fn check_rank(rank: usize, ranks: usize) -> Result<(), PlanError> {
    match rank < ranks {
        true => Ok(()),
        false => Err(invalid("rank", format!("less than {ranks}"), rank)),
    }
}

/// A sum of rows, unless it is more than row maps can number.
fn within_i32(what: &'static str, rows: Option<usize>) -> Result<usize, PlanError> {
    match rows.filter(|&rows| i32::try_from(rows).is_ok()) {
        Some(rows) => Ok(rows),
        None => {
            let got = rows.map_or("more than memory can hold".into(), |rows| rows.to_string());
            Err(invalid(what, format!("at most {}", i32::MAX), got))
        }
    }
}
