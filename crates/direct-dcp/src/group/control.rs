//! The words that every rank of a generation can see and set at once.
//!
//! They lie in one shared mapping that rank 0 creates, so that a rank which waits for a peer's
//! signal in shared memory learns of an abort, a departure or a failure without any message:
//!
//! ```text
//! byte 0         abort      0, or 1 + the rank that aborted first
//! byte 4         lost       0, or 1 + the first rank that a collective found gone
//! byte 8         failures   how many ranks are FAILED
//! byte 64 + 24r  state      of rank r: LIVE, LEFT or FAILED
//!         + 4    blamed     0, or 1 + the rank that r failed because of
//!         + 8    ubatch     of the call in which r failed
//!         + 16   epoch      of that call
//! ```
//!
//! All of them only ever change once, away from zero (`failures` grows): what was seen set stays
//! set until the generation ends. A rebuilt group has words of its own.

use super::error::{GroupError, shm_error};
use super::fabric::Fabric;
use direct_dcp_shm::{Mapping, SharedMemory, ShmError, forks};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

const ABORT: usize = 0;
const LOST: usize = 4;
const FAILURES: usize = 8;
const STATES: usize = 64;
/// Bytes of each rank, and where in them what lies.
const RANK: usize = 24;
const BLAMED: usize = 4;
const UBATCH: usize = 8;
const EPOCH: usize = 16;

/// The rank takes part.
const LIVE: u32 = 0;
/// The rank is done with this generation, by its own will.
const LEFT: u32 = 1;
/// The rank can no longer take part in gathers of this generation, and says so.
const FAILED: u32 = 2;

/// Why a rank can no longer take part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failure {
    /// The rank because of which, if it was lost.
    pub(crate) blamed: Option<usize>,
    /// The ubatch of the call that failed.
    pub(crate) ubatch: u32,
    /// The call.
    pub(crate) epoch: u64,
}

/// The shared words of one generation, as mapped by one process.
#[derive(Debug)]
pub(super) struct Words {
    mapping: Mapping,
    world: usize,
}

impl Words {
    /// Bytes that the words of `world` ranks take.
    pub(super) fn len(world: usize) -> usize {
        STATES + RANK * world
    }

    /// Memory for the words of `world` ranks, all zero: nobody aborted, everybody live.
    pub(super) fn memory(world: usize) -> Result<SharedMemory, ShmError> {
        SharedMemory::create("direct-dcp-control", Words::len(world))
    }

    /// Maps such memory.
    pub(super) fn map(memory: &SharedMemory, world: usize) -> Result<Arc<Words>, ShmError> {
        let mapping = memory.map()?;
        Ok(Arc::new(Words { mapping, world }))
    }

    /// Fresh words for ranks that share this process.
    pub(super) fn create(world: usize) -> Result<Arc<Words>, GroupError> {
        Words::memory(world)
            .and_then(|memory| Words::map(&memory, world))
            .map_err(shm_error("creating the group's control words"))
    }

    pub(super) fn aborted(&self) -> Option<usize> {
        first(self.word(ABORT))
    }

    pub(super) fn abort(&self, by: usize) {
        set_first(self.word(ABORT), by);
    }

    /// The first rank that a collective found gone.
    pub(super) fn lost(&self) -> Option<usize> {
        first(self.word(LOST))
    }

    /// Tells every rank that a collective cannot be completed because `rank` is gone.
    pub(super) fn lose(&self, rank: usize) {
        set_first(self.word(LOST), rank);
    }

    fn state(&self, rank: usize) -> u32 {
        // SYNC: membership. Acquires what the rank did before it left or failed.
        self.state_word(rank)
            .map_or(LEFT, |word| word.load(Ordering::Acquire))
    }

    /// Moves a rank from LIVE to `state`, and says whether this call did it.
    fn retire(&self, rank: usize, state: u32) -> bool {
        // SYNC: membership. Releases what the rank did before: its last signals are visible to
        // whoever sees it gone.
        self.state_word(rank).is_some_and(|word| {
            word.compare_exchange(LIVE, state, Ordering::Release, Ordering::Relaxed)
                .is_ok()
        })
    }

    pub(super) fn leave(&self, rank: usize) {
        self.retire(rank, LEFT);
    }

    fn fail(&self, rank: usize, failure: Failure) {
        let blamed = failure.blamed.and_then(|rank| u32::try_from(rank + 1).ok());
        if self.state(rank) == LIVE {
            // Only this rank writes these, and the state that releases them changes once.
            if let Some(word) = self.rank_word(rank, BLAMED) {
                word.store(blamed.unwrap_or(0), Ordering::Relaxed);
            }
            if let Some(word) = self.rank_word(rank, UBATCH) {
                word.store(failure.ubatch, Ordering::Relaxed);
            }
            if let Some(word) = self.epoch_word(rank) {
                word.store(failure.epoch, Ordering::Relaxed);
            }
        }
        if self.retire(rank, FAILED)
            && let Some(failures) = self.word(FAILURES)
        {
            // SYNC: membership. The count follows the state that explains it.
            failures.fetch_add(1, Ordering::Release);
        }
    }

    /// A rank that failed in this very call. A single load while none has failed at all.
    fn failed_in(&self, ubatch: u32, epoch: u64) -> Option<usize> {
        // SYNC: membership. Usually the one load that a waiting rank pays for.
        let failures = self.word(FAILURES)?.load(Ordering::Acquire);
        if failures == 0 {
            return None;
        }
        let in_call = |&rank: &usize| {
            let word = |word: Option<&AtomicU32>| word.map(|word| word.load(Ordering::Relaxed));
            self.state(rank) == FAILED
                && word(self.rank_word(rank, UBATCH)) == Some(ubatch)
                && self
                    .epoch_word(rank)
                    .map(|word| word.load(Ordering::Relaxed))
                    == Some(epoch)
        };
        (0..self.world).find(in_call)
    }

    /// Whose fault it was that `rank` is gone: a rank that failed because of another leads there.
    fn culprit(&self, rank: usize) -> usize {
        let mut at = rank;
        for _ in 0..self.world {
            if self.state(at) != FAILED {
                break;
            }
            let blamed = self
                .rank_word(at, BLAMED)
                .map_or(0, |word| word.load(Ordering::Relaxed));
            match blamed.checked_sub(1) {
                Some(next) => at = next as usize,
                None => break,
            }
        }
        at
    }

    fn state_word(&self, rank: usize) -> Option<&AtomicU32> {
        self.rank_word(rank, 0)
    }

    fn rank_word(&self, rank: usize, offset: usize) -> Option<&AtomicU32> {
        self.word(STATES + RANK * rank + offset)
            .filter(|_| rank < self.world)
    }

    fn epoch_word(&self, rank: usize) -> Option<&AtomicU64> {
        self.mapping
            .atomic_u64(STATES + RANK * rank + EPOCH)
            .filter(|_| rank < self.world)
    }

    /// `None` never happens for an offset of the table above; it is passed on, not unwrapped.
    fn word(&self, offset: usize) -> Option<&AtomicU32> {
        self.mapping.atomic_u32(offset)
    }
}

/// The rank in a word that holds 0 or 1 + a rank.
fn first(word: Option<&AtomicU32>) -> Option<usize> {
    // SYNC: membership. Acquires what the rank that set it did before.
    let value = word?.load(Ordering::Acquire);
    value.checked_sub(1).map(|rank| rank as usize)
}

/// Sets such a word, unless another rank was first.
fn set_first(word: Option<&AtomicU32>, rank: usize) {
    let value = u32::try_from(rank).unwrap_or(u32::MAX - 1) + 1;
    if let Some(word) = word {
        // SYNC: membership. First one wins; the others' failure to set it is the point.
        let _ = word.compare_exchange(0, value, Ordering::Release, Ordering::Relaxed);
    }
}

/// One rank's view of who is still there, for those who wait in shared memory rather than in a
/// collective. Dropping the last handle of it leaves the generation.
#[derive(Debug)]
pub(crate) struct Control {
    words: Arc<Words>,
    rank: usize,
    fabric: Arc<dyn Fabric>,
    /// Says which process is the rank. One that was forked from it shares the words and the sockets,
    /// but is nobody in the group: what it does and how it ends must not be taken for the rank's.
    forks: u32,
}

impl Control {
    pub(super) fn new(words: Arc<Words>, rank: usize, fabric: Arc<dyn Fabric>) -> Arc<Control> {
        Arc::new(Control {
            words,
            rank,
            fabric,
            forks: forks(),
        })
    }

    /// Whether this process is a fork of the rank's.
    pub(crate) fn is_forked(&self) -> bool {
        forks() != self.forks
    }

    /// The rank that aborted the generation, if any did.
    pub(crate) fn aborted_by(&self) -> Option<usize> {
        self.words.aborted()
    }

    /// Whether `rank` will not do anything any more in this generation: it left, failed, died, or
    /// this rank itself has left. What it published before it went is visible once this says true,
    /// so look for its signal again before giving up.
    ///
    /// One load where the rank's own word tells; otherwise a system call, so ask only after a while
    /// of waiting.
    pub(crate) fn lost(&self, rank: usize) -> bool {
        self.words.state(rank) != LIVE
            || self.words.state(self.rank) != LIVE
            || self.fabric.closed(rank)
    }

    /// A rank that failed in call `epoch` of `ubatch`. A single load while none has failed.
    pub(crate) fn failed_in(&self, ubatch: u32, epoch: u64) -> Option<usize> {
        self.words.failed_in(ubatch, epoch)
    }

    /// Whose fault it was that `rank` is gone.
    pub(crate) fn culprit(&self, rank: usize) -> usize {
        match self.words.culprit(rank) {
            // Whoever blames us is the one that we cannot go on with.
            culprit if culprit == self.rank => rank,
            culprit => culprit,
        }
    }

    /// Says that this rank can no longer take part in gathers of this generation, and why.
    pub(crate) fn mark_failed(&self, failure: Failure) {
        if !self.is_forked() {
            self.words.fail(self.rank, failure);
        }
    }

    /// Says that this rank is done with this generation.
    pub(crate) fn mark_left(&self) {
        self.words.leave(self.rank);
        self.fabric.wake();
    }

    /// Whether this rank is done with this generation.
    pub(crate) fn has_left(&self) -> bool {
        self.words.state(self.rank) == LEFT
    }

    /// Ends every wait of every rank in this generation.
    pub(crate) fn abort(&self) {
        self.words.abort(self.rank);
        self.fabric.wake();
    }

    pub(super) fn fabric(&self) -> &Arc<dyn Fabric> {
        &self.fabric
    }

    pub(super) fn abort_handle(&self) -> AbortHandle {
        AbortHandle {
            words: Arc::clone(&self.words),
            rank: self.rank,
            fabric: Arc::downgrade(&self.fabric),
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if self.is_forked() {
            // The fabric's threads are not in this process, and its sockets are not its own.
            std::mem::forget(Arc::clone(&self.fabric));
            return;
        }
        self.words.leave(self.rank);
        self.fabric.leave();
    }
}

/// Ends every wait of a group, from any thread: a watchdog's, a server's that is told to stop.
///
/// It does not keep its rank in the group: once the rank has left, aborting does nothing to its
/// connections.
#[derive(Debug, Clone)]
pub struct AbortHandle {
    words: Arc<Words>,
    rank: usize,
    fabric: Weak<dyn Fabric>,
}

impl AbortHandle {
    /// Makes every wait of every rank in this generation return
    /// [`GroupError::Aborted`](super::GroupError::Aborted), now and from now on. Only the first
    /// abort counts; [`Group::rebuild`](super::Group::rebuild) starts anew.
    pub fn abort(&self) {
        self.words.abort(self.rank);
        if let Some(fabric) = self.fabric.upgrade() {
            fabric.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_to_abort_or_to_be_lost_is_remembered() {
        let words = Words::create(3).unwrap();
        assert_eq!((words.aborted(), words.lost()), (None, None));
        words.abort(2);
        words.abort(0);
        words.lose(1);
        words.lose(2);
        assert_eq!((words.aborted(), words.lost()), (Some(2), Some(1)));
    }

    #[test]
    fn a_state_is_left_once() {
        let words = Words::create(3).unwrap();
        let failure = Failure {
            blamed: None,
            ubatch: 0,
            epoch: 7,
        };
        words.fail(1, failure);
        words.leave(1);
        words.leave(2);
        words.fail(2, failure);
        assert_eq!(
            [0, 1, 2].map(|rank| words.state(rank)),
            [LIVE, FAILED, LEFT]
        );
        assert_eq!(words.failed_in(0, 7), Some(1));
        assert_eq!((words.failed_in(0, 8), words.failed_in(1, 7)), (None, None));
        assert_eq!(words.state(3), LEFT);
    }

    #[test]
    fn blame_leads_to_whoever_began() {
        let words = Words::create(4).unwrap();
        words.fail(
            0,
            Failure {
                blamed: Some(1),
                ubatch: 0,
                epoch: 7,
            },
        );
        words.fail(
            1,
            Failure {
                blamed: Some(3),
                ubatch: 0,
                epoch: 7,
            },
        );
        assert_eq!([0, 1, 2, 3].map(|rank| words.culprit(rank)), [3, 3, 2, 3]);
    }
}
