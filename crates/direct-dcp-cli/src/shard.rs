//! Which rank holds which token under decode context parallelism.
//!
//! Tokens are dealt to the ranks in runs of `interleave`: token t belongs to rank
//! (t / interleave) mod ranks. Every rank's shard is padded to the same number of rows, so that a
//! gather delivers `[ranks · padded_rows, row]`, rank by rank.

/// How `tokens` rows are dealt to `ranks` ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sharding {
    tokens: usize,
    ranks: usize,
    interleave: usize,
}

/// Neighbouring tokens that are neighbours in a shard too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The first token.
    pub(crate) token: usize,
    /// The rank that holds them.
    pub(crate) rank: usize,
    /// The row of the first token in the rank's shard.
    pub(crate) row: usize,
    /// How many there are.
    pub(crate) len: usize,
}

impl Sharding {
    /// `ranks` and `interleave` are positive.
    pub(crate) fn new(tokens: usize, ranks: usize, interleave: usize) -> Self {
        Sharding {
            tokens,
            ranks: ranks.max(1),
            interleave: interleave.max(1),
        }
    }

    /// Rows of every rank's shard, padding included: ceil(tokens / (interleave · ranks)) ·
    /// interleave.
    pub(crate) fn padded_rows(&self) -> usize {
        let round = self.interleave.saturating_mul(self.ranks);
        self.tokens.div_ceil(round).saturating_mul(self.interleave)
    }

    /// Tokens that `rank` holds; the rest of its shard is padding.
    pub(crate) fn valid_rows(&self, rank: usize) -> usize {
        let base = self.tokens / self.interleave / self.ranks * self.interleave;
        let rest = self.tokens - base * self.ranks;
        let before = rank.saturating_mul(self.interleave);
        base + rest.saturating_sub(before).min(self.interleave)
    }

    /// All tokens, in order.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Run> + use<> {
        let Sharding {
            tokens,
            ranks,
            interleave,
        } = *self;
        (0..tokens.div_ceil(interleave)).map(move |block| {
            // Below `tokens`, or there would be no such block.
            let token = block * interleave;
            Run {
                token,
                rank: block % ranks,
                row: block / ranks * interleave,
                len: interleave.min(tokens - token),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Sharding;
    use proptest::prelude::*;

    fn valid(tokens: usize, ranks: usize, interleave: usize) -> Vec<usize> {
        let sharding = Sharding::new(tokens, ranks, interleave);
        (0..ranks).map(|rank| sharding.valid_rows(rank)).collect()
    }

    #[test]
    fn local_lengths() {
        assert_eq!(valid(10, 4, 1), [3, 3, 2, 2]);
        assert_eq!(valid(10, 4, 4), [4, 4, 2, 0]);
        assert_eq!(valid(3, 8, 1), [1, 1, 1, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn huge_interleave_does_not_overflow() {
        let sharding = Sharding::new(10, 1024, usize::MAX);
        assert_eq!(sharding.padded_rows(), usize::MAX);
        assert_eq!(sharding.valid_rows(0), 10);
        assert_eq!(sharding.valid_rows(1023), 0);
        assert_eq!(sharding.runs().count(), 1);
    }

    proptest! {
        #[test]
        fn every_token_has_one_place(
            tokens in 1_usize..2_000,
            ranks in 2_usize..20,
            interleave in 1_usize..70,
        ) {
            let sharding = Sharding::new(tokens, ranks, interleave);
            let padded = sharding.padded_rows();
            let mut places = vec![None; ranks * padded];
            let mut next = 0;
            for run in sharding.runs() {
                prop_assert_eq!(run.token, next);
                next += run.len;
                for i in 0..run.len {
                    let token = run.token + i;
                    prop_assert_eq!(run.rank, token / interleave % ranks);
                    prop_assert!(run.row + i < padded);
                    let place = &mut places[run.rank * padded + run.row + i];
                    prop_assert_eq!(place.replace(token), None);
                }
            }
            prop_assert_eq!(next, tokens);
            // Each shard is its valid rows in ascending order, then padding.
            for (rank, shard) in places.chunks(padded).enumerate() {
                let valid = sharding.valid_rows(rank);
                prop_assert!(shard[..valid].iter().all(Option::is_some));
                prop_assert!(shard[..valid].is_sorted());
                prop_assert!(shard[valid..].iter().all(Option::is_none));
            }
            // No more padding than the last round needs.
            prop_assert!(ranks * padded < tokens + interleave * ranks);
        }
    }
}
