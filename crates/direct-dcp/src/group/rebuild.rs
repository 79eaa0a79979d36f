//! How processes agree on who goes on after a loss.
//!
//! It goes in *rounds*, whose numbers only grow. In a round each rank tells every peer that it
//! believes alive which ranks those are, and hears the same from each.
//!
//! - A set that is heard shrinks one's own to what both contain. Who is not in a set that it hears
//!   is excluded, and gives up.
//! - Who hears of a later round joins it at once.
//! - A peer that hangs up, or has not called rebuild by the deadline, is dropped; it is told so, in
//!   case it comes late.
//! - If every set of a round was the same, the round is agreed, and its number is that of the new
//!   generation. If not, the next round begins.
//!
//! An agreed round is confirmed by two exchanges among its members. Should one of them die
//! meanwhile, those who notice begin the next round. Those who did not notice may come up in a
//! generation that is short of a member; the first thing that they hear in it is that round, which
//! their user answers as every loss, by calling rebuild.
//!
//! Ranks are spoken of by their number in the first generation: two ranks that rebuild together may
//! have come from different ones.

use super::error::GroupError;
use super::fabric::Generation;
use super::link::{Broken, Link};
use super::mesh::{Mesh, settle};
use super::message::{Head, Kind};
use super::session::{BUSY_SLICE, SLICE, Session};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// How long past the deadline a rank that has called rebuild may take to answer in a later round.
const GRACE: Duration = Duration::from_secs(2);

/// A round further ahead than this is noise.
const FAR: u64 = 1 << 20;

/// Runs rounds until one is agreed and confirmed.
pub(super) fn run(session: Session, until: Instant) -> Result<Generation, GroupError> {
    let before = session.origins();
    let mut rounds = Rounds::new(session, false);
    loop {
        let mut session = rounds.agree(until)?;
        match settle(&mut session, until.max(Instant::now() + GRACE), || ()) {
            Ok(words) => {
                let origins = session.origins();
                let old = |origin| before.iter().position(|&before| before == origin);
                let previous = origins.into_iter().filter_map(old).collect();
                return Ok(Mesh::generation(session, words, previous));
            }
            Err(
                GroupError::PeerLost { .. }
                | GroupError::Rebuilding { .. }
                | GroupError::Timeout { .. },
            ) => rounds = Rounds::new(session, true),
            Err(error) => return Err(error),
        }
    }
}

/// What this rank knows of the others, all by their original ranks.
struct Rounds {
    own: usize,
    universe: usize,
    number: u64,
    /// Those believed alive.
    peers: BTreeMap<usize, Peer>,
}

struct Peer {
    link: Link,
    /// It has called rebuild: it answered in some round.
    answered: bool,
    /// It has been told our set in this round.
    told: bool,
    /// The set that it said in this round.
    said: Option<BTreeSet<usize>>,
}

/// How a round ends.
enum Ending {
    Agreed,
    /// The sets differed.
    Differed,
    /// A later round has begun elsewhere, and its number is now ours.
    Overtaken,
}

impl Rounds {
    /// `answered` tells whether the others are known to have called rebuild.
    fn new(session: Session, answered: bool) -> Rounds {
        let peers = session.links.into_iter().flatten();
        let peers = peers.map(|link| {
            let peer = Peer {
                told: false,
                said: None,
                answered,
                link,
            };
            (peer.link.origin, peer)
        });
        Rounds {
            own: session.origin,
            universe: session.universe,
            number: session.generation,
            peers: peers.collect(),
        }
    }

    /// Runs rounds until one is agreed; its members make up the session.
    fn agree(mut self, until: Instant) -> Result<Session, GroupError> {
        let mut ending = Ending::Differed;
        loop {
            match ending {
                Ending::Agreed => return Ok(self.into_session()),
                Ending::Differed => {
                    self.number = self.number.saturating_add(1);
                    for peer in self.peers.values_mut() {
                        (peer.told, peer.said) = (false, None);
                    }
                }
                Ending::Overtaken => {}
            }
            ending = self.round(until)?;
        }
    }

    fn round(&mut self, until: Instant) -> Result<Ending, GroupError> {
        let ours = self.alive();
        let grace = until.max(Instant::now() + GRACE);
        loop {
            if self.peers.is_empty() {
                return Err(GroupError::TooFew { survivors: 1 });
            }
            let busy = self.tell(&ours);
            let open: Vec<usize> = self
                .peers
                .iter()
                .filter(|(_, peer)| peer.said.is_none() || !peer.told)
                .map(|(&origin, _)| origin)
                .collect();
            if open.is_empty() {
                let same = |peer: &Peer| peer.said.as_ref() == Some(&ours);
                let agreed = self.alive() == ours && self.peers.values().all(same);
                return Ok(if agreed {
                    Ending::Agreed
                } else {
                    Ending::Differed
                });
            }
            // The first of them is waited for; if it is silent, the others are looked at.
            let now = Instant::now();
            let slice = if busy { BUSY_SLICE } else { SLICE };
            for (index, &origin) in open.iter().enumerate() {
                let wait = if index == 0 { now + slice } else { now };
                match self.hear(origin, wait)? {
                    Heard::Nothing => self.expire(origin, until, grace),
                    Heard::Something if index == 0 && !busy => break,
                    Heard::Something => {}
                    Heard::Later => return Ok(Ending::Overtaken),
                }
            }
        }
    }

    /// Tells our set to those who have yet to hear it in this round; says whether some still have.
    fn tell(&mut self, ours: &BTreeSet<usize>) -> bool {
        let head = self.head();
        let bytes = encode(ours, self.universe);
        for peer in self.peers.values_mut().filter(|peer| !peer.told) {
            // Whoever cannot be told has hung up, which shows when we listen, or has no room yet.
            let sent = peer
                .link
                .send_fragment(head, &bytes, 0, None, Instant::now());
            peer.told = !matches!(sent, Ok(None));
        }
        self.peers.values().any(|peer| !peer.told)
    }

    /// Takes one message of a peer, if one comes before `until`.
    fn hear(&mut self, origin: usize, until: Instant) -> Result<Heard, GroupError> {
        let Some(peer) = self.peers.get_mut(&origin) else {
            return Ok(Heard::Something);
        };
        if peer.said.is_some() {
            // It may already be confirming this round. What it says then is not ours to take; that
            // it has no room to be told is.
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
            return Ok(Heard::Nothing);
        }
        let message = match peer.link.poll(until) {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(Heard::Nothing),
            Err(Broken::Closed | Broken::Foreign(_) | Broken::Failed(_)) => {
                self.peers.remove(&origin);
                return Ok(Heard::Something);
            }
        };
        if message.head.kind != Kind::Rebuild {
            // What is left of an earlier generation; a descriptor that came along is closed.
            return Ok(Heard::Something);
        }
        let round = message.head.generation;
        if round < self.number || round - self.number > FAR {
            return Ok(Heard::Something);
        }
        let set = decode(&message.bytes, self.universe);
        if !set.contains(&self.own) {
            return Err(GroupError::Excluded);
        }
        let later = round > self.number;
        if later {
            self.number = round;
            for peer in self.peers.values_mut() {
                (peer.told, peer.said) = (false, None);
            }
        }
        let dropped = self.peers.keys().copied();
        let dropped: Vec<usize> = dropped.filter(|peer| !set.contains(peer)).collect();
        if let Some(peer) = self.peers.get_mut(&origin) {
            peer.answered = true;
            peer.said = Some(set);
        }
        for origin in dropped {
            self.exclude(origin);
        }
        Ok(if later {
            Heard::Later
        } else {
            Heard::Something
        })
    }

    /// Drops a peer whose time is over.
    fn expire(&mut self, origin: usize, until: Instant, grace: Instant) {
        let answered = self.peers.get(&origin).is_some_and(|peer| peer.answered);
        if Instant::now() >= if answered { grace } else { until } {
            self.exclude(origin);
        }
    }

    /// Drops a peer, and tells it the set that it is no longer in: that of the next round, which
    /// has to come, so that not even one that thinks this round agreed takes it for old news.
    fn exclude(&mut self, origin: usize) {
        if let Some(peer) = self.peers.remove(&origin) {
            let bytes = encode(&self.alive(), self.universe);
            let mut head = self.head();
            head.generation = head.generation.saturating_add(1);
            peer.link.try_send(head, &bytes);
        }
    }

    fn head(&self) -> Head {
        Head {
            kind: Kind::Rebuild,
            generation: self.number,
            sequence: 0,
        }
    }

    fn alive(&self) -> BTreeSet<usize> {
        self.peers.keys().copied().chain([self.own]).collect()
    }

    /// The members of an agreed round, renumbered in the old order.
    fn into_session(self) -> Session {
        let rank = self.peers.range(..self.own).count();
        let mut links: Vec<Option<Link>> = self
            .peers
            .into_values()
            .map(|peer| Some(peer.link))
            .collect();
        links.insert(rank, None);
        Session::new(rank, self.number, (self.own, self.universe), links)
    }
}

/// What came of listening to a peer.
enum Heard {
    Nothing,
    Something,
    /// A later round than ours, which we now are in.
    Later,
}

/// A set as bits, the lowest rank in the lowest bit of the first byte.
fn encode(set: &BTreeSet<usize>, universe: usize) -> Vec<u8> {
    let mut bytes = vec![0; universe.div_ceil(8)];
    for &rank in set {
        if let Some(byte) = bytes.get_mut(rank / 8) {
            *byte |= 1 << (rank % 8);
        }
    }
    bytes
}

fn decode(bytes: &[u8], universe: usize) -> BTreeSet<usize> {
    let bit = |rank: &usize| {
        bytes
            .get(rank / 8)
            .is_some_and(|byte| byte >> (rank % 8) & 1 == 1)
    };
    (0..universe).filter(bit).collect()
}
