//! What ranks send, and what each must therefore receive.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Names one call's data: alike on all ranks, different for every call of every workspace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    pub(crate) seed: u64,
    pub(crate) ubatch: usize,
    pub(crate) call: u64,
}

/// One step of SplitMix64: neighbours become strangers.
fn mixed(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// A seed that depends on all of `parts`, and on nothing else.
fn seed(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |seed, part| mixed(seed ^ part))
}

/// Numbers that depend on all of `parts`, and on nothing else.
pub(crate) fn dice(parts: &[u64]) -> StdRng {
    StdRng::seed_from_u64(seed(parts))
}

/// The rows of one rank: random, and without a zero, which untouched memory might show too.
pub(crate) fn rows(key: Key, rank: usize, bytes: usize) -> Vec<u8> {
    // Plain arithmetic, word by word: a suite that is not optimized makes a lot of it.
    let start = seed(&[key.seed, key.ubatch as u64, key.call, rank as u64]);
    let mut rows = vec![0; bytes];
    for (index, place) in (0..).zip(rows.chunks_mut(8)) {
        let bytes = (mixed(start.wrapping_add(index)) | 0x0101_0101_0101_0101).to_le_bytes();
        place.copy_from_slice(&bytes[..place.len()]);
    }
    rows
}

/// The rows of all ranks, one after another.
pub(crate) fn gathered(key: Key, world: usize, bytes: usize) -> Vec<u8> {
    let mut all = Vec::with_capacity(world * bytes);
    for rank in 0..world {
        all.extend(rows(key, rank, bytes));
    }
    all
}

/// Bytes none of which is what is `expected` at its place.
pub(crate) fn poison(rng: &mut StdRng, expected: &[u8]) -> Vec<u8> {
    let mask = rng.random_range(1..=u8::MAX);
    expected.iter().map(|byte| byte ^ mask).collect()
}

/// Says where `got` differs from `expected`, both `[world, slice]`.
pub(crate) fn difference(got: &[u8], expected: &[u8], slice: usize) -> String {
    if got.len() != expected.len() {
        return format!("{} bytes came, not {}", got.len(), expected.len());
    }
    let wrong = |(got, expected): (&u8, &u8)| got != expected;
    let Some(at) = got.iter().zip(expected).position(wrong) else {
        return "nothing differs".into();
    };
    let count = got.iter().zip(expected).filter(|&pair| wrong(pair)).count();
    format!(
        "{count} of {} bytes are wrong, first byte {} of the slice of rank {}",
        got.len(),
        at % slice,
        at / slice
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key = Key {
        seed: 7,
        ubatch: 1,
        call: 3,
    };

    #[test]
    fn every_call_and_rank_has_rows_of_its_own() {
        let one = rows(KEY, 0, 64);
        assert_eq!(one, rows(KEY, 0, 64));
        assert!(!one.contains(&0));
        assert_ne!(one, rows(KEY, 1, 64));
        assert_ne!(one, rows(Key { call: 4, ..KEY }, 0, 64));
        assert_ne!(one, rows(Key { ubatch: 0, ..KEY }, 0, 64));
        assert_eq!(gathered(KEY, 2, 64)[64..], rows(KEY, 1, 64));
    }

    #[test]
    fn poison_is_wrong_everywhere() {
        let expected = rows(KEY, 0, 500);
        let poison = poison(&mut dice(&[1]), &expected);
        assert!(
            poison
                .iter()
                .zip(&expected)
                .all(|(one, other)| one != other)
        );
    }
}
