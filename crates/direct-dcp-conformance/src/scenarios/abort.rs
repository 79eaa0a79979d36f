//! A group that is aborted while its ranks wait.

use std::thread;
use std::time::{Duration, Instant};

use direct_dcp::{GatherError, GroupError};
use rand::RngExt;

use super::basic::BF16;
use super::disagree::poisoned;
use super::recovered;
use crate::Rank;
use crate::case::{Case, Spec};
use crate::failure::{Failure, Outcome, ensure};
use crate::probe::{Probe, fails};
use crate::reference::dice;

/// Far below the deadline of a call, which would end the wait as well.
const PROMPT: Duration = Duration::from_secs(10);

/// All but one rank wait in a gather; another thread of some rank aborts.
pub(super) fn while_waiting<R: Rank>(rank: R, case: &Case) -> Outcome {
    let mut rng = dice(&[case.seed, 8]);
    let absent = rng.random_range(0..case.world);
    // A rank that waits itself, or the one that the others wait for.
    let by = rng.random_range(0..case.world);
    let probe = Probe::build(&rank, Spec::new(case, 8 * case.world, BF16), case.seed)?;
    for _ in 0..rng.random_range(0..3) {
        probe.both(0, 4)?;
    }
    // Spinning, yielding or asleep.
    let moment = Duration::from_micros(rng.random_range(0..60_000));
    if rank.rank() == by {
        let abort = rank.aborter();
        thread::spawn(move || {
            thread::sleep(moment);
            abort();
        });
    }
    let started = Instant::now();
    if rank.rank() == absent {
        // Unless somebody is so quick that it has begun to rebuild already.
        let error = rank.meet();
        let fits = match error {
            Err(GroupError::Aborted { by: rank }) => rank == by,
            Err(GroupError::Rebuilding { .. }) => true,
            _ => false,
        };
        ensure(fits, || {
            format!("expected Aborted by rank {by}, got {error:?}")
        })?;
    } else {
        let expected = format!("Aborted by rank {by}");
        fails(probe.try_copied(0, 4), &expected, |error| {
            *error == GatherError::Aborted { by }
        })?;
        poisoned(&probe, 4)?;
    }
    let waited = started.elapsed();
    ensure(waited < PROMPT, || format!("aborted after {waited:?}"))?;
    if rank.rank() == absent {
        // It comes late, and the reason is still the abort.
        late(&probe, by)?;
        poisoned(&probe, 4)?;
    }
    let (_, more) = recovered(&rank, case, case.world)?;
    Ok(probe.checked() + more)
}

fn late<G: crate::Gather>(probe: &Probe<G>, by: usize) -> Result<(), Failure> {
    let expected = format!("Aborted by rank {by}");
    fails(probe.try_copied(0, 4), &expected, |error| {
        *error == GatherError::Aborted { by }
    })?;
    Ok(())
}
