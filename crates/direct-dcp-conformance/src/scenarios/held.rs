//! Results that are lent: how long they hold, and who is refused while they do.

use std::sync::mpsc;
use std::thread;

use direct_dcp::GatherError;
use rand::RngExt;

use super::basic::BF16;
use crate::Rank;
use crate::case::{Case, Spec};
use crate::failure::{Failure, Outcome, ensure};
use crate::probe::{Probe, fails};
use crate::reference::dice;

/// With S slots a result may be held while the next S - 2 calls are made, and not one more.
pub(super) fn slots<R: Rank>(rank: R, case: &Case) -> Outcome {
    let mut checked = 0;
    for slots in 2..=4 {
        let spec = Spec {
            slots,
            ubatches: 2,
            ..Spec::new(case, 8 * case.world, BF16)
        };
        let probe = Probe::build(&rank, spec, case.seed ^ slots as u64)?;
        // Everybody holds.
        let mut held = Vec::new();
        for _ in 1..slots {
            held.push(probe.lent(0, 5)?);
        }
        let oldest = held[0].call();
        let refused = |error: &GatherError| {
            matches!(error, GatherError::SlotInUse { ubatch: 0, epoch } if *epoch == oldest)
                && error.to_string().contains("drop it first")
        };
        let word = format!("SlotInUse of call {oldest}");
        for _ in 0..2 {
            fails(probe.try_copied(0, 4), &word, refused)?;
            fails(probe.try_lent(0, 4), &word, refused)?;
            held.iter().try_for_each(|lent| lent.verify())?;
        }
        // Another ubatch has slots of its own.
        probe.both(1, 8)?;
        held.iter().try_for_each(|lent| lent.verify())?;
        drop(held.remove(0));
        probe.copied(0, 8)?;
        held.iter().try_for_each(|lent| lent.verify())?;
        held.clear();

        // One rank holds; the others wait for it, and nothing that it holds changes.
        let holder = slots % case.world;
        let mine = probe.lent(0, 6)?;
        for _ in 2..slots {
            probe.copied(0, 2)?;
            mine.verify()?;
        }
        if rank.rank() == holder {
            fails(probe.try_copied(0, 3), "SlotInUse", |error| {
                *error
                    == GatherError::SlotInUse {
                        ubatch: 0,
                        epoch: mine.call(),
                    }
            })?;
            thread::yield_now();
            mine.verify()?;
        }
        drop(mine);
        probe.copied(0, 3)?;

        // A newer result that is held does not stand in for an older one that is not.
        let first = probe.lent(0, 1)?;
        if slots > 2 {
            let second = probe.lent(0, 2)?;
            drop(first);
            probe.copied(0, 7)?;
            second.verify()?;
        }
        checked += probe.checked();
    }
    rank.meet().map_err(Failure::from)?;
    Ok(checked)
}

/// A result that another thread drops, which is what frees the slot.
pub(super) fn elsewhere<R: Rank>(rank: R, case: &Case) -> Outcome {
    let spec = Spec::new(case, 8 * case.world, BF16);
    let probe = Probe::build(&rank, spec, case.seed)?;
    for round in 0..20 {
        let lent = probe.lent(0, 1 + round % 8)?;
        thread::scope(|scope| {
            let reader = scope.spawn(move || {
                lent.verify()?;
                thread::yield_now();
                lent.verify()
            });
            // Until then it may be held; afterwards it is not.
            if round % 2 == 0 {
                let early = probe.try_copied(0, 8)?;
                if let Err(error) = early {
                    ensure(matches!(error, GatherError::SlotInUse { .. }), || {
                        format!("{error:?}")
                    })?;
                    join(reader)?;
                    return probe.copied(0, 8);
                }
                return join(reader);
            }
            join(reader)?;
            probe.copied(0, 8)
        })?;
    }
    Ok(probe.checked())
}

fn join(thread: thread::ScopedJoinHandle<'_, Result<(), Failure>>) -> Result<(), Failure> {
    thread
        .join()
        .unwrap_or_else(|_| Err(Failure("a reader panicked".into())))
}

/// Two threads of a rank on one ubatch: one of them is told so, and the other's call is not hurt.
pub(super) fn one_call_at_a_time<R: Rank>(rank: R, case: &Case) -> Outcome {
    let spec = Spec {
        ubatches: 2,
        ..Spec::new(case, 8 * case.world, BF16)
    };
    let probe = Probe::build(&rank, spec, case.seed)?;
    for round in 0..8 {
        let crowded = round % case.world;
        if rank.rank() == crowded {
            thread::scope(|scope| {
                let (results, ended) = mpsc::channel();
                for _ in 0..2 {
                    let (probe, results) = (&probe, results.clone());
                    scope.spawn(move || results.send(probe.try_copied(0, 3)));
                }
                drop(results);
                let next = || {
                    ended
                        .recv()
                        .map_err(|_| Failure("a thread panicked".into()))
                };
                // The peers do not call before we meet them, so this is the one that is refused.
                fails(next()?, "Busy", |error| {
                    *error == GatherError::Busy { ubatch: 0 }
                })?;
                // The other ubatch is free, for whoever comes.
                rank.meet()?;
                probe.copied(1, 2)?;
                next()??.map_err(Failure::from)
            })?;
        } else {
            rank.meet()?;
            probe.copied(1, 2)?;
            probe.copied(0, 3)?;
        }
    }
    rank.meet()?;
    Ok(probe.checked())
}

/// Two threads of each rank, each with a ubatch of its own and in no order between them.
pub(super) fn ubatches_at_once<R: Rank>(rank: R, case: &Case) -> Outcome {
    let spec = Spec {
        ubatches: 2,
        slots: 3,
        ..Spec::new(case, 16 * case.world, BF16)
    };
    let probe = Probe::build(&rank, spec, case.seed)?;
    thread::scope(|scope| {
        let threads = [0, 1].map(|ubatch| {
            let probe = &probe;
            scope.spawn(move || {
                let mut sizes = dice(&[case.seed, 3, ubatch as u64]);
                for _ in 0..40 {
                    let rows = sizes.random_range(1..=16);
                    let lent = probe.lent(ubatch, rows)?;
                    probe.copied(ubatch, rows)?;
                    lent.verify()?;
                }
                Ok(())
            })
        });
        threads.into_iter().try_for_each(join)
    })?;
    rank.meet()?;
    Ok(probe.checked())
}
