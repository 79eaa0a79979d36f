//! One rank's end of one ubatch: checks, launches, and slots that the caller holds.
#![allow(unsafe_code)]

use std::fmt;
use std::num::NonZeroU32;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use direct_dcp_shm::Mapping;

use super::direct;
use super::machine::{Block, Launch, Local, rotation};
use super::placement::{Conversion, Placement, Rows};
use super::region::{Geometry, Region, Way};
use crate::machine::{Call, Fault, Machine, Shape};
use crate::protocol::{gather, slot_of};

/// Polls of a signal before the CPU is offered to others, where every rank has a core.
const SPINS: u32 = 1000;

/// Bytes of a slice from which a copy-out between threads reads the peers' rows in place. Below,
/// one more copy costs less than one more wait.
const IN_PLACE_FROM: u64 = 4096;

/// What a waiting rank asks about its group.
pub trait Watch: Send + Sync {
    /// Whether somebody aborted the group. Asked at every poll, so it should be a load.
    fn aborted(&self) -> bool;
    /// Whether `rank` has left, failed or died. May cost a system call.
    fn lost(&self, rank: u32) -> bool;
    /// A rank that has failed in call `epoch` of `ubatch`, if any. Asked once a call.
    fn failed(&self, ubatch: u32, epoch: u64) -> Option<u32>;
}

/// How a lane is built.
#[derive(Clone, Copy, Debug)]
pub struct LaneOptions {
    /// The layout of the mappings.
    pub geometry: Geometry,
    /// This rank.
    pub rank: u32,
    /// This ubatch.
    pub ubatch: u32,
    /// Threads that share a rank's copies, at least 1.
    pub blocks: NonZeroU32,
    /// Whether a waiting rank may keep its core busy, because every rank has one.
    pub spin: bool,
    /// Whether all ranks are threads of this process, and so can read each other's rows in place.
    pub one_process: bool,
}

/// Why a launch did not deliver.
#[derive(Debug)]
pub enum LaunchError {
    /// Another thread is in a call on this ubatch.
    Busy,
    /// The slot, or one that the call would free for the peers, is held: release the result of
    /// call `epoch` first.
    SlotInUse {
        /// The call whose result is held.
        epoch: u64,
    },
    /// A buffer has the wrong number of bytes, or there are more rows than the slot holds.
    Size {
        /// The argument.
        what: &'static str,
        /// What it must be.
        expected: u64,
        /// What it is.
        got: u64,
    },
    /// Row `row` of the caller's is in slot `slot`, which the cache does not have.
    OutsideCache {
        /// The row.
        row: u32,
        /// Its slot.
        slot: u32,
    },
    /// Rows that are pulled are not placed.
    Pulled,
    /// An earlier call of this generation failed.
    Poisoned,
    /// The call failed, and poisoned the lane.
    Fault(Report),
}

/// What a failed launch left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The first fault.
    pub fault: Fault,
    /// The ranks that did not publish in time, if the fault is a timeout.
    pub missing: Vec<u32>,
}

/// One rank's end of one ubatch.
pub struct Lane {
    options: LaneOptions,
    /// The mapping that all ranks share, or one per rank.
    regions: Box<[Region]>,
    /// The result of a zero-copy call of `Way::Pull`, `slots` times the gathered rows.
    private: Option<Private>,
    pub(super) epoch: AtomicU64,
    pub(super) arrivals: AtomicU32,
    pub(super) poisoned: AtomicBool,
    pub(super) started: Instant,
    /// Per slot, the call whose result is held, or 0.
    held: Box<[AtomicU64]>,
    busy: AtomicBool,
    watch: Arc<dyn Watch>,
    pool: Option<rayon::ThreadPool>,
}

struct Private {
    mapping: Mapping,
    slot_bytes: usize,
}

impl Lane {
    /// A lane over `mappings`: one that all ranks share, or each rank's in rank order, as
    /// [`Geometry::mappings`] says.
    ///
    /// # Errors
    /// A sentence, where the mappings do not fit the geometry, or threads or memory run out.
    pub fn new(
        options: LaneOptions,
        mappings: &[Arc<Mapping>],
        watch: Arc<dyn Watch>,
    ) -> Result<Self, String> {
        let geometry = options.geometry;
        if mappings.len() != geometry.mappings() as usize
            || options.rank >= geometry.world_size
            || geometry.slots < 2
        {
            return Err(format!(
                "{} mappings do not fit {options:?}",
                mappings.len()
            ));
        }
        let regions = mappings
            .iter()
            .map(|mapping| Region::new(mapping.clone(), &geometry, options.ubatch))
            .collect::<Option<Box<[Region]>>>()
            .ok_or_else(|| format!("a mapping is too small for {geometry:?}"))?;
        let private = match geometry.way {
            Way::Pull => Some(Private::new(&geometry)?),
            Way::Shared | Way::Push => None,
        };
        let pool = match options.blocks.get() - 1 {
            0 => None,
            helpers => Some(
                rayon::ThreadPoolBuilder::new()
                    .num_threads(helpers as usize)
                    .thread_name(|_| "direct-dcp block".into())
                    .build()
                    .map_err(|error| format!("cannot start {helpers} threads: {error}"))?,
            ),
        };
        Ok(Lane {
            regions,
            private,
            epoch: AtomicU64::new(0),
            arrivals: AtomicU32::new(0),
            poisoned: AtomicBool::new(false),
            started: Instant::now(),
            held: (0..geometry.slots).map(|_| AtomicU64::new(0)).collect(),
            busy: AtomicBool::new(false),
            watch,
            pool,
            options,
        })
    }

    /// Calls completed in this generation.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// Whether a call of this generation has failed.
    #[must_use]
    pub fn poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Acquire)
    }

    /// Gathers the rows of all ranks into `out`, rank by rank.
    ///
    /// # Errors
    /// See [`LaunchError`]; before a fault nothing was written.
    pub fn gather_into(
        &self,
        shape: Shape,
        local: &[u8],
        out: &mut [u8],
        timeout: Duration,
    ) -> Result<(), LaunchError> {
        let _turn = self.turn()?;
        let shape = shape.in_form(true);
        let gathered = self.check(shape, local)?;
        if out.len() != gathered {
            return Err(size("output bytes", gathered, out.len()));
        }
        let direct = self.reads_in_place(shape);
        let local = Local::Slice(local);
        self.launch(shape, local, out.as_mut_ptr(), true, direct, timeout)
    }

    /// Gathers the rows of all ranks into a slot, and lends the slot.
    ///
    /// # Errors
    /// See [`LaunchError`]; before a fault nothing was written.
    pub fn gather(
        self: &Arc<Self>,
        shape: Shape,
        local: &[u8],
        timeout: Duration,
    ) -> Result<Held, LaunchError> {
        let _turn = self.turn()?;
        let shape = shape.in_form(false);
        let len = self.check(shape, local)?;
        let epoch = self.epoch() + 1;
        let slot = slot_of(epoch, self.slots());
        let local = Local::Slice(local);
        let rows = match &self.private {
            Some(private) => {
                let out = private.slot(slot);
                self.launch(shape, local, out, true, false, timeout)?;
                out
            }
            None => {
                self.launch(shape, local, std::ptr::null_mut(), false, false, timeout)?;
                self.own_region().slot(slot)
            }
        };
        Ok(self.hold(slot, epoch, rows, len))
    }

    /// Gathers each row of all ranks to its place in a slot, and lends the slot: all of it, of
    /// which only the places that the ranks' placements name were written.
    ///
    /// # Errors
    /// See [`LaunchError`]; before a fault nothing was written.
    pub fn place(
        self: &Arc<Self>,
        placement: &Placement,
        rows: Rows<'_>,
        conversion: Conversion,
        timeout: Duration,
    ) -> Result<Held, LaunchError> {
        let _turn = self.turn()?;
        self.check_placement(placement, rows, conversion)?;
        self.check_slots()?;
        let geometry = &self.options.geometry;
        let shape = Shape {
            rows: placement.total_rows(),
            row_bytes: geometry.row_bytes,
            digest: placement.digest(),
        }
        .in_form(false);
        let epoch = self.epoch() + 1;
        let slot = slot_of(epoch, self.slots());
        let local = Local::Placed {
            placement,
            rows,
            conversion,
        };
        self.launch(shape, local, std::ptr::null_mut(), false, false, timeout)?;
        let len = geometry.capacity_rows as usize * geometry.row_bytes as usize;
        Ok(self.hold(slot, epoch, self.own_region().slot(slot), len))
    }

    /// Whether a call of [`place`](Lane::place) could take these rows, slots aside.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn check_placement(
        &self,
        placement: &Placement,
        rows: Rows<'_>,
        conversion: Conversion,
    ) -> Result<(), LaunchError> {
        let geometry = &self.options.geometry;
        if geometry.way == Way::Pull {
            return Err(LaunchError::Pulled);
        }
        let row_bytes = geometry.row_bytes as usize;
        if placement.row_bytes() != row_bytes as u64 {
            let got = placement.row_bytes() as usize;
            return Err(size("bytes of a row in all planes", row_bytes, got));
        }
        let source_bytes = conversion.source_bytes(row_bytes);
        let count = rows.count(source_bytes).unwrap_or(usize::MAX);
        if count != placement.local_rows() as usize {
            return Err(size("local rows", placement.local_rows() as usize, count));
        }
        if placement.total_rows() > geometry.capacity_rows {
            let (most, got) = (geometry.capacity_rows, placement.total_rows());
            return Err(size(
                "rows of the result, at most",
                most as usize,
                got as usize,
            ));
        }
        if let Some((row, slot)) = rows.outside(placement.runs(), source_bytes) {
            return Err(LaunchError::OutsideCache { row, slot });
        }
        Ok(())
    }

    /// Whether the result of call `epoch` is held.
    #[must_use]
    pub fn holds(&self, epoch: u64) -> bool {
        let held = self.held.get(slot_of(epoch, self.slots()) as usize);
        // SYNC: held.
        held.is_some_and(|held| held.load(Ordering::Acquire) == epoch)
    }

    /// Marks the slot of a call that has delivered as held.
    fn hold(self: &Arc<Self>, slot: u32, epoch: u64, rows: *const u8, len: usize) -> Held {
        if let Some(held) = self.held.get(slot as usize) {
            held.store(epoch, Ordering::Relaxed);
        }
        Held {
            lane: self.clone(),
            slot,
            epoch,
            rows,
            len,
        }
    }

    fn turn(&self) -> Result<Turn<'_>, LaunchError> {
        // SYNC: turn.
        if self.busy.swap(true, Ordering::Acquire) {
            return Err(LaunchError::Busy);
        }
        Ok(Turn(self))
    }

    /// Everything that must hold before a launch; returns the bytes it delivers.
    fn check(&self, shape: Shape, local: &[u8]) -> Result<usize, LaunchError> {
        let geometry = &self.options.geometry;
        if shape.row_bytes != geometry.row_bytes {
            return Err(size(
                "row bytes",
                geometry.row_bytes as usize,
                shape.row_bytes as usize,
            ));
        }
        let most = geometry.capacity_rows / geometry.world_size;
        if shape.rows == 0 || shape.rows > most {
            return Err(size("rows per rank", most as usize, shape.rows as usize));
        }
        let slice = shape.bytes() as usize;
        if local.len() != slice {
            return Err(size("local bytes", slice, local.len()));
        }
        self.check_slots()?;
        Ok(slice * geometry.world_size as usize)
    }

    /// Whether there may be a next call now.
    fn check_slots(&self) -> Result<(), LaunchError> {
        if self.poisoned() {
            return Err(LaunchError::Poisoned);
        }
        // Slot rule: publishing call n tells the peers that they may store into the slot of call
        // n - (S - 1), so its result, and any older one, must have been released.
        let issued = self.epoch() + 1;
        for held in &self.held {
            // SYNC: held. What the holder read happens before our publish.
            let epoch = held.load(Ordering::Acquire);
            if epoch != 0 && epoch + u64::from(self.options.geometry.slots) - 1 <= issued {
                return Err(LaunchError::SlotInUse { epoch });
            }
        }
        Ok(())
    }

    fn launch(
        &self,
        shape: Shape,
        local: Local<'_>,
        out: *mut u8,
        copy_out: bool,
        direct: bool,
        timeout: Duration,
    ) -> Result<(), LaunchError> {
        let slot = slot_of(self.epoch() + 1, self.slots());
        let launch = Launch {
            lane: self,
            call: Call {
                world_size: self.world_size(),
                rank: self.options.rank,
                slots: self.slots(),
                shape,
                copy_out,
                timeout: timeout.as_nanos().try_into().unwrap_or(u64::MAX),
            },
            local,
            out,
            direct,
            report: Mutex::new(None),
        };
        let run = |block| {
            gather(
                &Block {
                    launch: &launch,
                    block,
                },
                &launch.call,
            )
        };
        match &self.pool {
            None => run(0),
            Some(pool) => pool.in_place_scope(|scope| {
                for block in 1..self.options.blocks.get() {
                    scope.spawn(move |_| run(block));
                }
                run(0);
            }),
        }
        if direct {
            self.take_back(&launch, slot);
        }
        match launch
            .report
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
        {
            None => Ok(()),
            Some(report) => Err(LaunchError::Fault(report)),
        }
    }

    /// Whether a copy-out reads the peers' rows where they are.
    fn reads_in_place(&self, shape: Shape) -> bool {
        let most = self
            .options
            .blocks
            .get()
            .saturating_mul(self.options.geometry.world_size);
        self.options.one_process
            && shape.bytes() >= IN_PLACE_FROM
            && self.options.geometry.way == Way::Shared
            && most <= direct::MAX_READERS
    }

    /// Ends the loan of the caller's rows: waits until all peers have read them, or, where the
    /// call failed, until none of them reads any more.
    fn take_back(&self, launch: &Launch<'_>, slot: u32) {
        let (rank, peers) = (self.options.rank, self.options.geometry.world_size - 1);
        let region = self.own_region();
        let gate = &region.source(slot, rank).gate;
        if !launch.failed() {
            for peer in rotation(rank, self.world_size()).filter(|&peer| peer != rank) {
                direct::finish(&region.source(slot, peer).gate);
            }
            // Every peer has published this call, so it is inside it, and ends it in bounded time:
            // it finishes here, or says that it failed. Either way, and if the group is aborted
            // meanwhile, this call has delivered: who comes too late finds the gate closed.
            let mut polls = 0;
            while !direct::finished(gate, peers) {
                if self.watch.aborted() || self.failed_peer(self.epoch()).is_some() {
                    direct::close(gate);
                    break;
                }
                Block { launch, block: 0 }.relax(polls);
                polls = polls.saturating_add(1);
            }
        }
        if launch.failed() {
            // SYNC: poison.
            self.poisoned.store(true, Ordering::Release);
            direct::close(gate);
        }
    }

    pub(super) fn geometry(&self) -> &Geometry {
        &self.options.geometry
    }

    pub(super) fn blocks(&self) -> NonZeroU32 {
        self.options.blocks
    }

    /// A rank that has failed in call `epoch` of this lane.
    pub(super) fn failed_peer(&self, epoch: u64) -> Option<u32> {
        self.watch.failed(self.options.ubatch, epoch)
    }

    pub(super) fn watch(&self) -> &dyn Watch {
        &*self.watch
    }

    pub(super) fn spins(&self) -> u32 {
        if self.options.spin { SPINS } else { 0 }
    }

    pub(super) fn receivers(&self) -> NonZeroU32 {
        NonZeroU32::new(self.regions.len() as u32).unwrap_or(NonZeroU32::MIN)
    }

    pub(super) fn region(&self, receiver: u32) -> Option<&Region> {
        self.regions.get(receiver as usize)
    }

    /// The region whose signals this rank observes, and whose slots it reads.
    pub(super) fn own_region(&self) -> &Region {
        self.rows_of(self.options.rank)
    }

    /// The region from which the rows of `source` are taken.
    pub(super) fn rows_of(&self, source: u32) -> &Region {
        let index = match self.options.geometry.way {
            Way::Shared => 0,
            Way::Push => self.options.rank,
            Way::Pull => source,
        };
        &self.regions[index as usize]
    }

    /// The regions that this rank's rows are stored to. Where the call copies out, the rank's own
    /// rows reach the output directly, so its own slots need them only if peers read there.
    pub(super) fn stores_to(&self, copy_out: bool) -> impl Iterator<Item = &Region> {
        let way = self.options.geometry.way;
        let rank = self.options.rank;
        rotation(rank, self.receivers())
            .filter(move |&receiver| match way {
                Way::Shared => true,
                Way::Push => receiver != rank || !copy_out,
                Way::Pull => receiver == rank,
            })
            .filter_map(|receiver| self.region(receiver))
    }

    fn world_size(&self) -> NonZeroU32 {
        NonZeroU32::new(self.options.geometry.world_size).unwrap_or(NonZeroU32::MIN)
    }

    fn slots(&self) -> NonZeroU32 {
        NonZeroU32::new(self.options.geometry.slots).unwrap_or(NonZeroU32::MIN)
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane")
            .field("options", &self.options)
            .field("epoch", &self.epoch)
            .field("poisoned", &self.poisoned)
            .finish_non_exhaustive()
    }
}

impl Private {
    fn new(geometry: &Geometry) -> Result<Self, String> {
        let too_large = || format!("the gathered rows of {geometry:?} exceed the address space");
        let slot_bytes = geometry.gathered_bytes().ok_or_else(too_large)?;
        let len = slot_bytes
            .checked_mul(geometry.slots as usize)
            .ok_or_else(too_large)?;
        let mapping = direct_dcp_shm::SharedMemory::create("direct-dcp gathered", len)
            .and_then(|memory| memory.map())
            .map_err(|error| error.to_string())?;
        Ok(Private {
            mapping,
            slot_bytes,
        })
    }

    fn slot(&self, slot: u32) -> *mut u8 {
        // slot < slots, and the mapping holds that many times slot_bytes.
        self.mapping
            .as_ptr()
            .wrapping_add(slot as usize * self.slot_bytes)
    }
}

/// The right to be the one call on a lane.
struct Turn<'a>(&'a Lane);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // SYNC: turn.
        self.0.busy.store(false, Ordering::Release);
    }
}

/// The rows of all ranks, in a slot that no rank stores into until this is dropped.
#[derive(Debug)]
pub struct Held {
    lane: Arc<Lane>,
    slot: u32,
    epoch: u64,
    rows: *const u8,
    len: usize,
}

// SAFETY: `rows` points into a mapping that `lane` keeps, and is only read.
unsafe impl Send for Held {}
// SAFETY: as above.
unsafe impl Sync for Held {}

impl Held {
    /// The call that delivered these rows.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}

impl Deref for Held {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the call's launch acquired the signal of every source, so the rows are
        // complete. A peer stores into this slot again only after this rank has published call
        // epoch + S - 1, which `Lane::check` refuses while the slot is held; a failed lane never
        // publishes again. The mapping lives as long as `lane`.
        unsafe { std::slice::from_raw_parts(self.rows, self.len) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(held) = self.lane.held.get(self.slot as usize) {
            // SYNC: held.
            held.store(0, Ordering::Release);
        }
    }
}

fn size(what: &'static str, expected: usize, got: usize) -> LaunchError {
    LaunchError::Size {
        what,
        expected: expected as u64,
        got: got as u64,
    }
}
