//! Running scenarios on a backend, over the worlds, ways and blocks that each is worth.

use std::env;
use std::time::Instant;

use crate::case::Case;
use crate::failure::{Failure, ensure};
use crate::scenarios::{self, Scenario};
use crate::{Backend, Outcome};

/// Instantiates the suite for a backend: a test for every scenario.
#[macro_export]
macro_rules! conformance {
    ($backend:expr) => {
        $crate::conformance! {
            @tests $backend;
            rank_major, rows_of_any_size, blocks_of_any_number, forms_that_differ,
            late_rank_and_reused_slots, status,
            refused_workspaces, refused_calls,
            held_slots, held_elsewhere, one_call_at_a_time, ubatches_at_once,
            random,
            other_rows, other_options, one_call_more, one_call_less,
            missing_rank, rank_past_the_deadline, abort_while_waiting,
            rank_that_leaves, rank_that_leaves_after_its_last_call, rank_that_panics,
        }
    };
    (@tests $backend:expr; $($scenario:ident),* $(,)?) => {
        $(
            #[test]
            fn $scenario() {
                $crate::check(&$backend, stringify!($scenario));
            }
        )*

        #[test]
        fn nothing_is_left_out() {
            $crate::nothing_is_left_out(&[$(stringify!($scenario)),*]);
        }

        #[test]
        fn a_group_of_one_is_refused() {
            let error = $crate::Backend::alone(&$backend).expect("one rank is no group");
            assert!(error.to_string().contains("at least two ranks"), "{error}");
        }
    };
}

/// Gathers of the random scenario, per backend, unless the environment says otherwise. Without
/// optimization a tenth of that takes as long.
const GATHERS: u64 = if cfg!(debug_assertions) {
    5_120
} else {
    51_200
};

/// Runs a scenario in all its cases.
///
/// # Panics
/// If a rank fails, with what each had to say and the case that repeats it.
pub fn check(backend: &dyn Backend, name: &str) {
    let scenario = backend
        .scenarios()
        .into_iter()
        .find(|scenario| scenario.name == name);
    let Some(scenario) = scenario else {
        panic!("there is no scenario {name}");
    };
    match attempt(backend, &scenario) {
        Ok(passed) => eprintln!("{passed}"),
        Err(Failure(why)) => panic!("{why}"),
    }
}

/// Runs a scenario in all its cases, and says what was done.
///
/// # Errors
/// Of the first case that fails: what each rank had to say, and what repeats it.
pub fn attempt(backend: &dyn Backend, scenario: &Scenario) -> Result<String, Failure> {
    let seed = variable("DIRECT_DCP_SEED").unwrap_or_else(rand::random);
    let started = Instant::now();
    let cases = cases(backend, scenario, seed);
    let mut gathers = 0;
    for case in &cases {
        gathers += judge(backend.name(), case, backend.run(case))?;
    }
    Ok(format!(
        "{} {}: {} cases, {gathers} gathers on {} ranks and more, 0 mismatches, {:.1?}",
        backend.name(),
        scenario.name,
        cases.len(),
        scenario.worlds.iter().min().unwrap_or(&0),
        started.elapsed(),
    ))
}

/// The gathers of the group, if all went well.
fn judge(backend: &str, case: &Case, outcomes: Vec<Outcome>) -> Result<u64, Failure> {
    let failures: Vec<String> = outcomes
        .iter()
        .enumerate()
        .filter_map(|(rank, outcome)| Some(format!("rank {rank}: {}", outcome.as_ref().err()?)))
        .collect();
    ensure(failures.is_empty(), || {
        format!(
            "{backend} {case} (DIRECT_DCP_SEED={}):\n  {}",
            case.seed,
            failures.join("\n  ")
        )
    })?;
    // Ranks that leave early have made fewer.
    Ok(outcomes.into_iter().flatten().max().unwrap_or(0))
}

/// Every world, way and number of blocks that the scenario is worth on this backend.
fn cases(backend: &dyn Backend, scenario: &Scenario, seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    for &way in backend.ways() {
        for &blocks in scenario.blocks {
            for &world in scenario.worlds {
                // More threads on more ranks show nothing that fewer do not.
                if blocks > 1 && world > 4 {
                    continue;
                }
                for repeat in 0..scenario.repeats {
                    cases.push(Case {
                        scenario: scenario.name.into(),
                        world,
                        way,
                        blocks,
                        seed: seed.wrapping_add(repeat),
                        amount: 0,
                    });
                }
            }
        }
    }
    if scenario.scales {
        let total = variable("DIRECT_DCP_GATHERS").unwrap_or(GATHERS);
        let amount = total.div_ceil(cases.len() as u64);
        cases.iter_mut().for_each(|case| case.amount = amount);
    }
    cases
}

fn variable(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    match text.parse() {
        Ok(value) => Some(value),
        Err(_) => panic!("{name} is {text:?}, no number"),
    }
}

/// Checks that the suite has all scenarios, which a macro cannot ask.
///
/// # Panics
/// If one is missing.
pub fn nothing_is_left_out(names: &[&str]) {
    let missing: Vec<&str> = scenarios::names()
        .filter(|name| !names.contains(name))
        .collect();
    assert!(missing.is_empty(), "the suite lacks {missing:?}");
}
