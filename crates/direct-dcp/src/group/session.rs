//! Collectives between processes: every rank sends to every other, and receives from it.
//!
//! Nobody waits to send before it has looked for what to receive, so payloads may be larger than
//! the sockets' buffers. A wait is cut into short slices; between them the rank looks at everything
//! that could end it.

use super::error::GroupError;
use super::fabric::Operation;
use super::hub::clash;
use super::link::Link;
use super::message::{Foreign, Head, Kind, Message};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// How long a rank waits for one peer before it looks at everything else.
pub(super) const SLICE: Duration = Duration::from_millis(20);

/// The same while there is something left to send, for which no wait is set up.
pub(super) const BUSY_SLICE: Duration = Duration::from_millis(1);

/// A rank's links in one generation.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) rank: usize,
    pub(super) generation: u64,
    /// This rank in the first generation, which never changes.
    pub(super) origin: usize,
    /// How many ranks the first generation had.
    pub(super) universe: usize,
    /// By rank; none at our own.
    pub(super) links: Vec<Option<Link>>,
    /// Collectives begun in this generation.
    sequence: u64,
}

/// What one rank contributed to a collective.
#[derive(Debug, Default)]
pub(super) struct Parcel {
    pub(super) bytes: Vec<u8>,
    pub(super) fd: Option<OwnedFd>,
}

/// What ends a collective before it is complete.
pub(super) struct Limit<'a> {
    pub(super) until: Instant,
    pub(super) timeout: Duration,
    /// Looked at between slices.
    pub(super) check: &'a dyn Fn() -> Result<(), GroupError>,
}

impl Session {
    pub(super) fn new(
        rank: usize,
        generation: u64,
        (origin, universe): (usize, usize),
        links: Vec<Option<Link>>,
    ) -> Session {
        Session {
            rank,
            generation,
            origin,
            universe,
            links,
            sequence: 0,
        }
    }

    pub(super) fn world(&self) -> usize {
        self.links.len()
    }

    /// The original rank of each rank.
    pub(super) fn origins(&self) -> Vec<usize> {
        let own = self.origin;
        let origin = |link: &Option<Link>| link.as_ref().map_or(own, |link| link.origin);
        self.links.iter().map(origin).collect()
    }

    /// Collective: every rank's contribution, in rank order; our own without its descriptor.
    pub(super) fn exchange(
        &mut self,
        operation: Operation,
        payload: &[u8],
        fd: Option<BorrowedFd<'_>>,
        limit: &Limit<'_>,
    ) -> Result<Vec<Parcel>, GroupError> {
        self.sequence += 1;
        let head = Head {
            kind: Kind::Collective(operation),
            generation: self.generation,
            sequence: self.sequence,
        };
        let rank = self.rank;
        let mut ties: Vec<Tie<'_>> = self
            .links
            .iter_mut()
            .enumerate()
            .filter_map(|(peer, link)| {
                link.as_mut().map(|link| Tie {
                    peer,
                    link,
                    next: Some(0),
                    got: None,
                })
            })
            .collect();
        // Each rank starts behind itself, so that not all send to the same one at once.
        let start = ties.partition_point(|tie| tie.peer < rank);
        ties.rotate_left(start);

        let mut sweep = true;
        loop {
            if sweep {
                for tie in &mut ties {
                    tie.send(head, payload, fd, Instant::now())?;
                    while tie.got.is_none() && tie.hear(head, operation, Instant::now())? {}
                }
            }
            let sending = ties.iter().any(|tie| tie.next.is_some());
            let Some(waiting) = ties
                .iter_mut()
                .find(|tie| tie.got.is_none() || tie.next.is_some())
            else {
                break;
            };
            (limit.check)()?;
            let now = Instant::now();
            if now >= limit.until {
                return Err(GroupError::Timeout {
                    missing: unheard(&ties),
                    waited: limit.timeout,
                });
            }
            let slice = if sending { BUSY_SLICE } else { SLICE };
            let until = limit.until.min(now + slice);
            let heard = match waiting.got {
                None => waiting.hear(head, operation, until)?,
                Some(_) => {
                    waiting.send(head, payload, fd, until)?;
                    false
                }
            };
            // While messages come and all is sent, the others' can wait until we get to them.
            sweep = sending || !heard;
        }

        let own = Parcel {
            bytes: payload.to_vec(),
            fd: None,
        };
        ties.sort_unstable_by_key(|tie| tie.peer);
        let mut parcels: Vec<Parcel> = ties.into_iter().filter_map(|tie| tie.got).collect();
        parcels.insert(rank.min(parcels.len()), own);
        Ok(parcels)
    }
}

/// One peer during one collective.
struct Tie<'a> {
    peer: usize,
    link: &'a mut Link,
    /// Where the rest that is to be sent begins, unless all is sent.
    next: Option<usize>,
    got: Option<Parcel>,
}

impl Tie<'_> {
    /// Sends as much as there is, or comes to be, room for before `until`.
    fn send(
        &mut self,
        head: Head,
        payload: &[u8],
        fd: Option<BorrowedFd<'_>>,
        until: Instant,
    ) -> Result<(), GroupError> {
        while let Some(offset) = self.next {
            let sent = self
                .link
                .send_fragment(head, payload, offset, fd, until)
                .map_err(|broken| broken.at_rank(self.peer))?;
            match sent {
                Some(next) => self.next = Some(next).filter(|&next| next < payload.len()),
                None => return Ok(()),
            }
        }
        Ok(())
    }

    /// Takes one message, if one comes before `until`; says whether one came.
    fn hear(
        &mut self,
        ours: Head,
        operation: Operation,
        until: Instant,
    ) -> Result<bool, GroupError> {
        let rank = self.peer;
        let polled = self.link.poll(until);
        let Some(message) = polled.map_err(|broken| broken.at_rank(rank))? else {
            return Ok(false);
        };
        let head = message.head;
        let current = head.generation == ours.generation;
        match head.kind {
            Kind::Rebuild if head.generation > ours.generation => {
                self.link.put_back(message);
                return Err(GroupError::Rebuilding { rank });
            }
            Kind::Collective(theirs) if current && head.sequence == ours.sequence => {
                if theirs != operation {
                    return Err(clash(rank, operation, theirs));
                }
                let Message { bytes, fd, .. } = message;
                self.got = Some(Parcel { bytes, fd });
            }
            Kind::Collective(_) if current && head.sequence > ours.sequence => {
                let number = |sequence: u64| format!("number {sequence}");
                let ahead = Foreign::new(
                    "collective under way",
                    number(ours.sequence),
                    number(head.sequence),
                );
                self.link.put_back(message);
                return Err(ahead.at_rank(rank));
            }
            // What is left of a collective that we gave up, or of an earlier generation.
            _ => {}
        }
        Ok(true)
    }
}

/// Who has not been heard; if all have, who does not listen.
fn unheard(ties: &[Tie<'_>]) -> Vec<usize> {
    let pick = |late: &dyn Fn(&Tie<'_>) -> bool| {
        let late = ties.iter().filter(|tie| late(tie));
        let mut ranks: Vec<usize> = late.map(|tie| tie.peer).collect();
        ranks.sort_unstable();
        ranks
    };
    let silent = pick(&|tie| tie.got.is_none());
    match silent.is_empty() {
        true => pick(&|_| true),
        false => silent,
    }
}
