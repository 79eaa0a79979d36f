//! Which way a group of GPUs takes, and what becomes of it when some rank cannot.

mod cuda_common;

use std::sync::Mutex;
use std::time::Instant;

use cuda_common::{Machine, ROWS, Rank, each, nothing_left, options, threads};
use direct_dcp::{DType, Group, RowFormat, Way, WorkspaceError, WorkspaceOptions};
use direct_dcp_fake_cuda::{FailMode, Fake};
use direct_dcp_fake_kernels::{Sabotage, sabotage};

/// What the library logs.
struct Log(Mutex<Vec<(log::Level, String)>>);

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = (record.level(), record.args().to_string());
        self.0.lock().unwrap().push(line);
    }

    fn flush(&self) {}
}

static LOG: Log = Log(Mutex::new(Vec::new()));

/// Takes what was logged at a level since the last time.
fn logged(level: log::Level) -> Vec<String> {
    // The first call starts it.
    if log::set_logger(&LOG).is_ok() {
        log::set_max_level(log::LevelFilter::Info);
    }
    let mut lines = LOG.0.lock().unwrap();
    let taken = lines.extract_if(.., |(of, _)| *of == level);
    taken.map(|(_, line)| line).collect()
}

/// Builds a workspace on every rank and gathers twice; the way, the same on all.
#[track_caller]
fn chosen(world: usize, devices: usize, options: &WorkspaceOptions) -> Way {
    let ways = threads(world, |group| {
        let device = (group.rank() % devices) as u32;
        let rank = Rank::new(group, device, options.clone()).unwrap();
        rank.gather_into(0, 3, 1);
        rank.gather_lent(0, 1, 2);
        rank.meet();
        rank.gather.workspace().way()
    });
    assert!(ways.iter().all(|way| *way == ways[0]), "{ways:?}");
    ways[0]
}

/// Builds a workspace on every rank; the error, the same kind on all.
#[track_caller]
fn refused(world: usize, devices: usize, options: &WorkspaceOptions) -> Vec<WorkspaceError> {
    threads(world, |group| {
        let device = (group.rank() % devices) as u32;
        let refused = Rank::new(group, device, options.clone()).map(drop);
        refused.expect_err("a workspace")
    })
}

#[track_caller]
fn unsupported(errors: &[WorkspaceError], words: &str) {
    for error in errors {
        let text = error.to_string();
        assert!(
            matches!(error, WorkspaceError::Unsupported { .. }) && text.contains(words),
            "{error:?}"
        );
        let push = text.starts_with("push cannot");
        let instead = if push { "use pull" } else { "use push" };
        assert!(text.contains(instead), "says what to do: {text}");
        assert!(!text.contains('{'), "in words: {text}");
    }
}

#[test]
fn multicast_is_chosen_where_everybody_offers_it() {
    Machine::new(8).run("multicast_is_chosen_where_everybody_offers_it", |_| {
        logged(log::Level::Info);
        for world in [2, 3, 4, 8] {
            assert_eq!(chosen(world, world, &options(world)), Way::Multicast);
            let lines = logged(log::Level::Info);
            assert_eq!(lines.len(), 1, "{lines:?}");
            assert!(lines[0].contains("multicast"), "{lines:?}");
        }
        // The same device twice; rows that its instructions cannot move.
        assert_eq!(chosen(4, 2, &options(4)), Way::Push);
        let odd = WorkspaceOptions::new(64, RowFormat::new(DType::BF16, 577));
        assert_eq!(chosen(4, 4, &odd), Way::Push);
        // Choosing is not failing.
        assert_eq!(logged(log::Level::Warn), [] as [&str; 0]);
        let forced = |options: WorkspaceOptions| options.way(Way::Multicast);
        unsupported(&refused(4, 2, &forced(options(4))), "shares its device");
        unsupported(&refused(4, 4, &forced(odd)), "1154 bytes");
    });
}

#[test]
fn devices_without_multicast_push() {
    Machine::new(3)
        .without("multicast")
        .run("devices_without_multicast_push", |_| {
            logged(log::Level::Info);
            assert_eq!(chosen(3, 3, &options(3)), Way::Push);
            let lines = logged(log::Level::Info);
            let both = "gather by push, copy-out by pull, ";
            assert!(lines.len() == 1 && lines[0].contains(both), "{lines:?}");
            let errors = refused(3, 3, &options(3).way(Way::Multicast));
            unsupported(&errors, "rank 0's device does not offer it");
        });
}

#[test]
fn a_variable_turns_multicast_off() {
    switch(
        "a_variable_turns_multicast_off",
        "DIRECT_DCP_DISABLE_MULTICAST",
        "1",
    );
}

#[test]
fn the_variable_of_torch_does_so_too() {
    let test = "the_variable_of_torch_does_so_too";
    switch(test, "TORCH_SYMM_MEM_DISABLE_MULTICAST", "1");
}

#[test]
fn the_variable_of_nccl_does_so_too() {
    switch("the_variable_of_nccl_does_so_too", "NCCL_NVLS_ENABLE", "0");
}

fn switch(test: &str, name: &'static str, value: &str) {
    Machine::new(2).with(name, value).run(test, |_| {
        assert_eq!(chosen(2, 2, &options(2)), Way::Push);
        unsupported(&refused(2, 2, &options(2).way(Way::Multicast)), "variable");
    });
}

#[test]
fn other_values_leave_multicast_on() {
    Machine::new(2)
        .with("DIRECT_DCP_DISABLE_MULTICAST", "0")
        .with("NCCL_NVLS_ENABLE", "1")
        .run("other_values_leave_multicast_on", |_| {
            assert_eq!(chosen(2, 2, &options(2)), Way::Multicast);
        });
}

/// Wrong bytes on one rank are everybody's fallback; without one, everybody's error.
#[test]
fn the_self_test_finds_wrong_bytes() {
    Machine::new(4).run("the_self_test_finds_wrong_bytes", |fake| {
        logged(log::Level::Warn);
        for replica in [0, 3] {
            sabotage(Sabotage::CorruptReplica(replica));
            logged(log::Level::Warn);
            assert_eq!(chosen(4, 4, &options(4)), Way::Push);
            let lines = logged(log::Level::Warn);
            let expected = format!("multicast does not work on rank {replica}: self-test");
            assert!(
                lines.len() == 1 && lines[0].contains(&expected),
                "{lines:?}"
            );
            let errors = refused(4, 4, &options(4).way(Way::Multicast));
            unsupported(&errors, "self-test");
            nothing_left(fake);
        }
        // Peer access that is advertised, and writes that never arrive.
        sabotage(Sabotage::DropRowsTo(2));
        let errors = refused(4, 4, &options(4).way(Way::Push));
        unsupported(&errors, "self-test");
        unsupported(&refused(3, 1, &options(3)), "self-test");
        nothing_left(fake);
        sabotage(Sabotage::None);
        assert_eq!(chosen(4, 4, &options(4)), Way::Multicast);
    });
}

#[test]
fn cpu_ways_are_refused() {
    Machine::new(2).run("cpu_ways_are_refused", |_| {
        let errors = refused(2, 2, &options(2).way(Way::SharedSlot));
        unsupported(&errors, "the ranks are on GPUs");
    });
}

#[test]
fn devices_that_cannot_reach_each_other_are_refused() {
    let test = "devices_that_cannot_reach_each_other_are_refused";
    Machine::new(2).without("p2p,multicast").run(test, |_| {
        for error in refused(2, 2, &options(2)) {
            assert!(matches!(error, WorkspaceError::Refused { .. }), "{error:?}");
        }
        assert_eq!(chosen(2, 1, &options(2)), Way::Push);
    });
}

#[test]
fn a_device_that_is_not_there_is_everybodys_error() {
    let test = "a_device_that_is_not_there_is_everybodys_error";
    Machine::new(2).run(test, |_| {
        let errors = threads(3, |group| {
            let device = if group.rank() == 1 { 7 } else { 0 };
            Rank::new(group, device, options(3)).map(drop).unwrap_err()
        });
        for error in errors {
            let WorkspaceError::Refused { rank: 1, reason } = &error else {
                panic!("{error:?}")
            };
            assert!(reason.contains('7'), "{reason}");
        }
    });
}

#[test]
fn ranks_that_ask_for_other_things_are_told_so() {
    let test = "ranks_that_ask_for_other_things_are_told_so";
    Machine::new(2).run(test, |_| {
        let errors = threads(2, |group| {
            let slots = 2 + group.rank();
            let device = group.rank() as u32;
            let built = Rank::new(group, device, options(2).slots(slots));
            built.map(drop).unwrap_err()
        });
        for (rank, error) in errors.iter().enumerate() {
            let WorkspaceError::Mismatch {
                source_rank,
                field,
                ours,
                theirs,
            } = error
            else {
                panic!("{error:?}")
            };
            assert_eq!((*source_rank, *field), (1 - rank, "slots"));
            assert_eq!(ours, &(2 + rank).to_string());
            assert_eq!(theirs, &(3 - rank).to_string());
        }
    });
}

#[test]
fn sizes_that_cannot_work_touch_no_device() {
    Machine::new(4).run("sizes_that_cannot_work_touch_no_device", |fake| {
        let format = |dim| RowFormat::new(DType::BF16, dim);
        let bad = [
            (WorkspaceOptions::new(63, ROWS), "divide evenly"),
            (WorkspaceOptions::new(0, ROWS), "capacity_rows"),
            (WorkspaceOptions::new(64, format(0)), "dim"),
            (options(4).ubatches(0), "ubatch"),
            (options(4).slots(1), "slots"),
            (options(4).blocks(0), "blocks"),
            (WorkspaceOptions::new(usize::MAX & !3, ROWS), "memory"),
        ];
        for (options, word) in bad {
            let before = fake.calls();
            for error in refused(4, 4, &options) {
                let text = error.to_string();
                assert!(
                    matches!(error, WorkspaceError::InvalidArgument { .. }) && text.contains(word),
                    "{error:?}"
                );
            }
            assert_eq!(fake.calls(), before);
        }
    });
}

/// One driver call of one rank fails, and then another, and so on through all that there are: each
/// time every rank gets a workspace of the same way, which works, or every rank gets an error.
#[test]
fn whatever_fails_while_building_fails_for_all() {
    let test = "whatever_fails_while_building_fails_for_all";
    Machine::new(2).run(test, |fake| {
        building_fails(fake, 2, &options(2));
    });
}

#[test]
fn whatever_fails_while_building_on_one_device_fails_for_all() {
    let test = "whatever_fails_while_building_on_one_device_fails_for_all";
    Machine::new(1).run(test, |fake| {
        building_fails(fake, 1, &options(2).way(Way::Pull));
    });
}

fn building_fails(fake: &Fake, devices: usize, options: &WorkspaceOptions) {
    let world = 2;
    let build = |group: Group| {
        let device = (group.rank() % devices) as u32;
        Rank::new(group, device, options.clone())
    };
    // What Driver::load does once is not among the calls.
    threads(world, |group| drop(build(group).unwrap()));
    let before = fake.calls();
    let usual = threads(world, |group| {
        build(group).unwrap().gather.workspace().way()
    })[0];
    let calls = fake.calls() - before;
    let (mut other, mut none) = (0, 0);
    for k in 1..=calls {
        let groups = Group::threads(world).unwrap();
        let start = Instant::now();
        fake.fail(None, k, 999, FailMode::AfterRelease);
        let built = each(groups, |group| {
            let device = (group.rank() % devices) as u32;
            let workspace = direct_dcp::cuda::Workspace::new(&group, device, options.clone());
            (group, workspace)
        });
        let failed = fake.failed();
        let took = start.elapsed();
        assert!(took.as_secs() < 10, "{k} of {calls}, {failed:?}: {took:?}");
        fake.fail(None, 0, 0, FailMode::AfterRelease);
        let ways: Vec<_> = built
            .iter()
            .map(|(_, built)| built.as_ref().ok().map(|workspace| workspace.way()))
            .collect();
        assert!(
            ways.iter().all(|way| *way == ways[0]),
            "{k} of {calls}, {failed:?}: {ways:?}"
        );
        each(built, |(group, workspace)| match workspace {
            Ok(workspace) => {
                let rank = Rank::of(group, workspace);
                rank.gather_into(0, 17, k);
                rank.gather_lent(0, 3, k + 1000);
                rank.meet();
            }
            Err(error) => assert!(
                matches!(
                    error,
                    WorkspaceError::Refused { .. } | WorkspaceError::Unsupported { .. }
                ),
                "{k}, {failed:?}: {error:?}"
            ),
        });
        match ways[0] {
            None => none += 1,
            Some(way) if way != usual => other += 1,
            Some(_) => {}
        }
        assert_eq!(fake.outstanding(), 0, "{k}, {failed:?}: {}", fake.report());
        assert_eq!(fake.context_depth(), 0, "{k}, {failed:?}");
    }
    assert!(calls > 100 && none > 10, "{calls} calls, {none} without");
    // Only where there is something to fall back to.
    assert_eq!(other > 10, usual == Way::Multicast, "{other} fell back");
}
