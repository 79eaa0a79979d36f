//! What has to arrive where, of gathers in final layout.

use super::pattern;
use direct_dcp::plan::{Chunk, PlanError, Run};

/// From which rows of all ranks, `rows` of each, to which rows of the result a pass over gathered rows
/// copies: through the result from its start to its end.
pub(super) fn runs(chunk: &Chunk, rows: usize, ranks: usize) -> Result<Vec<Run>, PlanError> {
    let mut runs = Vec::new();
    for rank in 0..ranks {
        let map = chunk.row_map(rank)?;
        runs.extend(map.runs().iter().map(|run| Run {
            src: rank * rows + run.src,
            ..*run
        }));
    }
    runs.sort_unstable_by_key(|run| run.dst);
    Ok(runs)
}

/// Makes the rows that `rank` of `ranks` sends, and what has to arrive of those of all, in planes of
/// `widths` bytes: token by token, which belong to the ranks in turn.
pub(super) fn fill(
    chunk: &Chunk,
    widths: &[usize],
    seed: u64,
    (rank, ranks): (usize, usize),
    local: &mut [u8],
    expected: &mut [Vec<u8>],
) {
    let row_bytes: usize = widths.iter().sum();
    for other in 0..ranks {
        // All ranks' rows in turn, and last those of this one.
        let rank = (rank + 1 + other) % ranks;
        pattern::fill(local, seed, rank);
        let (mut first, mut src) = (0, 0);
        for part in chunk.parts() {
            // The tokens of the ranks before come first.
            let before = (0..part.len).filter(|token| token % ranks < rank).count();
            let own = (0..part.len).filter(|token| token % ranks == rank).count();
            for i in 0..own {
                let mut from = &local[(src + i) * row_bytes..][..row_bytes];
                for (plane, &width) in expected.iter_mut().zip(widths) {
                    let (piece, rest) = from.split_at(width);
                    let to = (first + before + i) * width;
                    plane[to..to + width].copy_from_slice(piece);
                    from = rest;
                }
            }
            first += part.len;
            src += part.len.div_ceil(ranks);
        }
    }
}

/// How many bytes are not as expected.
pub(super) fn differences<'a>(found: impl Iterator<Item = &'a [u8]>, expected: &[Vec<u8>]) -> u64 {
    let planes = found.zip(expected);
    let count = |(found, expected): (&[u8], &Vec<u8>)| match found == expected {
        true => 0,
        false => {
            let pairs = found.iter().zip(expected);
            pairs.filter(|(a, b)| a != b).count() + found.len().abs_diff(expected.len())
        }
    };
    planes.map(count).sum::<usize>() as u64
}
