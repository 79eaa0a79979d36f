//! Gathering until a rank is killed, and going on without it.
//!
//! The rank speaks on its standard output, to somebody who kills: `up` once it gathers, and `lost`
//! with the rank that its error names.

use std::io::{self, Write};

use direct_dcp::{DType, GatherError, RowFormat};
use rand::RngExt;

use super::recovered;
use crate::Rank;
use crate::case::{Case, Spec};
use crate::failure::{Failure, Outcome, ensure};
use crate::probe::Probe;
use crate::reference::dice;

/// Gathers after which it is taken for granted that nobody is killed any more.
const MOST: u64 = 50_000_000;

pub(super) fn survive<R: Rank>(rank: R, case: &Case) -> Outcome {
    let mut common = dice(&[case.seed, 11]);
    let format = RowFormat::new(DType::BF16, 64);
    let spec = Spec {
        slots: 3,
        ..Spec::new(case, 32 * case.world, format)
    };
    let probe = Probe::build(&rank, spec, case.seed)?;
    probe.both(0, 1)?;
    rank.meet()?;
    say("up")?;
    let error = loop {
        let rows = common.random_range(1..=32);
        let result = if common.random() {
            probe.try_copied(0, rows)?
        } else {
            probe.try_lent(0, rows)?.map(|_| ())
        };
        if let Err(error) = result {
            break error;
        }
        ensure(probe.checked() < MOST, || "nobody was killed".into())?;
    };
    match error {
        GatherError::PeerLost { rank } => say(&format!("lost {rank}"))?,
        error => return Err(error.into()),
    }
    let (_, more) = recovered(&rank, case, case.world - 1)?;
    Ok(probe.checked() + more)
}

fn say(line: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .map_err(|error| Failure(format!("cannot speak: {error}")))
}
