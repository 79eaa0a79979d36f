//! What only devices do: graphs, calls that are under way together, readers on other streams.

use std::time::Duration;

use direct_dcp::cuda::{Delivery, Rehearsal};
use direct_dcp::{DType, GatherError, RowFormat, Way, WorkspaceOptions};
use rand::{Rng, RngExt};

use super::final_layout::final_layout;
use super::rank::{CudaGather, CudaRank};
use crate::case::{Case, Spec};
use crate::failure::{Failure, Outcome, ensure};
use crate::reference::{Key, dice, difference, gathered, poison, rows};
use crate::scenarios::Scenario;
use crate::{Gather, Rank};

/// How long calls wait: longer than any rank that still comes is late.
const TIMEOUT: Duration = Duration::from_secs(30);

const ROWS: RowFormat = RowFormat::new(DType::BF16, 576);

const fn plain(name: &'static str) -> Scenario {
    Scenario {
        name,
        worlds: &[],
        blocks: &[1],
        repeats: 1,
        scales: false,
    }
}

/// They are run in the worlds of the backend.
pub(super) const ALL: &[Scenario] = &[
    plain("graphs"),
    Scenario {
        scales: true,
        ..plain("calls_in_flight")
    },
    plain("slow_readers"),
    plain("ways_unforced"),
    plain("final_layout"),
];

/// What one rank does in a scenario that is only for devices.
pub(super) fn part(name: &str) -> Option<fn(CudaRank, &Case) -> Outcome> {
    Some(match name {
        "graphs" => graphs,
        "calls_in_flight" => calls_in_flight,
        "slow_readers" => slow_readers,
        "ways_unforced" => ways_unforced,
        "final_layout" => final_layout,
        _ => return None,
    })
}

/// Capture, replay, an eager call, other rows, replay: the bytes are right, and the epoch counts
/// every call, on both ubatches.
fn graphs(rank: CudaRank, case: &Case) -> Outcome {
    const CALLS: u64 = 3;
    let mut checked = 0;
    for (slots, delivery) in [
        (2, Delivery::CopyOut),
        (3, Delivery::CopyOut),
        (2, Delivery::ZeroCopy),
        (3, Delivery::ZeroCopy),
    ] {
        let spec = Spec {
            slots,
            ubatches: 2,
            ..Spec::new(case, 40 * case.world, ROWS)
        };
        let gather = rank.build(&spec)?;
        let mut rehearsals = [0, 1].map(|ubatch| Replayed::new(&gather, ubatch, case.seed, slots));
        // Making graphs and memory may wait for the device, and so for a rank that waits for this
        // one; so may freeing them.
        rank.meet()?;
        for replayed in &mut rehearsals {
            let replayed = replayed.as_mut().map_err(|error| error.clone())?;
            replayed.eager(delivery, &rank)?;
            let recorded = replayed.rehearsal.record(delivery, CALLS as usize);
            if case.way == Way::CopyEngine {
                let told = matches!(&recorded, Err(GatherError::Unsupported { .. }));
                ensure(told, || format!("{recorded:?} of copies in a graph"))?;
            } else {
                recorded?;
                rank.meet()?;
                replayed.replay(1, CALLS, &rank)?;
                replayed.eager(delivery, &rank)?;
                replayed.replay(2, CALLS, &rank)?;
                replayed.replay(1, CALLS, &rank)?;
            }
            replayed.eager(Delivery::CopyOut, &rank)?;
            replayed.eager(Delivery::ZeroCopy, &rank)?;
            checked += replayed.epoch;
        }
        rank.meet()?;
    }
    Ok(checked)
}

/// One ubatch, and how many calls it must have completed.
struct Replayed<'a> {
    gather: &'a CudaGather,
    rehearsal: Rehearsal<'a>,
    key: Key,
    epoch: u64,
    slice: usize,
}

impl<'a> Replayed<'a> {
    fn new(
        gather: &'a CudaGather,
        ubatch: usize,
        seed: u64,
        slots: usize,
    ) -> Result<Self, Failure> {
        let slice = (33 + ubatch) * ROWS.row_bytes();
        Ok(Replayed {
            gather,
            rehearsal: Rehearsal::new(gather.inner(), ubatch, slice)?,
            key: Key {
                seed: seed ^ slots as u64,
                ubatch,
                call: 0,
            },
            epoch: 0,
            slice,
        })
    }

    /// Rows that were not there before, and nothing of the old ones in the output.
    fn refill(&mut self, rank: &CudaRank) -> Result<(), Failure> {
        self.key.call += 1;
        let own = rows(self.key, rank.rank(), self.slice);
        self.rehearsal.set_rows(&own)?;
        // Rows hold no zero.
        self.rehearsal.fill_out(0)?;
        Ok(())
    }

    fn eager(&mut self, delivery: Delivery, rank: &CudaRank) -> Result<(), Failure> {
        self.refill(rank)?;
        self.rehearsal.call(delivery)?;
        self.verify(1, rank)
    }

    fn replay(&mut self, times: u64, calls: u64, rank: &CudaRank) -> Result<(), Failure> {
        self.refill(rank)?;
        (0..times).try_for_each(|_| self.rehearsal.replay())?;
        self.verify(times * calls, rank)
    }

    fn verify(&mut self, calls: u64, rank: &CudaRank) -> Result<(), Failure> {
        let got = self.rehearsal.read()?;
        let expected = gathered(self.key, rank.world_size(), self.slice);
        ensure(got == expected, || {
            let wrong = difference(&got, &expected, self.slice);
            format!("after {calls} more calls than {}, {wrong}", self.epoch)
        })?;
        self.epoch += calls;
        let epochs = self.gather.status().epochs;
        ensure(epochs[self.key.ubatch] == self.epoch, || {
            format!("{epochs:?} after {} calls", self.epoch)
        })?;
        // What a slot lends is read before anybody goes on.
        Ok(rank.meet()?)
    }
}

/// Many calls, of sizes at random, are submitted before the first is looked at. Then every byte of
/// the storage is looked at, also those that no call may touch.
fn calls_in_flight(rank: CudaRank, case: &Case) -> Outcome {
    let mut rng = dice(&[case.seed, 13]);
    let mut checked = 0;
    // Each with an access of another width.
    let formats = [
        ROWS,
        RowFormat::new(DType::Bytes, 3),
        RowFormat::new(DType::F16, 3),
        RowFormat::new(DType::BF16, 18),
        RowFormat::new(DType::F8E4M3, 656),
        RowFormat::new(DType::Bytes, 88),
    ];
    let each = case.amount.div_ceil(formats.len() as u64);
    for (index, format) in formats.into_iter().enumerate() {
        let most = 8.max(4096 / format.row_bytes());
        let spec = Spec {
            slots: rng.random_range(2..=4),
            ubatches: 2,
            ..Spec::new(case, most * case.world, format)
        };
        let gather = rank.build(&spec)?;
        let mut keys = [0, 1].map(|ubatch| Key {
            seed: case.seed ^ index as u64,
            ubatch,
            call: 0,
        });
        let (goal, align) = (checked + each, 1_usize << rng.random_range(0..=4));
        while checked < goal {
            let count = rng.random_range(1..=24);
            let (mut end, mut calls, mut used) = (0, Vec::new(), Vec::new());
            // As `Desk` has room for.
            let room = most * case.world * format.row_bytes();
            while calls.len() < count && end < room {
                let key = &mut keys[rng.random_range(0..2)];
                key.call += 1;
                let slice = rng.random_range(1..=most) * format.row_bytes();
                let mut place = |bytes: usize| {
                    let start = (end + rng.random_range(1..40)).next_multiple_of(align);
                    end = start + bytes;
                    start..end
                };
                let (local, out) = (place(slice), place(slice * case.world));
                calls.push((key.ubatch, local, out));
                used.push(*key);
            }
            let mut storage = vec![0; end + 64];
            rng.fill_bytes(&mut storage);
            let mut wanted = storage.clone();
            for ((_, local, out), key) in calls.iter().zip(&used) {
                let own = rows(*key, rank.rank(), local.len());
                let all = gathered(*key, case.world, local.len());
                storage[out.clone()].copy_from_slice(&poison(&mut rng, &all));
                for bytes in [&mut storage, &mut wanted] {
                    bytes[local.clone()].copy_from_slice(&own);
                }
                wanted[out.clone()].copy_from_slice(&all);
            }
            gather.gather_all(&calls, &mut storage)?;
            ensure(storage == wanted, || {
                let wrong = difference(&storage, &wanted, storage.len());
                format!("after {calls:?}: {wrong}")
            })?;
            checked += calls.len() as u64;
        }
        let epochs = gather.status().epochs;
        ensure(epochs == keys.map(|key| key.call), || {
            format!("{epochs:?} after {keys:?}")
        })?;
        rank.meet()?;
    }
    Ok(checked)
}

/// A reader on another stream holds up the call that would have its rows overwritten.
fn slow_readers(rank: CudaRank, case: &Case) -> Outcome {
    let gather = rank.build(&Spec::new(case, 9 * case.world, ROWS))?;
    let mut checked = 0;
    for call in 1..=3 {
        let key = Key {
            seed: case.seed,
            ubatch: 0,
            call,
        };
        let slice = 9 * ROWS.row_bytes();
        let own = rows(key, rank.rank(), slice);
        let (found, early) = gather.read_slowly(&own, || rank.meet())?;
        let expected = gathered(key, case.world, slice);
        ensure(found == expected, || {
            let wrong = difference(&found, &expected, slice);
            format!("what a slow reader found in its slot: {wrong}")
        })?;
        ensure(!early, || "a call did not wait for a slow reader".into())?;
        checked += 3;
    }
    Ok(checked)
}

/// The group's own choice, which all ranks make alike, and the algorithm that it never chooses.
fn ways_unforced(rank: CudaRank, case: &Case) -> Outcome {
    let mut checked = 0;
    for way in [None, Some(Way::Staged)] {
        let options = WorkspaceOptions::new(64 * case.world, ROWS);
        let options = way.into_iter().fold(options, WorkspaceOptions::way);
        let gather = rank.with(options, TIMEOUT)?;
        let taken = gather.inner().workspace().way();
        // Ranks on one device have no multicast.
        ensure(taken == way.unwrap_or(Way::Push), || {
            format!("{taken} was taken where {way:?} was asked for")
        })?;
        for call in 1..=20 {
            let key = Key {
                seed: case.seed,
                ubatch: 0,
                call,
            };
            let slice = (1 + call as usize * 3) * ROWS.row_bytes();
            let mut storage = rows(key, rank.rank(), slice);
            storage.resize(slice * (1 + case.world), 0);
            gather.gather_into(0, &mut storage, 0..slice, slice..slice * (1 + case.world))?;
            let expected = gathered(key, case.world, slice);
            ensure(storage[slice..] == expected, || {
                let wrong = difference(&storage[slice..], &expected, slice);
                format!("call {call} by {taken}: {wrong}")
            })?;
            checked += 1;
        }
        rank.meet()?;
    }
    Ok(checked)
}
