//! What holds for every group, however it came up.

mod group_common;

use direct_dcp::{Group, GroupError};
use group_common::{WAYS, Way, each, lost_rank, payload, threads, watched};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Runs a case for every way, in one after another: each name shows in the failure.
fn for_every_way(case: fn(Way)) {
    watched(move || {
        for (name, way) in WAYS {
            eprintln!("by {name}");
            case(way);
        }
    });
}

#[test]
fn everybody_gets_everybodys_bytes() {
    for_every_way(|way| {
        for world in [2, 3, 4, 8] {
            gather_and_check(way(world), 0xc0ffee, 20, 3_000);
        }
    });
}

#[test]
fn payloads_may_be_larger_than_any_buffer() {
    for_every_way(|way| {
        for world in [2, 4] {
            gather_and_check(way(world), 7, 2, 4 << 20);
        }
    });
}

#[test]
fn many_threads() {
    watched(|| {
        gather_and_check(threads(64), 1, 20, 500);
        gather_and_check(threads(1024), 2, 2, 64);
    });
}

fn gather_and_check(groups: Vec<Group>, seed: u64, rounds: u64, most: usize) {
    let world = groups.len();
    let round = |round| (0..world).map(move |rank| payload(seed, round, rank, most));
    let rounds: Vec<Vec<Vec<u8>>> = (0..rounds).map(|number| round(number).collect()).collect();
    each(groups, |group| {
        assert_eq!(group.world_size(), world);
        assert_eq!(group.generation(), 1);
        assert!(group.previous_ranks().iter().copied().eq(0..world));
        let rank = group.rank();
        for (number, expected) in rounds.iter().enumerate() {
            let all = group.all_gather(&expected[rank]).unwrap();
            assert!(all == *expected, "round {number}, rank {rank}");
            let ballot = |rank: usize| (number + rank).is_multiple_of(3);
            let votes = group.vote(ballot(rank)).unwrap();
            assert!(votes.into_iter().eq((0..world).map(ballot)));
        }
    });
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    for_every_way(|way| {
        let arrived = AtomicUsize::new(0);
        each(way(4), |group| {
            for round in 1..=50 {
                if group.rank() == round % 4 {
                    thread::sleep(Duration::from_micros(200));
                }
                arrived.fetch_add(1, Ordering::Relaxed);
                group.barrier().unwrap();
                assert!(arrived.load(Ordering::Relaxed) >= 4 * round);
                group.barrier().unwrap();
            }
        });
    });
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    for_every_way(|way| {
        each(way(4), |group| {
            let group = group.with_timeout(Duration::from_millis(200));
            if group.rank() % 3 == 1 {
                return thread::sleep(Duration::from_millis(600));
            }
            match group.barrier() {
                Err(GroupError::Timeout { missing, waited }) => {
                    assert_eq!(missing, [1]);
                    assert_eq!(waited, Duration::from_millis(200));
                }
                Err(error) => assert_eq!(lost_rank(&error), Some(1)),
                Ok(()) => panic!("rank 1 never came"),
            }
        });
    });
}

#[test]
fn ranks_that_call_different_collectives_are_told() {
    for_every_way(|way| {
        each(way(3), |group| {
            let result = match group.rank() {
                1 => group.vote(true).map(|_| ()),
                _ => group.barrier(),
            };
            match result {
                Err(error @ GroupError::Mismatch { .. }) => {
                    let text = error.to_string();
                    assert!(text.contains("vote") && text.contains("barrier"), "{text}");
                    assert!(group.rank() == 1 || text.starts_with("rank 1 "), "{text}");
                }
                // Somebody left after being told.
                Err(GroupError::PeerLost { .. }) => {}
                other => panic!("{other:?}"),
            }
            thread::sleep(Duration::from_millis(100));
        });
    });
}

#[test]
fn a_dropped_handle_ends_the_others_waits() {
    for_every_way(|way| {
        each(way(3), |group| {
            if group.rank() == 2 {
                thread::sleep(Duration::from_millis(30));
                return;
            }
            let error = group.all_gather(b"anybody?").unwrap_err();
            assert!(matches!(error, GroupError::PeerLost { rank: 2 }), "{error}");
            assert!(error.to_string().contains("rebuild"));
            // It stays so, at once.
            let start = Instant::now();
            assert_eq!(lost_rank(&group.barrier().unwrap_err()), Some(2));
            assert!(start.elapsed() < Duration::from_secs(30));
            // Both must have looked before either leaves.
            thread::sleep(Duration::from_millis(200));
        });
    });
}

#[test]
fn who_is_done_first_does_not_spoil_the_last_collective() {
    for_every_way(|way| {
        for round in 0..10 {
            each(way(4), |group| {
                for _ in 0..5 {
                    if group.rank() == round % 4 {
                        thread::sleep(Duration::from_micros(300));
                    }
                    group.all_gather(&[1; 100]).unwrap();
                }
            });
        }
    });
}

#[test]
fn abort_ends_every_wait_and_says_who() {
    for_every_way(|way| {
        each(way(4), |group| {
            let rank = group.rank();
            if rank == 2 {
                let handle = group.abort_handle();
                thread::spawn(move || {
                    thread::sleep(Duration::from_millis(30));
                    handle.abort();
                });
            }
            if rank != 3 {
                let error = group.barrier().unwrap_err();
                assert!(matches!(error, GroupError::Aborted { by: 2 }), "{error}");
            } else {
                thread::sleep(Duration::from_millis(100));
            }
            // Sticky, and only the first one counts.
            group.abort();
            let error = group.vote(true).unwrap_err();
            assert!(matches!(error, GroupError::Aborted { by: 2 }), "{error}");

            let group = group.rebuild(Duration::from_secs(20)).unwrap();
            assert_eq!((group.rank(), group.world_size()), (rank, 4));
            group.barrier().unwrap();
        });
    });
}

#[test]
fn an_abort_handle_does_not_keep_its_rank() {
    for_every_way(|way| {
        let handles = each(way(2), |group| group.abort_handle());
        handles[0].abort();
        let mut groups = way(3);
        let handle = groups.pop().unwrap().abort_handle();
        each(groups, |group| {
            assert_eq!(lost_rank(&group.barrier().unwrap_err()), Some(2));
            thread::sleep(Duration::from_millis(100));
        });
        handle.abort();
    });
}

#[test]
fn survivors_are_renumbered_in_the_old_order() {
    for_every_way(|way| {
        each(way(5), |group| {
            let before = group.rank();
            if before == 1 || before == 3 {
                return;
            }
            assert!(lost_rank(&group.barrier().unwrap_err()).is_some());
            let next = group.rebuild(Duration::from_secs(20)).unwrap();
            assert!(next.generation() > group.generation());
            assert_eq!(next.previous_ranks(), [0, 2, 4]);
            assert_eq!(next.rank(), before / 2);
            let all = next.all_gather(&[before as u8]).unwrap();
            assert_eq!(all, [[0], [2], [4]]);

            // The old one is over.
            let over = |error| matches!(error, GroupError::Superseded { generation: 1 });
            assert!(over(group.barrier().unwrap_err()));
            assert!(over(group.rebuild(Duration::ZERO).unwrap_err()));
            next.barrier().unwrap();
        });
    });
}

#[test]
fn a_rebuild_with_nobody_lost_keeps_everybody() {
    for_every_way(|way| {
        each(way(4), |mut group| {
            for _ in 0..5 {
                let next = group.rebuild(Duration::from_secs(20)).unwrap();
                assert!(next.generation() > group.generation());
                assert_eq!(next.previous_ranks(), [0, 1, 2, 3]);
                group = next;
                group.barrier().unwrap();
            }
        });
    });
}

#[test]
fn a_wait_in_the_old_generation_hears_of_the_rebuild() {
    for_every_way(|way| {
        each(way(3), |group| {
            if group.rank() == 1 {
                thread::sleep(Duration::from_millis(30));
            } else {
                let error = group.barrier().unwrap_err();
                assert!(lost_rank(&error).is_some(), "{error}");
            }
            let group = group.rebuild(Duration::from_secs(20)).unwrap();
            assert_eq!(group.world_size(), 3);
            group.barrier().unwrap();
        });
    });
}

#[test]
fn a_rank_that_never_rebuilds_is_excluded() {
    for_every_way(|way| {
        each(way(4), |group| {
            if group.rank() == 2 {
                thread::sleep(Duration::from_millis(800));
                let error = group.rebuild(Duration::from_secs(20)).unwrap_err();
                assert!(matches!(error, GroupError::Excluded), "{error}");
                return;
            }
            let next = group.rebuild(Duration::from_millis(300)).unwrap();
            assert_eq!(next.previous_ranks(), [0, 1, 3]);
            next.barrier().unwrap();
            thread::sleep(Duration::from_millis(700));
            next.barrier().unwrap();
        });
    });
}

#[test]
fn deadlines_need_not_agree() {
    for_every_way(|way| {
        each(way(4), |group| {
            let deadline = match group.rank() {
                3 => return thread::sleep(Duration::from_millis(700)),
                1 => Duration::from_millis(200),
                _ => Duration::from_secs(60),
            };
            // The shortest ends the waiting for all.
            let next = group.rebuild(deadline).unwrap();
            assert_eq!(next.previous_ranks(), [0, 1, 2]);
            next.barrier().unwrap();
        });
    });
}

#[test]
fn the_last_one_is_told_so() {
    for_every_way(|way| {
        let mut groups = way(3);
        groups.truncate(1);
        let error = groups[0].rebuild(Duration::from_secs(20)).unwrap_err();
        assert!(
            matches!(error, GroupError::TooFew { survivors: 1 }),
            "{error}"
        );
    });
}

#[test]
fn threads_of_one_rank_take_turns() {
    for_every_way(|way| {
        each(way(3), |group| {
            each((0..4).collect(), |_: usize| {
                for _ in 0..25 {
                    assert_eq!(group.all_gather(b"turn").unwrap(), [b"turn"; 3]);
                }
            });
        });
    });
}

#[test]
fn sizes_that_make_no_group_are_refused() {
    for world in [0, 1, 1025] {
        let error = Group::threads(world).unwrap_err();
        assert!(matches!(error, GroupError::InvalidArgument { .. }));
        assert!(error.to_string().contains("at least two ranks"), "{error}");
        assert!(error.to_string().ends_with(&world.to_string()), "{error}");
    }
}
