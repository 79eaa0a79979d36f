//! Calls of one workspace that take different ways, by kind, by size and by a table.

#![allow(unsafe_code)] // promises about rows that live here

mod cuda_common;

use std::collections::VecDeque;
use std::thread::sleep;
use std::time::Duration;

use cuda_common::{Machine, Rank, nothing_left, options, read, rows_of_all, threads};
use direct_dcp::cuda::{CaptureMode, Delivery, Gathered, Rehearsal};
use direct_dcp::tuning::{Entry, Setting, Tuning};
use direct_dcp::{Way, WorkspaceError, WorkspaceOptions};
use direct_dcp_fake_kernels::{Sabotage, sabotage};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// The name of the fake's devices.
fn device_name(world: usize, devices: usize) -> String {
    let names = threads(world, |group| {
        let device = (group.rank() % devices) as u32;
        let rank = Rank::new(group, device, options(world)).unwrap();
        let setting = rank.gather.workspace().setting().clone();
        assert_eq!((setting.ranks, setting.devices), (world, devices));
        rank.meet();
        setting.device
    });
    names[0].clone()
}

/// A table for `world` ranks on `devices` devices, from lines of mode, size, way and blocks.
fn table(world: usize, devices: usize, lines: &[&str]) -> Tuning {
    let device = device_name(world, devices);
    let lines: Vec<String> = lines
        .iter()
        .map(|line| format!("cuda {world} {devices} {line} {device}\n"))
        .collect();
    format!("direct-dcp-tuning 1\n{}", lines.concat())
        .parse()
        .unwrap()
}

/// Many calls of random size, with a copy and without, among them lent ones that are held as long
/// as may be; ranks dawdle each by itself, so that the fastest are ahead as far as the slots allow.
fn mixed_calls(rank: &Rank, seed: u64) {
    let slots = rank.gather.workspace().slots();
    let row_bytes = rank.row_bytes();
    let (mut plan, mut own) = (
        StdRng::seed_from_u64(seed),
        StdRng::seed_from_u64(seed ^ ((rank.rank() as u64 + 1) << 32)),
    );
    // Calls that still hold their rows: how many calls ago, which, and how many bytes.
    let mut held: VecDeque<(u64, Gathered, usize)> = VecDeque::new();
    let still = |gathered: &Gathered, call, bytes: usize| {
        let address = gathered.address().unwrap();
        let got = read(&rank.stream, address, bytes * rank.world());
        let expected = rows_of_all(call, 0..rank.world(), bytes);
        assert!(got == expected, "call {call}: other bytes");
    };
    for call in 1..=40_u64 {
        let rows = [1, 2, 17, 64, 128][plan.random_range(0..5)];
        let bytes = rows * row_bytes;
        if own.random_range(0..6) == 0 {
            sleep(Duration::from_millis(own.random_range(0..4)));
        }
        // What this call would have overwritten is let go just before it.
        while held
            .front()
            .is_some_and(|(of, ..)| of + slots as u64 - 1 <= call)
        {
            let (of, gathered, bytes) = held.pop_front().unwrap();
            still(&gathered, of, bytes);
        }
        if plan.random_range(0..2) == 0 {
            rank.gather_into(0, rows, call);
        } else {
            rank.fill_on(&rank.stream, call, bytes);
            let local = rank.local(bytes);
            let gathered = rank.gather.gather(0, &rank.stream, local).unwrap();
            rank.gather.wait(&rank.stream).unwrap();
            still(&gathered, call, bytes);
            held.push_back((call, gathered, bytes));
        }
    }
    for (of, gathered, bytes) in held {
        still(&gathered, of, bytes);
    }
    assert_eq!(rank.epochs(), [40]);
    rank.meet();
}

/// Without a word, calls that lend push and calls that copy out pull, in the same slots.
#[test]
fn unforced_calls_push_and_pull() {
    Machine::new(4)
        .without("multicast")
        .run("unforced_calls_push_and_pull", |_| {
            for (world, devices, slots) in [(2, 1, 2), (3, 3, 3), (4, 2, 2), (8, 4, 2)] {
                threads(world, |group| {
                    let device = (group.rank() % devices) as u32;
                    let options = options(world).slots(slots);
                    let rank = Rank::new(group, device, options).unwrap();
                    let workspace = rank.gather.workspace();
                    assert_eq!(workspace.way(), Way::Push);
                    for rows in [1, 128] {
                        assert_eq!(workspace.way_of(Delivery::CopyOut, rows), Way::Pull);
                        assert_eq!(workspace.way_of(Delivery::ZeroCopy, rows), Way::Push);
                    }
                    mixed_calls(&rank, 7 * world as u64);
                });
            }
        });
}

/// What the calls say they go by is what they go by: each way has a fault of its own.
#[test]
fn calls_go_by_the_way_that_they_name() {
    let test = "calls_go_by_the_way_that_they_name";
    Machine::new(1).run(test, |_| {
        threads(2, |group| {
            let rank = Rank::new(group, 0, options(2)).unwrap();
            rank.gather_into(0, 5, 1);
            rank.gather_lent(0, 5, 2);
            rank.meet();
            // Rows that are pushed to rank 1 are lost.
            sabotage(Sabotage::DropRowsTo(1));
            rank.gather_into(0, 5, 3);
            rank.meet();
            let bytes = 5 * rank.row_bytes();
            rank.fill_on(&rank.stream, 4, bytes);
            let lent = rank.gather.gather(0, &rank.stream, rank.local(bytes));
            let address = lent.as_ref().unwrap().address().unwrap();
            let right = read(&rank.stream, address, 2 * bytes) == rows_of_all(4, 0..2, bytes);
            assert_eq!(right, rank.rank() == 0);
            drop(lent);
            rank.meet();
            // Rows that rank 0 stages are.
            sabotage(Sabotage::DropStagedBy(0));
            rank.meet();
            rank.gather_lent(0, 5, 5);
            rank.meet();
            rank.attempt(0, 5, 6).unwrap();
            let right = rank.output(2 * bytes) == rows_of_all(6, 0..2, bytes);
            assert_eq!(right, rank.rank() == 0);
            rank.meet();
        });
    });
}

/// The self-test tries each way as calls will use it. What can only be pushed is pushed.
#[test]
fn ranks_that_cannot_pull_push() {
    Machine::new(1).run("ranks_that_cannot_pull_push", |fake| {
        let ways = |options: WorkspaceOptions| {
            threads(2, |group| {
                let rank = Rank::new(group, 0, options.clone())?;
                rank.gather_into(0, 5, 1);
                rank.gather_lent(0, 5, 2);
                rank.meet();
                let workspace = rank.gather.workspace();
                Ok::<_, WorkspaceError>((workspace.way(), workspace.way_of(Delivery::CopyOut, 5)))
            })
        };
        for way in ways(options(2)) {
            assert_eq!(way.unwrap(), (Way::Push, Way::Pull));
        }
        let tuned = options(2).tuning(table(2, 1, &["copy-out any copy-engine auto"]));
        let pulled = options(2).tuning(table(2, 1, &["copy-out any pull auto"]));
        for way in ways(tuned.clone()) {
            assert_eq!(way.unwrap(), (Way::Push, Way::CopyEngine));
        }
        sabotage(Sabotage::DropStagedBy(1));
        for way in ways(options(2)) {
            assert_eq!(way.unwrap(), (Way::Push, Way::Push));
        }
        for way in ways(options(2).way(Way::Pull)) {
            let error = way.unwrap_err().to_string();
            assert!(error.contains("self-test of copy-out by pull"), "{error}");
        }
        // What the table names does without it.
        for way in ways(tuned) {
            assert_eq!(way.unwrap(), (Way::Push, Way::CopyEngine));
        }
        // Calls that lend are pushed all the same.
        sabotage(Sabotage::DropRowsTo(0));
        for way in ways(pulled) {
            let error = way.unwrap_err().to_string();
            assert!(error.starts_with("push cannot"), "{error}");
        }
        sabotage(Sabotage::None);
        nothing_left(fake);
    });
}

/// A table with every way, on one device and on several.
#[test]
fn calls_go_by_a_table() {
    // Rows of 1,152 bytes.
    const LINES: [&str; 7] = [
        "copy-out 1152 push 1",
        "copy-out 2304 multicast auto",
        "copy-out 19584 copy-engine auto",
        "copy-out any pull 2",
        "zero-copy 2304 copy-engine auto",
        "zero-copy 73728 pull 3",
        "zero-copy 147456 multicast auto",
    ];
    Machine::new(3).run("calls_go_by_a_table", |_| {
        for (world, devices, base) in [(2, 1, Way::Push), (3, 3, Way::Multicast)] {
            let table = table(world, devices, &LINES);
            for slots in [2, 3] {
                threads(world, |group| {
                    let device = (group.rank() % devices) as u32;
                    let options = options(world).slots(slots).tuning(table.clone());
                    let rank = Rank::new(group, device, options).unwrap();
                    let workspace = rank.gather.workspace();
                    assert_eq!(workspace.way(), base);
                    let ways =
                        |delivery| [1, 2, 17, 64, 128].map(|rows| workspace.way_of(delivery, rows));
                    let [one, two, some, many, most] = ways(Delivery::CopyOut);
                    // What is not to be had gives way to the next entry.
                    let second = match base {
                        Way::Multicast => Way::Multicast,
                        _ => Way::CopyEngine,
                    };
                    assert_eq!((one, two), (Way::Push, second));
                    assert_eq!((some, many, most), (Way::CopyEngine, Way::Pull, Way::Pull));
                    let [one, two, some, many, most] = ways(Delivery::ZeroCopy);
                    assert_eq!((one, two), (Way::CopyEngine, Way::CopyEngine));
                    assert_eq!((some, many, most), (Way::Pull, Way::Pull, base));
                    mixed_calls(&rank, 3 * slots as u64 + world as u64);
                });
            }
        }
    });
}

/// The copy engines' calls are captured by push, whose rows lie where theirs do.
#[test]
fn what_the_copy_engines_cannot_is_captured_by_push() {
    let test = "what_the_copy_engines_cannot_is_captured_by_push";
    Machine::new(2).run(test, |_| {
        let lines = [
            "copy-out any copy-engine auto",
            "zero-copy any copy-engine auto",
        ];
        let table = table(2, 2, &lines);
        threads(2, |group| {
            let device = group.rank() as u32;
            let options = options(2).tuning(table.clone());
            let rank = Rank::new(group, device, options).unwrap();
            let bytes = 17 * rank.row_bytes();
            let way = rank.gather.workspace().way_of(Delivery::ZeroCopy, 17);
            assert_eq!(way, Way::CopyEngine);
            rank.gather_into(0, 17, 1);
            let capture = rank.stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
            rank.submit_on(&rank.stream, 0, 17).unwrap();
            let lent = rank
                .gather
                .gather(0, &rank.stream, rank.local(bytes))
                .unwrap();
            let word = lent.address_word();
            drop(lent);
            let graph = capture.end().unwrap().instantiate().unwrap();
            for call in 2..6 {
                rank.fill_on(&rank.stream, call, bytes);
                rank.poison_on(&rank.stream);
                // SAFETY: workspace and storage live until the stream is waited for; the other
                // calls on the ubatch are on the same stream.
                unsafe { graph.launch(&rank.stream) }.unwrap();
                rank.gather.wait(&rank.stream).unwrap();
                rank.check_output(17, call);
                let address = read(&rank.stream, word, 8).try_into().unwrap();
                let lent = read(&rank.stream, u64::from_ne_bytes(address), 2 * bytes);
                assert!(lent == rows_of_all(call, 0..2, bytes), "lent");
                rank.gather_lent(0, 3, 10 + call);
            }
            drop(graph);
            rank.meet();
            // One rank captures a call that the other makes: they meet all the same.
            let mut rehearsal = Rehearsal::new(&rank.gather, 0, bytes).unwrap();
            let rows = cuda_common::rows_of(99, rank.rank(), bytes);
            rehearsal.set_rows(&rows).unwrap();
            rehearsal.fill_out(0xee).unwrap();
            rank.meet();
            if rank.rank() == 0 {
                rehearsal.record(Delivery::CopyOut, 1).unwrap();
                rehearsal.replay().unwrap();
            } else {
                rehearsal.call(Delivery::CopyOut).unwrap();
            }
            assert!(rehearsal.read().unwrap() == rows_of_all(99, 0..2, bytes));
            rank.meet();
        });
    });
}

#[test]
fn a_forced_way_goes_before_a_table() {
    Machine::new(1).run("a_forced_way_goes_before_a_table", |_| {
        let table = table(2, 1, &["copy-out any push auto", "zero-copy any pull auto"]);
        threads(2, |group| {
            let options = options(2).tuning(table.clone()).way(Way::CopyEngine);
            let rank = Rank::new(group, 0, options).unwrap();
            let workspace = rank.gather.workspace();
            assert_eq!(workspace.way(), Way::CopyEngine);
            for delivery in [Delivery::CopyOut, Delivery::ZeroCopy] {
                assert_eq!(workspace.way_of(delivery, 5), Way::CopyEngine);
            }
            rank.meet();
        });
    });
}

/// Entries for other groups say nothing.
#[test]
fn other_settings_entries_are_not_for_us() {
    let test = "other_settings_entries_are_not_for_us";
    Machine::new(2).without("multicast").run(test, |_| {
        let ours = table(2, 1, &["copy-out any push auto"]);
        let entry = ours.entries()[0].clone();
        let other = |change: &dyn Fn(&mut Setting)| {
            let mut setting = entry.setting.clone();
            change(&mut setting);
            Entry {
                setting,
                ..entry.clone()
            }
        };
        let others = [
            other(&|setting| setting.ranks = 3),
            other(&|setting| setting.devices = 2),
            other(&|setting| setting.device.push('x')),
            other(&|setting| setting.backend = direct_dcp::tuning::Backend::CudaProcesses),
        ];
        for (table, expected) in [
            (Tuning::new(others).unwrap(), Way::Pull),
            (ours, Way::Push),
            (Tuning::default(), Way::Pull),
        ] {
            threads(2, |group| {
                let options = options(2).tuning(table.clone());
                let rank = Rank::new(group, 0, options).unwrap();
                let way = rank.gather.workspace().way_of(Delivery::CopyOut, 5);
                assert_eq!(way, expected);
                rank.meet();
            });
        }
    });
}

#[test]
fn ranks_with_other_tables_are_told_so() {
    Machine::new(1).run("ranks_with_other_tables_are_told_so", |_| {
        let tables = [
            Some(table(2, 1, &["copy-out any push auto"])),
            Some(table(2, 1, &["copy-out any push 7"])),
            None,
        ];
        for (one, other) in [(0, 1), (1, 2), (2, 0)] {
            let errors = threads(2, |group| {
                let table = &tables[[one, other][group.rank()]];
                let options = table
                    .iter()
                    .cloned()
                    .fold(options(2), WorkspaceOptions::tuning);
                Rank::new(group, 0, options).map(drop).unwrap_err()
            });
            for error in errors {
                let WorkspaceError::Mismatch { field, .. } = &error else {
                    panic!("{error:?}")
                };
                assert_eq!(*field, "tuning");
            }
        }
    });
}
