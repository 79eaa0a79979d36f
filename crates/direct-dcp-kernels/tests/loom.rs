//! The protocol under loom: two ranks of two blocks make three calls over two slots.
//!
//! Every block is a model thread; rows are `loom` cells, so a store that is not ordered before a
//! load, or after it, is reported as a causality violation whatever the values are. Exploration
//! is bounded to [`PREEMPTIONS`] preemptions per execution (all executions within that bound are
//! visited). The mutants at the end break one rule each and must be caught.
//!
//! A wait does not spin: where the awaited store has not been made, the thread blocks until it is.
//! The wake-up orders more than the protocol does, but only in executions that block, and each of
//! those has a twin, also visited, in which the waiter runs later and finds the store made.

#![allow(unsafe_code, clippy::unwrap_used)]

use std::cell::Cell;
use std::num::NonZeroU32;
use std::sync::atomic::AtomicU64 as StdAtomicU64;
use std::sync::{Arc as StdArc, Mutex as StdMutex};

use direct_dcp_kernels::protocol::{gather, slot_of};
use direct_dcp_kernels::{Call, Fault, Interrupt, Machine, Shape};
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use loom::sync::{Arc, Condvar, Mutex};

const RANKS: u32 = 2;
const BLOCKS: u32 = 2;
const PREEMPTIONS: usize = 1;
/// A row, and a cell, for each block.
const SHAPE: Shape = Shape {
    rows: BLOCKS,
    row_bytes: 8,
    digest: 7,
};

/// The value that block `block` of `rank` stores in call `epoch`.
fn value(rank: u32, block: u32, epoch: u64) -> u64 {
    1_000 * u64::from(rank + 1) + 10 * epoch + u64::from(block)
}

/// Which rule the machine breaks.
#[derive(Clone, Copy, PartialEq)]
enum Mutant {
    None,
    ArriveWithoutAcquire,
    PublishBeforeAllArrived,
    WaitWithoutAcquire,
}

#[derive(Clone, Copy, PartialEq)]
enum Delivery {
    CopyOut,
    /// The caller reads the slot until it issues call e + S - 1, or `late` calls longer.
    ZeroCopy {
        late: u64,
    },
}

#[derive(Clone, Copy)]
struct Setup {
    /// One region for all ranks, or one each.
    regions: u32,
    slots: u32,
    calls: u64,
    delivery: Delivery,
    mutant: Mutant,
}

/// A word whose waiter blocks, seen by no thread but ours: loom does not know of it.
#[derive(Default)]
struct Awaited {
    /// The newest value.
    now: StdAtomicU64,
    waiter: StdMutex<Option<loom::thread::Thread>>,
}

impl Awaited {
    /// Lets others run, until the word is no longer `seen`.
    fn wait_while(&self, seen: u64) {
        if self.now.load(Ordering::Relaxed) == seen {
            *self.waiter.lock().unwrap() = Some(loom::thread::current());
            loom::thread::park();
        } else {
            // The store is made, but loom showed us an older value. That is as if we had looked
            // before it: the rest of this execution teaches nothing new.
            loom::skip_branch();
            loom::thread::yield_now();
        }
    }

    fn changed(&self, value: u64) {
        self.now.store(value, Ordering::Relaxed);
        if let Some(waiter) = self.waiter.lock().unwrap().take() {
            waiter.unpark();
        }
    }
}

/// Symmetric memory: the slots and signals of one region.
struct Region {
    rows: Vec<UnsafeCell<u64>>,
    signals: Vec<AtomicU32>,
    shapes: Vec<UnsafeCell<Shape>>,
}

/// What a rank keeps to itself.
struct Rank {
    epoch: AtomicU64,
    arrivals: AtomicU32,
    /// Blocks that have reached a launch boundary, over all calls.
    boundary: Mutex<u32>,
    all_there: Condvar,
    /// The epoch, for the block that follows.
    followed: Awaited,
    /// For each slot and source, the signal in this rank's view, for the block that waits.
    awaited: Vec<Awaited>,
    /// Output, a cell for each source and block.
    out: Vec<UnsafeCell<u64>>,
}

struct World {
    setup: Setup,
    regions: Vec<Region>,
    ranks: Vec<Rank>,
}

impl World {
    fn new(setup: Setup) -> Self {
        let cells = |count: u32| (0..count).map(|_| UnsafeCell::new(0)).collect();
        let words = setup.slots * RANKS;
        World {
            setup,
            regions: (0..setup.regions)
                .map(|_| Region {
                    rows: cells(words * BLOCKS),
                    signals: (0..words).map(|_| AtomicU32::new(0)).collect(),
                    shapes: (0..words)
                        .map(|_| {
                            UnsafeCell::new(Shape {
                                rows: 0,
                                row_bytes: 0,
                                digest: 0,
                            })
                        })
                        .collect(),
                })
                .collect(),
            ranks: (0..RANKS)
                .map(|_| Rank {
                    epoch: AtomicU64::new(0),
                    arrivals: AtomicU32::new(0),
                    boundary: Mutex::new(0),
                    all_there: Condvar::new(),
                    followed: Awaited::default(),
                    awaited: (0..words).map(|_| Awaited::default()).collect(),
                    out: cells(RANKS * BLOCKS),
                })
                .collect(),
        }
    }
}

/// One block of one rank.
struct Block {
    world: Arc<World>,
    rank: u32,
    block: u32,
    /// The call under way, for the values that it stores.
    call: Cell<u64>,
}

impl Block {
    fn me(&self) -> &Rank {
        &self.world.ranks[self.rank as usize]
    }

    fn own(&self) -> &Region {
        &self.world.regions[(self.rank % self.world.setup.regions) as usize]
    }

    /// A launch boundary: all blocks of the rank are done with what came before.
    fn boundary(&self) {
        let mut arrived = self.me().boundary.lock().unwrap();
        *arrived += 1;
        let all = arrived.next_multiple_of(BLOCKS);
        if *arrived == all {
            self.me().all_there.notify_all();
        }
        while *arrived < all {
            arrived = self.me().all_there.wait(arrived).unwrap();
        }
    }

    /// Reads this block's part of every slice of call `epoch` from the slot.
    fn read_slot(&self, epoch: u64) {
        let slot = slot_of(epoch, NonZeroU32::new(self.world.setup.slots).unwrap());
        for source in 0..RANKS {
            let at = ((slot * RANKS + source) * BLOCKS + self.block) as usize;
            // SAFETY: loom checks that no store is concurrent.
            let got = self.own().rows[at].with(|cell| unsafe { *cell });
            assert_eq!(
                got,
                value(source, self.block, epoch),
                "stale or future rows"
            );
        }
    }

    fn run(&self) {
        let setup = self.world.setup;
        let call = Call {
            world_size: NonZeroU32::new(RANKS).unwrap(),
            rank: self.rank,
            slots: NonZeroU32::new(setup.slots).unwrap(),
            shape: SHAPE,
            copy_out: setup.delivery == Delivery::CopyOut,
            timeout: u64::MAX,
        };
        for epoch in 1..=setup.calls {
            self.call.set(epoch);
            gather(self, &call);
            self.boundary();
            match setup.delivery {
                Delivery::CopyOut => {
                    for source in 0..RANKS {
                        let at = (source * BLOCKS + self.block) as usize;
                        // SAFETY: loom checks that no store is concurrent.
                        let got = self.me().out[at].with(|cell| unsafe { *cell });
                        assert_eq!(
                            got,
                            value(source, self.block, epoch),
                            "stale or future rows"
                        );
                    }
                }
                Delivery::ZeroCopy { late } => {
                    // The oldest call whose rows may still be read here, before the next is
                    // issued.
                    let held = u64::from(setup.slots) - 2 + late;
                    if epoch > held {
                        self.read_slot(epoch - held);
                    }
                }
            }
        }
    }
}

impl Machine for Block {
    const POLLS_PER_LOOK: u32 = 1;
    fn block(&self) -> u32 {
        self.block
    }
    fn blocks(&self) -> NonZeroU32 {
        NonZeroU32::new(BLOCKS).unwrap()
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
        self.me().epoch.load(Ordering::Relaxed)
    }
    fn poisoned(&self) -> bool {
        false
    }
    fn advance(&self, epoch: u64) {
        self.me().epoch.store(epoch, Ordering::Release);
        self.me().followed.changed(epoch);
    }
    fn poison(&self) {
        panic!("no call fails here");
    }
    fn outcome(&self, epoch: u64) -> Option<bool> {
        (self.me().epoch.load(Ordering::Acquire) == epoch).then_some(true)
    }
    fn arrive(&self) -> u32 {
        let order = match self.world.setup.mutant {
            Mutant::ArriveWithoutAcquire => Ordering::Release,
            _ => Ordering::AcqRel,
        };
        let before = self.me().arrivals.fetch_add(1, order);
        match self.world.setup.mutant {
            // The first block takes itself for the last.
            Mutant::PublishBeforeAllArrived => BLOCKS - 1 - before % BLOCKS,
            _ => before,
        }
    }
    fn reset_arrivals(&self) {
        // A fresh launch counts from zero; the mutant's first block must not hide the second.
        if self.world.setup.mutant != Mutant::PublishBeforeAllArrived {
            self.me().arrivals.store(0, Ordering::Relaxed);
        }
    }
    fn store(&self, slot: impl FnOnce() -> Option<u32>) -> Option<u32> {
        let slot = slot()?;
        let at = ((slot * RANKS + self.rank) * BLOCKS + self.block) as usize;
        let epoch = self.call.get();
        for region in &self.world.regions {
            // SAFETY: loom checks that nobody else accesses the cell.
            region.rows[at].with_mut(|cell| unsafe { *cell = value(self.rank, self.block, epoch) });
        }
        Some(slot)
    }
    fn take(&self, slot: u32, source: u32) {
        let at = ((slot * RANKS + source) * BLOCKS + self.block) as usize;
        // SAFETY: loom checks that no store is concurrent.
        let rows = self.own().rows[at].with(|cell| unsafe { *cell });
        let to = (source * BLOCKS + self.block) as usize;
        // SAFETY: as above.
        self.me().out[to].with_mut(|cell| unsafe { *cell = rows });
    }
    fn receivers(&self) -> NonZeroU32 {
        NonZeroU32::new(self.world.setup.regions).unwrap()
    }
    fn publish(&self, receiver: u32, slot: u32, shape: Shape, epoch: u32) {
        let region = &self.world.regions[receiver as usize];
        let at = (slot * RANKS + self.rank) as usize;
        // SAFETY: loom checks that nobody else accesses the cell.
        region.shapes[at].with_mut(|cell| unsafe { *cell = shape });
        region.signals[at].store(epoch, Ordering::Release);
        for (rank, state) in (0..).zip(&self.world.ranks) {
            if rank % self.world.setup.regions == receiver {
                state.awaited[at].changed(epoch.into());
            }
        }
    }
    fn observe(&self, slot: u32, source: u32) -> u32 {
        let order = match self.world.setup.mutant {
            Mutant::WaitWithoutAcquire => Ordering::Relaxed,
            _ => Ordering::Acquire,
        };
        self.own().signals[(slot * RANKS + source) as usize].load(order)
    }
    fn shape(&self, slot: u32, source: u32) -> Shape {
        let at = (slot * RANKS + source) as usize;
        // SAFETY: loom checks that no store is concurrent.
        self.own().shapes[at].with(|cell| unsafe { *cell })
    }
    fn failed_peer(&self) -> Option<u32> {
        None
    }
    fn now(&self) -> u64 {
        0
    }
    fn pause(&self, slot: u32, source: u32, seen: u32, _: u32, _: u64) -> Result<(), Interrupt> {
        self.me().awaited[(slot * RANKS + source) as usize].wait_while(seen.into());
        Ok(())
    }
    fn relax(&self, _: u32) {
        self.me().followed.wait_while(self.call.get() - 1);
    }
    fn fail(&self, fault: Fault) {
        panic!("a fault where none can be: {fault:?}");
    }
}

fn explore(setup: Setup) {
    let executions = StdArc::new(std::sync::atomic::AtomicU64::new(0));
    let count = executions.clone();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.max_branches = 100_000;
    builder.check(move || {
        count.fetch_add(1, Ordering::Relaxed);
        let world = Arc::new(World::new(setup));
        let block = |index: u32| Block {
            world: world.clone(),
            rank: index / BLOCKS,
            block: index % BLOCKS,
            call: Cell::new(0),
        };
        let others: Vec<_> = (1..RANKS * BLOCKS)
            .map(|index| {
                let block = block(index);
                loom::thread::spawn(move || block.run())
            })
            .collect();
        block(0).run();
        for other in others {
            other.join().unwrap();
        }
    });
    println!("{} executions", executions.load(Ordering::Relaxed));
}

const SOUND: Setup = Setup {
    regions: RANKS,
    slots: 2,
    calls: 3,
    delivery: Delivery::CopyOut,
    mutant: Mutant::None,
};

#[test]
fn copy_out_from_a_slot_per_rank() {
    explore(SOUND);
}

#[test]
fn copy_out_from_a_shared_slot() {
    explore(Setup {
        regions: 1,
        ..SOUND
    });
}

#[test]
fn zero_copy_from_a_slot_per_rank() {
    explore(Setup {
        delivery: Delivery::ZeroCopy { late: 0 },
        ..SOUND
    });
}

#[test]
fn zero_copy_from_a_shared_slot() {
    explore(Setup {
        regions: 1,
        delivery: Delivery::ZeroCopy { late: 0 },
        ..SOUND
    });
}

#[test]
#[should_panic = "Causality violation"]
fn mutant_arrive_without_acquire() {
    explore(Setup {
        mutant: Mutant::ArriveWithoutAcquire,
        ..SOUND
    });
}

#[test]
#[should_panic = "stale or future rows"]
fn mutant_publish_before_all_blocks_arrived() {
    explore(Setup {
        mutant: Mutant::PublishBeforeAllArrived,
        ..SOUND
    });
}

#[test]
#[should_panic = "Causality violation"]
fn mutant_wait_without_acquire() {
    explore(Setup {
        mutant: Mutant::WaitWithoutAcquire,
        ..SOUND
    });
}

#[test]
#[should_panic = "Causality violation"]
fn mutant_one_slot() {
    explore(Setup { slots: 1, ..SOUND });
}

#[test]
#[should_panic = "Causality violation"]
fn mutant_zero_copy_result_read_one_call_too_long() {
    explore(Setup {
        delivery: Delivery::ZeroCopy { late: 1 },
        ..SOUND
    });
}
