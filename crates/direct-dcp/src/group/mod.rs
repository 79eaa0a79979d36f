//! Which ranks there are, and whether they still are there.
//!
//! A [`Group`] is one rank's handle to the others. It comes up in one of these ways:
//!
//! | the ranks are | use |
//! |---|---|
//! | threads of this process | [`Group::threads`] |
//! | processes that torchrun or the [`Launcher`] started | [`Group::from_env`] |
//! | processes that share a private directory | [`Group::directory`] |
//! | processes whose parent made their sockets | [`Group::from_sockets`] |
//! | processes that already have a store, such as MPI | [`Group::with_exchange`] |
//!
//! All ranks of a group run on one machine. Every wait ends: by success, by a timeout that names the
//! missing ranks, because a rank has gone, or by an abort.

mod bringup;
mod control;
mod environment;
mod error;
mod exchange;
mod fabric;
mod hub;
mod launcher;
mod link;
mod mesh;
mod message;
mod rebuild;
mod session;
#[cfg(test)]
mod tests;
mod watch;

pub use control::AbortHandle;
pub(crate) use control::{Control, Failure};
pub use error::GroupError;
pub use exchange::Exchange;
pub(crate) use fabric::Passed;
pub use launcher::Launcher;

use direct_dcp_shm::{Mapping, SharedMemory};
use fabric::{Fabric, Generation, Operation};
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The most ranks that a group can have.
const MAX_RANKS: usize = 1024;

/// How long a collective, and bring-up where nothing else is said, waits for the other ranks.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// One rank's handle to a group of ranks.
///
/// The *collectives*, [`all_gather`](Self::all_gather), [`barrier`](Self::barrier) and
/// [`vote`](Self::vote), have to be called by every rank, in the same order. Threads of one rank
/// that call them take turns, and the order is theirs to see to.
///
/// ```
/// use direct_dcp::{Group, GroupError};
///
/// # fn main() -> Result<(), GroupError> {
/// let answers = std::thread::scope(|scope| {
///     let ranks = Group::threads(4)?.into_iter().map(|group| {
///         scope.spawn(move || group.all_gather(format!("I am {}", group.rank()).as_bytes()))
///     });
///     let ranks: Vec<_> = ranks.collect();
///     ranks.into_iter().map(|rank| rank.join().expect("no panic")).collect::<Result<Vec<_>, _>>()
/// })?;
/// assert!(answers.iter().all(|answer| answer[3] == b"I am 3"));
/// # Ok(())
/// # }
/// ```
///
/// A clone is another handle of the same rank, which leaves the group when the last one is dropped,
/// and with it every workspace.
///
/// # When a rank is lost
/// The collective under way, or the next one, fails on all others with [`GroupError::PeerLost`], or
/// [`GroupError::Rebuilding`] if another rank was faster to see it. The generation is then of no
/// more use. The survivors, in the same processes, call [`rebuild`](Self::rebuild):
///
/// ```
/// use direct_dcp::{Group, GroupError};
/// use std::time::Duration;
///
/// fn agree(group: &mut Group, bytes: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
///     loop {
///         match group.all_gather(bytes) {
///             Err(GroupError::PeerLost { .. } | GroupError::Rebuilding { .. }) => {
///                 *group = group.rebuild(Duration::from_secs(5))?;
///             }
///             result => return result,
///         }
///     }
/// }
///
/// # fn main() -> Result<(), GroupError> {
/// let mut ranks = Group::threads(3)?;
/// drop(ranks.remove(1));
/// std::thread::scope(|scope| {
///     for group in &mut ranks {
///         scope.spawn(|| assert_eq!(agree(group, b"still here").map(|all| all.len()).ok(), Some(2)));
///     }
/// });
/// assert_eq!((ranks[1].rank(), ranks[1].previous_ranks()), (1, &[0, 2][..]));
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Group {
    control: Arc<Control>,
    rank: usize,
    number: u64,
    previous: Arc<[usize]>,
    timeout: Duration,
}

impl Group {
    /// A group whose ranks are threads of this process; hand one of the handles, which are in rank
    /// order, to each.
    ///
    /// # Errors
    /// [`GroupError::InvalidArgument`] unless `world_size` is 2 to 1,024, [`GroupError::Shm`] if
    /// there is no memory for it.
    pub fn threads(world_size: usize) -> Result<Vec<Group>, GroupError> {
        bringup::check_world(world_size)?;
        let seats = hub::seats(world_size)?.into_iter();
        Ok(seats.map(|seat| Group::of(seat, DEFAULT_TIMEOUT)).collect())
    }

    /// A group over sockets that are connected already, as a launcher hands them over: at each
    /// peer's place one end of a Unix `SOCK_SEQPACKET` pair, whose other end the peer has at
    /// `rank`'s; at our own place none. There are as many ranks as places.
    ///
    /// # Errors
    /// [`GroupError::InvalidArgument`] if a socket is missing or too much, [`GroupError::Shm`] if
    /// one is of another type, [`GroupError::Mismatch`] if a peer has another idea of the group,
    /// another version or another user, [`GroupError::Timeout`] if one does not greet within 60 s.
    pub fn from_sockets(rank: usize, sockets: Vec<Option<OwnedFd>>) -> Result<Group, GroupError> {
        let generation = bringup::over_sockets(rank, sockets, DEFAULT_TIMEOUT)?;
        Ok(Group::of(generation, DEFAULT_TIMEOUT))
    }

    /// A group whose ranks meet in `dir`, an existing directory of our user with mode 0700. It is
    /// as empty afterwards as it was before, and can serve the next group.
    ///
    /// # Errors
    /// [`GroupError::Shm`] if the directory is not private or another rank has our number,
    /// [`GroupError::Timeout`] if not all ranks come within `deadline`, [`GroupError::Mismatch`] and
    /// [`GroupError::Stranger`] if somebody comes who does not belong here.
    pub fn directory(
        dir: &Path,
        rank: usize,
        world_size: usize,
        deadline: Duration,
    ) -> Result<Group, GroupError> {
        let generation = environment::in_directory(dir, rank, world_size, deadline, || ())?;
        Ok(Group::of(generation, DEFAULT_TIMEOUT))
    }

    /// The group that the environment describes, as torchrun or the [`Launcher`] sets it.
    ///
    /// | variable | meaning |
    /// |---|---|
    /// | `RANK`, `WORLD_SIZE` | this rank, and how many there are |
    /// | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | the same on this machine; must agree if set |
    /// | `DIRECT_DCP_SOCKETS` | set by the [`Launcher`]: where the sockets are |
    /// | `DIRECT_DCP_DIR` | else: the directory to meet in, as for [`directory`](Self::directory) |
    /// | `MASTER_ADDR`, `MASTER_PORT`, `TORCHELASTIC_RUN_ID`, `TORCHELASTIC_RESTART_COUNT` | else: the name of a directory that is made for the purpose, in `XDG_RUNTIME_DIR` or the temporary directory |
    /// | `DIRECT_DCP_TIMEOUT` | seconds to wait for other ranks, now and in collectives; 60 if unset |
    ///
    /// # Errors
    /// [`GroupError::Environment`] if a variable is missing or wrong, [`GroupError::Unsupported`] if
    /// the ranks are on several machines, and those of [`directory`](Self::directory) or
    /// [`from_sockets`](Self::from_sockets).
    pub fn from_env() -> Result<Group, GroupError> {
        let (generation, timeout) = environment::from_environment(None)?;
        Ok(Group::of(generation, timeout))
    }

    /// The same with a timeout of the caller's in place of `DIRECT_DCP_TIMEOUT`, which is not
    /// looked at.
    ///
    /// # Errors
    /// Those of [`from_env`](Self::from_env).
    pub fn from_env_timeout(timeout: Duration) -> Result<Group, GroupError> {
        let (generation, timeout) = environment::from_environment(Some(timeout))?;
        Ok(Group::of(generation, timeout))
    }

    /// A group whose ranks find each other by a store that the caller has.
    ///
    /// # Errors
    /// [`GroupError::Io`] if the store fails, [`GroupError::InvalidArgument`] if it returns
    /// something else than was passed, [`GroupError::Unsupported`] if the ranks are on several
    /// machines, [`GroupError::PeerFailed`] if another rank could not take part, and those of
    /// [`directory`](Self::directory).
    pub fn with_exchange(exchange: &mut dyn Exchange) -> Result<Group, GroupError> {
        Group::with_exchange_timeout(exchange, DEFAULT_TIMEOUT)
    }

    /// The same with another limit than 60 s for how long bring-up, once the store has answered,
    /// and then each collective waits.
    ///
    /// # Errors
    /// Those of [`with_exchange`](Self::with_exchange).
    pub fn with_exchange_timeout(
        exchange: &mut dyn Exchange,
        timeout: Duration,
    ) -> Result<Group, GroupError> {
        let generation = exchange::over_exchange(exchange, timeout)?;
        Ok(Group::of(generation, timeout))
    }

    fn of(generation: Generation, timeout: Duration) -> Group {
        let Generation {
            fabric,
            words,
            rank,
            number,
            previous,
        } = generation;
        log::debug!(
            "rank {rank} of {}: generation {number} is up, between {}",
            previous.len(),
            if fabric.one_process() {
                "threads"
            } else {
                "processes"
            },
        );
        Group {
            control: Control::new(words, rank, fabric),
            rank,
            number,
            previous: previous.into(),
            timeout,
        }
    }

    /// The same handle with another limit for how long a collective waits; it is 60 s unless the
    /// environment says otherwise. A rebuilt group inherits it.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Group {
        self.timeout = timeout;
        self
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.previous.len()
    }

    /// Which generation of the group this is. It is the same on all ranks, and larger after each
    /// rebuild, by 1 or more.
    pub fn generation(&self) -> u64 {
        self.number
    }

    /// The rank that each rank had in the group on which [`rebuild`](Self::rebuild) was called; in
    /// the first generation, its own.
    pub fn previous_ranks(&self) -> &[usize] {
        &self.previous
    }

    /// Collective: passes `bytes` to every rank, and returns what every rank passed, in rank order.
    /// The lengths may differ.
    ///
    /// # Errors
    /// [`GroupError::InvalidArgument`] for more than 256 MiB and in a process that was forked from
    /// the rank's, [`GroupError::Timeout`], [`GroupError::PeerLost`], [`GroupError::Rebuilding`],
    /// [`GroupError::Aborted`], and [`GroupError::Mismatch`] if another rank called another collective.
    pub fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        if bytes.len() > message::MAX_PAYLOAD {
            return Err(GroupError::InvalidArgument {
                what: "bytes",
                expected: format!("at most {}", message::MAX_PAYLOAD),
                got: bytes.len().to_string(),
            });
        }
        let mut all = Vec::with_capacity(self.world_size());
        self.gather(Operation::AllGather, bytes, &mut |_, bytes| {
            all.push(bytes.to_vec());
        })?;
        Ok(all)
    }

    /// Collective: returns once every rank has called it.
    ///
    /// # Errors
    /// Those of [`all_gather`](Self::all_gather).
    pub fn barrier(&self) -> Result<(), GroupError> {
        self.gather(Operation::Barrier, &[], &mut |_, _| ())
    }

    /// Collective: returns each rank's ballot, in rank order, for a choice that all must make
    /// alike, such as a way that only works if it works for everybody.
    ///
    /// # Errors
    /// Those of [`all_gather`](Self::all_gather).
    pub fn vote(&self, ballot: bool) -> Result<Vec<bool>, GroupError> {
        let mut all = Vec::with_capacity(self.world_size());
        self.gather(Operation::Vote, &[u8::from(ballot)], &mut |_, bytes| {
            all.push(bytes == [1]);
        })?;
        Ok(all)
    }

    /// Makes every wait of every rank in this generation return [`GroupError::Aborted`], now and
    /// from now on.
    pub fn abort(&self) {
        self.control.abort();
    }

    /// A handle by which any thread can abort the group.
    pub fn abort_handle(&self) -> AbortHandle {
        self.control.abort_handle()
    }

    /// Agrees on a new generation with all ranks that call this within `deadline`, as threads or
    /// processes that are still the same. Ranks that have gone are left out at once, others when
    /// the first `deadline` passes. The ranks are renumbered in the old order;
    /// [`previous_ranks`](Self::previous_ranks) tells who was who.
    ///
    /// It ends this generation for this rank, whatever the result: call it once, on the newest
    /// group. Ranks that die during the rebuild may make it take some seconds longer.
    ///
    /// # Errors
    /// [`GroupError::TooFew`] if nobody else is left, [`GroupError::Excluded`] if the others went
    /// on without this rank, [`GroupError::Superseded`] if it was called before.
    pub fn rebuild(&self, deadline: Duration) -> Result<Group, GroupError> {
        self.control.mark_left();
        let next = self.fabric().rebuild(deadline)?;
        log::info!(
            "rank {} of {} is rank {} of {} in generation {}",
            self.rank,
            self.world_size(),
            next.rank,
            next.previous.len(),
            next.number,
        );
        Ok(Group::of(next, self.timeout))
    }

    /// Collective: every rank's memory, mapped here. If any rank cannot map all of it, no rank gets
    /// any.
    pub(crate) fn share(
        &self,
        own: Option<SharedMemory>,
    ) -> Result<Vec<Option<Arc<Mapping>>>, GroupError> {
        self.fabric().share(own, self.timeout)
    }

    /// Collective: lets every rank use something of this one's. Ranks of one process get the
    /// object, those of several the descriptor; a rank's own place holds neither between processes.
    pub(crate) fn pass(&self, own: Passed) -> Result<Vec<Passed>, GroupError> {
        self.fabric().pass(own, self.timeout)
    }

    /// Who is still there, for those who wait in shared memory. Holding it keeps this rank in the
    /// generation.
    pub(crate) fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Whether the ranks are threads of one process, and so share an address space.
    pub(crate) fn one_process(&self) -> bool {
        self.fabric().one_process()
    }

    fn gather(
        &self,
        operation: Operation,
        bytes: &[u8],
        take: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), GroupError> {
        if self.control.is_forked() {
            return Err(GroupError::InvalidArgument {
                what: "process",
                expected: "that of the rank".into(),
                got: "one that was forked from it".into(),
            });
        }
        self.fabric().gather(operation, bytes, self.timeout, take)
    }

    fn fabric(&self) -> &Arc<dyn Fabric> {
        self.control.fabric()
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size())
            .field("generation", &self.number)
            .finish_non_exhaustive()
    }
}
