//! Arguments that cannot work: refused with the words that users search for, and without effect.

use direct_dcp::{DType, GatherError, RowFormat, WorkspaceError};

use super::basic::BF16;
use crate::case::{Case, Spec};
use crate::failure::{Failure, Outcome, ensure};
use crate::probe::{Probe, fails};
use crate::{Gather, Rank};

/// Workspaces that no group could use; the group can build a good one after each.
pub(super) fn workspaces<R: Rank>(rank: R, case: &Case) -> Outcome {
    let world = case.world;
    let good = || Spec::new(case, 8 * world, BF16);
    let mut refused = vec![
        (
            "ubatch",
            Spec {
                ubatches: 0,
                ..good()
            },
        ),
        ("slots", Spec { slots: 0, ..good() }),
        ("slots", Spec { slots: 1, ..good() }),
        (
            "blocks",
            Spec {
                blocks: 0,
                ..good()
            },
        ),
        (
            "capacity",
            Spec {
                capacity: 0,
                ..good()
            },
        ),
        (
            "dim",
            Spec {
                format: RowFormat::new(DType::BF16, 0),
                ..good()
            },
        ),
        (
            "divide evenly",
            Spec {
                capacity: 16 * world - 1,
                ..good()
            },
        ),
        (
            "memory can hold",
            Spec {
                format: RowFormat::new(DType::BF16, usize::MAX),
                ..good()
            },
        ),
        (
            "memory can hold",
            Spec {
                capacity: usize::MAX / world * world,
                ..good()
            },
        ),
    ];
    if world == 4 {
        refused.push((
            "divide evenly",
            Spec {
                capacity: 63,
                ..good()
            },
        ));
    }
    for (word, spec) in refused {
        let described = format!("{spec:?}");
        for alone in [false, true] {
            // First everybody asks for it, then only the last rank does.
            let bad = !alone || rank.rank() == world - 1;
            let spec = if bad { spec.clone() } else { good() };
            let error = rank.build(&spec).err();
            let fits = match &error {
                Some(error @ WorkspaceError::InvalidArgument { .. }) => {
                    bad && error.to_string().contains(word)
                }
                Some(error @ WorkspaceError::Refused { rank, .. }) => {
                    !bad && *rank == world - 1 && error.to_string().contains(word)
                }
                _ => false,
            };
            ensure(fits, || {
                format!("{error:?} for {described}, alone: {alone}")
            })?;
        }
    }
    let options = good().options();
    let one = options.memory_bytes(1).map_err(|error| error.to_string());
    ensure(
        matches!(&one, Err(text) if text.contains("at least two ranks")),
        || format!("a workspace of one rank: {one:?}"),
    )?;
    let probe = Probe::build(&rank, good(), case.seed)?;
    probe.both(0, 8)?;
    Ok(probe.checked())
}

/// Calls that cannot work, by one rank and in between good ones: nobody notices.
pub(super) fn calls<R: Rank>(rank: R, case: &Case) -> Outcome {
    const ROWS: usize = 8;
    let spec = Spec {
        ubatches: 2,
        ..Spec::new(case, ROWS * case.world, BF16)
    };
    let row = BF16.row_bytes();
    let probe = Probe::build(&rank, spec, case.seed)?;
    let all = |rows| rows * row * case.world;
    let last = ROWS * row;
    // Ubatch, input, output, and a word of the message.
    let wrong = [
        (0, 0, 0, "whole rows"),
        (0, 0, all(1), "whole rows"),
        (0, row - 1, all(1), "whole rows"),
        (0, row + 1, all(1), "whole rows"),
        (0, 1, all(1), "whole rows"),
        (0, last + row, all(ROWS + 1), "at most"),
        (0, all(ROWS), all(ROWS) * case.world, "at most"),
        (0, row, all(1) - 1, "output"),
        (0, row, all(1) + 1, "output"),
        (0, row, row, "output"),
        (0, row, 0, "output"),
        (1, last, all(ROWS) + row, "output"),
        (2, row, all(1), "ubatch"),
        (usize::MAX, row, all(1), "ubatch"),
    ];
    probe.both(0, 2)?;
    let before = probe.gather().status();
    for (index, &(ubatch, bytes, len, word)) in wrong.iter().enumerate() {
        if rank.rank() == index % case.world {
            let refused = |error: &GatherError| {
                matches!(error, GatherError::InvalidArgument { .. })
                    && error.to_string().contains(word)
            };
            fails(probe.try_copied_bytes(ubatch, bytes, len), word, refused)?;
            if word != "output" {
                let lent = probe.gather().gather(ubatch, &vec![7; bytes]);
                fails(Ok(lent), word, refused)?;
            }
        }
        let index = index as u64;
        probe.copied(0, 3)?;
        probe.lent(1, 1)?.verify()?;
        let status = probe.gather().status();
        let expected = [before.epochs[0] + index + 1, index + 1];
        ensure(
            status.epochs == expected && status.failure.is_none(),
            || format!("{status:?} after {index} refused calls"),
        )?;
    }
    rank.meet().map_err(Failure::from)?;
    Ok(probe.checked())
}
