//! What the protocol needs from the machine it runs on.

use core::num::NonZeroU32;

/// What a rank says of its own slice, published beside the signal.
///
/// Written before the release of the signal and read after its acquire, so that ranks which
/// disagree find out before anybody uses the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct Shape {
    /// Rows of this rank's slice.
    pub rows: u32,
    /// Bytes of one row.
    pub row_bytes: u32,
    /// What else the ranks must agree on (the element type, a chunk plan), as a digest.
    pub digest: u64,
}

/// The bit of a digest that says that the rank wants a copy. Ranks use one form in one call: where
/// rows are read in place, a rank that lends its rows to a peer's copy fills no slot.
pub const COPY_OUT: u64 = 1 << 63;

impl Shape {
    /// The shape as a call of one form publishes it.
    #[must_use]
    pub fn in_form(self, copy_out: bool) -> Self {
        let digest = if copy_out {
            self.digest | COPY_OUT
        } else {
            self.digest & !COPY_OUT
        };
        Shape { digest, ..self }
    }

    /// Bytes of the slice.
    #[must_use]
    #[inline(always)]
    pub fn bytes(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.row_bytes)
    }
}

/// One gather, the same for every thread of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Ranks of the group.
    pub world_size: NonZeroU32,
    /// This rank, below `world_size`.
    pub rank: u32,
    /// Slots per ubatch, at least 2.
    pub slots: NonZeroU32,
    /// This rank's slice.
    pub shape: Shape,
    /// Whether the launch ends with a copy of all slices into the caller's output.
    pub copy_out: bool,
    /// How long to wait for the peers, in nanoseconds of [`Machine::now`].
    pub timeout: u64,
}

/// Why a wait for a source is pointless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// Somebody called the group's abort.
    Aborted,
    /// The source has left the group or died.
    Lost,
}

/// What went wrong in a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum FaultCode {
    /// The source did not publish in time.
    Timeout = 1,
    /// The group was aborted.
    Aborted = 2,
    /// The source left the group, died, or failed in this generation.
    PeerLost = 3,
    /// The source gathers another number of rows: `ours` and `theirs`.
    Rows = 4,
    /// The source's rows have another size in bytes: `ours` and `theirs`.
    RowBytes = 5,
    /// The source's digest differs: `ours` and `theirs`.
    Digest = 6,
    /// The source is ahead: it published epoch `theirs` where `ours` was expected.
    Ahead = 7,
    /// A row of this rank has place `ours` in a result of `theirs` rows.
    Place = 8,
    /// A row of this rank is in slot `ours` of a cache of `theirs`.
    CacheSlot = 9,
}

#[cfg(not(target_arch = "nvptx64"))]
impl FaultCode {
    /// The code that a status word holds. A word that no kernel writes counts as
    /// [`PeerLost`](FaultCode::PeerLost): whatever happened, this generation is over.
    #[must_use]
    pub fn from_u32(word: u32) -> Self {
        use FaultCode::{
            Aborted, Ahead, CacheSlot, Digest, PeerLost, Place, RowBytes, Rows, Timeout,
        };
        [
            Timeout, Aborted, PeerLost, Rows, RowBytes, Digest, Ahead, Place, CacheSlot,
        ]
        .into_iter()
        .find(|&code| code as u32 == word)
        .unwrap_or(PeerLost)
    }
}

/// A fault of one launch, with the source that shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Fault {
    /// The kind of fault.
    pub code: FaultCode,
    /// The rank that it is about.
    pub source: u32,
    /// The call that failed.
    pub epoch: u64,
    /// Our side, where the code has two sides.
    pub ours: u64,
    /// The source's side, where the code has two sides.
    pub theirs: u64,
}

/// One thread of one block of a launch, and the memory it reaches.
///
/// Memory is named by *slot*, *receiver* and *source*, never by address: a receiver is a place
/// that rows and signals are stored to. There are `world_size` of them where every rank has
/// memory of its own, and one where a single store reaches everybody (multicast, a shared slot).
///
/// Everything here may be called by every thread of a block, except where it says *leader*.
pub trait Machine {
    /// Polls of a signal between two looks at the clock.
    const POLLS_PER_LOOK: u32;

    /// This block, below [`blocks`](Machine::blocks).
    fn block(&self) -> u32;
    /// Blocks of the launch.
    fn blocks(&self) -> NonZeroU32;
    /// This thread, below [`threads`](Machine::threads); thread 0 is the block's leader.
    fn thread(&self) -> u32;
    /// Threads of a block.
    fn threads(&self) -> NonZeroU32;
    /// Waits for all threads of the block.
    ///
    /// What a thread did before the barrier happens before what any thread of the block does
    /// after it.
    fn barrier(&self);
    /// A [`barrier`](Machine::barrier) that tells each thread whether any of them voted yes.
    fn any(&self, vote: bool) -> bool;

    /// The last call that this rank completed in an earlier launch. The launch boundary orders it.
    fn epoch(&self) -> u64;
    /// Whether an earlier launch of this generation failed. The launch boundary orders it.
    fn poisoned(&self) -> bool;
    /// *Leader.* Records `epoch` as completed (release).
    fn advance(&self, epoch: u64);
    /// *Leader.* Ends the generation for this rank: every later launch returns at once, and the
    /// peers can learn of it. After all faults of this launch (release).
    fn poison(&self);
    /// How call `epoch`, of this launch, ended: complete or not, or not ended yet (acquire).
    fn outcome(&self, epoch: u64) -> Option<bool>;

    /// *Leader.* Counts this block as arrived and returns how many had arrived before
    /// (acquire and release).
    fn arrive(&self) -> u32;
    /// *Leader of the last block.* Makes the count ready for the next launch.
    fn reset_arrivals(&self);

    /// Stores this block's share of the local slice into a slot of every receiver, at the place of
    /// this rank. The blocks' shares make up the slice; the threads of a block share its work.
    ///
    /// `slot` says which slot, or that nothing is to be stored; it may be asked after the first
    /// reads are under way, and its answer is returned.
    fn store(&self, slot: impl FnOnce() -> Option<u32>) -> Option<u32>;
    /// *Last block, after all have arrived; all its threads.* Whether a block of this launch found
    /// rows that have no place, and recorded the fault: then nothing is published. All threads get
    /// one answer: they meet after they have looked, before one of them can record a later fault.
    fn refused(&self) -> bool {
        false
    }
    /// Copies this block's share of the slice of `source` to its place in the output, from `slot`,
    /// or, for this rank itself, from the local slice.
    fn take(&self, slot: u32, source: u32);

    /// Places that signals are stored to.
    fn receivers(&self) -> NonZeroU32;
    /// Stores `shape`, then `epoch` with release, as this rank's signal of `slot` at `receiver`.
    fn publish(&self, receiver: u32, slot: u32, shape: Shape, epoch: u32);
    /// The signal of `source` in `slot` (acquire).
    fn observe(&self, slot: u32, source: u32) -> u32;
    /// The shape that `source` published; only after [`observe`](Machine::observe) showed the
    /// epoch.
    fn shape(&self, slot: u32, source: u32) -> Shape;
    /// A rank known to have failed in this generation, if any.
    fn failed_peer(&self) -> Option<u32>;

    /// Nanoseconds of a clock that never goes back.
    fn now(&self) -> u64;
    /// Lets time pass until the signal of `source` may have changed from `seen`, for `left`
    /// nanoseconds at most; `polls` counts the calls for this source.
    ///
    /// # Errors
    /// The reason, where waiting for `source` has become pointless.
    fn pause(
        &self,
        slot: u32,
        source: u32,
        seen: u32,
        polls: u32,
        left: u64,
    ) -> Result<(), Interrupt>;
    /// Lets a little time pass while another block of this launch works.
    fn relax(&self, polls: u32);
    /// Records a fault. The first one of a launch counts, and every [`FaultCode::Timeout`] adds
    /// its source to the missing ranks.
    fn fail(&self, fault: Fault);
}
