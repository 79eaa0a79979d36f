//! How ranks of different processes talk: the bytes of a message.
//!
//! A message is cut into fragments, so that each is one packet of the channel: sent whole or not at
//! all, without waiting. Each fragment starts with a header, little endian:
//!
//! ```text
//! byte 0    magic        "dDCP"
//! byte 4    version      u16
//! byte 6    kind         u8
//! byte 7    operation    u8, of a collective; else 0
//! byte 8    generation   u64; of a rebuild, the round
//! byte 16   sequence     u64, of a collective; else 0
//! byte 24   total        u64, bytes of the whole message
//! byte 32   offset       u64, of this fragment in it
//! byte 40   the fragment
//! ```
//!
//! A fragment at offset 0 begins a message, and may carry its descriptor. Fragments follow in
//! order. A message may stop short when its sender gives up, and the next begins at offset 0 again.

use super::error::GroupError;
use super::fabric::Operation;
use std::os::fd::OwnedFd;

const MAGIC: [u8; 4] = *b"dDCP";

/// Raised with every change of what the ranks say to each other or place in shared memory.
pub(super) const VERSION: u16 = 1;

const HEADER: usize = 40;

/// Bytes of a message that one fragment carries.
pub(super) const FRAGMENT: usize = 16 << 10;

/// The most bytes that one rank may contribute to a collective: 256 MiB.
pub(super) const MAX_PAYLOAD: usize = 256 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Who I am; the first message on every channel.
    Hello,
    Collective(Operation),
    /// I am rebuilding, and these are the ranks that I believe to be alive.
    Rebuild,
}

impl Kind {
    fn bytes(self) -> (u8, u8) {
        match self {
            Kind::Hello => (1, 0),
            Kind::Collective(operation) => (2, operation as u8),
            Kind::Rebuild => (3, 0),
        }
    }

    fn from_bytes(kind: u8, operation: u8) -> Option<Kind> {
        match (kind, operation) {
            (1, 0) => Some(Kind::Hello),
            (2, operation) => Operation::from_byte(operation).map(Kind::Collective),
            (3, 0) => Some(Kind::Rebuild),
            _ => None,
        }
    }
}

/// What a message is and where it belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) kind: Kind,
    pub(super) generation: u64,
    pub(super) sequence: u64,
}

#[derive(Debug)]
pub(super) struct Message {
    pub(super) head: Head,
    pub(super) bytes: Vec<u8>,
    pub(super) fd: Option<OwnedFd>,
}

/// Why bytes are no message of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Foreign {
    /// What differs, and its two values.
    field: &'static str,
    ours: String,
    theirs: String,
}

impl Foreign {
    pub(super) fn new(
        field: &'static str,
        ours: impl Into<String>,
        theirs: impl Into<String>,
    ) -> Foreign {
        Foreign {
            field,
            ours: ours.into(),
            theirs: theirs.into(),
        }
    }

    /// As the error of a channel whose rank is known.
    pub(super) fn at_rank(self, rank: usize) -> GroupError {
        GroupError::Mismatch {
            r#source: rank,
            field: self.field,
            ours: self.ours,
            theirs: self.theirs,
        }
    }

    /// As the error of a channel that has yet to say which rank it is.
    pub(super) fn of_process(self, process: u32) -> GroupError {
        let Foreign {
            field,
            ours,
            theirs,
        } = self;
        GroupError::Stranger {
            process,
            reason: format!("has another {field}: {theirs} there, {ours} here"),
        }
    }
}

/// The fragment of `payload` at `offset`, ready to send.
pub(super) fn fragment(head: Head, payload: &[u8], offset: usize) -> Vec<u8> {
    let rest = payload.get(offset..).unwrap_or_default();
    let piece = rest.get(..FRAGMENT).unwrap_or(rest);
    let (kind, operation) = head.kind.bytes();
    let mut bytes = Vec::with_capacity(HEADER + piece.len());
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[kind, operation]);
    for number in [
        head.generation,
        head.sequence,
        payload.len() as u64,
        offset as u64,
    ] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.extend_from_slice(piece);
    bytes
}

/// Puts the fragments of one sender together again.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    partial: Option<(Message, usize)>,
}

impl Assembly {
    /// Takes the next packet of the channel; gives the message that it completes.
    pub(super) fn push(
        &mut self,
        packet: &[u8],
        fd: Option<OwnedFd>,
    ) -> Result<Option<Message>, Foreign> {
        let (head, total, offset, piece) = parse(packet)?;
        let malformed = |what: &str| {
            let theirs = format!("a message {what}");
            Foreign::new("protocol", "whole messages", theirs)
        };
        if total > MAX_PAYLOAD {
            return Err(malformed("over the limit"));
        }
        let (mut message, total) = match self.partial.take() {
            Some((message, known)) if offset != 0 => {
                let next = message.head == head && message.bytes.len() == offset && known == total;
                if !next || fd.is_some() || piece.is_empty() {
                    return Err(malformed("out of order"));
                }
                (message, total)
            }
            _ if offset == 0 => {
                let bytes = Vec::new();
                (Message { head, bytes, fd }, total)
            }
            _ => return Err(malformed("without its beginning")),
        };
        if piece.len() > total - message.bytes.len() {
            return Err(malformed("longer than it says"));
        }
        if piece.is_empty() && total > 0 {
            return Err(malformed("with an empty piece"));
        }
        message.bytes.extend_from_slice(piece);
        if message.bytes.len() == total {
            return Ok(Some(message));
        }
        self.partial = Some((message, total));
        Ok(None)
    }
}

/// Head, total, offset and piece of a fragment.
fn parse(packet: &[u8]) -> Result<(Head, usize, usize, &[u8]), Foreign> {
    let foreign = |theirs: String| {
        Foreign::new(
            "protocol",
            format!("direct-dcp's, version {VERSION}"),
            theirs,
        )
    };
    let unknown = || foreign(format!("{} bytes of something else", packet.len()));
    let mut rest = packet;
    if take::<4>(&mut rest) != Some(MAGIC) {
        return Err(unknown());
    }
    let version = take(&mut rest)
        .map(u16::from_le_bytes)
        .ok_or_else(unknown)?;
    if version != VERSION {
        return Err(foreign(format!("direct-dcp's, version {version}")));
    }
    let [kind, operation] = take(&mut rest).ok_or_else(unknown)?;
    let kind = Kind::from_bytes(kind, operation)
        .ok_or_else(|| foreign(format!("a message of unknown kind {kind}.{operation}")))?;
    let mut number = || take(&mut rest).map(u64::from_le_bytes).ok_or_else(unknown);
    let head = Head {
        kind,
        generation: number()?,
        sequence: number()?,
    };
    let mut size = || number().map(|size| usize::try_from(size).unwrap_or(usize::MAX));
    let (total, offset) = (size()?, size()?);
    Ok((head, total, offset, rest))
}

/// The next `N` bytes of `rest`, which then goes on behind them.
pub(super) fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (bytes, behind) = rest.split_first_chunk()?;
    *rest = behind;
    Some(*bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEAD: Head = Head {
        kind: Kind::Collective(Operation::Vote),
        generation: 3,
        sequence: 99,
    };

    fn fragments(payload: &[u8]) -> Vec<Vec<u8>> {
        let offsets = (0..payload.len().max(1)).step_by(FRAGMENT);
        offsets.map(|at| fragment(HEAD, payload, at)).collect()
    }

    #[test]
    fn an_abandoned_message_gives_way_to_the_next() {
        let mut assembly = Assembly::default();
        let long = vec![7; 3 * FRAGMENT];
        assert!(assembly.push(&fragments(&long)[0], None).unwrap().is_none());
        assert!(assembly.push(&fragments(&long)[1], None).unwrap().is_none());
        let message = assembly.push(&fragments(b"new")[0], None).unwrap().unwrap();
        assert_eq!(message.bytes, b"new");
        assert!(assembly.push(&fragments(&long)[2], None).is_err());
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = fragment(HEAD, b"", 0);
        bytes[4] = 9;
        let error = Assembly::default().push(&bytes, None).unwrap_err();
        let text = error.at_rank(1).to_string();
        assert!(text.contains("version 9 there"), "{text}");
    }

    proptest! {
        #[test]
        fn messages_come_back_whole(payload in prop::collection::vec(any::<u8>(), 0..70_000)) {
            let mut assembly = Assembly::default();
            let mut parts = fragments(&payload).into_iter().peekable();
            while let Some(part) = parts.next() {
                let message = assembly.push(&part, None).unwrap();
                prop_assert_eq!(message.is_some(), parts.peek().is_none());
                if let Some(message) = message {
                    prop_assert_eq!(message.head, HEAD);
                    prop_assert!(message.bytes == payload);
                }
            }
        }

        #[test]
        fn damage_is_an_answer_not_a_panic(
            payload in prop::collection::vec(any::<u8>(), 0..40),
            damage in prop::collection::vec((0usize..90, any::<u8>()), 1..6),
            cut in 0usize..90,
        ) {
            let mut bytes = fragment(HEAD, &payload, 0);
            for (at, value) in damage {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = value;
                }
            }
            bytes.truncate(cut);
            let mut assembly = Assembly::default();
            let _ = assembly.push(&bytes, None);
            let _ = assembly.push(&fragment(HEAD, &payload, 0), None);
            let _ = assembly.push(&bytes, None);
        }
    }
}
