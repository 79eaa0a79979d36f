//! Gathers between GPUs that cannot succeed: every rank is told why, in time, and can go on.
#![allow(unsafe_code)] // promises about rows that live here

mod cuda_common;

use std::sync::Barrier;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use cuda_common::{Machine, Rank, each, options, threads};
use direct_dcp::cuda::{DeviceRows, DeviceRowsMut};
use direct_dcp::{DType, GatherError, Group, RowFormat, Way, WorkspaceOptions};
use direct_dcp_fake_cuda::{FailMode, Fake};

const WAYS: [Way; 5] = Way::CUDA;

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Checks that `body` does not take long.
#[track_caller]
fn quickly<T>(body: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = body();
    let took = start.elapsed();
    assert!(took < millis(5000), "{took:?}");
    result
}

/// Checks that later calls, on every ubatch, fail as the first did, without touching anything.
#[track_caller]
fn fails_fast(rank: &Rank, error: &GatherError) {
    for ubatch in 0..rank.gather.workspace().ubatches() {
        rank.poison_on(&rank.stream);
        let start = Instant::now();
        assert_eq!(&rank.submit_on(&rank.stream, ubatch, 1).unwrap_err(), error);
        let local = rank.local(rank.row_bytes());
        let lent = rank.gather.gather(ubatch, &rank.stream, local).map(drop);
        assert_eq!(&lent.unwrap_err(), error);
        assert_eq!(&rank.gather.check().unwrap_err(), error);
        assert!(start.elapsed() < millis(1000), "{:?}", start.elapsed());
        rank.output_untouched();
    }
    let status = rank.gather.status(&rank.stream).unwrap();
    assert_eq!(status.failure, Some(error.to_string()));
}

/// Builds the group again, and a workspace, and gathers.
#[track_caller]
fn goes_on(rank: Rank, device: u32, way: Way, world: usize) {
    let group = rank.group.rebuild(Duration::from_secs(10)).unwrap();
    assert_eq!(group.world_size(), world);
    drop(rank);
    let rank = Rank::new(group, device, options(world).way(way)).unwrap();
    rank.gather_into(0, 17, 900);
    rank.gather_lent(0, 128, 901);
    assert_eq!(rank.epochs(), [2]);
    rank.meet();
}

#[test]
fn a_rank_that_is_missing_is_named() {
    Machine::new(3).run("a_rank_that_is_missing_is_named", |_| {
        for way in WAYS {
            threads(3, |group| {
                let device = group.rank() as u32;
                let options = options(3).way(way).ubatches(2);
                let rank = Rank::new(group, device, options).unwrap();
                let rank = rank.limits(20_000, 500);
                rank.gather_into(0, 17, 1);
                if rank.rank() == 2 {
                    sleep(millis(1200));
                    // Too late: the others have given up. At the latest its next call says so.
                    let error = quickly(|| {
                        let first = rank.attempt(0, 17, 2);
                        first.and_then(|()| rank.attempt(0, 17, 3)).unwrap_err()
                    });
                    let lost = matches!(error, GatherError::PeerLost { rank: 0 | 1 });
                    assert!(lost, "{error:?}");
                    fails_fast(&rank, &error);
                } else {
                    let start = Instant::now();
                    let error = rank.attempt(0, 17, 2).unwrap_err();
                    let expected = GatherError::Timeout {
                        epoch: 2,
                        missing: vec![2],
                        waited: millis(500),
                    };
                    assert_eq!(error, expected);
                    let took = start.elapsed();
                    assert!(took >= millis(500) && took < millis(5000), "{took:?}");
                    fails_fast(&rank, &error);
                    assert_eq!(rank.epochs(), [1, 0], "the call does not count");
                }
                goes_on(rank, device, way, 3);
            });
        }
    });
}

/// The first call waits longer, and says how long.
#[test]
fn first_calls_have_their_own_deadline() {
    Machine::new(2).run("first_calls_have_their_own_deadline", |_| {
        threads(2, |group| {
            let device = group.rank() as u32;
            let rank = Rank::new(group, device, options(2)).unwrap();
            let rank = rank.limits(500, 50);
            if rank.rank() == 0 {
                let error = rank.attempt(0, 5, 1).unwrap_err();
                let expected = GatherError::Timeout {
                    epoch: 1,
                    missing: vec![1],
                    waited: millis(500),
                };
                assert_eq!(error, expected);
            }
            rank.meet();
        });
    });
}

#[test]
fn all_that_are_missing_are_named() {
    Machine::new(1).run("all_that_are_missing_are_named", |_| {
        threads(5, |group| {
            let rank = Rank::new(group, 0, options(5)).unwrap().limits(300, 300);
            if rank.rank().is_multiple_of(2) {
                let error = rank.attempt(0, 5, 1).unwrap_err();
                let GatherError::Timeout { epoch, missing, .. } = error else {
                    panic!("{error:?}")
                };
                assert_eq!((epoch, missing), (1, vec![1, 3]));
            }
            rank.meet();
        });
    });
}

#[test]
fn an_abort_ends_every_wait() {
    Machine::new(3).run("an_abort_ends_every_wait", |_| {
        for way in WAYS {
            threads(3, |group| {
                let device = group.rank() as u32;
                let rank = Rank::new(group, device, options(3).way(way).ubatches(2)).unwrap();
                rank.gather_into(1, 3, 1);
                let handle = rank.group.abort_handle();
                let error = scope(|threads| {
                    if rank.rank() == 2 {
                        threads.spawn(move || {
                            sleep(millis(100));
                            handle.abort();
                        });
                        sleep(millis(200));
                    }
                    // Rank 2 calls after the abort. That what the others published is there makes no
                    // difference.
                    quickly(|| rank.attempt(0, 17, 2).unwrap_err())
                });
                assert_eq!(error, GatherError::Aborted { by: 2 });
                fails_fast(&rank, &error);
                goes_on(rank, device, way, 3);
            });
        }
    });
}

/// A rank leaves while the others wait for it, also where all share one device.
#[test]
fn a_rank_that_leaves_is_named() {
    Machine::new(3).run("a_rank_that_leaves_is_named", |_| {
        for (way, devices) in WAYS.into_iter().zip([3, 3, 1, 1, 1]) {
            threads(3, |group| {
                let device = (group.rank() % devices) as u32;
                let rank = Rank::new(group, device, options(3).way(way)).unwrap();
                rank.gather_into(0, 17, 1);
                rank.gather_lent(0, 17, 2);
                rank.fill_on(&rank.stream, 3, 17 * rank.row_bytes());
                rank.poison_on(&rank.stream);
                rank.meet();
                if rank.rank() == 1 {
                    sleep(millis(50));
                    let Rank {
                        gather,
                        group,
                        stream,
                        storage,
                        ..
                    } = rank;
                    drop(group);
                    quickly(|| drop(gather));
                    drop((stream, storage));
                    return;
                }
                let error = quickly(|| {
                    rank.submit_on(&rank.stream, 0, 17).unwrap();
                    rank.gather.wait(&rank.stream).unwrap_err()
                });
                assert_eq!(error, GatherError::PeerLost { rank: 1 });
                fails_fast(&rank, &error);
                goes_on(rank, device, way, 2);
            });
        }
    });
}

/// A call that has found one rank lost does not wait for another, which calls only after it.
#[test]
fn a_lost_rank_ends_the_wait_for_the_others() {
    Machine::new(3).run("a_lost_rank_ends_the_wait_for_the_others", |_| {
        for way in WAYS {
            let done = Barrier::new(2);
            threads(3, |group| {
                let device = group.rank() as u32;
                let rank = Rank::new(group, device, options(3).way(way)).unwrap();
                rank.gather_into(0, 17, 1);
                // Longer than this test may take.
                let rank = rank.limits(3_600_000, 3_600_000);
                let error = match rank.rank() {
                    0 => return,
                    1 => {
                        done.wait();
                        rank.attempt(0, 17, 2).unwrap_err()
                    }
                    _ => {
                        let error = rank.attempt(0, 17, 2).unwrap_err();
                        done.wait();
                        error
                    }
                };
                assert_eq!(error, GatherError::PeerLost { rank: 0 });
                fails_fast(&rank, &error);
                goes_on(rank, device, way, 2);
            });
        }
    });
}

/// A rank has left before the others call: nothing that they store to is gone.
#[test]
fn a_rank_that_has_left_is_named() {
    Machine::new(3).run("a_rank_that_has_left_is_named", |_| {
        for way in WAYS {
            threads(3, |group| {
                let device = group.rank() as u32;
                let rank = Rank::new(group, device, options(3).way(way)).unwrap();
                rank.gather_into(0, 17, 1);
                if rank.rank() == 0 {
                    return;
                }
                sleep(millis(50));
                let error = quickly(|| rank.attempt(0, 17, 2).unwrap_err());
                assert_eq!(error, GatherError::PeerLost { rank: 0 });
                fails_fast(&rank, &error);
                goes_on(rank, device, way, 2);
            });
        }
    });
}

/// The last call of a rank is good for the others, however soon it leaves after.
#[test]
fn a_rank_may_leave_after_its_last_call() {
    Machine::new(4).run("a_rank_may_leave_after_its_last_call", |_| {
        for (way, _) in WAYS.into_iter().cycle().zip(0..15) {
            threads(4, |group| {
                let device = group.rank() as u32;
                let rank = Rank::new(group, device, options(4).way(way)).unwrap();
                for call in 0..2 {
                    rank.fill_on(&rank.stream, call, 17 * rank.row_bytes());
                    rank.poison_on(&rank.stream);
                    if rank.rank() % 2 == 1 {
                        sleep(millis(20));
                    }
                    rank.submit_on(&rank.stream, 0, 17).unwrap();
                    rank.gather.wait(&rank.stream).unwrap();
                    rank.check_output(17, call);
                }
            });
        }
    });
}

#[test]
fn both_sides_of_a_mismatch_are_told() {
    Machine::new(3).run("both_sides_of_a_mismatch_are_told", |_| {
        for way in WAYS {
            threads(3, |group| {
                let device = group.rank() as u32;
                let rank = Rank::new(group, device, options(3).way(way)).unwrap();
                rank.gather_into(0, 5, 1);
                let odd = rank.rank() == 2;
                let rows = if odd { 9 } else { 8 };
                let error = quickly(|| rank.attempt(0, rows, 2).unwrap_err());
                let expected = |source_rank| GatherError::Mismatch {
                    source_rank,
                    field: "rows",
                    ours: rows as u64,
                    theirs: 17 - rows as u64,
                };
                // The odd one differs from both others, and meets either first.
                let sources: &[usize] = if odd { &[0, 1] } else { &[2] };
                let found = sources.iter().any(|source| error == expected(*source));
                assert!(found, "{error:?}");
                fails_fast(&rank, &error);
                goes_on(rank, device, way, 3);
            });
        }
    });
}

/// Two ubatches of one rank are two sequences: one waits while the other goes on.
#[test]
fn a_ubatch_that_waits_holds_up_no_other() {
    Machine::new(2).run("a_ubatch_that_waits_holds_up_no_other", |_| {
        threads(2, |group| {
            let device = group.rank() as u32;
            let rank = Rank::new(group, device, options(2).ubatches(2)).unwrap();
            let other = direct_dcp::cuda::Stream::new(rank.context()).unwrap();
            let bytes = 3 * rank.row_bytes();
            rank.fill_on(&rank.stream, 1, bytes);
            rank.poison_on(&rank.stream);
            let local = rank.local(bytes);
            if rank.rank() == 0 {
                // The peer makes this call last.
                drop(rank.gather.gather(1, &other, local).unwrap());
            }
            for _ in 0..5 {
                rank.submit_on(&rank.stream, 0, 3).unwrap();
                rank.gather.wait(&rank.stream).unwrap();
                rank.check_output(3, 1);
            }
            if rank.rank() == 1 {
                drop(rank.gather.gather(1, &other, local).unwrap());
            }
            rank.gather.wait(&other).unwrap();
            assert_eq!(rank.epochs(), [5, 1]);
            rank.meet();
        });
    });
}

/// Arguments that cannot work: nothing is submitted, nothing is written, and the next call works.
#[test]
fn bad_arguments_touch_nothing() {
    Machine::new(2).run("bad_arguments_touch_nothing", |fake| {
        for way in WAYS {
            let turn = Barrier::new(2);
            threads(2, |group| {
                let device = group.rank() as u32;
                let options = options(2).way(way).ubatches(2);
                let rank = Rank::new(group, device, options).unwrap();
                rank.gather_into(0, 2, 1);
                turn.wait();
                if rank.rank() == 0 {
                    bad_arguments(fake, &rank);
                }
                turn.wait();
                rank.gather_into(0, 2, 2);
                assert_eq!(rank.epochs(), [2, 0]);
                rank.meet();
            });
        }
    });
}

fn bad_arguments(fake: &Fake, rank: &Rank) {
    rank.poison_on(&rank.stream);
    let row = rank.row_bytes();
    let base = rank.local(0).address();
    let room = rank.out(0).address();
    let multicast = rank.gather.workspace().way() == Way::Multicast;
    // Ubatch, local (address, bytes), out (address, bytes), what is wrong, what was got.
    let mut bad = vec![
        (2, (base, row), (room, 2 * row), "ubatch", "2"),
        (
            usize::MAX,
            (base, row),
            (room, 2 * row),
            "ubatch",
            "below 2",
        ),
        (0, (base, 0), (room, 0), "local bytes", "got 0"),
        (0, (base, row - 1), (room, 2 * row), "local bytes", "1151"),
        (1, (base, row + 1), (room, 2 * row), "local bytes", "1153"),
        (0, (base, 129 * row), (room, 258 * row), "local rows", "128"),
        (0, (base, row), (room, row), "output bytes", "2304"),
        (0, (base, row), (room, 4 * row), "output bytes", "4608"),
        (
            0,
            (base, 2 * row),
            (room, 4 * row - 1),
            "output bytes",
            "4607",
        ),
    ];
    if multicast {
        bad.push((0, (base + 8, row), (room, 2 * row), "alignment", "16"));
        bad.push((0, (base, row), (room + 4, 2 * row), "alignment", "16"));
    }
    for (ubatch, local, out, what, word) in bad {
        fake.clear_log();
        // SAFETY: refused, as the test checks; the storage has room for what is not.
        let local = unsafe { DeviceRows::new(local.0, local.1) };
        // SAFETY: as above.
        let out = unsafe { DeviceRowsMut::new(out.0, out.1) };
        let error = rank.gather.gather_into(ubatch, &rank.stream, local, out);
        let error = error.unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, GatherError::InvalidArgument { .. })
                && text.contains(what)
                && text.contains(word),
            "{text}"
        );
        let log = fake.log();
        let submits = |(name, _): &(String, i32)| {
            ["Launch", "Memcpy", "Memset", "Record"]
                .iter()
                .any(|part| name.contains(part))
        };
        assert!(!log.iter().any(submits), "{what}: {log:?}");
    }
    rank.output_untouched();
    rank.gather.check().unwrap();
}

/// Each driver call of a gather fails in turn. The caller is told unless the rows arrive, and
/// whichever it is, later calls are right.
#[test]
fn whatever_fails_while_calling_loses_no_count() {
    Machine::new(2).run("whatever_fails_while_calling_loses_no_count", |fake| {
        for way in [Way::Push, Way::CopyEngine, Way::Multicast] {
            for lent in [false, true] {
                let turn = Barrier::new(2);
                threads(2, |group| {
                    let device = group.rank() as u32;
                    let rank = Rank::new(group, device, options(2).way(way)).unwrap();
                    calling_fails(fake, &rank, &turn, lent);
                    rank.meet();
                });
            }
        }
    });
}

fn calling_fails(fake: &Fake, rank: &Rank, turn: &Barrier, lent: bool) {
    // On two streams in turn, so that calls wait for events.
    let other = direct_dcp::cuda::Stream::new(rank.context()).unwrap();
    let streams = [&rank.stream, &other];
    let bytes = 4 * rank.row_bytes();
    let mut told = 0;
    for k in 1.. {
        let stream = streams[k as usize % 2];
        let submit = || match lent {
            false => rank.submit_on(stream, 0, 4),
            true => rank.gather.gather(0, stream, rank.local(bytes)).map(drop),
        };
        rank.fill_on(stream, k, bytes);
        rank.poison_on(stream);
        let before = rank.epochs()[0];
        let mut more = false;
        if rank.rank() == 1 {
            submit().unwrap();
            turn.wait();
            turn.wait();
        } else {
            // The peer is done with the driver, and waits.
            turn.wait();
            fake.fail(None, k, 999, FailMode::AfterRelease);
            let submitted = submit();
            more = fake.failed().is_some();
            fake.fail(None, 0, 0, FailMode::AfterRelease);
            if let Err(error) = submitted {
                told += 1;
                assert!(
                    matches!(
                        error,
                        GatherError::Driver {
                            code: Some(999),
                            ..
                        }
                    ),
                    "{k}: {error:?}"
                );
                // If it went out all the same, it counts; if not, this is it.
                stream.synchronize().unwrap();
                if rank.epochs()[0] == before {
                    submit().unwrap();
                }
            }
            turn.wait();
        }
        rank.gather.wait(stream).unwrap();
        assert_eq!(rank.epochs(), [before + 1], "{k}");
        rank.meet();
        // What the host thinks of the slots is what the device thinks.
        rank.gather_lent(0, 4, 1000 + k);
        rank.gather_into(0, 4, 2000 + k);
        let more = rank.group.all_gather(&[more.into()]).unwrap()[0][0] != 0;
        if !more {
            break;
        }
    }
    if rank.rank() == 0 {
        assert!(told > 5, "{told}");
    }
}

/// What a group that was aborted, or whose rank is gone, builds.
#[test]
fn nothing_is_built_without_everybody() {
    Machine::new(2).run("nothing_is_built_without_everybody", |_| {
        let mut groups = Group::threads(3).unwrap();
        drop(groups.remove(1));
        let errors = each(groups, |group| {
            let device = group.rank() as u32 % 2;
            quickly(|| Rank::new(group, device, options(3)).map(drop).unwrap_err())
        });
        for error in errors {
            let text = error.to_string();
            assert!(text.contains("rank 1 has left"), "{text}");
        }
        let groups = Group::threads(2).unwrap();
        groups[0].abort();
        for error in each(groups, |group| {
            let device = group.rank() as u32;
            quickly(|| Rank::new(group, device, options(2)).map(drop).unwrap_err())
        }) {
            let text = error.to_string();
            assert!(text.contains("rank 0 aborted"), "{text}");
        }
    });
}

/// A rank that is late within the limits is waited for, also by many small calls.
#[test]
fn ranks_may_be_late() {
    Machine::new(2).run("ranks_may_be_late", |_| {
        let format = RowFormat::new(DType::Bytes, 48);
        threads(2, |group| {
            let device = group.rank() as u32;
            let options = WorkspaceOptions::new(8, format);
            let rank = Rank::new(group, device, options).unwrap();
            let rank = rank.limits(2000, 2000);
            for call in 0..60 {
                if call % 20 == 7 && rank.rank() == call / 20 % 2 {
                    sleep(millis(120));
                }
                rank.gather_into(0, 1 + call % 4, call as u64);
            }
            rank.meet();
        });
    });
}
