//! The slot rule: how long the rows of a call may be read, and what breaks it.

use direct_dcp_litmus::slots::{
    Compare, Finding, Kind, Payload, ReadAt, SlotFrom, Step, Stream, System, call, calls, fetches,
    issue, mixed, publish_and_wait,
};

fn gather(ranks: usize, slots: u64, reads: ReadAt) -> Finding {
    let length = if ranks == 2 { 6 } else { 4 };
    System::uniform(ranks, slots, &calls(0, length, ranks, reads)).explore()
}

/// Calls one after the other with copy-out: (call number, rows).
fn sequence(list: &[(u64, Payload)]) -> Vec<Step> {
    list.iter()
        .flat_map(|&(number, rows)| call(number, rows, 2))
        .collect()
}

fn two_ranks(streams: [(usize, Vec<Step>); 2]) -> System {
    with_streams(streams.into())
}

fn with_streams(streams: Vec<(usize, Vec<Step>)>) -> System {
    System {
        streams: streams
            .into_iter()
            .map(|(rank, steps)| Stream { rank, steps })
            .collect(),
        ..System::uniform(2, 2, &[])
    }
}

#[test]
fn one_slot_is_never_safe() {
    for ranks in [2, 3] {
        for reads in [
            ReadAt::AfterWait,
            ReadAt::BeforeIssue(1),
            ReadAt::BeforePublish(1),
            ReadAt::BeforePublish(2),
        ] {
            let finding = gather(ranks, 1, reads);
            assert!(
                finding.is_corrupt(),
                "{ranks} ranks, {reads:?}: {finding:?}"
            );
        }
    }
    // A group of one has nobody who could overwrite its slot.
    assert!(gather(1, 1, ReadAt::AfterWait).is_safe());
}

#[test]
fn two_slots_are_safe_for_copy_out() {
    for ranks in [1, 2, 3] {
        for slots in [2, 3, 4] {
            let finding = gather(ranks, slots, ReadAt::AfterWait);
            assert!(
                finding.is_safe(),
                "{ranks} ranks, {slots} slots: {finding:?}"
            );
        }
    }
}

#[test]
fn zero_copy_is_valid_until_the_call_that_is_slots_minus_one_later() {
    for (ranks, slots) in [(2, 2), (2, 3), (2, 4), (3, 2), (3, 3)] {
        for lag in 1..slots {
            for reads in [ReadAt::BeforeIssue(lag), ReadAt::BeforePublish(lag)] {
                let finding = gather(ranks, slots, reads);
                assert!(
                    finding.is_safe(),
                    "{ranks} ranks, {slots} slots, {reads:?}: {finding:?}"
                );
            }
        }
    }
    for (ranks, slots) in [(2, 2), (2, 3), (2, 4), (3, 2), (3, 3)] {
        for reads in [ReadAt::BeforeIssue(slots), ReadAt::BeforePublish(slots)] {
            let finding = gather(ranks, slots, reads);
            assert!(
                finding.is_corrupt(),
                "{ranks} ranks, {slots} slots, {reads:?}: {finding:?}"
            );
        }
    }
}

#[test]
fn the_state_spaces_keep_their_size() {
    // A change that makes the explorer visit less must not go unseen.
    assert_eq!(
        gather(2, 2, ReadAt::AfterWait),
        Finding::Safe { states: 536 }
    );
    assert_eq!(
        gather(2, 2, ReadAt::BeforePublish(1)),
        Finding::Safe { states: 518 }
    );
    assert_eq!(
        gather(3, 2, ReadAt::AfterWait),
        Finding::Safe { states: 9462 }
    );
    assert_eq!(
        gather(3, 3, ReadAt::BeforePublish(2)),
        Finding::Safe { states: 7695 }
    );
}

#[test]
fn signals_may_wrap() {
    // Across the real wrap of a u32, for slot counts that do and do not divide its range.
    for slots in [2, 3, 4] {
        for compare in [Compare::Equal, Compare::AtLeast] {
            let finished = u64::from(u32::MAX) - 3;
            let system = System {
                finished,
                compare,
                ..System::uniform(2, slots, &calls(finished, 8, 2, ReadAt::AfterWait))
            };
            assert!(system.explore().is_safe(), "{slots} slots, {compare:?}");
        }
    }
    // In a small range, several times.
    for compare in [Compare::Equal, Compare::AtLeast] {
        let system = System {
            signal_values: 4,
            compare,
            ..System::uniform(2, 2, &calls(0, 8, 2, ReadAt::AfterWait))
        };
        assert!(system.explore().is_safe(), "{compare:?}");
    }
}

#[test]
fn a_signal_range_no_larger_than_the_slots_is_corrupt() {
    let system = System {
        signal_values: 2,
        ..System::uniform(2, 2, &calls(0, 6, 2, ReadAt::AfterWait))
    };
    assert!(system.explore().is_corrupt());
}

#[test]
fn the_slot_must_come_from_the_call_not_from_the_wrapped_signal() {
    // 2^32 is no multiple of 3: at the wrap two calls in a row would use slot 0.
    let finished = u64::from(u32::MAX) - 2;
    for (slot_from, safe) in [(SlotFrom::Call, true), (SlotFrom::Signal, false)] {
        let steps = calls(finished, 6, 2, ReadAt::AfterWait);
        let system = System {
            finished,
            slot_from,
            ..System::uniform(2, 3, &steps)
        };
        let finding = system.explore();
        assert_eq!(finding.is_safe(), safe, "{slot_from:?}: {finding:?}");
        assert_eq!(finding.is_corrupt(), !safe, "{slot_from:?}: {finding:?}");
    }
}

#[test]
fn one_rank_that_starts_again_is_corrupt_or_hangs() {
    let steady = sequence(&[(1, 1), (2, 2), (3, 3), (4, 4)]);
    let again = sequence(&[(1, 3), (2, 4)]);
    let kept = [sequence(&[(1, 1), (2, 2)]), again.clone()].concat();
    assert!(
        two_ranks([(0, steady.clone()), (1, kept)])
            .explore()
            .is_corrupt()
    );
    let zeroed = [sequence(&[(1, 1), (2, 2)]), vec![Step::ZeroSignals], again].concat();
    let finding = two_ranks([(0, steady), (1, zeroed)]).explore();
    assert_eq!(finding, Finding::Hangs { stuck: 2, ended: 0 });
}

#[test]
fn all_ranks_that_start_again_in_the_same_memory_are_corrupt_or_may_hang() {
    let (before, again) = (sequence(&[(1, 1), (2, 2)]), sequence(&[(1, 3), (2, 4)]));
    let kept = [before.clone(), again.clone()].concat();
    assert!(
        two_ranks([(0, kept.clone()), (1, kept)])
            .explore()
            .is_corrupt()
    );
    // Zeroing without a barrier wipes out a signal of a peer that is already ahead.
    let zeroed = [before, vec![Step::ZeroSignals], again].concat();
    let finding = two_ranks([(0, zeroed.clone()), (1, zeroed)]).explore();
    assert_eq!(finding, Finding::Hangs { stuck: 2, ended: 1 });
}

#[test]
fn two_streams_on_one_ubatch_are_corrupt() {
    const A1: Payload = 11;
    const A3: Payload = 13;
    const B2: Payload = 22;
    const B3: Payload = 23;
    let run = |list: &[(u64, Payload)]| sequence(list);

    // The ranks number the two streams' calls in opposite order.
    let opposite = with_streams(vec![
        (0, run(&[(1, A1)])),
        (0, run(&[(2, B2)])),
        (1, run(&[(1, B2)])),
        (1, run(&[(2, A1)])),
    ]);
    assert!(opposite.explore().is_corrupt());

    // The numbers agree, but no stream keeps the other out of the slots.
    let both = |rank| {
        [
            (rank, run(&[(1, A1), (3, A3)])),
            (rank, run(&[(2, B2), (4, 24)])),
        ]
    };
    assert!(
        with_streams([both(0), both(1)].concat())
            .explore()
            .is_corrupt()
    );

    // One stream reuses the slot that the other still reads.
    let reuse = |rank| [(rank, run(&[(1, A1)])), (rank, run(&[(2, B2), (3, B3)]))];
    assert!(
        with_streams([reuse(0), reuse(1)].concat())
            .explore()
            .is_corrupt()
    );
}

/// Calls of these kinds, whose slices move from one use of a slot to the next.
fn mixture(kinds: &[Kind], ranks: usize, slots: u64, shift: u64) -> Finding {
    System {
        shift,
        ..System::uniform(ranks, slots, &mixed(kinds, ranks, slots))
    }
    .explore()
}

/// Every sequence of this many kinds.
fn sequences(length: usize) -> Vec<Vec<Kind>> {
    let longer = |shorter: &Vec<Kind>| {
        let shorter = shorter.clone();
        Kind::ALL.map(|kind| [&shorter[..], &[kind]].concat())
    };
    (0..length).fold(vec![Vec::new()], |all, _| {
        all.iter().flat_map(longer).collect()
    })
}

#[test]
fn ways_may_change_from_call_to_call() {
    for (ranks, slots, length) in [(2, 2, 5), (2, 3, 5), (3, 2, 3), (3, 3, 4)] {
        for kinds in sequences(length) {
            for shift in 0..2 {
                let finding = mixture(&kinds, ranks, slots, shift);
                assert!(
                    finding.is_safe(),
                    "{ranks} ranks, {slots} slots, {kinds:?}, shift {shift}: {finding:?}"
                );
            }
        }
    }
    // One slot is as wrong as ever.
    for kinds in [[Kind::PullOut; 2], [Kind::PullOut, Kind::PushOut]] {
        assert!(mixture(&kinds, 2, 1, 0).is_corrupt(), "{kinds:?}");
    }
    // A change that makes the explorer visit less must not go unseen.
    let kinds = [Kind::PullOut, Kind::PushLent, Kind::PullLent, Kind::PushOut];
    assert_eq!(mixture(&kinds, 2, 2, 1), Finding::Safe { states: 359 });
}

#[test]
fn a_call_that_ranks_make_by_different_ways_is_corrupt() {
    for (one, other) in [
        (Kind::PushOut, Kind::PullOut),
        (Kind::PushLent, Kind::PullLent),
    ] {
        let steps = |kind| mixed(&[kind; 2], 2, 2);
        let system = two_ranks([(0, steps(one)), (1, steps(other))]);
        assert!(system.explore().is_corrupt(), "{one:?} and {other:?}");
    }
}

/// Rows that are read where their source has staged them, as late as may be and later, while the
/// calls that follow are pushed.
#[test]
fn rows_at_their_source_are_under_the_slot_rule_too() {
    for slots in [2_u64, 3] {
        for lag in 1..=slots {
            let mut steps = vec![Step::Stage { call: 1, rows: 1 }];
            steps.extend(publish_and_wait(1, 2));
            for call in 2..=slots + 2 {
                if call == 1 + lag {
                    steps.extend(fetches(1, 1, 2, false));
                }
                steps.extend(issue(call, call as Payload, 2));
                steps.extend(publish_and_wait(call, 2));
            }
            let system = System {
                shift: 1,
                ..System::uniform(2, slots, &steps)
            };
            let finding = system.explore();
            assert_eq!(
                finding.is_safe(),
                lag < slots,
                "{slots}, {lag}: {finding:?}"
            );
            assert_eq!(
                finding.is_corrupt(),
                lag == slots,
                "{slots}, {lag}: {finding:?}"
            );
        }
    }
}

/// A rank that stores a call's rows before the call before it has ended, as copies on a stream of
/// their own could, overwrites what a peer still fetches from a third rank.
#[test]
fn a_push_that_does_not_wait_for_the_call_before_is_corrupt() {
    let hasty = |first: Kind| {
        let mut steps = mixed(&[first], 2, 2);
        steps.extend(issue(2, 2, 2));
        let (publish, wait): (Vec<_>, Vec<_>) =
            publish_and_wait(2, 2).partition(|step| matches!(step, Step::Publish { .. }));
        steps.extend(publish);
        steps.extend(issue(3, 3, 2));
        steps.extend(wait);
        steps
    };
    for first in [Kind::PullOut, Kind::PushOut] {
        let system = System {
            shift: 1,
            ..System::uniform(2, 2, &hasty(first))
        };
        assert!(system.explore().is_corrupt(), "{first:?}");
    }
}
