//! Chunks: what one gather delivers.

use super::digest::{Digest, RequestDigests};
use super::error::PlanError;
use super::row_map::RowMap;
use super::sharding::Sharding;

/// What digests of chunks, of requests and of plans start with.
const CHUNK: u64 = 1;
const REQUEST: u64 = 2;
const PLAN: u64 = 3;

/// The share of one request in a chunk: tokens `start` to `start + len` of its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// The request, counted from 0 in the list that was planned.
    pub request: usize,
    /// The first token: a multiple of the planner's alignment.
    pub start: usize,
    /// Tokens, at least one.
    pub len: usize,
    /// The row of every rank's shard of the request from which its rows are taken.
    pub local_start: usize,
    /// Rows that every rank takes from there, padding included.
    pub padded_len: usize,
    sharding: Sharding,
}

impl Part {
    /// `start` is a multiple of the sharding's round, and `start + len` does not overflow.
    pub(super) fn new(sharding: Sharding, request: usize, start: usize, len: usize) -> Self {
        let local_start = sharding.padded_rows(start);
        Part {
            request,
            start,
            len,
            local_start,
            padded_len: sharding.padded_rows(start + len) - local_start,
            sharding,
        }
    }

    /// How many of the rows of `rank` hold tokens; the others, behind them, are padding. A rank
    /// that is none of the group's has 0.
    #[must_use]
    pub fn valid_rows(&self, rank: usize) -> usize {
        self.local_len(rank)
            .saturating_sub(self.sharding.local_len(self.start, rank))
    }

    /// Tokens of `rank` up to the end of this part.
    fn local_len(&self, rank: usize) -> usize {
        self.sharding.local_len(self.start + self.len, rank)
    }
}

/// What one gather delivers: parts of one or more requests, in their order.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Chunk {
    sharding: Sharding,
    parts: Vec<Part>,
    local_rows: usize,
    total_rows: usize,
}

impl Chunk {
    /// Parts that have at most `i32::MAX` rows over all ranks.
    pub(super) fn new(sharding: Sharding, parts: Vec<Part>) -> Self {
        Chunk {
            sharding,
            local_rows: parts.iter().map(|part| part.padded_len).sum(),
            total_rows: parts.iter().map(|part| part.len).sum(),
            parts,
        }
    }

    /// The requests that take part, each once, in ascending order.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// T, the rows that every rank contributes, padding included.
    #[must_use]
    pub const fn local_rows(&self) -> usize {
        self.local_rows
    }

    /// Rows of the result in its final layout, which has no padding: one per token.
    #[must_use]
    pub const fn total_rows(&self) -> usize {
        self.total_rows
    }

    /// Where the rows of `rank` belong: request by request, and inside a request rank by rank.
    ///
    /// # Errors
    /// [`PlanError::InvalidArgument`] for a rank that is none of the group's.
    pub fn row_map(&self, rank: usize) -> Result<RowMap, PlanError> {
        let ranks = 0..self.sharding.world_size();
        let lens = |part: &Part| ranks.clone().map(|rank| part.local_len(rank)).collect();
        let lens: Vec<Vec<usize>> = self.parts.iter().map(lens).collect();
        let padded: Vec<usize> = self.parts.iter().map(|part| part.padded_len).collect();
        let starts: Vec<usize> = self.parts.iter().map(|part| part.local_start).collect();
        RowMap::for_requests(&padded, &lens, &starts, rank)
    }

    /// A fingerprint, equal on all ranks and platforms for equal chunks: 64-bit FNV-1a over 64-bit
    /// little-endian words, which are 1, the world size, the interleave, and of every part the
    /// request, the start and the length.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let sharding = [self.sharding.world_size(), self.sharding.interleave()];
        let parts = self.parts.iter();
        Digest::of(CHUNK)
            .words(sharding)
            .words(parts.flat_map(|part| [part.request, part.start, part.len]))
            .finish()
    }
}

/// All chunks of a list of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    chunks: Vec<Chunk>,
    requests: RequestDigests,
}

impl ChunkPlan {
    pub(super) fn new(sharding: Sharding, contexts: &[usize], chunks: Vec<Chunk>) -> Self {
        let sharding = [sharding.world_size(), sharding.interleave()];
        let begin = |&context| Digest::of(REQUEST).words(sharding).words([context]);
        let mut digests: Vec<Digest> = contexts.iter().map(begin).collect();
        for (index, chunk) in chunks.iter().enumerate() {
            for part in &chunk.parts {
                if let Some(digest) = digests.get_mut(part.request) {
                    *digest = digest.words([index, part.start, part.len]);
                }
            }
        }
        let digests = digests.into_iter().map(Digest::finish).collect();
        ChunkPlan {
            chunks,
            requests: RequestDigests::new(digests),
        }
    }

    /// The chunks, in the order in which all ranks gather them.
    #[must_use]
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// A fingerprint of each request's share: 64-bit FNV-1a over 64-bit little-endian words, which
    /// are 2, the world size, the interleave, the context, and of every part the number of its
    /// chunk, the start and the length.
    #[must_use]
    pub const fn request_digests(&self) -> &RequestDigests {
        &self.requests
    }

    /// A fingerprint of the whole plan: 64-bit FNV-1a over 64-bit little-endian words, which are 3
    /// and the digests of the requests. Ranks whose plans have the same digest gather the same
    /// chunks; where they differ, [`request_digests`](Self::request_digests) say which request is to
    /// blame.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let requests = self.requests.as_slice().iter();
        requests
            .fold(Digest::of(PLAN), |digest, &request| digest.word(request))
            .finish()
    }
}
