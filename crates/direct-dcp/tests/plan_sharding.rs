//! Every token has one owner and one row, and shards are as long as the caller's formula says.

use direct_dcp::plan::{PlanError, Sharding};
use proptest::prelude::*;

fn lengths(tokens: usize, ranks: usize, interleave: usize) -> Vec<usize> {
    let sharding = Sharding::new(ranks, interleave).unwrap();
    (0..ranks)
        .map(|rank| sharding.local_len(tokens, rank))
        .collect()
}

#[test]
fn local_lengths() {
    assert_eq!(lengths(10, 4, 1), [3, 3, 2, 2]);
    assert_eq!(lengths(10, 4, 4), [4, 4, 2, 0]);
    assert_eq!(lengths(3, 8, 1), [1, 1, 1, 0, 0, 0, 0, 0]);
    assert_eq!(lengths(0, 2, 5), [0, 0]);
}

#[test]
fn nothing_overflows() {
    let interleave = usize::MAX / 1024;
    let sharding = Sharding::new(1024, interleave).unwrap();
    assert_eq!(sharding.padded_rows(10), interleave);
    assert_eq!(
        (sharding.local_len(10, 0), sharding.local_len(10, 1023)),
        (10, 0)
    );
    assert_eq!(sharding.local_len(10, usize::MAX), 0);
    assert_eq!(sharding.runs(10).count(), 1);
    // The largest context there is.
    for (ranks, interleave) in [(2, 1), (2, usize::MAX / 2), (1024, interleave)] {
        let sharding = Sharding::new(ranks, interleave).unwrap();
        assert!(sharding.padded_rows(usize::MAX) >= usize::MAX / ranks);
        assert!(sharding.owner(usize::MAX) < ranks);
        let all: usize = (0..ranks)
            .map(|rank| sharding.local_len(usize::MAX, rank))
            .sum();
        assert_eq!(all, usize::MAX);
    }
}

#[test]
fn refusals() {
    for (ranks, interleave, word) in [
        (0, 1, "two ranks"),
        (1, 1, "two ranks"),
        (2, 0, "interleave"),
        (2, usize::MAX, "interleave"),
    ] {
        let error = Sharding::new(ranks, interleave).unwrap_err();
        assert!(matches!(error, PlanError::InvalidArgument { .. }));
        assert!(error.to_string().contains(word), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_token_has_one_place(
        tokens in 1_usize..2_000,
        ranks in 2_usize..20,
        interleave in 1_usize..70,
    ) {
        let sharding = Sharding::new(ranks, interleave).unwrap();
        let padded = sharding.padded_rows(tokens);
        let mut places = vec![None; ranks * padded];
        let mut next = 0;
        for run in sharding.runs(tokens) {
            prop_assert_eq!(run.token, next);
            next += run.len;
            for i in 0..run.len {
                let token = run.token + i;
                prop_assert_eq!(run.rank, token / interleave % ranks);
                prop_assert_eq!(sharding.owner(token), run.rank);
                prop_assert_eq!(sharding.local_row(token), run.row + i);
                prop_assert!(run.row + i < padded);
                let place = &mut places[run.rank * padded + run.row + i];
                prop_assert_eq!(place.replace(token), None);
            }
        }
        prop_assert_eq!(next, tokens);
        // Each shard is its valid rows in ascending order, then padding.
        for (rank, shard) in places.chunks(padded).enumerate() {
            let valid = sharding.local_len(tokens, rank);
            prop_assert!(shard[..valid].iter().all(Option::is_some));
            prop_assert!(shard[..valid].is_sorted());
            prop_assert!(shard[valid..].iter().all(Option::is_none));
        }
        // No more padding than the last round needs.
        prop_assert!(ranks * padded < tokens + interleave * ranks);
    }

    #[test]
    fn lengths_are_those_of_the_formula(
        tokens in 0_usize..1_000_000,
        ranks in 2_usize..17,
        interleave in 1_usize..70,
    ) {
        let base = tokens / interleave / ranks * interleave;
        for (rank, len) in lengths(tokens, ranks, interleave).into_iter().enumerate() {
            let rest = tokens as i64 - (base * ranks) as i64 - (rank * interleave) as i64;
            prop_assert_eq!(len as i64, base as i64 + rest.clamp(0, interleave as i64));
        }
    }
}
