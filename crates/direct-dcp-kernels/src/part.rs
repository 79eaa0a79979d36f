//! Who does what: the split of a slice over blocks, and the order in which peers are visited.

use core::num::NonZeroU32;

/// The granule in which a slice is split over blocks, in bytes: 256 threads of 16 bytes.
///
/// Boundaries between blocks are multiples of it, so only the end of a slice can be ragged.
const GRANULE: u64 = 4096;

/// A run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// First byte.
    pub start: u64,
    /// Number of bytes; 0 when there are more blocks than work.
    pub len: u64,
}

/// The bytes of a slice of `total` bytes that block `block` of `blocks` handles.
///
/// The parts of all blocks cover the slice exactly once, in order.
#[must_use]
pub fn part(total: u64, block: u32, blocks: NonZeroU32) -> Part {
    let granules = total.div_ceil(GRANULE);
    let every = granules / u64::from(blocks.get());
    let more = granules % u64::from(blocks.get());
    // The first `more` blocks take one granule more than `every`.
    let block = u64::from(block);
    let first = every * block + block.min(more);
    let count = every + u64::from(block < more);
    let start = (first * GRANULE).min(total);
    let end = ((first + count) * GRANULE).min(total);
    Part {
        start,
        len: end - start,
    }
}

/// The `step`-th of `count` peers in the order in which `rank` visits them: the next rank first,
/// itself last, so that no receiver is hit by all ranks at once. `rank` and `step` are below
/// `count`.
#[must_use]
pub fn rotated(rank: u32, step: u32, count: NonZeroU32) -> u32 {
    // rank < count and step < count, so the sum stays below 2 · count: one subtraction suffices.
    let peer = rank % count + 1 + step % count;
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
    fn parts_cover_a_slice_once_and_in_order() {
        for total in [1, 15, 4095, 4096, 4097, 40_961, 1_000_003] {
            for blocks in 1..20 {
                let blocks = NonZeroU32::new(blocks).unwrap();
                let mut next = 0;
                for block in 0..blocks.get() {
                    let part = part(total, block, blocks);
                    assert_eq!(part.start, next.min(total));
                    next = part.start + part.len;
                }
                assert_eq!(next, total);
            }
        }
    }

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
}
