//! Ranks that leave: by returning, which drops all they have and ends a process, or by a panic.

use std::panic;

use direct_dcp::GatherError;
use rand::RngExt;

use super::basic::BF16;
use super::disagree::poisoned;
use super::recovered;
use crate::Rank;
use crate::case::{Case, Spec};
use crate::failure::Outcome;
use crate::probe::{Probe, fails};
use crate::reference::dice;

/// What a rank panics with that is meant to.
#[derive(Debug)]
pub struct Deliberate;

/// A rank leaves between two calls that it should make. The others name it, and go on.
pub(super) fn midway<R: Rank>(rank: R, case: &Case) -> Outcome {
    without(rank, case, || ())
}

/// A rank panics between two calls.
pub(super) fn panics<R: Rank>(rank: R, case: &Case) -> Outcome {
    // Not panic!, which would write about it.
    without(rank, case, || panic::resume_unwind(Box::new(Deliberate)))
}

fn without<R: Rank>(rank: R, case: &Case, leave: impl FnOnce()) -> Outcome {
    let mut rng = dice(&[case.seed, 9]);
    let leaver = rng.random_range(0..case.world);
    let probe = Probe::build(&rank, Spec::new(case, 8 * case.world, BF16), case.seed)?;
    for _ in 0..rng.random_range(0..4) {
        probe.both(0, 4)?;
    }
    // The others are all done with their last call, or may not be.
    if rng.random() {
        rank.meet()?;
    }
    // Gone before the probe is, however this ends: a rank leaves before it frees memory, for which
    // a device waits until nobody's call waits for this rank.
    let rank = rank;
    if rank.rank() == leaver {
        leave();
        return Ok(probe.checked());
    }
    let lost = |error: &GatherError| *error == GatherError::PeerLost { rank: leaver };
    let expected = format!("PeerLost of rank {leaver}");
    if rng.random() {
        fails(probe.try_copied(0, 4), &expected, lost)?;
    } else {
        fails(probe.try_lent(0, 4), &expected, lost)?;
    }
    poisoned(&probe, 4)?;
    if case.world == 2 {
        return Ok(probe.checked());
    }
    let (_, more) = recovered(&rank, case, case.world - 1)?;
    Ok(probe.checked() + more)
}

/// Every rank leaves as soon as its own last call is done, whether or not the others' is.
pub(super) fn after_the_last_call<R: Rank>(rank: R, case: &Case) -> Outcome {
    let mut rng = dice(&[case.seed, 10]);
    let probe = Probe::build(&rank, Spec::new(case, 8 * case.world, BF16), case.seed)?;
    let lends: bool = rng.random();
    for _ in 0..rng.random_range(1..4) {
        let rows = rng.random_range(1..=8);
        if lends {
            probe.lent(0, rows)?.verify()?;
        } else {
            probe.copied(0, rows)?;
        }
    }
    Ok(probe.checked())
}
