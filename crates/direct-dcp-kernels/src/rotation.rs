//! The order in which peers are visited.

use core::num::NonZeroU32;

/// The `step`-th of `count` peers in the order in which `rank` visits them: the next rank first,
/// itself last, so that no receiver is hit by all ranks at once. `step` is below `count`. `rank` may
/// not be: one receiver may stand for all ranks, and then every rank visits that one.
#[must_use]
#[inline(always)]
pub fn rotated(rank: u32, step: u32, count: NonZeroU32) -> u32 {
    let first = if rank < count.get() - 1 { rank + 1 } else { 0 };
    // Both are below count: one subtraction suffices.
    let peer = first + step;
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
    fn every_rank_visits_the_one_receiver_that_stands_for_all() {
        for rank in [0, 1, 2, 1023, u32::MAX] {
            assert_eq!(rotated(rank, 0, NonZeroU32::MIN), 0);
        }
    }
}
