//! The rows of a rank, in pages or one behind the other.

use super::plan::Plan;
use super::task::{JUNK, Task};
use direct_dcp::plan::{Chunk, Sharding};
use direct_dcp::{Pages, Rows};
use std::ops::Range;

/// The rows of a rank.
pub(super) struct Cache {
    bytes: Vec<u8>,
    /// None if the rows, padding included, are one behind the other.
    paged: Option<(Pages, Vec<Vec<u32>>)>,
}

impl Cache {
    /// Room for the rows of `rank`, and junk in it.
    pub(super) fn new(plan: &Plan, sharding: Sharding, rank: usize, row_bytes: usize) -> Self {
        let rows = plan.cache_rows(sharding).unwrap_or_default();
        let paged = plan.paged.map(|block| {
            let mut pages: Vec<u32> = (0..(rows / block) as u32).collect();
            // In no order, which is always the same: keys that differ, for the factor is odd.
            pages.sort_unstable_by_key(|page| page.wrapping_add(1).wrapping_mul(0x9E37_79B1));
            let mut free = pages.into_iter();
            let tables = plan.requests.iter().map(|&len| {
                let pages = sharding.local_len(len, rank).div_ceil(block);
                free.by_ref().take(pages).collect()
            });
            let tables = tables.collect();
            (Pages::dense(block, row_bytes), tables)
        });
        Cache {
            bytes: vec![JUNK; rows * row_bytes],
            paged,
        }
    }

    /// The slots of the rows that `rank` contributes to a chunk, of which padding has none.
    pub(super) fn slots(&self, chunk: &Chunk, rank: usize) -> Result<Vec<u32>, String> {
        let mut slots = Vec::new();
        let Some((pages, tables)) = &self.paged else {
            return Ok(slots);
        };
        for part in chunk.parts() {
            let valid = part.valid_rows(rank);
            let rows = part.local_start..part.local_start + valid;
            let found = pages.slots(&tables[part.request], rows);
            slots.extend(found.map_err(|error| error.to_string())?);
            slots.extend(std::iter::repeat_n(u32::MAX, part.padded_len - valid));
        }
        Ok(slots)
    }

    /// All of them.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// How they lie in pages, if they do.
    pub(super) fn pages(&self) -> Option<Pages> {
        self.paged.as_ref().map(|(pages, _)| *pages)
    }

    /// Rows with these slots, or these bytes if they are not in pages.
    pub(super) fn rows<'a>(&'a self, slots: &'a [u32], bytes: Range<usize>) -> Rows<'a> {
        match &self.paged {
            Some((pages, _)) => Rows::paged(&self.bytes, *pages, slots),
            None => Rows::dense(&self.bytes[bytes]),
        }
    }
}

impl Task {
    /// The rows of `rank`, from the file.
    pub(super) fn cache(
        &self,
        plan: &Plan,
        sharding: Sharding,
        rank: usize,
    ) -> Result<Cache, String> {
        let row_bytes = self.source.row_bytes();
        let mut cache = Cache::new(plan, sharding, rank, row_bytes);
        // The request that is read, its first token in the file, and its first row if unpaged.
        let (mut request, mut first, mut row) = (0, 0, 0);
        self.source.each_chunk(|token, rows| {
            for (token, bytes) in (token..).zip(rows.chunks_exact(row_bytes)) {
                while token - first == plan.requests[request] {
                    first = token;
                    row += sharding.padded_rows(plan.requests[request]);
                    request += 1;
                }
                let token = token - first;
                if sharding.owner(token) != rank {
                    continue;
                }
                let local = sharding.local_row(token);
                let slot = match &cache.paged {
                    Some((pages, tables)) => {
                        let page = tables[request][local / pages.page_rows] as usize;
                        page * pages.page_rows + local % pages.page_rows
                    }
                    None => row + local,
                };
                cache.bytes[slot * row_bytes..][..row_bytes].copy_from_slice(bytes);
            }
            Ok::<_, String>(())
        })?;
        Ok(cache)
    }
}
