//! The split of a slice over blocks.

use std::num::NonZeroU32;

/// The granule in which a slice is split over blocks, in bytes: a page.
///
/// Boundaries between blocks are multiples of it, so only the end of a slice can be ragged.
const GRANULE: u64 = 4096;

/// A run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// First byte.
    pub(super) start: u64,
    /// Number of bytes; 0 when there are more blocks than work.
    pub(super) len: u64,
}

/// The bytes of a slice of `total` bytes that block `block` of `blocks` handles.
///
/// The parts of all blocks cover the slice exactly once, in order.
#[must_use]
pub(super) fn part(total: u64, block: u32, blocks: NonZeroU32) -> Part {
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
}
