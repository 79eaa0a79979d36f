//! What ranks do and check, by name.

mod abort;
mod basic;
mod deadline;
mod departure;
mod disagree;
mod held;
mod leaks;
mod random;
mod refused;
mod survive;

use std::time::Duration;

use crate::case::Case;
use crate::failure::{Failure, Outcome};
use crate::probe::Probe;
use crate::{Rank, Spec};

pub use departure::Deliberate;

/// How long a rebuild waits for ranks that should all come.
const REBUILD: Duration = Duration::from_secs(20);

/// What the suite runs of a scenario.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Its name.
    pub name: &'static str,
    /// Worlds it is run on.
    pub worlds: &'static [usize],
    /// Threads per rank it is run with.
    pub blocks: &'static [usize],
    /// Runs of each case, with different seeds.
    pub repeats: u64,
    /// Whether it does more or less as it is told.
    pub scales: bool,
}

const WORLDS: &[usize] = &[2, 3, 4, 8];

/// Run on all worlds, with up to three threads a rank.
const fn thorough(name: &'static str) -> Scenario {
    Scenario {
        name,
        worlds: WORLDS,
        blocks: &[1, 2, 3],
        repeats: 1,
        scales: false,
    }
}

/// Run on all worlds, with one thread a rank.
const fn plain(name: &'static str) -> Scenario {
    Scenario {
        blocks: &[1],
        ..thorough(name)
    }
}

const PLANS: &[Scenario] = &[
    thorough("rank_major"),
    thorough("rows_of_any_size"),
    plain("blocks_of_any_number"),
    thorough("forms_that_differ"),
    thorough("late_rank_and_reused_slots"),
    thorough("status"),
    plain("refused_workspaces"),
    thorough("refused_calls"),
    thorough("held_slots"),
    thorough("held_elsewhere"),
    plain("one_call_at_a_time"),
    thorough("ubatches_at_once"),
    Scenario {
        scales: true,
        ..plain("random")
    },
    thorough("other_rows"),
    plain("other_options"),
    plain("one_call_more"),
    plain("one_call_less"),
    plain("missing_rank"),
    plain("rank_past_the_deadline"),
    plain("abort_while_waiting"),
    Scenario {
        repeats: 4,
        ..plain("rank_that_leaves")
    },
    Scenario {
        repeats: 20,
        ..plain("rank_that_leaves_after_its_last_call")
    },
    plain("rank_that_panics"),
];

/// The scenarios of the suite.
pub fn names() -> impl Iterator<Item = &'static str> {
    PLANS.iter().map(|scenario| scenario.name)
}

/// What the suite runs of every scenario.
#[must_use]
pub fn all() -> &'static [Scenario] {
    PLANS
}

/// Plays one rank's part in a case.
///
/// # Errors
/// What the backend did wrong.
pub fn play<R: Rank>(rank: R, case: &Case) -> Outcome {
    let part: fn(R, &Case) -> Outcome = match case.scenario.as_str() {
        "rank_major" => basic::rank_major,
        "rows_of_any_size" => basic::rows_of_any_size,
        "blocks_of_any_number" => basic::blocks_of_any_number,
        "forms_that_differ" => basic::forms_that_differ,
        "late_rank_and_reused_slots" => basic::late_rank_and_reused_slots,
        "status" => basic::status,
        "refused_workspaces" => refused::workspaces,
        "refused_calls" => refused::calls,
        "held_slots" => held::slots,
        "held_elsewhere" => held::elsewhere,
        "one_call_at_a_time" => held::one_call_at_a_time,
        "ubatches_at_once" => held::ubatches_at_once,
        "random" => random::random,
        "other_rows" => disagree::rows,
        "other_options" => disagree::options,
        "one_call_more" => disagree::one_call_more,
        "one_call_less" => disagree::one_call_less,
        "missing_rank" => deadline::missing_rank,
        "rank_past_the_deadline" => deadline::past,
        "abort_while_waiting" => abort::while_waiting,
        "rank_that_leaves" => departure::midway,
        "rank_that_leaves_after_its_last_call" => departure::after_the_last_call,
        "rank_that_panics" => departure::panics,
        // These are not of the suite: somebody stands by who counts, or kills.
        "one_gather" => basic::one_gather,
        "leaks_of_workspaces" => leaks::workspaces,
        "leaks_of_rebuilds" => leaks::rebuilds,
        "survive" => survive::survive,
        name => return Err(Failure(format!("there is no scenario {name}"))),
    };
    part(rank, case)
}

/// The group of all ranks that rebuild, after it has shown that it gathers.
fn recovered<R: Rank>(rank: &R, case: &Case, members: usize) -> Result<(R, u64), Failure> {
    let rank = rank.rebuild(REBUILD)?;
    crate::failure::ensure(rank.world_size() == members, || {
        format!(
            "{} ranks came out of a rebuild, not {members}",
            rank.world_size()
        )
    })?;
    let spec = Spec {
        ubatches: 2,
        ..Spec::new(case, 8 * members, basic::BF16)
    };
    let probe = Probe::build(&rank, spec, case.seed ^ members as u64 ^ 0x7265_6275)?;
    for call in 0..6 {
        probe.both(call % 2, 1 + call)?;
    }
    rank.meet()?;
    Ok((rank, probe.checked()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut all: Vec<_> = names().collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), PLANS.len());
    }
}
