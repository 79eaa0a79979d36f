//! Building, using and dropping leaves nothing behind.
//!
//! One test, because it counts what its process holds.

use direct_dcp::Way;
use direct_dcp_conformance::backends::{Processes, Threads};
use direct_dcp_conformance::usage::Usage;
use direct_dcp_conformance::{Backend, Case};

fn case(scenario: &str, world: usize, way: Way, seed: u64, amount: u64) -> Case {
    Case {
        scenario: scenario.into(),
        world,
        way,
        blocks: 1 + seed as usize % 2,
        seed,
        amount,
    }
}

fn run(backend: &dyn Backend, case: &Case) {
    for outcome in backend.run(case) {
        if let Err(failure) = outcome {
            panic!("{} {case}: {failure}", backend.name());
        }
    }
}

/// Rounds of each kind, over the ways.
const ROUNDS: u64 = 1002;

#[test]
fn nothing_is_left_behind() {
    // Groups of threads.
    let round = |seed: u64| {
        let way = Way::CPU[seed as usize % 3];
        run(&Threads, &case("one_gather", 3, way, seed, 0));
    };
    (0..60).for_each(round);
    let before = Usage::steady();
    (0..ROUNDS).for_each(round);
    let after = Usage::settled(&before);
    assert!(after.is_as(&before), "{before:?} became {after:?}");
    eprintln!("{ROUNDS} groups of threads: {before:?}, then {after:?}");

    // Workspaces on groups that live on, of threads and of processes.
    let processes = Processes::of(env!("CARGO_BIN_EXE_rank"));
    for (seed, way) in (0..).zip(Way::CPU) {
        run(
            &Threads,
            &case("leaks_of_workspaces", 2, way, seed, ROUNDS / 3),
        );
        run(
            &processes,
            &case("leaks_of_workspaces", 2, way, seed, ROUNDS / 3),
        );
    }

    // Groups within processes that live on.
    for (seed, way) in (0..).zip(Way::CPU) {
        run(&processes, &case("leaks_of_rebuilds", 2, way, seed, 60));
    }
}
