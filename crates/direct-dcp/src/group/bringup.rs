//! How processes become a group: sockets between any two, a greeting on each, then the first
//! generation.

use super::MAX_RANKS;
use super::error::{GroupError, io_error, shm_error};
use super::fabric::{Generation, deadline};
use super::link::{Broken, Link};
use super::mesh::{Mesh, settle};
use super::message::{Foreign, Head, Kind, take};
use super::session::Session;
use direct_dcp_shm::rendezvous::{self, Listener};
use direct_dcp_shm::{Channel, ShmError};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The generation that comes up first.
pub(super) const FIRST: u64 = 1;

/// Checks what every way of bring-up is told about the group.
pub(super) fn check_world(world: usize) -> Result<(), GroupError> {
    match world {
        2..=MAX_RANKS => Ok(()),
        _ => Err(GroupError::InvalidArgument {
            what: "world size",
            expected: format!("at least two ranks, and at most {MAX_RANKS}"),
            got: world.to_string(),
        }),
    }
}

/// The same, for a way that is told one rank.
pub(super) fn check_rank(rank: usize, world: usize) -> Result<(), GroupError> {
    check_world(world)?;
    match rank < world {
        true => Ok(()),
        false => Err(GroupError::InvalidArgument {
            what: "rank",
            expected: format!("a number from 0 to {}", world - 1),
            got: rank.to_string(),
        }),
    }
}

/// Over sockets that are there already, one for each peer.
pub(super) fn over_sockets(
    rank: usize,
    sockets: Vec<Option<OwnedFd>>,
    timeout: Duration,
) -> Result<Generation, GroupError> {
    let world = sockets.len();
    check_rank(rank, world)?;
    let mut arrivals = Arrivals::new(rank, world, timeout);
    for (peer, socket) in sockets.into_iter().enumerate() {
        match socket {
            None if peer == rank => {}
            Some(socket) if peer != rank => {
                let channel = Channel::from_fd(socket)
                    .map_err(shm_error(format!("taking the socket to rank {peer}")))?;
                check_user(&channel, peer)?;
                arrivals.greet(channel, peer)?;
            }
            _ => {
                return Err(GroupError::InvalidArgument {
                    what: "sockets",
                    expected: format!("one for each rank but our own, {rank}"),
                    got: match peer == rank {
                        true => "one for our own rank".into(),
                        false => format!("none for rank {peer}"),
                    },
                });
            }
        }
    }
    arrivals.hear_greeted()?;
    arrivals.finish(|| ())
}

/// Where the ranks listen.
pub(super) enum Places<'a> {
    /// All in one directory.
    Shared(&'a Path),
    /// Each in one of its own, by rank.
    Own(&'a [PathBuf]),
}

impl Places<'_> {
    fn of(&self, rank: usize) -> Option<&Path> {
        match self {
            Places::Shared(dir) => Some(dir),
            Places::Own(dirs) => dirs.get(rank).map(PathBuf::as_path),
        }
    }
}

/// Starts to listen. All that others need to connect to exists once this returns.
pub(super) fn listen(dir: &Path, rank: usize) -> Result<Listener, GroupError> {
    let what = format!("meeting the other ranks in {}", dir.display());
    Listener::bind(dir, number(rank)).map_err(shm_error(what))
}

/// Over sockets in directories: each rank connects to those below it, and is connected to by those
/// above it. `met` is called when nobody needs the directories any more.
pub(super) fn over_directories(
    rank: usize,
    world: usize,
    places: &Places<'_>,
    listener: Listener,
    timeout: Duration,
    met: impl FnOnce(),
) -> Result<Generation, GroupError> {
    let mut arrivals = Arrivals::new(rank, world, timeout);
    for peer in 0..rank {
        let Some(dir) = places.of(peer) else { continue };
        match rendezvous::connect(dir, number(peer), arrivals.until) {
            Ok(channel) => arrivals.greet(channel, peer)?,
            // Once the deadline has passed, this only finds out who else is missing.
            Err(ShmError::TimedOut) => {}
            Err(error) => {
                let what = format!("connecting to rank {peer} in {}", dir.display());
                return Err(shm_error(what)(error));
            }
        }
    }
    arrivals.hear_greeted()?;
    for _ in rank + 1..world {
        match listener.accept(arrivals.until) {
            Ok(channel) => arrivals.welcome(channel)?,
            Err(ShmError::TimedOut) => break,
            Err(error) => return Err(shm_error("accepting a rank's connection")(error)),
        }
    }
    // Before anybody is told that all is well: whoever comes next in this directory finds it empty.
    drop(listener);
    arrivals.finish(met)
}

/// A private directory of a name that nobody else has.
pub(super) fn private_directory() -> Result<TemporaryDirectory, GroupError> {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let base = std::env::temp_dir();
    loop {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = base.join(format!("direct-dcp-{}-{count}", std::process::id()));
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => return Ok(TemporaryDirectory { path }),
            // Another process had our number before, or has it in another container.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && count < u32::MAX => {
            }
            Err(error) => {
                let what = format!("creating the directory {}", path.display());
                return Err(io_error(what)(error));
            }
        }
    }
}

/// A directory that is removed when it is dropped, if it is empty then.
#[derive(Debug)]
pub(super) struct TemporaryDirectory {
    pub(super) path: PathBuf,
}

impl Drop for TemporaryDirectory {
    fn drop(&mut self) {
        // Nothing depends on it.
        let _ = fs::remove_dir(&self.path);
    }
}

/// The ranks that have come so far.
struct Arrivals {
    rank: usize,
    until: Instant,
    timeout: Duration,
    /// By rank; those that have been greeted, and whether they have greeted us.
    links: Vec<Option<(Link, bool)>>,
}

/// The first message on a channel.
struct Greeting {
    world: u64,
    from: u64,
    to: u64,
}

impl Arrivals {
    fn new(rank: usize, world: usize, timeout: Duration) -> Arrivals {
        Arrivals {
            rank,
            until: deadline(timeout),
            timeout,
            links: std::iter::repeat_with(|| None).take(world).collect(),
        }
    }

    fn world(&self) -> usize {
        self.links.len()
    }

    /// Greets the rank at the other end of a channel; its answer is heard later.
    fn greet(&mut self, channel: Channel, peer: usize) -> Result<(), GroupError> {
        let link = Link::new(channel, peer);
        self.say_hello(&link, peer)?;
        self.keep(link, peer, false);
        Ok(())
    }

    fn say_hello(&self, link: &Link, peer: usize) -> Result<(), GroupError> {
        let head = Head {
            kind: Kind::Hello,
            generation: FIRST,
            sequence: 0,
        };
        let mut bytes = Vec::new();
        for number in [self.world(), self.rank, peer] {
            bytes.extend_from_slice(&(number as u64).to_le_bytes());
        }
        match link.send_fragment(head, &bytes, 0, None, self.until) {
            Ok(Some(_)) => Ok(()),
            // Whoever hangs up before we have spoken may still have said why.
            Err(Broken::Closed) => Ok(()),
            Ok(None) => Err(self.late()),
            Err(broken) => Err(broken.at_rank(peer)),
        }
    }

    /// Hears the answers of all that have been greeted, as far as they come in time.
    fn hear_greeted(&mut self) -> Result<(), GroupError> {
        let (rank, world, until) = (self.rank, self.world(), self.until);
        for (peer, place) in self.links.iter_mut().enumerate() {
            let Some((link, heard @ false)) = place else {
                continue;
            };
            let greeting = hear(link, until).map_err(|broken| broken.at_rank(peer))?;
            if let Some(greeting) = greeting {
                let fits = greeting.check(world, Some(peer), rank);
                fits.map_err(|foreign| foreign.at_rank(peer))?;
                *heard = true;
            }
        }
        Ok(())
    }

    /// Hears who has connected, and greets it.
    fn welcome(&mut self, channel: Channel) -> Result<(), GroupError> {
        let process = channel.peer().map_or(0, |peer| peer.pid);
        // Its rank is known once it has spoken.
        let mut link = Link::new(channel, usize::MAX);
        let stranger = |reason: &str| GroupError::Stranger {
            process,
            reason: reason.into(),
        };
        let greeting = match hear(&mut link, self.until) {
            Ok(Some(greeting)) => greeting,
            Ok(None) => return Ok(()),
            Err(Broken::Closed) => return Err(stranger("hung up without a word")),
            Err(Broken::Foreign(foreign)) => return Err(foreign.of_process(process)),
            Err(Broken::Failed(error)) => return Err(shm_error("hearing who connects")(error)),
        };
        let world = self.world();
        let from = usize::try_from(greeting.from).unwrap_or(usize::MAX);
        if from >= MAX_RANKS {
            return Err(stranger("says that it is a rank which no group has"));
        }
        // It learns of a mismatch from our greeting, just as we do from its.
        self.say_hello(&link, from)?;
        greeting
            .check(world, None, self.rank)
            .map_err(|foreign| foreign.at_rank(from))?;
        match self.links.get(from) {
            Some(None) if from > self.rank => {}
            _ => return Err(stranger("has the number of a rank that is here already")),
        }
        link.origin = from;
        self.keep(link, from, true);
        Ok(())
    }

    fn keep(&mut self, link: Link, peer: usize, heard: bool) {
        if let Some(place) = self.links.get_mut(peer) {
            *place = Some((link, heard));
        }
    }

    fn late(&self) -> GroupError {
        let here = |place: &Option<(Link, bool)>| matches!(place, Some((_, true)));
        let places = self.links.iter().enumerate();
        let missing = places.filter(|&(peer, place)| peer != self.rank && !here(place));
        GroupError::Timeout {
            missing: missing.map(|(peer, _)| peer).collect(),
            waited: self.timeout,
        }
    }

    /// Brings the first generation up, if all ranks are here.
    fn finish(self, met: impl FnOnce()) -> Result<Generation, GroupError> {
        let here = |place: &&Option<(Link, bool)>| matches!(place, Some((_, true)));
        let world = self.world();
        if self.links.iter().filter(here).count() + 1 < world {
            return Err(self.late());
        }
        let links = self.links.into_iter().map(|place| Some(place?.0)).collect();
        let mut session = Session::new(self.rank, FIRST, (self.rank, world), links);
        let words = settle(&mut session, self.until, met)?;
        Ok(Mesh::generation(session, words, (0..world).collect()))
    }
}

impl Greeting {
    fn check(&self, world: usize, from: Option<usize>, to: usize) -> Result<(), Foreign> {
        let checks = [
            ("world size", world, self.world),
            (
                "rank",
                from.unwrap_or(usize::try_from(self.from).unwrap_or(usize::MAX)),
                self.from,
            ),
            ("idea of our rank", to, self.to),
        ];
        for (field, ours, theirs) in checks {
            if ours as u64 != theirs {
                return Err(Foreign::new(field, ours.to_string(), theirs.to_string()));
            }
        }
        Ok(())
    }
}

/// The greeting on a fresh channel, if it comes in time.
fn hear(link: &mut Link, until: Instant) -> Result<Option<Greeting>, Broken> {
    let Some(message) = link.poll(until)? else {
        return Ok(None);
    };
    let mut rest = message.bytes.as_slice();
    let mut number = || take(&mut rest).map(u64::from_le_bytes);
    match (message.head.kind, number(), number(), number()) {
        (Kind::Hello, Some(world), Some(from), Some(to)) => Ok(Some(Greeting { world, from, to })),
        _ => Err(Broken::Foreign(Foreign::new(
            "protocol",
            "a greeting first",
            "another message",
        ))),
    }
}

/// Refuses a peer of another user. Root could do anything to us without being a peer, and a launcher
/// that runs as root may have made the sockets, so its are taken.
fn check_user(channel: &Channel, peer: usize) -> Result<(), GroupError> {
    let what = || format!("asking who is at the socket to rank {peer}");
    let theirs = channel.peer().map_err(shm_error(what()))?.uid;
    let ours = own_user()?;
    match theirs == ours || theirs == 0 {
        true => Ok(()),
        false => Err(Foreign::new("user", ours.to_string(), theirs.to_string()).at_rank(peer)),
    }
}

/// Our effective user, as a peer sees it.
pub(super) fn own_user() -> Result<u32, GroupError> {
    let what = "asking for our own user";
    let (ours, _) = Channel::pair().map_err(shm_error(what))?;
    Ok(ours.peer().map_err(shm_error(what))?.uid)
}

/// A rank as the rendezvous counts; it is below `MAX_RANKS`.
fn number(rank: usize) -> u32 {
    u32::try_from(rank).unwrap_or(u32::MAX)
}
