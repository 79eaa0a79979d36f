//! Cutting contexts into chunks.

use super::chunk::{Chunk, ChunkPlan, Part};
use super::error::{PlanError, invalid};
use super::sharding::Sharding;

/// The most rows of a workspace that is sized for a model.
const MODEL_ROWS: usize = 65_536;

/// Cuts the contexts of requests into chunks, each of which one gather delivers.
///
/// Requests are taken in order, and a chunk takes of them what it has room for. A context is cut
/// only at multiples of [`alignment`](Self::alignment), where every shard is at the same row, so a
/// part takes equally many rows of every rank. A chunk is at an end when the next part would have
/// to be shorter than that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkPlanner {
    sharding: Sharding,
    alignment: usize,
    budget_rows: usize,
}

impl ChunkPlanner {
    /// Chunks of at most `rows` rows over all ranks, padding included, rounded up to a multiple of
    /// the alignment: the least common multiple of `block`, the tokens of a cache page, and
    /// [`Sharding::round`].
    ///
    /// # Errors
    /// [`PlanError::InvalidArgument`] for zeros, and where the rounded rows exceed `i32::MAX`,
    /// which is what row maps can number.
    pub fn new(sharding: Sharding, block: usize, rows: usize) -> Result<Self, PlanError> {
        if block == 0 {
            return Err(invalid("block", "at least one token", 0));
        }
        if rows == 0 {
            return Err(invalid("budget", "at least one row", 0));
        }
        let too_large = |what| {
            let got = format!(
                "a budget of {rows} rows, pages of {block} tokens, interleave {} and {} ranks",
                sharding.interleave(),
                sharding.world_size()
            );
            invalid(what, format!("at most {} rows", i32::MAX), got)
        };
        let alignment = (sharding.round() / gcd(sharding.round(), block))
            .checked_mul(block)
            .ok_or_else(|| too_large("least common multiple of page and round"))?;
        let budget_rows = rows
            .checked_next_multiple_of(alignment)
            .filter(|&rows| i32::try_from(rows).is_ok())
            .ok_or_else(|| too_large("rounded budget"))?;
        Ok(ChunkPlanner {
            sharding,
            alignment,
            budget_rows,
        })
    }

    /// Chunks as large as a model's longest context and number of sequences are worth:
    /// max(8 · `max_model_len`, 4 · `max_num_seqs` · `block`) rows, but no more than 65,536, rounded
    /// up as by [`new`](Self::new).
    ///
    /// # Errors
    /// As those of [`new`](Self::new).
    pub fn for_model(
        sharding: Sharding,
        block: usize,
        max_model_len: usize,
        max_num_seqs: usize,
    ) -> Result<Self, PlanError> {
        let contexts = max_model_len.saturating_mul(8);
        let pages = max_num_seqs.saturating_mul(block).saturating_mul(4);
        Self::new(sharding, block, contexts.max(pages).min(MODEL_ROWS))
    }

    /// How tokens are dealt to the ranks.
    #[must_use]
    pub const fn sharding(&self) -> Sharding {
        self.sharding
    }

    /// Tokens; contexts are cut at multiples of it.
    #[must_use]
    pub const fn alignment(&self) -> usize {
        self.alignment
    }

    /// Rows over all ranks that a chunk has at most: the capacity that its workspace needs. A
    /// multiple of the alignment, and so of the world size.
    #[must_use]
    pub const fn budget_rows(&self) -> usize {
        self.budget_rows
    }

    /// The chunks of requests with these contexts, in tokens. A context of 0 is in no chunk.
    ///
    /// # Errors
    /// [`PlanError::InvalidArgument`] for a context past `i32::MAX`.
    pub fn plan(&self, contexts: &[usize]) -> Result<ChunkPlan, PlanError> {
        if let Some(context) = contexts.iter().find(|&&len| i32::try_from(len).is_err()) {
            let expected = format!("at most {} tokens", i32::MAX);
            return Err(invalid("context", expected, context));
        }
        let chunks = self.chunks(contexts).collect();
        Ok(ChunkPlan::new(self.sharding, contexts, chunks))
    }

    /// The same chunks, made one by one as they are asked for.
    #[must_use]
    pub fn chunks<'a>(&self, contexts: &'a [usize]) -> Chunks<'a> {
        Chunks {
            planner: *self,
            contexts,
            request: 0,
            start: 0,
        }
    }

    /// How many of the next `left` tokens of a request a chunk takes that has `room` rows left.
    fn fit(&self, left: usize, room: usize) -> usize {
        let rows = self.sharding.padded_rows(left);
        let rows = rows.checked_mul(self.sharding.world_size());
        match rows.is_some_and(|rows| rows <= room) {
            true => left,
            // Less than `left`, whose rows would fit otherwise.
            false => room / self.alignment * self.alignment,
        }
    }
}

/// The iterator that [`ChunkPlanner::chunks`] returns.
#[derive(Clone, Debug)]
pub struct Chunks<'a> {
    planner: ChunkPlanner,
    contexts: &'a [usize],
    /// The first request with tokens in no chunk yet.
    request: usize,
    /// The first of them.
    start: usize,
}

impl Iterator for Chunks<'_> {
    type Item = Chunk;

    fn next(&mut self) -> Option<Chunk> {
        let sharding = self.planner.sharding;
        let mut room = self.planner.budget_rows;
        let mut parts = Vec::new();
        while let Some(context) = self.contexts.get(self.request) {
            let left = context - self.start;
            let len = self.planner.fit(left, room);
            if len > 0 {
                let part = Part::new(sharding, self.request, self.start, len);
                room -= part.padded_len * sharding.world_size();
                parts.push(part);
            }
            if len < left {
                self.start += len;
                break;
            }
            self.request += 1;
            self.start = 0;
        }
        (!parts.is_empty()).then(|| Chunk::new(sharding, parts))
    }
}

fn gcd(mut a: usize, mut b: usize) -> usize {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
