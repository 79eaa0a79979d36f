//! Ranks that do not do the same: every one is told, with both sides, and none gets wrong bytes.

use std::time::Duration;

use direct_dcp::{DType, GatherError, RowFormat, Way, WorkspaceError};
use rand::RngExt;

use super::basic::BF16;
use super::recovered;
use crate::case::{Case, Spec};
use crate::failure::{Outcome, ensure};
use crate::probe::{Probe, fails};
use crate::reference::dice;
use crate::{Gather, Rank};

/// One rank gathers another number of rows.
pub(super) fn rows<R: Rank>(rank: R, case: &Case) -> Outcome {
    let mut rng = dice(&[case.seed, 6]);
    let odd = rng.random_range(0..case.world);
    let most = 8;
    let probe = Probe::build(&rank, Spec::new(case, most * case.world, BF16), case.seed)?;
    for _ in 0..rng.random_range(0..4) {
        probe.both(0, rng.random_range(1..=most))?;
    }
    let usual = rng.random_range(1..most);
    let unusual = rng.random_range(usual + 1..=most);
    let (usual, unusual) = if rng.random() {
        (usual, unusual)
    } else {
        (unusual, usual)
    };
    let (ours, theirs) = if rank.rank() == odd {
        (unusual, usual)
    } else {
        (usual, unusual)
    };
    let both_sides = |error: &GatherError| {
        let GatherError::Mismatch {
            source_rank,
            field,
            ours: our,
            theirs: their,
        } = error
        else {
            return false;
        };
        let named = if rank.rank() == odd {
            *source_rank != odd
        } else {
            *source_rank == odd
        };
        named && *field == "rows" && (*our, *their) == (ours as u64, theirs as u64)
    };
    let expected = format!("Mismatch of rows, {ours} here and {theirs} there, rank {odd} is odd");
    if rng.random() {
        fails(probe.try_copied(0, ours), &expected, both_sides)?;
    } else {
        fails(probe.try_lent(0, ours), &expected, both_sides)?;
    }
    poisoned(&probe, usual)?;
    let (_, more) = recovered(&rank, case, case.world)?;
    Ok(probe.checked() + more)
}

/// One rank asks for another workspace, in one way after another.
pub(super) fn options<R: Rank>(rank: R, case: &Case) -> Outcome {
    let good = || Spec::new(case, 8 * case.world, BF16);
    let other_way = match case.way {
        Way::Push => Way::Pull,
        _ => Way::Push,
    };
    let other = [
        (
            "dtype",
            Spec {
                format: RowFormat::new(DType::F16, BF16.dim()),
                ..good()
            },
        ),
        (
            "dim",
            Spec {
                format: RowFormat::new(DType::BF16, BF16.dim() + 1),
                ..good()
            },
        ),
        (
            "capacity_rows",
            Spec {
                capacity: 16 * case.world,
                ..good()
            },
        ),
        ("slots", Spec { slots: 3, ..good() }),
        (
            "ubatches",
            Spec {
                ubatches: 2,
                ..good()
            },
        ),
        (
            "way",
            Spec {
                way: other_way,
                ..good()
            },
        ),
    ];
    for (index, (wanted, spec)) in other.into_iter().enumerate() {
        let odd = (index + case.seed as usize % case.world) % case.world;
        let spec = if rank.rank() == odd { spec } else { good() };
        let error = rank.build(&spec).err();
        let fits = match &error {
            Some(WorkspaceError::Mismatch {
                source_rank,
                field,
                ours,
                theirs,
            }) => {
                let named = (rank.rank() == odd) != (*source_rank == odd);
                named && *field == wanted && ours != theirs
            }
            _ => false,
        };
        ensure(fits, || {
            format!("{error:?} where rank {odd} has another {wanted}")
        })?;
    }
    let probe = Probe::build(&rank, good(), case.seed)?;
    probe.both(0, 8)?;
    Ok(probe.checked())
}

/// One rank makes a call that nobody else makes.
pub(super) fn one_call_more<R: Rank>(rank: R, case: &Case) -> Outcome {
    let odd = case.seed as usize % case.world;
    let spec = Spec {
        timeout: Duration::from_millis(400),
        ..Spec::new(case, 8 * case.world, BF16)
    };
    let probe = Probe::build(&rank, spec, case.seed)?;
    rank.meet()?;
    for _ in 0..3 {
        probe.both(0, 4)?;
    }
    if rank.rank() == odd {
        let others: Vec<usize> = (0..case.world).filter(|&rank| rank != odd).collect();
        let expected = format!("Timeout of call 7, missing {others:?}");
        fails(
            probe.try_copied(0, 4),
            &expected,
            |error| matches!(error, GatherError::Timeout { epoch: 7, missing, .. } if *missing == others),
        )?;
    }
    rank.meet()?;
    // Those who come later find that one of them has given up.
    if rank.rank() != odd {
        fails(probe.try_copied(0, 4), "PeerLost", |error| {
            matches!(error, GatherError::PeerLost { .. })
        })?;
    }
    poisoned(&probe, 4)?;
    let (_, more) = recovered(&rank, case, case.world)?;
    Ok(probe.checked() + more)
}

/// One rank skips a call, and so takes its next one for the others' last.
pub(super) fn one_call_less<R: Rank>(rank: R, case: &Case) -> Outcome {
    let odd = case.seed as usize % case.world;
    let probe = Probe::build(&rank, Spec::new(case, 8 * case.world, BF16), case.seed)?;
    probe.both(0, 4)?;
    let ours = if rank.rank() == odd {
        probe.skip(0);
        6
    } else {
        5
    };
    fails(probe.try_copied(0, ours), "Mismatch of rows", |error| {
        matches!(error, GatherError::Mismatch { field: "rows", .. })
    })?;
    poisoned(&probe, ours)?;
    let (_, more) = recovered(&rank, case, case.world)?;
    // The call that was skipped does not count.
    Ok(probe.checked() + more - u64::from(rank.rank() == odd))
}

/// After a failure, calls on every ubatch fail at once, and the status tells why. Where a device
/// finds the fault, calls were submitted before anybody knew, so later ones say it themselves.
pub(super) fn poisoned<G: Gather>(probe: &Probe<G>, rows: usize) -> Result<(), crate::Failure> {
    let status = probe.gather().status();
    ensure(status.failure.is_some(), || {
        format!("{status:?} after a failure")
    })?;
    for ubatch in 0..status.epochs.len() {
        let is_poisoned = |error: &GatherError| {
            let cause = match error {
                GatherError::Poisoned { cause } => cause,
                error => &error.to_string(),
            };
            Some(cause) == status.failure.as_ref()
        };
        fails(probe.try_copied(ubatch, rows), "Poisoned", is_poisoned)?;
        fails(probe.try_lent(ubatch, rows), "Poisoned", is_poisoned)?;
    }
    let after = probe.gather().status();
    ensure(after == status, || format!("{after:?} was {status:?}"))
}
