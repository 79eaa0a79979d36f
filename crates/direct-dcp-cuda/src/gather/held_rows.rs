//! What a call has lent, read to the host.
#![allow(unsafe_code)] // copies from memory that is lent

use super::lane::Held;
use crate::copy;
use crate::error::{Result, check_span};
use crate::stream::Stream;

impl Held {
    /// Notes that a replay has delivered since: only the device knows where.
    pub(super) fn replayed(&mut self) {
        self.address = None;
    }

    /// Waits, and reads what is lent, from byte `offset` on.
    pub(super) fn read(&self, stream: &Stream, offset: usize, to: &mut [u8]) -> Result<()> {
        let bytes = usize::try_from(self.bytes()).unwrap_or(usize::MAX);
        check_span("gathered bytes", offset, to.len(), bytes)?;
        let address = match self.address() {
            Some(address) => address,
            None => {
                let mut word = [0; 8];
                // SAFETY: a word of the lane's state, which the guard keeps.
                unsafe { copy::download(stream, &mut word, self.address_word()) }?;
                u64::from_ne_bytes(word)
            }
        };
        // SAFETY: bytes of the slot that the call delivered into, in memory that the guard keeps.
        unsafe { copy::download(stream, to, address + offset as u64) }
    }
}
