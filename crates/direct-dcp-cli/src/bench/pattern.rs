//! Random rows that any rank can make again, and so check without having been sent them.

/// A generator with 64 bits of state, splitmix64: fast, and different for every seed.
struct Random(u64);

impl Random {
    fn new(seed: u64, rank: usize) -> Self {
        // Far apart, so that no rank's rows continue another's.
        Random(seed.wrapping_mul(0xA076_1D64_78BD_642F) ^ (rank as u64) << 40)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// Makes the rows of `rank`.
pub(super) fn fill(rows: &mut [u8], seed: u64, rank: usize) {
    let mut random = Random::new(seed, rank);
    for word in rows.chunks_mut(8) {
        let bytes = random.next().to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
    }
}

/// How many bytes of the gathered rows of `ranks` ranks are not as made.
pub(super) fn wrong(gathered: &[u8], seed: u64, ranks: usize) -> u64 {
    let slice = (gathered.len() / ranks).max(1);
    let mut wrong = 0;
    for (rank, rows) in gathered.chunks(slice).enumerate() {
        let mut random = Random::new(seed, rank);
        for word in rows.chunks(8) {
            let bytes = random.next().to_le_bytes();
            if *word != bytes[..word.len()] {
                wrong += word.iter().zip(bytes).filter(|&(&a, b)| a != b).count() as u64;
            }
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_byte_counts() {
        let mut all = vec![0; 3 * 21];
        for (rank, rows) in all.chunks_mut(21).enumerate() {
            fill(rows, 7, rank);
        }
        assert_eq!(wrong(&all, 7, 3), 0);
        assert!(wrong(&all, 8, 3) > 50);
        for at in [0, 20, 21, 62] {
            all[at] ^= 1;
        }
        assert_eq!(wrong(&all, 7, 3), 4);
        all.rotate_left(21);
        assert!(wrong(&all, 7, 3) > 50);
    }
}
