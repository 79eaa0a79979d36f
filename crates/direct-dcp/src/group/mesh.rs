//! The fabric of ranks that are processes: a channel between any two of them.

use super::control::Words;
use super::error::{GroupError, shm_error};
use super::fabric::{Fabric, Generation, Operation, Passed, deadline};
use super::hub::lock;
use super::message::{Foreign, take};
use super::rebuild;
use super::session::{Limit, Parcel, Session};
use direct_dcp_shm::{Channel, Mapping, SharedMemory};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// One rank's end of the mesh, for one generation.
#[derive(Debug)]
pub(super) struct Mesh {
    rank: usize,
    number: u64,
    words: Arc<Words>,
    /// Held by the collective under way: they take turns. Empty once this rank has called rebuild,
    /// which takes the links into the next generation.
    session: Mutex<Option<Session>>,
    /// The channels by rank, to look at while a collective runs; empty with `session`.
    channels: Mutex<Vec<Option<Arc<Channel>>>>,
    /// This rank has called rebuild.
    superseded: AtomicBool,
}

impl Mesh {
    /// Makes a session that has come up a generation of its own.
    pub(super) fn generation(
        session: Session,
        words: Arc<Words>,
        previous: Vec<usize>,
    ) -> Generation {
        let channels = session.links.iter();
        let channels = channels.map(|link| link.as_ref().map(|link| Arc::clone(link.channel())));
        let mesh = Mesh {
            rank: session.rank,
            number: session.generation,
            words: Arc::clone(&words),
            channels: Mutex::new(channels.collect()),
            superseded: AtomicBool::new(false),
            session: Mutex::new(Some(session)),
        };
        Generation {
            rank: mesh.rank,
            number: mesh.number,
            fabric: Arc::new(mesh),
            words,
            previous,
        }
    }

    /// Runs `step` on the session, with the limit that holds for all its exchanges.
    fn turn<T>(
        &self,
        timeout: Duration,
        step: impl FnOnce(&mut Session, &Limit<'_>) -> Result<T, GroupError>,
    ) -> Result<T, GroupError> {
        let check = || self.check();
        let limit = Limit {
            until: deadline(timeout),
            timeout,
            check: &check,
        };
        let mut session = lock(&self.session);
        self.check()?;
        let session = session.as_mut().ok_or_else(|| self.over())?;
        match step(session, &limit) {
            Err(GroupError::PeerLost { rank }) => {
                // Those who have this rank's message, or wait for ours, learn it from the word.
                self.words.lose(rank);
                Err(GroupError::PeerLost { rank })
            }
            // Why the others rebuild tells more than that they do.
            Err(error @ GroupError::Rebuilding { .. }) => match self.words.lost() {
                Some(rank) => Err(GroupError::PeerLost { rank }),
                None => Err(error),
            },
            result => result,
        }
    }

    /// Why no collective can begin or go on, if so.
    fn check(&self) -> Result<(), GroupError> {
        if self.superseded.load(Ordering::Relaxed) {
            return Err(self.over());
        }
        if let Some(by) = self.words.aborted() {
            return Err(GroupError::Aborted { by });
        }
        match self.words.lost() {
            Some(rank) => Err(GroupError::PeerLost { rank }),
            None => Ok(()),
        }
    }

    fn over(&self) -> GroupError {
        GroupError::Superseded {
            generation: self.number,
        }
    }
}

impl Fabric for Mesh {
    fn gather(
        &self,
        operation: Operation,
        bytes: &[u8],
        timeout: Duration,
        take: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), GroupError> {
        let parcels = self.turn(timeout, |session, limit| {
            session.exchange(operation, bytes, None, limit)
        })?;
        for (rank, parcel) in parcels.iter().enumerate() {
            take(rank, &parcel.bytes);
        }
        Ok(())
    }

    fn share(
        &self,
        own: Option<SharedMemory>,
        timeout: Duration,
    ) -> Result<Vec<Option<Arc<Mapping>>>, GroupError> {
        self.turn(timeout, |session, limit| share(session, own, limit))
    }

    fn pass(&self, own: Passed, timeout: Duration) -> Result<Vec<Passed>, GroupError> {
        let parcels = self.turn(timeout, |session, limit| {
            let fd = own.fd.as_ref().map(AsFd::as_fd);
            session.exchange(Operation::Pass, &[], fd, limit)
        })?;
        let passed = parcels.into_iter().map(|parcel| Passed {
            object: None,
            fd: parcel.fd,
        });
        Ok(passed.collect())
    }

    fn closed(&self, rank: usize) -> bool {
        let channels = lock(&self.channels);
        match channels.get(rank) {
            Some(Some(channel)) => channel.is_closed(),
            Some(None) => false,
            None => true,
        }
    }

    fn wake(&self) {
        // Those who wait look at the words between slices.
    }

    fn leave(&self) {
        // The others see the channels close, which are dropped right after this.
    }

    fn rebuild(&self, timeout: Duration) -> Result<Generation, GroupError> {
        if self.superseded.swap(true, Ordering::Relaxed) {
            return Err(self.over());
        }
        let until = deadline(timeout);
        // A collective under way sees the flag, and ends.
        let session = lock(&self.session).take();
        // From here on the links own the channels alone, so that dropping one closes it.
        lock(&self.channels).clear();
        rebuild::run(session.ok_or_else(|| self.over())?, until)
    }

    fn one_process(&self) -> bool {
        false
    }
}

/// The last steps of bring-up: rank 0 hands out fresh control words, and everybody says that it has
/// mapped them. `met` is called when all ranks are known to have come so far.
pub(super) fn settle(
    session: &mut Session,
    until: Instant,
    met: impl FnOnce(),
) -> Result<Arc<Words>, GroupError> {
    let limit = Limit {
        until,
        timeout: until.saturating_duration_since(Instant::now()),
        check: &|| Ok(()),
    };
    let what = "sharing the group's control words";
    let world = session.world();
    let own = match session.rank {
        0 => Some(Words::memory(world).map_err(shm_error(what))?),
        _ => None,
    };
    let fd = own.as_ref().map(SharedMemory::fd);
    let parcels = session.exchange(Operation::Control, &[], fd, &limit)?;
    met();
    let memory = match own {
        Some(memory) => memory,
        None => {
            let fd = parcels.into_iter().next().and_then(|parcel| parcel.fd);
            let fd = fd.ok_or_else(|| no_memory().at_rank(0))?;
            SharedMemory::from_fd(fd, Words::len(world)).map_err(shm_error(what))?
        }
    };
    let words = Words::map(&memory, world).map_err(shm_error(what))?;
    match session.exchange(Operation::Ready, &[], None, &limit) {
        Ok(_) => Ok(words),
        Err(error) => {
            // Whoever did come up with these words must not wait for us.
            words.leave(session.rank);
            Err(error)
        }
    }
}

/// Passes memory around. A rank that fails says so in the second exchange, when all can still turn
/// back together.
fn share(
    session: &mut Session,
    own: Option<SharedMemory>,
    limit: &Limit<'_>,
) -> Result<Vec<Option<Arc<Mapping>>>, GroupError> {
    let size = own
        .as_ref()
        .map(|memory| (memory.len() as u64).to_le_bytes());
    let size = size.as_ref().map_or(&[][..], |size| size);
    let fd = own.as_ref().map(SharedMemory::fd);
    let parcels = session.exchange(Operation::Share, size, fd, limit)?;

    let rank = session.rank;
    let mapped: Result<Vec<Option<Arc<Mapping>>>, GroupError> = parcels
        .into_iter()
        .enumerate()
        .map(|(source, parcel)| match source == rank {
            true => map(own.as_ref(), source),
            false => map(received(source, parcel)?.as_ref(), source),
        })
        .collect();

    let failed = [u8::from(mapped.is_err())];
    let results = session.exchange(Operation::Shared, &failed, None, limit)?;
    let mapped = mapped?;
    match results.iter().position(|parcel| parcel.bytes != [0]) {
        Some(rank) => Err(GroupError::PeerFailed {
            rank,
            what: "map the shared memory".into(),
        }),
        None => Ok(mapped),
    }
}

/// The memory in a parcel, checked against the size that was said.
fn received(source: usize, parcel: Parcel) -> Result<Option<SharedMemory>, GroupError> {
    let mut rest = parcel.bytes.as_slice();
    let size = take(&mut rest).map(u64::from_le_bytes);
    match (size, parcel.fd) {
        (None, None) => Ok(None),
        (Some(size), Some(fd)) => {
            let size = usize::try_from(size).unwrap_or(usize::MAX);
            let what = format!("checking the memory of rank {source}");
            let memory = SharedMemory::from_fd(fd, size).map_err(shm_error(what))?;
            Ok(Some(memory))
        }
        _ => Err(no_memory().at_rank(source)),
    }
}

fn map(memory: Option<&SharedMemory>, source: usize) -> Result<Option<Arc<Mapping>>, GroupError> {
    let what = || format!("mapping the memory of rank {source}");
    memory
        .map(|memory| memory.map().map(Arc::new).map_err(shm_error(what())))
        .transpose()
}

/// A message came without the descriptor that belongs to it, or with one that does not.
fn no_memory() -> Foreign {
    Foreign::new(
        "protocol",
        "memory with its size",
        "a message with only one of the two",
    )
}
