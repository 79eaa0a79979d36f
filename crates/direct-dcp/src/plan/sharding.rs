//! Which rank holds which token under decode context parallelism.

use super::error::{PlanError, invalid};

/// How the tokens of a sequence are dealt to ranks: in runs of `interleave`, so that token t belongs
/// to rank (t / interleave) mod `world_size`.
///
/// A rank's shard holds its tokens in ascending order. For a gather every shard is padded to the
/// rows of the longest, in whole runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sharding {
    world_size: usize,
    interleave: usize,
}

/// Neighbouring tokens that are neighbours in a shard too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRun {
    /// The first token.
    pub token: usize,
    /// The rank that holds them.
    pub rank: usize,
    /// The row of the first token in the rank's shard.
    pub row: usize,
    /// How many there are.
    pub len: usize,
}

impl Sharding {
    /// Deals runs of `interleave` tokens to `world_size` ranks in turn.
    ///
    /// # Errors
    /// [`PlanError::InvalidArgument`] for fewer than two ranks, an interleave of zero, or a product
    /// of the two past `usize::MAX`.
    pub fn new(world_size: usize, interleave: usize) -> Result<Self, PlanError> {
        if world_size < 2 {
            return Err(invalid("world_size", "at least two ranks", world_size));
        }
        if interleave == 0 {
            return Err(invalid("interleave", "at least one token", 0));
        }
        if world_size.checked_mul(interleave).is_none() {
            let expected = format!("at most {} for {world_size} ranks", usize::MAX / world_size);
            return Err(invalid("interleave", expected, interleave));
        }
        Ok(Sharding {
            world_size,
            interleave,
        })
    }

    /// The number of ranks.
    #[must_use]
    pub const fn world_size(self) -> usize {
        self.world_size
    }

    /// How many neighbouring tokens go to one rank.
    #[must_use]
    pub const fn interleave(self) -> usize {
        self.interleave
    }

    /// Tokens of one round, in which every rank gets a run: `world_size` · `interleave`. A context
    /// that starts at a multiple of it starts at the same row of every shard.
    #[must_use]
    pub const fn round(self) -> usize {
        // Does not overflow: the constructor multiplied them.
        self.world_size * self.interleave
    }

    /// The rank that holds `token`.
    #[must_use]
    pub const fn owner(self, token: usize) -> usize {
        token / self.interleave % self.world_size
    }

    /// The row of `token` in its owner's shard.
    #[must_use]
    pub const fn local_row(self, token: usize) -> usize {
        token / self.round() * self.interleave + token % self.interleave
    }

    /// How many of the first `tokens` tokens `rank` holds. A rank that is none of the group's
    /// holds 0.
    #[must_use]
    pub fn local_len(self, tokens: usize, rank: usize) -> usize {
        if rank >= self.world_size {
            return 0;
        }
        let base = tokens / self.round() * self.interleave;
        let rest = tokens % self.round();
        base + rest
            .saturating_sub(rank * self.interleave)
            .min(self.interleave)
    }

    /// Rows of every rank's shard of `tokens` tokens, padding included:
    /// ceil(`tokens` / [`round`](Self::round)) · `interleave`.
    #[must_use]
    pub const fn padded_rows(self, tokens: usize) -> usize {
        // Does not overflow: with two ranks or more, both factors' product is at most
        // (tokens + round) / 2.
        tokens.div_ceil(self.round()) * self.interleave
    }

    /// The runs of the first `tokens` tokens, in order.
    pub fn runs(self, tokens: usize) -> impl Iterator<Item = TokenRun> {
        (0..tokens.div_ceil(self.interleave)).map(move |run| {
            // Below `tokens`, or there would be no such run.
            let token = run * self.interleave;
            TokenRun {
                token,
                rank: self.owner(token),
                row: self.local_row(token),
                len: self.interleave.min(tokens - token),
            }
        })
    }
}
