//! Ranks that plan differently find out which request it is.

mod group_common;

use direct_dcp::Group;
use direct_dcp::plan::{AgreementError, ChunkPlanner, Sharding};
use group_common::watched;
use std::thread;

/// Each rank plans its own contexts, by its own interleave, and says what it was told.
fn told(plans: Vec<(Vec<usize>, usize)>) -> Vec<Result<(), AgreementError>> {
    let groups = Group::threads(plans.len()).unwrap();
    let threads: Vec<_> = groups
        .into_iter()
        .zip(plans)
        .map(|(group, (contexts, interleave))| {
            thread::spawn(move || {
                let sharding = Sharding::new(group.world_size(), interleave).unwrap();
                let planner = ChunkPlanner::new(sharding, 4, 96).unwrap();
                let told = planner.plan(&contexts).unwrap().agree(&group);
                // Nobody leaves before all have heard.
                group.barrier().unwrap();
                told
            })
        })
        .collect();
    threads
        .into_iter()
        .map(|rank| rank.join().unwrap())
        .collect()
}

fn differs(told: &Result<(), AgreementError>, with: usize, at: usize) -> bool {
    matches!(told, Err(AgreementError::Differs { rank, request }) if (*rank, *request) == (with, at))
}

#[test]
fn equal_plans_agree() {
    watched(|| {
        let told = told(vec![(vec![100, 0, 7], 1); 3]);
        assert!(told.iter().all(Result::is_ok), "{told:?}");
    });
}

#[test]
fn the_request_is_named() {
    watched(|| {
        let told = told(vec![
            (vec![100, 50, 7], 1),
            (vec![100, 50, 7], 1),
            (vec![100, 51, 7], 1),
        ]);
        assert!(differs(&told[0], 2, 1), "{told:?}");
        assert!(differs(&told[1], 2, 1), "{told:?}");
        assert!(differs(&told[2], 0, 1), "{told:?}");
    });
}

#[test]
fn a_request_more_and_another_sharding_differ() {
    watched(|| {
        let more = told(vec![(vec![100, 50], 1), (vec![100, 50, 3], 1)]);
        assert!(
            differs(&more[0], 1, 2) && differs(&more[1], 0, 2),
            "{more:?}"
        );
        let other = told(vec![(vec![100, 50], 1), (vec![100, 50], 2)]);
        assert!(
            differs(&other[0], 1, 0) && differs(&other[1], 0, 0),
            "{other:?}"
        );
    });
}
