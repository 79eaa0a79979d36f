//! The plain operation: the rows of all ranks, in rank order.

use std::time::Duration;

use direct_dcp::{DType, GatherError, RowFormat};
use rand::RngExt;

use crate::case::{Case, Spec};
use crate::failure::{Failure, Outcome, ensure};
use crate::probe::{Probe, fails};
use crate::reference::dice;
use crate::{Gather, Rank};

/// A row that is a whole number of 16 bytes, but not much.
pub(super) const BF16: RowFormat = RowFormat::new(DType::BF16, 24);

/// Rows of an MLA cache in every type; 1, 128 and 17 in turn, on two ubatches in turn.
pub(super) fn rank_major<R: Rank>(rank: R, case: &Case) -> Outcome {
    let mut checked = 0;
    for dtype in [DType::BF16, DType::F16, DType::F8E4M3, DType::Bytes] {
        let spec = Spec {
            ubatches: 2,
            ..Spec::new(case, 128 * case.world, RowFormat::new(dtype, 576))
        };
        let probe = Probe::build(&rank, spec, case.seed ^ dtype.to_string().len() as u64)?;
        for rows in [1, 128, 17] {
            for ubatch in [0, 1] {
                probe.both(ubatch, rows)?;
            }
        }
        checked += probe.checked();
    }
    Ok(checked)
}

/// Rows that are no multiple of 16 bytes, nor of anything else.
pub(super) fn rows_of_any_size<R: Rank>(rank: R, case: &Case) -> Outcome {
    let mut checked = 0;
    let bytes = [1, 3, 6, 15, 17, 656, 1151].map(|dim| RowFormat::new(DType::Bytes, dim));
    for format in bytes.into_iter().chain([RowFormat::new(DType::F16, 3)]) {
        let probe = Probe::build(&rank, Spec::new(case, 19 * case.world, format), case.seed)?;
        for rows in [1, 19, 2, 7] {
            probe.both(0, rows)?;
        }
        checked += probe.checked();
    }
    Ok(checked)
}

/// Ranks that split their work differently still fit together.
pub(super) fn blocks_of_any_number<R: Rank>(rank: R, case: &Case) -> Outcome {
    let spec = Spec {
        blocks: 1 + rank.rank() % 4,
        ..Spec::new(case, 40 * case.world, RowFormat::new(DType::Bytes, 1151))
    };
    let probe = Probe::build(&rank, spec, case.seed)?;
    for rows in [1, 40, 3, 33, 12] {
        probe.both(0, rows)?;
    }
    Ok(probe.checked())
}

/// Of one call, some ranks take a copy and others borrow the slot: every rank is told.
pub(super) fn forms_that_differ<R: Rank>(rank: R, case: &Case) -> Outcome {
    let probe = Probe::build(&rank, Spec::new(case, 8 * case.world, BF16), case.seed)?;
    for rows in 1..4 {
        probe.both(0, rows)?;
    }
    let copies = rank.rank().is_multiple_of(2);
    let (our_form, their_form) = (u64::from(copies), u64::from(!copies));
    let expected = format!("a mismatch of form, {our_form} here and {their_form} there");
    let fits = |error: &GatherError| {
        matches!(error, GatherError::Mismatch { field, ours, theirs, source_rank }
            if field.starts_with("form of call")
                && (*ours, *theirs) == (our_form, their_form)
                && source_rank.is_multiple_of(2) != copies)
    };
    match copies {
        true => fails(probe.try_copied(0, 5), &expected, fits)?,
        false => fails(probe.try_lent(0, 5), &expected, fits)?,
    };
    Ok(probe.checked())
}

/// Slots 0, 1, 0 and on, with no barrier in between, and rank 0 asleep before one call.
pub(super) fn late_rank_and_reused_slots<R: Rank>(rank: R, case: &Case) -> Outcome {
    let mut rng = dice(&[case.seed, 1]);
    let late: usize = rng.random_range(1..4);
    let lends: bool = rng.random();
    let probe = Probe::build(&rank, Spec::new(case, 8 * case.world, BF16), case.seed)?;
    for call in 0..8 {
        if call == late && rank.rank() == 0 {
            rank.sleep(Duration::from_millis(250));
        }
        if lends {
            probe.lent(0, 1 + call)?.verify()?;
        } else {
            probe.copied(0, 1 + call)?;
        }
    }
    Ok(probe.checked())
}

/// The epoch of a ubatch counts its calls that delivered, and nothing else does.
pub(super) fn status<R: Rank>(rank: R, case: &Case) -> Outcome {
    let spec = Spec {
        ubatches: 3,
        ..Spec::new(case, 8 * case.world, BF16)
    };
    let probe = Probe::build(&rank, spec, case.seed)?;
    let mut rng = dice(&[case.seed, 2]);
    let mut epochs = vec![0; 3];
    for _ in 0..20 {
        let ubatch: usize = rng.random_range(0..3);
        if rng.random() {
            probe.copied(ubatch, 2)?;
        } else {
            probe.lent(ubatch, 2)?.verify()?;
        }
        epochs[ubatch] += 1;
        let status = probe.gather().status();
        ensure(status.epochs == epochs && status.failure.is_none(), || {
            format!("{status:?} after calls {epochs:?}")
        })?;
        ensure(status.way == case.way, || format!("{status:?}"))?;
        let refused = probe.try_copied_bytes(ubatch, 0, 0)?;
        ensure(refused.is_err(), || "no rows were gathered".into())?;
        let after = probe.gather().status();
        ensure(after == status, || {
            format!("{after:?} after a refused call, {status:?} before")
        })?;
    }
    Ok(probe.checked())
}

/// The least that a group is good for.
pub(super) fn one_gather<R: Rank>(rank: R, case: &Case) -> Outcome {
    let probe = Probe::build(&rank, Spec::new(case, 8 * case.world, BF16), case.seed)?;
    probe.both(0, 3)?;
    rank.meet().map_err(Failure::from)?;
    Ok(probe.checked())
}
