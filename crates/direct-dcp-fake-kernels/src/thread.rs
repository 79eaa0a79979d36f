//! [`Machine`] for a thread of a block.

#![allow(unsafe_code)] // device memory

use core::mem::offset_of;
use core::num::NonZeroU32;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::Barrier;
use std::time::Duration;

use direct_dcp_kernels::device::{State, Status};
use direct_dcp_kernels::protocol::slot_of;
use direct_dcp_kernels::{Fault, FaultCode, Interrupt, Machine, Shape, rotated};

use crate::launch::Launch;
use crate::memory;
use crate::sabotage::{self, Sabotage};

/// Polls that only yield the CPU, before a waiting thread sleeps between polls.
const BUSY_POLLS: u32 = 200;
const SLEEP: Duration = Duration::from_micros(100);

/// What the threads of a block share.
pub(crate) struct Team {
    barrier: Barrier,
    votes: Box<[AtomicBool]>,
}

impl Team {
    pub(crate) fn new(threads: NonZeroU32) -> Self {
        Team {
            barrier: Barrier::new(threads.get() as usize),
            votes: (0..threads.get()).map(|_| AtomicBool::new(false)).collect(),
        }
    }
}

/// One thread of a launch.
pub(crate) struct Thread<'a> {
    pub(crate) launch: &'a Launch,
    pub(crate) block: u32,
    pub(crate) thread: u32,
    pub(crate) team: &'a Team,
    /// Whether the launch ends with a copy.
    pub(crate) copy_out: bool,
}

impl Thread<'_> {
    /// A word whose span the launch has checked.
    fn word(&self, address: u64) -> &AtomicU32 {
        // SAFETY: checked by the launch. Whoever launched keeps the memory until the end of it.
        unsafe { memory::word(address) }
    }

    fn state(&self, offset: usize) -> &AtomicU32 {
        self.word(self.launch.arguments.state + offset as u64)
    }

    pub(crate) fn epoch_word(&self) -> &AtomicU64 {
        // SAFETY: as in `word`.
        unsafe { memory::double(self.launch.arguments.epoch) }
    }

    pub(crate) fn arrivals_word(&self) -> &AtomicU32 {
        self.state(offset_of!(State, arrivals))
    }

    fn status_u32(&self, offset: usize, value: u32) {
        let word = self.word(self.launch.arguments.status + offset as u64);
        word.store(value, Ordering::Relaxed);
    }

    fn status_u64(&self, offset: usize, value: u64) {
        let address = self.launch.arguments.status + offset as u64;
        // SAFETY: as in `word`.
        unsafe { memory::double(address) }.store(value, Ordering::Relaxed);
    }

    fn index(&self, slot: u32, source: u32) -> u64 {
        u64::from(slot) * u64::from(self.launch.world_size.get()) + u64::from(source)
    }

    /// Where the slice of `source` begins, from the first slot on.
    fn place(&self, slot: u32, source: u32) -> u64 {
        let arguments = &self.launch.arguments;
        u64::from(slot) * arguments.slot_bytes + u64::from(source) * arguments.shape.bytes()
    }

    /// Where a store to a receiver's address goes.
    fn targets(&self, address: u64, bytes: u64) -> Vec<u64> {
        match self.launch.everywhere {
            true => self.launch.replicas_or_fail(address, bytes),
            false => vec![address],
        }
    }

    /// This thread among those of all blocks, and how many they are.
    pub(crate) fn among_all(&self) -> (u32, u32) {
        let threads = self.threads().get();
        let this = self.block * threads + self.thread;
        (this, self.launch.blocks.get() * threads)
    }

    /// This thread's share of `total` bytes, a run of whole units.
    pub(crate) fn share(&self, total: u64) -> Range<u64> {
        let units = total / self.launch.unit;
        let (this, all) = self.among_all();
        let at = |thread| units * u64::from(thread) / u64::from(all) * self.launch.unit;
        at(this)..at(this + 1)
    }

    /// Where this rank's rows go in the output, if there is one.
    fn own_out(&self) -> Option<u64> {
        let arguments = &self.launch.arguments;
        let place = u64::from(arguments.rank) * arguments.shape.bytes();
        (self.copy_out && arguments.out != 0).then_some(arguments.out + place)
    }

    /// Stores this thread's share of the local slice where it belongs in `slot`, and in the output.
    pub(crate) fn store_share(&self, slot: u32) {
        let arguments = &self.launch.arguments;
        let share = self.share(arguments.shape.bytes());
        let (from, bytes) = (arguments.local + share.start, share.end - share.start);
        let place = self.place(slot, arguments.rank) + share.start;
        if bytes == 0 {
            return;
        }
        if let Some(out) = self.own_out() {
            // SAFETY: spans that the launch checked; only this thread writes this part.
            unsafe { memory::copy(out + share.start, from, bytes) };
        }
        let sabotage = sabotage::current();
        if arguments.pull != 0 {
            if sabotage == Sabotage::DropStagedBy(arguments.rank as usize) {
                return;
            }
            // SAFETY: spans that the launch checked. The slot rule keeps every reader out of these
            // bytes until the call publishes, and no other thread or rank writes them.
            return unsafe { memory::copy(arguments.own.rows + place, from, bytes) };
        }
        let count = self.receivers();
        for step in 0..count.get() {
            let receiver = rotated(arguments.rank, step, count) as usize;
            let own = !self.launch.everywhere && receiver == arguments.rank as usize;
            if own && self.own_out().is_some() {
                // Nobody would read it in our own slot.
                continue;
            }
            let to = self.launch.receivers[receiver].rows + place;
            if !self.launch.everywhere && sabotage == Sabotage::DropRowsTo(receiver) {
                continue;
            }
            for (replica, to) in self.targets(to, bytes).into_iter().enumerate() {
                // SAFETY: as above; for a replica, memory that the driver says is bound here.
                unsafe { memory::copy(to, from, bytes) };
                if self.launch.everywhere && sabotage == Sabotage::CorruptReplica(replica) {
                    // SAFETY: a byte of the span just written.
                    let byte = unsafe { memory::read::<u8>(to) } ^ 0x10;
                    // SAFETY: as above; the local lives through the copy.
                    unsafe { memory::copy(to, (&raw const byte).expose_provenance() as u64, 1) };
                }
            }
        }
    }

    /// Stores a shape word by word.
    fn write_shape(&self, address: u64, shape: Shape) {
        let (low, high) = (shape.digest as u32, (shape.digest >> 32) as u32);
        for (index, value) in (0_u64..).zip([shape.rows, shape.row_bytes, low, high]) {
            self.word(address + 4 * index)
                .store(value, Ordering::Relaxed);
        }
    }
}

impl Machine for Thread<'_> {
    const POLLS_PER_LOOK: u32 = 8;

    fn block(&self) -> u32 {
        self.block
    }

    fn blocks(&self) -> NonZeroU32 {
        self.launch.blocks
    }

    fn thread(&self) -> u32 {
        self.thread
    }

    fn threads(&self) -> NonZeroU32 {
        NonZeroU32::new(self.team.votes.len() as u32).unwrap_or(NonZeroU32::MIN)
    }

    fn barrier(&self) {
        self.team.barrier.wait();
    }

    fn any(&self, vote: bool) -> bool {
        let votes = &self.team.votes;
        votes[self.thread as usize].store(vote, Ordering::Relaxed);
        self.barrier();
        let any = votes.iter().any(|vote| vote.load(Ordering::Relaxed));
        // Nobody votes anew before all have counted.
        self.barrier();
        any
    }

    fn epoch(&self) -> u64 {
        self.epoch_word().load(Ordering::Relaxed)
    }

    fn poisoned(&self) -> bool {
        let word = self.state(offset_of!(State, poisoned));
        word.load(Ordering::Relaxed) != 0
    }

    fn advance(&self, epoch: u64) {
        let arguments = &self.launch.arguments;
        let slot = u64::from(slot_of(epoch, self.launch.slots));
        let rows = arguments.own.rows + slot * arguments.slot_bytes;
        let address = arguments.state + offset_of!(State, rows) as u64;
        // SAFETY: as in `word`.
        unsafe { memory::double(address) }.store(rows, Ordering::Relaxed);
        // SYNC: advance.
        self.epoch_word().store(epoch, Ordering::Release);
    }

    fn poison(&self) {
        // SYNC: poison.
        self.state(offset_of!(State, poisoned))
            .store(1, Ordering::Release);
        // SYNC: report.
        self.word(self.launch.arguments.status + offset_of!(Status, ready) as u64)
            .store(1, Ordering::Release);
        for receiver in &self.launch.receivers {
            if receiver.notice != 0 {
                for notice in self.targets(receiver.notice, 4) {
                    self.word(notice)
                        .store(self.launch.arguments.rank + 1, Ordering::Relaxed);
                }
            }
        }
    }

    fn outcome(&self, epoch: u64) -> Option<bool> {
        // SYNC: advance.
        if self.epoch_word().load(Ordering::Acquire) == epoch {
            return Some(true);
        }
        // SYNC: poison.
        let poisoned = self.state(offset_of!(State, poisoned));
        (poisoned.load(Ordering::Acquire) != 0).then_some(false)
    }

    fn arrive(&self) -> u32 {
        // SYNC: arrive.
        self.arrivals_word().fetch_add(1, Ordering::AcqRel)
    }

    fn reset_arrivals(&self) {
        self.arrivals_word().store(0, Ordering::Relaxed);
    }

    fn store(&self, slot: impl FnOnce() -> Option<u32>) -> Option<u32> {
        let slot = slot()?;
        match &self.launch.placing {
            Some(placing) => self.store_places(slot, placing),
            None if self.launch.arguments.stored == 0 => self.store_share(slot),
            None => {}
        }
        Some(slot)
    }

    fn refused(&self) -> bool {
        let reported = self.state(offset_of!(State, reported));
        self.launch.placing.is_some() && self.any(reported.load(Ordering::Relaxed) != 0)
    }

    fn take(&self, slot: u32, source: u32) {
        let arguments = &self.launch.arguments;
        if source == arguments.rank {
            return; // `store` has put our own rows there
        }
        let place = self.place(slot, source);
        let from = if arguments.pull != 0 {
            self.launch.receivers[source as usize].rows + place
        } else {
            arguments.own.rows + place
        };
        let out = if arguments.out == 0 {
            arguments.own.rows + place
        } else {
            arguments.out + u64::from(source) * arguments.shape.bytes()
        };
        let share = self.share(arguments.shape.bytes());
        // SAFETY: spans that the launch checked. The source's signal was acquired, so its rows are
        // complete, and it stores into this slot again only after our own next publish.
        unsafe {
            memory::copy(
                out + share.start,
                from + share.start,
                share.end - share.start,
            )
        };
    }

    fn receivers(&self) -> NonZeroU32 {
        NonZeroU32::new(self.launch.arguments.receiver_count).unwrap_or(NonZeroU32::MIN)
    }

    fn publish(&self, receiver: u32, slot: u32, shape: Shape, epoch: u32) {
        let index = self.index(slot, self.launch.arguments.rank);
        let receiver = &self.launch.receivers[receiver as usize];
        let signal = receiver.signals + index * 4;
        let record = receiver.shapes + index * size_of::<Shape>() as u64;
        if receiver.shapes != 0 {
            for record in self.targets(record, size_of::<Shape>() as u64) {
                self.write_shape(record, shape);
            }
        }
        if self.launch.everywhere {
            fence(Ordering::SeqCst);
        }
        // SYNC: publish.
        for signal in self.targets(signal, 4) {
            self.word(signal).store(epoch, Ordering::Release);
        }
    }

    fn observe(&self, slot: u32, source: u32) -> u32 {
        let signal = self.launch.arguments.own.signals + self.index(slot, source) * 4;
        // SYNC: publish.
        self.word(signal).load(Ordering::Acquire)
    }

    fn shape(&self, slot: u32, source: u32) -> Shape {
        let shapes = self.launch.arguments.own.shapes;
        if shapes == 0 {
            return self.launch.arguments.shape;
        }
        let record = shapes + self.index(slot, source) * size_of::<Shape>() as u64;
        let word = |index: u64| self.word(record + 4 * index).load(Ordering::Relaxed);
        Shape {
            rows: word(0),
            row_bytes: word(1),
            digest: u64::from(word(2)) | u64::from(word(3)) << 32,
        }
    }

    fn failed_peer(&self) -> Option<u32> {
        let notice = self.launch.arguments.own.notice;
        if notice == 0 {
            return None;
        }
        self.word(notice).load(Ordering::Relaxed).checked_sub(1)
    }

    fn now(&self) -> u64 {
        self.launch.started.elapsed().as_nanos() as u64
    }

    fn pause(
        &self,
        _slot: u32,
        source: u32,
        _seen: u32,
        polls: u32,
        _left: u64,
    ) -> Result<(), Interrupt> {
        if polls % Self::POLLS_PER_LOOK == Self::POLLS_PER_LOOK - 1 {
            let interrupts = self.launch.arguments.interrupts;
            if self.word(interrupts).load(Ordering::Relaxed) != 0 {
                return Err(Interrupt::Aborted);
            }
            let lost = interrupts + 4 * (1 + u64::from(source));
            if self.word(lost).load(Ordering::Relaxed) != 0 {
                return Err(Interrupt::Lost);
            }
            if self.failed_peer() == Some(source) {
                return Err(Interrupt::Lost);
            }
        }
        self.relax(polls);
        Ok(())
    }

    fn relax(&self, polls: u32) {
        match polls < BUSY_POLLS {
            true => std::thread::yield_now(),
            false => std::thread::sleep(SLEEP),
        }
    }

    fn fail(&self, fault: Fault) {
        let claim = self.state(offset_of!(State, reported));
        if claim.swap(1, Ordering::AcqRel) == 0 {
            self.status_u32(offset_of!(Status, code), fault.code as u32);
            self.status_u32(offset_of!(Status, source), fault.source);
            self.status_u64(offset_of!(Status, epoch), fault.epoch);
            self.status_u64(offset_of!(Status, ours), fault.ours);
            self.status_u64(offset_of!(Status, theirs), fault.theirs);
        }
        if fault.code == FaultCode::Timeout {
            self.status_u32(size_of::<Status>() + 4 * fault.source as usize, 1);
        }
    }
}
