//! Everything at random: sizes, delays, forms, ubatches, and results held for as long as may be.

use std::collections::VecDeque;
use std::thread;
use std::time::Duration;

use direct_dcp::{DType, GatherError, RowFormat};
use rand::RngExt;
use rand::rngs::StdRng;

use crate::case::{Case, Spec};
use crate::failure::{Failure, Outcome, ensure};
use crate::probe::{Lent, Probe, fails};
use crate::reference::dice;
use crate::{Gather, Rank};

/// Calls before everything is dropped and built anew, with other sizes; or a part of them all, for
/// not to spend the time on building.
const CALLS: u64 = 250;
const WORKSPACES: u64 = 16;

/// The most bytes of one rank's slice.
const SLICE: usize = 24 << 10;

pub(super) fn random<R: Rank>(rank: R, case: &Case) -> Outcome {
    // What all ranks must do alike, and what each does as it likes.
    let mut common = dice(&[case.seed, 4]);
    let mut own = dice(&[case.seed, 5, rank.rank() as u64]);
    let mut checked = 0;
    while checked < case.amount {
        let calls = CALLS.max(case.amount / WORKSPACES);
        let calls = calls.min(case.amount - checked);
        checked += workspace(&rank, case, calls, &mut common, &mut own)?;
    }
    Ok(checked)
}

fn workspace<R: Rank>(
    rank: &R,
    case: &Case,
    calls: u64,
    common: &mut StdRng,
    own: &mut StdRng,
) -> Outcome {
    let dtypes = [DType::F16, DType::BF16, DType::F8E4M3, DType::Bytes];
    let dim = match common.random_range(0..3) {
        0 => common.random_range(1..=40),
        1 => common.random_range(1..=700),
        _ => 576,
    };
    let format = RowFormat::new(dtypes[common.random_range(0..4)], dim);
    let most: usize = common.random_range(1..=SLICE / format.row_bytes());
    let spec = Spec {
        slots: common.random_range(2..=4),
        ubatches: common.random_range(1..=3),
        // Some have helpers, at most two.
        blocks: [1, 1, 2, 3][own.random_range(0..4)],
        ..Spec::new(case, most * case.world, format)
    };
    let (slots, ubatches) = (spec.slots as u64, spec.ubatches);
    let probe = Probe::build(rank, spec, common.random())?;
    let mut held: Vec<VecDeque<Lent<_>>> = (0..ubatches).map(|_| VecDeque::new()).collect();
    for _ in 0..calls {
        let ubatch = common.random_range(0..ubatches);
        // Mostly small, at times all that there is room for.
        let rows = match common.random_range(0..8) {
            0 => most,
            1 => 1,
            _ => common.random_range(1..=most.div_ceil(4)),
        };
        dawdle(own);
        let call = probe.next_call(ubatch);
        let lent = &mut held[ubatch];
        let too_old = |lent: &Lent<_>| lent.call() + slots - 1 <= call;
        if let Some(oldest) = lent.front().filter(|lent| too_old(lent)) {
            let epoch = oldest.call();
            if own.random_bool(0.2) {
                let expected = GatherError::SlotInUse { ubatch, epoch };
                fails(probe.try_copied(ubatch, rows), "SlotInUse", |error| {
                    *error == expected
                })?;
            }
        }
        while lent.front().is_some_and(too_old) || (!lent.is_empty() && own.random_bool(0.3)) {
            if let Some(lent) = lent.pop_front() {
                lent.verify()?;
            }
        }
        if common.random() {
            probe.copied(ubatch, rows)?;
        } else {
            lent.push_back(probe.lent(ubatch, rows)?);
        }
        let epochs = probe.gather().status().epochs;
        ensure(epochs[ubatch] == call, || {
            format!("{epochs:?} after call {call}")
        })?;
    }
    held.iter().flatten().try_for_each(Lent::verify)?;
    drop(held);
    if common.random() {
        rank.meet().map_err(Failure::from)?;
    }
    Ok(probe.checked())
}

/// Lets some time pass, or none.
fn dawdle(own: &mut StdRng) {
    match own.random_range(0..40) {
        0 => thread::sleep(Duration::from_micros(own.random_range(1..300))),
        1..=3 => thread::yield_now(),
        4..=8 => (0..own.random_range(0..2000)).for_each(|_| std::hint::spin_loop()),
        _ => {}
    }
}
