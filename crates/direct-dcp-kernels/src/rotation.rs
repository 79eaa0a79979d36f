//! The order in which peers are visited.

use core::num::NonZeroU32;

/// The `step`-th of `count` peers in the order in which `rank` visits them: the next rank first,
/// itself last, so that no receiver is hit by all ranks at once. `step` is below `count`, and so is
/// `rank`, unless there is one peer for all: a receiver that reaches everybody.
#[must_use]
#[inline(always)]
pub fn rotated(rank: u32, step: u32, count: NonZeroU32) -> u32 {
    if count.get() == 1 {
        return 0;
    }
    // rank < count and step < count, so the sum stays below 2 · count: one subtraction suffices.
    let peer = rank + 1 + step;
    if peer >= count.get() {
        peer - count.get()
    } else {
        peer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_visits_the_next_one_first_and_itself_last() {
        let count = NonZeroU32::new(5).unwrap();
        for rank in 0..5 {
            let order: Vec<u32> = (0..5).map(|step| rotated(rank, step, count)).collect();
            assert_eq!(order[0], (rank + 1) % 5);
            assert_eq!(order[4], rank);
            let mut sorted = order;
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4]);
        }
    }

    #[test]
    fn every_rank_finds_the_one_receiver_that_reaches_all() {
        for rank in 0..5 {
            assert_eq!(rotated(rank, 0, NonZeroU32::MIN), 0);
        }
    }
}
