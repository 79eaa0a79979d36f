//! Fingerprints of plans, which ranks compare instead of the plans.

use super::error::{PlanError, invalid};

/// 64-bit FNV-1a over words, each as its eight bytes from the least significant to the most. Equal
/// on every platform.
#[derive(Clone, Copy, Debug)]
pub(super) struct Digest(u64);

impl Digest {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;

    /// The digest of something of a kind: things of different kinds start with different words.
    pub(super) fn of(kind: u64) -> Self {
        Digest(Self::OFFSET).word(kind)
    }

    pub(super) fn word(self, word: u64) -> Self {
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(Self::PRIME);
        Digest(word.to_le_bytes().into_iter().fold(self.0, step))
    }

    pub(super) fn words(self, words: impl IntoIterator<Item = usize>) -> Self {
        words
            .into_iter()
            .fold(self, |digest, word| digest.word(word as u64))
    }

    pub(super) fn finish(self) -> u64 {
        self.0
    }
}

/// One digest per request of a plan, for ranks to exchange when their plans' digests differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestDigests(Vec<u64>);

impl RequestDigests {
    pub(super) fn new(digests: Vec<u64>) -> Self {
        RequestDigests(digests)
    }

    /// The digests, in the order of the requests.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        &self.0
    }

    /// The first request that a peer plans differently, or that only one of the two has. None if
    /// there is no such.
    #[must_use]
    pub fn first_difference(&self, peer: &RequestDigests) -> Option<usize> {
        let differ = self.0.iter().zip(&peer.0).position(|(a, b)| a != b);
        let shorter = self.0.len().min(peer.0.len());
        differ.or((self.0.len() != peer.0.len()).then_some(shorter))
    }

    /// Eight bytes per request, the least significant first.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.0.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// What [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// [`PlanError::InvalidArgument`] for bytes that are no whole number of digests.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, PlanError> {
        let (words, rest) = bytes.as_chunks();
        if !rest.is_empty() {
            let expected = "eight bytes per request";
            return Err(invalid("digest bytes", expected, bytes.len()));
        }
        let words = words.iter().map(|&word| u64::from_le_bytes(word));
        Ok(RequestDigests(words.collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::Digest;

    #[test]
    fn is_fnv_1a() {
        // Computed elsewhere, over the bytes 2a 01 00 00 00 00 00 00 07 00 00 00 00 00 00 00.
        assert_eq!(Digest::of(0x012a).word(7).finish(), 0x7d6a_3f51_8289_8873);
    }
}
