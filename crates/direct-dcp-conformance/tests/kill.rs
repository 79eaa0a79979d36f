//! Ranks that are killed with no chance to say anything.

use std::time::Duration;

use direct_dcp::Way;
use direct_dcp_conformance::Case;
use direct_dcp_conformance::backends::Processes;
use rand::RngExt;

/// A promise to users, not a matter of speed.
const PROMISE: Duration = Duration::from_secs(1);

#[test]
fn a_killed_rank_is_named_within_a_second_and_the_others_go_on() {
    let processes = Processes::of(env!("CARGO_BIN_EXE_rank"));
    let rounds: u64 = std::env::var("DIRECT_DCP_KILLS").map_or(100, |text| text.parse().unwrap());
    let mut rng = rand::rng();
    let mut worst = Duration::ZERO;
    let mut wrong = Vec::new();
    for round in 0..rounds {
        let case = Case {
            scenario: "survive".into(),
            world: [3, 4][round as usize % 2],
            way: Way::CPU[round as usize % 3],
            blocks: [1, 1, 1, 2][round as usize % 4],
            seed: rng.random(),
            amount: 0,
        };
        let victim = rng.random_range(0..case.world);
        let after = Duration::from_micros(rng.random_range(0..10_000));
        match processes.kill(&case, victim, after) {
            Ok(killed) => {
                worst = worst.max(killed.latency);
                for (rank, name) in killed.wrong {
                    wrong.push(format!("{case}: rank {rank} named {name}, not {victim}"));
                }
            }
            Err(failure) => panic!("round {round}, {case}, rank {victim} killed: {failure}"),
        }
        assert!(worst < PROMISE, "round {round}, {case}: {worst:?}");
    }
    eprintln!("{rounds} kills, all survivors knew after {worst:.1?} at most");
    assert!(
        wrong.is_empty(),
        "{} of {rounds} kills:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
