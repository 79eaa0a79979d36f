//! What a group needs from the ground it stands on: every wait and every exchange is in here.

use super::control::Words;
use super::error::GroupError;
use direct_dcp_shm::{Mapping, SharedMemory};
use std::any::Any;
use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One rank's connection to the others of its generation.
///
/// The collectives of one rank take turns, whichever threads call them. Every wait ends by success,
/// by the timeout, by an abort, or because a rank is gone or gave the generation up.
pub(super) trait Fabric: Debug + Send + Sync {
    /// Collective: hands `take` every rank's bytes, in rank order, once all have come.
    fn gather(
        &self,
        operation: Operation,
        bytes: &[u8],
        timeout: Duration,
        take: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), GroupError>;

    /// Collective: every rank's memory, in rank order. If any rank's cannot be had, nobody has any.
    fn share(
        &self,
        own: Option<SharedMemory>,
        timeout: Duration,
    ) -> Result<Vec<Option<Arc<Mapping>>>, GroupError>;

    /// Collective: what every rank passes, in rank order. Ranks of one process get the object, those
    /// of several the descriptor.
    fn pass(&self, own: Passed, timeout: Duration) -> Result<Vec<Passed>, GroupError>;

    /// Whether `rank` is known to be out of reach, beside what the words say. Never waits for it.
    fn closed(&self, rank: usize) -> bool;

    /// The words have changed: whoever waits here should look again.
    fn wake(&self);

    /// This rank's last handle is dropped. What it has sent still counts.
    fn leave(&self);

    /// Agrees on the next generation with whoever calls this too.
    fn rebuild(&self, timeout: Duration) -> Result<Generation, GroupError>;

    /// Whether the ranks are threads of one process.
    fn one_process(&self) -> bool;
}

/// Something that one rank lets the others use.
#[derive(Debug, Default)]
pub(crate) struct Passed {
    /// The thing itself, for ranks of the same process.
    pub(crate) object: Option<Arc<dyn Any + Send + Sync>>,
    /// A descriptor by which another process can import it.
    pub(crate) fd: Option<OwnedFd>,
}

/// One rank's part in a generation that has just come up.
#[derive(Debug)]
pub(super) struct Generation {
    pub(super) fabric: Arc<dyn Fabric>,
    pub(super) words: Arc<Words>,
    pub(super) rank: usize,
    pub(super) number: u64,
    /// The rank that each of its ranks had before.
    pub(super) previous: Vec<usize>,
}

/// Which collective a message belongs to; ranks that call different ones are told so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Operation {
    AllGather = 1,
    Barrier = 2,
    Vote = 3,
    /// Memory goes out, and whether there is any.
    Share = 4,
    /// Whether all memory could be mapped.
    Shared = 5,
    /// The control words of a new generation go out.
    Control = 6,
    /// Everybody has mapped them.
    Ready = 7,
    /// Objects or descriptors go out.
    Pass = 8,
}

impl Operation {
    pub(super) fn from_byte(byte: u8) -> Option<Operation> {
        use Operation::*;
        [
            AllGather, Barrier, Vote, Share, Shared, Control, Ready, Pass,
        ]
        .into_iter()
        .find(|&operation| operation as u8 == byte)
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Operation::AllGather => "all_gather",
            Operation::Barrier => "barrier",
            Operation::Vote => "vote",
            Operation::Share | Operation::Shared | Operation::Pass => "sharing of memory",
            Operation::Control | Operation::Ready => "bring-up",
        }
    }
}

/// When `timeout` from now is over. A timeout beyond what the clock can count is a year.
pub(super) fn deadline(timeout: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
    let now = Instant::now();
    now.checked_add(timeout)
        .unwrap_or_else(|| now.checked_add(YEAR).unwrap_or(now))
}
