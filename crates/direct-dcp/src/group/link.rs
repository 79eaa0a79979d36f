//! One rank's connection to one other rank in another process.

use super::error::{GroupError, shm_error};
use super::message::{Assembly, FRAGMENT, Foreign, Head, Message, fragment};
use direct_dcp_shm::{Channel, ShmError};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

/// A channel, with what has come through it and is not yet used.
#[derive(Debug)]
pub(super) struct Link {
    channel: Arc<Channel>,
    /// The peer's rank in the first generation: its name for good.
    pub(super) origin: usize,
    assembly: Assembly,
    /// Messages that came before their time.
    stash: VecDeque<Message>,
}

/// Why a link cannot go on.
#[derive(Debug)]
pub(super) enum Broken {
    /// The peer is gone, and all that it sent has been received.
    Closed,
    /// The peer is something else than we are.
    Foreign(Foreign),
    /// The kernel refused.
    Failed(ShmError),
}

impl Broken {
    /// As the error of a link to `rank`.
    pub(super) fn at_rank(self, rank: usize) -> GroupError {
        match self {
            Broken::Closed => GroupError::PeerLost { rank },
            Broken::Foreign(foreign) => foreign.at_rank(rank),
            Broken::Failed(error) => shm_error(format!("talking to rank {rank}"))(error),
        }
    }
}

impl From<ShmError> for Broken {
    fn from(error: ShmError) -> Broken {
        match error {
            ShmError::Closed => Broken::Closed,
            ShmError::Truncated
            | ShmError::WrongFdCount { .. }
            | ShmError::TooLarge { .. }
            | ShmError::Malformed { .. } => {
                Broken::Foreign(Foreign::new("protocol", "direct-dcp's", error.to_string()))
            }
            _ => Broken::Failed(error),
        }
    }
}

impl Link {
    pub(super) fn new(channel: Channel, origin: usize) -> Link {
        Link {
            channel: Arc::new(channel),
            origin,
            assembly: Assembly::default(),
            stash: VecDeque::new(),
        }
    }

    pub(super) fn channel(&self) -> &Arc<Channel> {
        &self.channel
    }

    /// The next message, if one comes before `until`. With a time in the past it takes what is
    /// there.
    pub(super) fn poll(&mut self, until: Instant) -> Result<Option<Message>, Broken> {
        if let Some(message) = self.stash.pop_front() {
            return Ok(Some(message));
        }
        loop {
            match self.channel.recv(until) {
                Ok((packet, fd)) => {
                    let message = self.assembly.push(&packet, fd).map_err(Broken::Foreign)?;
                    if message.is_some() {
                        return Ok(message);
                    }
                }
                Err(ShmError::TimedOut) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Puts a message back, to be the next one again.
    pub(super) fn put_back(&mut self, message: Message) {
        self.stash.push_front(message);
    }

    /// Sends the fragment of `payload` at `offset`; `None` if there is no room before `until`, else
    /// the offset of the next. A message has at least one fragment, even an empty one.
    pub(super) fn send_fragment(
        &self,
        head: Head,
        payload: &[u8],
        offset: usize,
        fd: Option<BorrowedFd<'_>>,
        until: Instant,
    ) -> Result<Option<usize>, Broken> {
        let fd = fd.filter(|_| offset == 0);
        let bytes = fragment(head, payload, offset);
        match self.channel.send(&bytes, fd, until) {
            Ok(()) => Ok(Some(payload.len().min(offset + FRAGMENT))),
            Err(ShmError::TimedOut) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Sends a message of one fragment if there is room right now, and lets it be if not.
    pub(super) fn try_send(&self, head: Head, payload: &[u8]) {
        // A peer that does not listen finds out by its own deadline, or is gone.
        let _ = self.send_fragment(head, payload, 0, None, Instant::now());
    }
}
