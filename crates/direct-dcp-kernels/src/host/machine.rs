//! [`Machine`] for one CPU thread of a launch.
#![allow(unsafe_code)]

use std::num::NonZeroU32;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use direct_dcp_shm::futex;

use super::direct;
use super::lane::{Lane, Report};
use super::part::{Part, part};
use super::placement::{Conversion, Placement, Rows};
use super::region::Way;
use crate::machine::{Call, Fault, FaultCode, Interrupt, Machine, Shape};
use crate::rotation::rotated;

/// Polls that yield the CPU before a wait goes to sleep. A yield costs about a microsecond where
/// another thread wants the CPU, and much less where none does.
const YIELDS: u32 = 1000;
/// Polls between two looks at whether the source still lives, which can cost a system call.
const LOOK_EVERY: u32 = 64;
/// The longest sleep between two such looks.
const LONGEST_SLEEP: Duration = Duration::from_millis(16);

/// What the blocks of one launch share.
pub(super) struct Launch<'a> {
    pub(super) lane: &'a Lane,
    pub(super) call: Call,
    pub(super) local: Local<'a>,
    /// The output, where the call copies out: valid for writes of `world_size` times that.
    pub(super) out: *mut u8,
    /// Whether peers read `local` where it is.
    pub(super) direct: bool,
    pub(super) report: Mutex<Option<Report>>,
}

/// The caller's rows.
#[derive(Clone, Copy)]
pub(super) enum Local<'a> {
    /// A slice, of `call.shape.bytes()` bytes, that goes to this rank's place.
    Slice(&'a [u8]),
    /// Rows with a place each.
    Placed {
        placement: &'a Placement,
        rows: Rows<'a>,
        conversion: Conversion,
    },
}

// SAFETY: the pointer comes from an exclusive borrow that outlives the launch. Blocks write disjoint
// parts of `out` (`part` gives every block its own).
unsafe impl Sync for Launch<'_> {}

impl Launch<'_> {
    /// Records a fault: the first one counts, and every timeout adds its source to the missing.
    pub(super) fn fail(&self, fault: Fault) {
        let mut report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        let report = report.get_or_insert_with(|| Report {
            fault,
            missing: Vec::new(),
        });
        if fault.code == FaultCode::Timeout {
            report.missing.push(fault.source);
        }
    }

    pub(super) fn failed(&self) -> bool {
        self.report
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }
}

/// One block of a launch.
pub(super) struct Block<'a> {
    pub(super) launch: &'a Launch<'a>,
    pub(super) block: u32,
}

impl Block<'_> {
    fn slice_bytes(&self) -> usize {
        self.launch.call.shape.bytes() as usize
    }

    /// This block's share of every slice.
    pub(super) fn share(&self) -> Part {
        part(self.launch.call.shape.bytes(), self.block, self.blocks())
    }

    /// The caller's slice: valid for reads of `slice_bytes` bytes during the launch.
    fn own_rows(&self) -> *const u8 {
        match self.launch.local {
            Local::Slice(rows) => rows.as_ptr(),
            // Rows with a place each are neither lent nor copied out.
            Local::Placed { .. } => std::ptr::null(),
        }
    }

    /// Where the slice of `source` begins in a slot.
    pub(super) fn place(&self, source: u32) -> usize {
        match self.launch.lane.geometry().way {
            Way::Pull => 0,
            Way::Shared | Way::Push => source as usize * self.slice_bytes(),
        }
    }
}

impl Machine for Block<'_> {
    const POLLS_PER_LOOK: u32 = 1;

    fn block(&self) -> u32 {
        self.block
    }

    fn blocks(&self) -> NonZeroU32 {
        self.launch.lane.blocks()
    }

    fn thread(&self) -> u32 {
        0
    }

    fn threads(&self) -> NonZeroU32 {
        NonZeroU32::MIN
    }

    fn barrier(&self) {}

    fn any(&self, vote: bool) -> bool {
        vote
    }

    fn epoch(&self) -> u64 {
        self.launch.lane.epoch.load(Ordering::Relaxed)
    }

    fn poisoned(&self) -> bool {
        self.launch.lane.poisoned.load(Ordering::Relaxed)
    }

    fn advance(&self, epoch: u64) {
        // SYNC: advance.
        self.launch.lane.epoch.store(epoch, Ordering::Release);
    }

    fn poison(&self) {
        // SYNC: poison.
        self.launch.lane.poisoned.store(true, Ordering::Release);
    }

    fn outcome(&self, epoch: u64) -> Option<bool> {
        // SYNC: advance.
        if self.launch.lane.epoch.load(Ordering::Acquire) == epoch {
            return Some(true);
        }
        // SYNC: poison.
        self.launch
            .lane
            .poisoned
            .load(Ordering::Acquire)
            .then_some(false)
    }

    fn arrive(&self) -> u32 {
        // SYNC: arrive.
        self.launch.lane.arrivals.fetch_add(1, Ordering::AcqRel)
    }

    fn reset_arrivals(&self) {
        self.launch.lane.arrivals.store(0, Ordering::Relaxed);
    }

    fn store(&self, slot: impl FnOnce() -> Option<u32>) -> Option<u32> {
        let slot = slot()?;
        if self.launch.direct {
            if self.block == 0 {
                let source = self
                    .launch
                    .lane
                    .own_region()
                    .source(slot, self.launch.call.rank);
                source
                    .address
                    .store(self.own_rows().expose_provenance(), Ordering::Relaxed);
                direct::open(&source.gate);
            }
            return Some(slot);
        }
        match self.launch.local {
            Local::Slice(rows) => self.store_slice(slot, rows),
            Local::Placed {
                placement,
                rows,
                conversion,
            } => self.store_placed(slot, placement, rows, conversion),
        }
        Some(slot)
    }

    fn take(&self, slot: u32, source: u32) {
        let part = self.share();
        let from = part.start as usize;
        let out = self
            .launch
            .out
            .wrapping_add(source as usize * self.slice_bytes() + from);
        if source == self.launch.call.rank {
            let rows = self.own_rows().wrapping_add(from);
            // SAFETY: `Lane::check` saw that `local` holds the slice and `out` world_size slices.
            // Only this block writes this part of `out`, which the caller lent exclusively.
            return unsafe { rows.copy_to_nonoverlapping(out, part.len as usize) };
        }
        let region = self.launch.lane.rows_of(source);
        if self.launch.direct {
            let lent = region.source(slot, source);
            if !direct::enter(&lent.gate) {
                // Whoever closed it did so because of somebody, or of an abort.
                let lane = self.launch.lane;
                return self.fail(Fault {
                    code: FaultCode::PeerLost,
                    source: lane.failed_peer(self.epoch()).unwrap_or(source),
                    epoch: self.epoch(),
                    ours: 0,
                    theirs: 0,
                });
            }
            let address = lent.address.load(Ordering::Relaxed);
            let rows = std::ptr::with_exposed_provenance::<u8>(address).wrapping_add(from);
            // SAFETY: the source's signal was acquired, so its address is that of this call's
            // rows, of the same size as ours, in our own address space. Its call returns only
            // after the gate shows that we have left. `out` as above.
            unsafe { rows.copy_to_nonoverlapping(out, part.len as usize) };
            return direct::leave(&lent.gate);
        }
        let rows = region
            .slot(slot)
            .wrapping_add(self.place(source) + from)
            .cast_const();
        // SAFETY: the source's signal was acquired (here or, for another block, before the epoch
        // that we acquired), so its rows are complete, and it stores into this slot again only
        // after our own next publish. A slot holds world_size slices, or, for what is pulled, one.
        // `out` as above.
        unsafe { rows.copy_to_nonoverlapping(out, part.len as usize) }
    }

    fn receivers(&self) -> NonZeroU32 {
        self.launch.lane.receivers()
    }

    fn publish(&self, receiver: u32, slot: u32, shape: Shape, epoch: u32) {
        let Some(region) = self.launch.lane.region(receiver) else {
            return;
        };
        region.write_shape(slot, self.launch.call.rank, shape);
        let signal = region.signal(slot, self.launch.call.rank);
        // SYNC: publish.
        signal.store(epoch, Ordering::Release);
        // SYNC: doorbell. Either we see the sleeper, or it sees our signal and does not sleep.
        fence(Ordering::SeqCst);
        if region.sleepers().load(Ordering::Relaxed) != 0 {
            futex::wake_all(signal);
        }
    }

    fn observe(&self, slot: u32, source: u32) -> u32 {
        // SYNC: publish.
        self.launch
            .lane
            .own_region()
            .signal(slot, source)
            .load(Ordering::Acquire)
    }

    fn shape(&self, slot: u32, source: u32) -> Shape {
        self.launch.lane.own_region().read_shape(slot, source)
    }

    fn failed_peer(&self) -> Option<u32> {
        self.launch.lane.failed_peer(self.epoch() + 1)
    }

    fn now(&self) -> u64 {
        self.launch.lane.started.elapsed().as_nanos() as u64
    }

    fn pause(
        &self,
        slot: u32,
        source: u32,
        seen: u32,
        polls: u32,
        left: u64,
    ) -> Result<(), Interrupt> {
        let watch = self.launch.lane.watch();
        if watch.aborted() {
            return Err(Interrupt::Aborted);
        }
        let spins = self.launch.lane.spins();
        if polls < spins {
            std::hint::spin_loop();
            return Ok(());
        }
        let yields = polls - spins;
        if yields < YIELDS && yields % LOOK_EVERY != LOOK_EVERY - 1 {
            std::thread::yield_now();
            return Ok(());
        }
        if watch.lost(source) {
            return Err(Interrupt::Lost);
        }
        if let Some(sleeps) = yields.checked_sub(YIELDS) {
            let sleep = Duration::from_millis(1 << sleeps.min(4)).min(LONGEST_SLEEP);
            let region = self.launch.lane.own_region();
            let signal = region.signal(slot, source);
            region.sleepers().fetch_add(1, Ordering::Relaxed);
            // SYNC: doorbell.
            fence(Ordering::SeqCst);
            futex::wait(signal, seen, sleep.min(Duration::from_nanos(left)));
            region.sleepers().fetch_sub(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn relax(&self, polls: u32) {
        match polls.checked_sub(self.launch.lane.spins()) {
            None => std::hint::spin_loop(),
            Some(yields) if yields < YIELDS => std::thread::yield_now(),
            Some(_) => std::thread::sleep(Duration::from_micros(50)),
        }
    }

    fn fail(&self, fault: Fault) {
        self.launch.fail(fault);
    }
}

/// The regions that `rank`'s rows are stored to, next rank first.
pub(super) fn rotation(rank: u32, count: NonZeroU32) -> impl Iterator<Item = u32> {
    (0..count.get()).map(move |step| rotated(rank, step, count))
}
