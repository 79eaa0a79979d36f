//! Ranks that do not come in time.

use std::time::Duration;

use direct_dcp::GatherError;
use rand::RngExt;

use super::basic::BF16;
use super::disagree::poisoned;
use super::recovered;
use crate::case::{Case, Spec};
use crate::failure::Outcome;
use crate::probe::{Probe, fails};
use crate::reference::dice;
use crate::{Gather, Rank};

const DEADLINE: Duration = Duration::from_millis(400);

/// One rank does not call: the others name it, once the deadline has passed and not before.
pub(super) fn missing_rank<R: Rank>(rank: R, case: &Case) -> Outcome {
    let (probe, _) = up_to_the_deadline(&rank, case)?;
    rank.meet()?;
    // It is alive all the while.
    let (_, more) = recovered(&rank, case, case.world)?;
    Ok(probe.checked() + more)
}

/// One rank calls when the others have given up: it is told that there is no next call.
pub(super) fn past<R: Rank>(rank: R, case: &Case) -> Outcome {
    let (probe, late) = up_to_the_deadline(&rank, case)?;
    rank.meet()?;
    if rank.rank() == late {
        attempt(
            &probe,
            case,
            "PeerLost",
            |error| matches!(error, GatherError::PeerLost { rank } if *rank != late),
        )?;
        poisoned(&probe, 4)?;
    }
    let (_, more) = recovered(&rank, case, case.world)?;
    Ok(probe.checked() + more)
}

/// Some good calls, then one that the rank which is returned does not make.
fn up_to_the_deadline<R: Rank>(
    rank: &R,
    case: &Case,
) -> Result<(Probe<R::Gather>, usize), crate::Failure> {
    let mut rng = dice(&[case.seed, 7]);
    let absent = rng.random_range(0..case.world);
    let spec = Spec {
        timeout: DEADLINE,
        ubatches: 2,
        ..Spec::new(case, 8 * case.world, BF16)
    };
    let probe = Probe::build(rank, spec, case.seed)?;
    rank.meet()?;
    let good = rng.random_range(0..4);
    for _ in 0..good {
        probe.copied(0, 4)?;
    }
    let in_time = |error: &GatherError| match error {
        GatherError::Timeout {
            epoch,
            missing,
            waited,
        } => *epoch == good + 1 && *missing == [absent] && *waited >= DEADLINE,
        _ => false,
    };
    if rank.rank() != absent {
        let expected = format!("Timeout of call {}, missing [{absent}]", good + 1);
        attempt(&probe, case, &expected, in_time)?;
        poisoned(&probe, 4)?;
    } else {
        let status = probe.gather().status();
        crate::failure::ensure(status.failure.is_none(), || format!("{status:?}"))?;
    }
    Ok((probe, absent))
}

/// A call that fails, of the same form on all ranks.
fn attempt<G: Gather>(
    probe: &Probe<G>,
    case: &Case,
    expected: &str,
    fits: impl Fn(&GatherError) -> bool,
) -> Result<(), crate::Failure> {
    if dice(&[case.seed, 12, case.world as u64]).random() {
        fails(probe.try_copied(0, 4), expected, fits)?;
    } else {
        fails(probe.try_lent(0, 4), expected, fits)?;
    }
    Ok(())
}
