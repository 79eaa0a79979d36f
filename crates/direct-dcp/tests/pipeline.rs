//! Windows in flight between threads: every byte, every order, every end.

mod group_common;

use direct_dcp::plan::RowMap;
use direct_dcp::{
    DType, FinalLayout, GatherError, Gathered, Group, KvGather, Pipeline, RowFormat, Ticket, Way,
    Workspace, WorkspaceOptions,
};
use group_common::{each, watched};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use std::collections::VecDeque;
use std::sync::{Arc, Barrier};
use std::thread::sleep;
use std::time::{Duration, Instant};

const WAYS: [Way; 3] = [Way::SharedSlot, Way::Push, Way::Pull];
const FORMAT: RowFormat = RowFormat::new(DType::BF16, 24);
const MOST_ROWS: usize = 19;

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn options(world: usize, slots: usize) -> WorkspaceOptions {
    WorkspaceOptions::new(MOST_ROWS * world, FORMAT).slots(slots)
}

fn gather(group: &Group, options: WorkspaceOptions) -> KvGather {
    KvGather::new(Workspace::new(group, options).unwrap())
        .timeout(Duration::from_secs(20))
        .first_timeout(Duration::from_secs(20))
}

fn pipeline(group: &Group, options: WorkspaceOptions) -> Pipeline {
    Pipeline::new(gather(group, options), 0).unwrap()
}

/// The rows of `rank` in a window, of which no two are alike, in numbers that differ.
fn rows(window: u64, rank: usize) -> Vec<u8> {
    let count = 1 + window as usize * 7 % MOST_ROWS;
    let mut rows = vec![0; count * FORMAT.row_bytes()];
    StdRng::seed_from_u64(window << 8 | rank as u64).fill_bytes(&mut rows);
    rows
}

fn rows_of_all(window: u64, world: usize) -> Vec<u8> {
    (0..world)
        .flat_map(|rank| rows(window, rank))
        .collect::<Vec<_>>()
}

#[track_caller]
fn quickly<T>(body: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = body();
    assert!(start.elapsed() < millis(5000), "{:?}", start.elapsed());
    result
}

/// Looks at every byte of a window.
#[track_caller]
fn check(got: &Gathered, world: usize) {
    let window = got.epoch();
    assert!(**got == rows_of_all(window, world), "window {window}");
}

/// As many windows in flight as the slots permit, ranks and readers late at random, each window
/// looked at when it comes and before it goes.
#[test]
fn every_window_arrives_and_stays() {
    const WINDOWS: u64 = 80;
    watched(|| {
        for (slots, way) in [2, 3, 4]
            .into_iter()
            .flat_map(|slots| WAYS.map(|way| (slots, way)))
        {
            let world = 2 + slots % 2;
            each(Group::threads(world).unwrap(), |group| {
                let mut rng = StdRng::seed_from_u64(slots as u64 * 100 + group.rank() as u64);
                let mut pipeline = pipeline(&group, options(world, slots).way(way));
                let mut waiting: VecDeque<Ticket> = VecDeque::new();
                let mut held: VecDeque<Gathered> = VecDeque::new();
                for window in 1..=WINDOWS {
                    sleep(Duration::from_micros(rng.random_range(0..300)));
                    let early = rng.random_range(0..slots);
                    for ticket in waiting.drain(..early.min(waiting.len())) {
                        held.push_back(pipeline.acquire(&ticket).unwrap());
                        check(held.back().unwrap(), world);
                    }
                    // What must be released by now.
                    loop {
                        let oldest = held.front().map(Gathered::epoch);
                        let oldest = oldest.or(waiting.front().map(Ticket::epoch));
                        if oldest.is_none_or(|oldest| oldest + slots as u64 - 1 > window) {
                            break;
                        }
                        let oldest = held.pop_front().unwrap_or_else(|| {
                            let ticket = waiting.pop_front().unwrap();
                            pipeline.acquire(&ticket).unwrap()
                        });
                        sleep(Duration::from_micros(rng.random_range(0..300)));
                        check(&oldest, world);
                    }
                    let ticket = pipeline.submit(rows(window, group.rank())).unwrap();
                    assert_eq!(ticket.epoch(), window);
                    waiting.push_back(ticket);
                }
                drop(held);
                for ticket in waiting {
                    check(&pipeline.acquire(&ticket).unwrap(), world);
                }
                assert_eq!(pipeline.gather().status().epochs, [WINDOWS]);
            });
        }
    });
}

#[test]
fn windows_are_acquired_once_each_in_order() {
    watched(|| {
        each(Group::threads(2).unwrap(), |group| {
            let rank = group.rank();
            let gather = Arc::new(gather(&group, options(2, 4).ubatches(2)));
            let mut first = Pipeline::new(gather.clone(), 0).unwrap();
            let mut second = Pipeline::new(gather.clone(), 1).unwrap();
            let tickets = [1, 2, 3].map(|window| first.submit(rows(window, rank)).unwrap());
            let other = second.submit(rows(1, rank)).unwrap();

            let out_of_turn = |epoch, next| GatherError::OutOfTurn { epoch, next };
            let error = first.acquire(&tickets[1]).unwrap_err();
            assert_eq!(error, out_of_turn(2, Some(1)));
            check(&first.acquire(&tickets[0]).unwrap(), 2);
            let error = first.acquire(&tickets[0]).unwrap_err();
            assert_eq!(error, out_of_turn(1, Some(2)));
            assert!(error.to_string().contains("that of call 2 is"), "{error}");
            for foreign in [first.acquire(&other), second.acquire(&tickets[1])] {
                let error = foreign.unwrap_err();
                assert!(
                    matches!(error, GatherError::InvalidArgument { what: "ticket", .. }),
                    "{error}"
                );
            }
            // None of that cost a window.
            check(&first.acquire(&tickets[1]).unwrap(), 2);
            check(&first.acquire(&tickets[2]).unwrap(), 2);
            check(&second.acquire(&other).unwrap(), 2);
            let error = first.acquire(&tickets[2]).unwrap_err();
            assert_eq!(error, out_of_turn(3, None));
            assert!(error.to_string().contains("there is none"), "{error}");
            assert_eq!(gather.status().epochs, [3, 1]);
        });
    });
}

/// A window that the caller still has, acquired or not, is named, and nothing is queued.
#[test]
fn slots_in_use_are_not_submitted_to() {
    watched(|| {
        for slots in [2, 3, 4] {
            each(Group::threads(2).unwrap(), |group| {
                let rank = group.rank();
                let mut pipeline = pipeline(&group, options(2, slots));
                let most = slots as u64 - 1;
                let mut tickets: VecDeque<_> = (1..=most)
                    .map(|window| pipeline.submit(rows(window, rank)).unwrap())
                    .collect();
                let in_use = |epoch| GatherError::SlotInUse { ubatch: 0, epoch };
                let next = most + 1;
                assert_eq!(pipeline.submit(rows(next, rank)).unwrap_err(), in_use(1));
                let held = pipeline.acquire(&tickets.pop_front().unwrap()).unwrap();
                assert_eq!(pipeline.submit(rows(next, rank)).unwrap_err(), in_use(1));
                check(&held, 2);
                drop(held);
                tickets.push_back(pipeline.submit(rows(next, rank)).unwrap());
                for ticket in tickets {
                    check(&pipeline.acquire(&ticket).unwrap(), 2);
                }
            });
        }
    });
}

/// Windows whose tickets are dropped are gathered, and block nobody, however many there are.
#[test]
fn windows_can_be_given_up() {
    watched(|| {
        for slots in [2, 3, 4] {
            each(Group::threads(2).unwrap(), |group| {
                let rank = group.rank();
                let mut pipeline = pipeline(&group, options(2, slots));
                // One rank reads what the other gives up.
                for window in 1..100 {
                    let ticket = pipeline.submit(rows(window, rank)).unwrap();
                    if (window + rank as u64).is_multiple_of(2) {
                        check(&pipeline.acquire(&ticket).unwrap(), 2);
                    }
                }
                if slots > 2 {
                    drop(pipeline.submit(rows(100, rank)).unwrap());
                    let ticket = pipeline.submit(rows(101, rank)).unwrap();
                    check(&pipeline.acquire(&ticket).unwrap(), 2);
                }
            });
        }
    });
}

/// A rank that reads nothing does not keep another from being S - 1 windows ahead of it.
#[test]
fn ranks_need_not_read_in_step() {
    watched(|| {
        for slots in [2, 3, 4] {
            let read = Barrier::new(2);
            each(Group::threads(2).unwrap(), |group| {
                let rank = group.rank();
                let mut pipeline = pipeline(&group, options(2, slots));
                let tickets: Vec<_> = (1..slots as u64)
                    .map(|window| pipeline.submit(rows(window, rank)).unwrap())
                    .collect();
                if rank == 1 {
                    read.wait();
                }
                for ticket in tickets {
                    check(&pipeline.acquire(&ticket).unwrap(), 2);
                }
                if rank == 0 {
                    let ahead = pipeline.submit(rows(slots as u64, rank)).unwrap();
                    read.wait();
                    check(&pipeline.acquire(&ahead).unwrap(), 2);
                } else {
                    let last = pipeline.submit(rows(slots as u64, rank)).unwrap();
                    check(&pipeline.acquire(&last).unwrap(), 2);
                }
            });
        }
    });
}

/// Rows are refused as they are submitted, and the pipeline goes on.
#[test]
fn bad_input_is_refused_before_it_is_queued() {
    watched(|| {
        each(Group::threads(2).unwrap(), |group| {
            let rank = group.rank();
            let gather = Arc::new(gather(&group, options(2, 3)));
            let error = Pipeline::new(gather.clone(), 1).unwrap_err();
            assert!(matches!(
                error,
                GatherError::InvalidArgument { what: "ubatch", .. }
            ));
            let mut pipeline = Pipeline::new(gather, 0).unwrap();
            let row = FORMAT.row_bytes();
            for bytes in [0, row - 1, (MOST_ROWS + 1) * row] {
                let error = pipeline.submit(vec![0; bytes]).unwrap_err();
                assert!(
                    matches!(error, GatherError::InvalidArgument { .. }),
                    "{error}"
                );
            }
            let map = RowMap::uneven(&[3, 3], rank).unwrap();
            let layout = Arc::new(FinalLayout::new(&map, FORMAT, &[24]).unwrap());
            let error = pipeline.submit_final(vec![0; row], layout).unwrap_err();
            assert!(
                matches!(error, GatherError::InvalidArgument { .. }),
                "{error}"
            );

            // Rows that are shared can be written again once their window was acquired.
            let mut shared: Arc<[u8]> = rows(1, rank).into();
            let ticket = pipeline.submit(shared.clone()).unwrap();
            check(&pipeline.acquire(&ticket).unwrap(), 2);
            assert!(Arc::get_mut(&mut shared).is_some());
        });
    });
}

/// Windows in their final layout and in rank order, in turn.
#[test]
fn final_layouts_are_windows_too() {
    watched(|| {
        for (slots, way) in [(2, Way::Push), (3, Way::SharedSlot), (4, Way::Push)] {
            each(Group::threads(2).unwrap(), |group| {
                let rank = group.rank();
                let mut pipeline = pipeline(&group, options(2, slots).way(way));
                let bytes = FORMAT.row_bytes();
                let map = RowMap::uneven(&[4, 3], rank).unwrap();
                let layout = Arc::new(FinalLayout::new(&map, FORMAT, &[16, 8]).unwrap());
                let local = |window: u64, rank: usize| {
                    let mut local = rows(window, rank);
                    local.resize((4 - rank) * bytes, 0);
                    local
                };
                for window in (1..40).step_by(2) {
                    let ticket = pipeline.submit_final(local(window, rank), layout.clone());
                    let ticket = ticket.unwrap();
                    let plain =
                        (slots > 2).then(|| pipeline.submit(rows(window + 1, rank)).unwrap());
                    let planes = pipeline.acquire(&ticket).unwrap();
                    let all = [local(window, 0), local(window, 1)].concat();
                    for (plane, columns) in [(0, 0..32), (1, 32..48)] {
                        let expected: Vec<u8> = all
                            .chunks(bytes)
                            .flat_map(|row| row[columns.clone()].to_vec())
                            .collect();
                        assert!(planes.plane(plane).unwrap() == expected, "window {window}");
                    }
                    drop(planes);
                    let plain =
                        plain.unwrap_or_else(|| pipeline.submit(rows(window + 1, rank)).unwrap());
                    check(&pipeline.acquire(&plain).unwrap(), 2);
                }
            });
        }
    });
}

/// Checks that a pipeline whose group has failed says so wherever it is asked, and ends.
#[track_caller]
fn is_over(mut pipeline: Pipeline, tickets: impl IntoIterator<Item = Ticket>, error: &GatherError) {
    for ticket in tickets {
        assert_eq!(&pipeline.acquire(&ticket).unwrap_err(), error);
    }
    let later = pipeline.submit(rows(90, 0)).unwrap_err();
    assert!(
        later == *error || matches!(later, GatherError::Poisoned { .. }),
        "{later}"
    );
    quickly(|| drop(pipeline));
}

/// A rank goes while windows are in flight: those it took part in arrive, the others say who it was.
#[test]
fn a_rank_that_goes_is_named_to_every_window() {
    watched(|| {
        for way in WAYS {
            each(Group::threads(3).unwrap(), |group| {
                let rank = group.rank();
                let mut pipeline = pipeline(&group, options(3, 4).way(way));
                let ticket = pipeline.submit(rows(1, rank)).unwrap();
                if rank == 2 {
                    // Its window is gathered all the same.
                    drop(ticket);
                    drop(pipeline);
                    return;
                }
                let later = [2, 3].map(|window| pipeline.submit(rows(window, rank)).unwrap());
                let held = pipeline.acquire(&ticket).unwrap();
                check(&held, 3);
                is_over(pipeline, later, &GatherError::PeerLost { rank: 2 });
                check(&held, 3);
            });
        }
    });
}

/// The pipeline goes while its windows are in flight: the peers get them.
#[test]
fn a_dropped_pipeline_delivers_to_its_peers() {
    watched(|| {
        each(Group::threads(2).unwrap(), |group| {
            let rank = group.rank();
            let mut pipeline = pipeline(&group, options(2, 4));
            let mut submit = |window| pipeline.submit(rows(window, rank)).unwrap();
            let tickets = [1, 2, 3].map(&mut submit);
            if rank == 0 {
                drop(pipeline);
                drop(tickets);
            } else {
                sleep(millis(20));
                for ticket in tickets {
                    check(&pipeline.acquire(&ticket).unwrap(), 2);
                }
            }
            group.barrier().unwrap();
        });
    });
}

#[test]
fn an_abort_ends_windows_in_flight() {
    watched(|| {
        each(Group::threads(2).unwrap(), |group| {
            let rank = group.rank();
            let mut pipeline = pipeline(&group, options(2, 3));
            if rank == 0 {
                let tickets = [1, 2].map(|window| pipeline.submit(rows(window, rank)).unwrap());
                quickly(|| is_over(pipeline, tickets, &GatherError::Aborted { by: 1 }));
            } else {
                sleep(millis(30));
                group.abort();
                let error = pipeline.submit(rows(1, rank)).unwrap_err();
                assert_eq!(error, GatherError::Aborted { by: 1 });
            }
        });
    });
}

/// Nobody comes: the deadline ends the first window, and with it all others, even given up ones.
#[test]
fn a_deadline_ends_windows_in_flight() {
    watched(|| {
        for give_up in [false, true] {
            let over = Barrier::new(2);
            each(Group::threads(2).unwrap(), |group| {
                let limited = gather(&group, options(2, 3))
                    .timeout(millis(100))
                    .first_timeout(millis(100));
                let mut pipeline = Pipeline::new(limited, 0).unwrap();
                if group.rank() == 0 {
                    let [first, second] =
                        [1, 2].map(|window| pipeline.submit(rows(window, 0)).unwrap());
                    if give_up {
                        drop(first);
                    } else {
                        quickly(|| pipeline.acquire(&first)).unwrap_err();
                    }
                    let error = quickly(|| pipeline.acquire(&second)).unwrap_err();
                    let GatherError::Timeout {
                        epoch: 1, missing, ..
                    } = &error
                    else {
                        panic!("{error}");
                    };
                    assert_eq!(missing, &[1]);
                    is_over(pipeline, [], &error);
                }
                over.wait();
            });
        }
    });
}

/// The end of a pipeline is not later than its deadline, and earlier by an abort.
#[test]
fn dropping_waits_no_longer_than_the_deadline() {
    watched(|| {
        let over = Barrier::new(2);
        each(Group::threads(2).unwrap(), |group| {
            let limited = gather(&group, options(2, 4))
                .timeout(millis(100))
                .first_timeout(millis(100));
            let mut pipeline = Pipeline::new(limited, 0).unwrap();
            if group.rank() == 0 {
                let tickets = [1, 2, 3].map(|window| pipeline.submit(rows(window, 0)).unwrap());
                quickly(|| drop(pipeline));
                drop(tickets);
            }
            over.wait();
        });
    });
}
