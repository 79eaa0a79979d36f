//! What a rank's process writes to its standard output, which its parent reads: frames of a tag, a
//! length and that many bytes.

use super::{Message, RankError};
use std::io::{self, Read, Write};

/// The largest frame that a parent believes in. Rows come some megabytes at a time.
const MAX_FRAME: u64 = 1 << 30;

const TEXT: u8 = 1;
const BYTES: u8 = 2;
const FAILED: u8 = 3;
const DONE: u8 = 4;

/// One frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Said(Message),
    /// The last one of a rank that failed.
    Failed(RankError),
    /// The last one of a rank that did not.
    Done,
}

impl Frame {
    pub(super) fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let json;
        let (tag, bytes): (u8, &[u8]) = match self {
            Frame::Said(Message::Text(text)) => (TEXT, text.as_bytes()),
            Frame::Said(Message::Bytes(bytes)) => (BYTES, bytes),
            Frame::Failed(error) => {
                json = serde_json::to_vec(error)?;
                (FAILED, &json)
            }
            Frame::Done => (DONE, &[]),
        };
        to.write_all(&[tag])?;
        to.write_all(&(bytes.len() as u64).to_le_bytes())?;
        to.write_all(bytes)?;
        to.flush()
    }

    /// The next frame, or none where the rank ended without one or says what no rank says.
    pub(super) fn read(from: &mut impl Read) -> Option<Frame> {
        let mut head = [0; 9];
        from.read_exact(&mut head).ok()?;
        let (tag, len) = head.split_first()?;
        let len = u64::from_le_bytes(len.try_into().ok()?);
        if len > MAX_FRAME {
            return None;
        }
        let mut bytes = Vec::new();
        if from.take(len).read_to_end(&mut bytes).ok()? as u64 != len {
            return None;
        }
        match *tag {
            TEXT => String::from_utf8(bytes)
                .ok()
                .map(|text| Frame::Said(Message::Text(text))),
            BYTES => Some(Frame::Said(Message::Bytes(bytes))),
            FAILED => serde_json::from_slice(&bytes).ok().map(Frame::Failed),
            DONE => Some(Frame::Done),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_pipe() {
        let frames = [
            Frame::Said(Message::Text("{}".into())),
            Frame::Said(Message::Bytes(vec![0, 255, 10])),
            Frame::Failed(String::from("no").into()),
            Frame::Done,
        ];
        let mut pipe = Vec::new();
        for frame in &frames {
            frame.write(&mut pipe).unwrap();
        }
        let mut rest = pipe.as_slice();
        for frame in frames {
            assert_eq!(Frame::read(&mut rest), Some(frame));
        }
        assert_eq!(Frame::read(&mut rest), None);
        // A rank that is killed in the middle of one.
        assert_eq!(Frame::read(&mut &pipe[..10]), None);
        assert_eq!(
            Frame::read(&mut &[1, 255, 255, 255, 255, 255, 255, 255, 255][..]),
            None
        );
    }
}
