//! Gathers between GPUs that work: every way, on one device and several, eager and captured.

#![allow(unsafe_code)] // promises about rows that live here

mod cuda_common;

use std::thread::sleep;
use std::time::Duration;

use cuda_common::{
    Machine, POISON, ROWS, Rank, WAYS, each, options, read, rows_of, rows_of_all, threads,
};
use direct_dcp::cuda::{
    CaptureMode, DeviceBuffer, DeviceRows, DeviceRowsMut, ExecutableGraph, KvGather, Stream,
};
use direct_dcp::{DType, GatherError, Group, RowFormat, Way, WorkspaceOptions};

#[test]
fn every_way_delivers_on_one_device_and_several() {
    Machine::new(8).run("every_way_delivers_on_one_device_and_several", |_| {
        for world in [2, 3, 4, 8] {
            let mut spread = vec![1, 2, world];
            spread.dedup();
            for devices in spread {
                for way in WAYS {
                    if way == Way::Multicast && devices < world {
                        continue;
                    }
                    threads(world, |group| {
                        let device = group.rank() % devices;
                        let options = options(world).way(way);
                        let rank = Rank::new(group, device as u32, options).unwrap();
                        assert_eq!(rank.gather.workspace().way(), way);
                        assert_eq!(
                            rank.gather.workspace().sharing() as usize,
                            (device..world).step_by(devices).count()
                        );
                        for (call, rows) in [1, 128, 17].into_iter().enumerate() {
                            rank.gather_into(0, rows, call as u64);
                            rank.gather_lent(0, rows, 100 + call as u64);
                        }
                        assert_eq!(rank.epochs(), [6]);
                        rank.meet();
                    });
                }
            }
        }
    });
}

/// Sizes in turn, element types, ubatches in turn; the storage is the same for both ubatches.
#[test]
fn rows_arrive_in_rank_order() {
    Machine::new(4).run("rows_arrive_in_rank_order", |_| {
        for (way, dtype) in WAYS
            .into_iter()
            .zip([DType::BF16, DType::F16].into_iter().cycle())
        {
            threads(4, |group| {
                let format = RowFormat::new(dtype, 576);
                let options = WorkspaceOptions::new(128 * 4, format).ubatches(2).way(way);
                let device = group.rank() as u32;
                let rank = Rank::new(group, device, options).unwrap();
                for (call, rows) in [1, 128, 17, 128, 1].into_iter().enumerate() {
                    rank.gather_into(call % 2, rows, call as u64);
                }
                assert_eq!(rank.epochs(), [3, 2]);
                assert_eq!(rank.gather.status(&rank.stream).unwrap().failure, None);
                rank.meet();
            });
        }
    });
}

#[test]
fn odd_rows_take_narrow_accesses() {
    Machine::new(2).run("odd_rows_take_narrow_accesses", |_| {
        let formats = [
            (DType::F8E4M3, 3),
            (DType::F8E4M3, 577),
            (DType::BF16, 5),
            (DType::F16, 1),
            (DType::F16, 6),
            (DType::BF16, 8),
        ];
        for (dtype, dim) in formats {
            let format = RowFormat::new(dtype, dim);
            for way in [Way::Push, Way::Pull, Way::CopyEngine] {
                threads(3, |group| {
                    let device = group.rank() as u32 % 2;
                    let options = WorkspaceOptions::new(99 * 3, format).way(way);
                    let rank = Rank::new(group, device, options).unwrap();
                    for (call, rows) in [99, 1, 7, 2].into_iter().enumerate() {
                        rank.gather_into(0, rows, call as u64);
                        rank.gather_lent(0, rows, 10 + call as u64);
                    }
                    rank.meet();
                });
            }
        }
    });
}

/// As many blocks as pay, no more than are resident.
#[test]
fn blocks_are_limited() {
    // Two blocks of four ranks are resident, where a slice would pay for 144.
    Machine::new(1)
        .with("DIRECT_DCP_FAKE_SMS", 4)
        .run("blocks_are_limited", |_| {
            threads(4, |group| {
                let options = WorkspaceOptions::new(1024 * 4, ROWS).way(Way::Push);
                let rank = Rank::new(group, 0, options).unwrap();
                rank.gather_into(0, 1024, 1);
                rank.gather_into(0, 1000, 2);
                rank.meet();
            });
        });
}

/// Kernels of other widths have blocks of other sizes: where small ones of some ranks were as many
/// as fit by themselves, larger ones of another rank would find no room.
#[test]
fn ranks_whose_rows_are_aligned_differently_fit_one_device() {
    Machine::new(1).with("DIRECT_DCP_FAKE_SMS", 4).run(
        "ranks_whose_rows_are_aligned_differently_fit_one_device",
        |_| {
            for way in [Way::Push, Way::Pull] {
                threads(4, |group| {
                    let options = WorkspaceOptions::new(16 * 4, ROWS).way(way);
                    let rank = Rank::new(group, 0, options).unwrap().limits(5000, 5000);
                    let bytes = 16 * rank.row_bytes();
                    for (call, shift) in [2, 4, 8, 1].into_iter().enumerate() {
                        rank.fill_on(&rank.stream, call as u64, bytes);
                        rank.poison_on(&rank.stream);
                        // The others' blocks are there when the last rank's come, of accesses of 16.
                        let shift = if rank.rank() == 3 { 0 } else { shift };
                        sleep(Duration::from_millis(if shift == 0 { 100 } else { 0 }));
                        let address = rank.storage.address() + rank.storage.bytes() as u64
                            - (4 * bytes) as u64
                            - 64
                            + shift;
                        // SAFETY: in the storage, behind the rows, until the wait below.
                        let out = unsafe { DeviceRowsMut::new(address, 4 * bytes) };
                        rank.gather
                            .gather_into(0, &rank.stream, rank.local(bytes), out)
                            .unwrap();
                        rank.gather.wait(&rank.stream).unwrap();
                        let got = read(&rank.stream, address, 4 * bytes);
                        assert!(got == rows_of_all(call as u64, 0..4, bytes), "other bytes");
                    }
                    rank.meet();
                });
            }
        },
    );
}

#[test]
fn calls_of_all_ubatches_fit_one_device() {
    Machine::new(1).with("DIRECT_DCP_FAKE_SMS", 4).run(
        "calls_of_all_ubatches_fit_one_device",
        |_| {
            threads(2, |group| {
                let options = WorkspaceOptions::new(32 * 2, ROWS).ubatches(2);
                let rank = Rank::new(group, 0, options.way(Way::Push)).unwrap();
                let rank = rank.limits(5000, 5000);
                begin_in_opposite_orders(&rank.group, [(&rank.gather, 0), (&rank.gather, 1)]);
                rank.meet();
            });
        },
    );
}

/// No more blocks than are asked for: so those of two workspaces fit beside each other.
#[test]
fn calls_of_two_workspaces_with_few_blocks_fit_one_device() {
    Machine::new(1).with("DIRECT_DCP_FAKE_SMS", 4).run(
        "calls_of_two_workspaces_with_few_blocks_fit_one_device",
        |_| {
            threads(2, |group| {
                let options = WorkspaceOptions::new(32 * 2, ROWS).way(Way::Push).blocks(2);
                let first = Rank::new(group.clone(), 0, options.clone()).unwrap();
                let second = Rank::new(group, 0, options).unwrap();
                let [first, second] = [first, second].map(|rank| rank.limits(5000, 5000));
                begin_in_opposite_orders(&first.group, [(&first.gather, 0), (&second.gather, 0)]);
                first.meet();
            });
        },
    );
}

/// Two calls of 32 rows, each of a gather and a ubatch, are under way at once, and odd ranks have
/// begun them in the other order.
fn begin_in_opposite_orders(group: &Group, calls: [(&KvGather, usize); 2]) {
    let (me, world) = (group.rank(), group.world_size());
    let bytes = 32 * ROWS.row_bytes();
    let context = calls[0].0.workspace().context();
    let desks = [0, 1].map(|call| {
        let stream = Stream::new(context).unwrap();
        let storage = DeviceBuffer::new(context, (1 + world) * bytes).unwrap();
        storage.fill(&stream, POISON).unwrap();
        storage
            .upload(&stream, 0, &rows_of(call, me, bytes))
            .unwrap();
        (stream, storage)
    });
    group.barrier().unwrap();
    for step in 0..2 {
        let call = (step + me) % 2;
        let ((gather, ubatch), (stream, storage)) = (calls[call], &desks[call]);
        let address = storage.address();
        // SAFETY: the first part of the storage, until the waits below.
        let local = unsafe { DeviceRows::new(address, bytes) };
        // SAFETY: the rest of it.
        let out = unsafe { DeviceRowsMut::new(address + bytes as u64, world * bytes) };
        gather.gather_into(ubatch, stream, local, out).unwrap();
        // The other ranks' calls, the other ones, have begun too.
        sleep(Duration::from_millis(100));
    }
    for (call, (stream, storage)) in (0..).zip(&desks) {
        calls[call as usize].0.wait(stream).unwrap();
        let got = read(stream, storage.address() + bytes as u64, world * bytes);
        assert!(got == rows_of_all(call, 0..world, bytes), "other bytes");
    }
}

/// A slot is used again two calls later, however late some rank is.
#[test]
fn slots_are_reused_without_a_barrier() {
    Machine::new(2).run("slots_are_reused_without_a_barrier", |_| {
        for (way, late) in [Way::Push, Way::Pull, Way::CopyEngine, Way::Multicast]
            .into_iter()
            .zip([0, 1, 0, 1])
        {
            threads(2, |group| {
                let device = group.rank() as u32;
                let rank = Rank::new(group, device, options(2).way(way)).unwrap();
                for call in 0..5 {
                    if call == 2 && rank.rank() == late {
                        sleep(Duration::from_millis(250));
                    }
                    rank.gather_into(0, 17, call);
                }
                rank.meet();
            });
        }
    });
}

#[test]
fn held_slots_are_not_overwritten() {
    Machine::new(2).run("held_slots_are_not_overwritten", |_| {
        for (way, slots) in [
            (Way::Push, 2),
            (Way::Push, 3),
            (Way::Pull, 4),
            (Way::CopyEngine, 3),
            (Way::Multicast, 2),
        ] {
            threads(2, |group| {
                let device = group.rank() as u32;
                let options = options(2).way(way).slots(slots);
                let rank = Rank::new(group, device, options).unwrap();
                let bytes = 5 * rank.row_bytes();
                let lend = |call| {
                    rank.fill_on(&rank.stream, call, bytes);
                    rank.gather.gather(0, &rank.stream, rank.local(bytes))
                };
                let holds = |gathered: &direct_dcp::cuda::Gathered, call| {
                    let address = gathered.address().unwrap();
                    let got = read(&rank.stream, address, 2 * bytes);
                    assert!(got == rows_of_all(call, 0..2, bytes), "call {call}");
                };
                rank.gather_into(0, 1, 1);
                let first = lend(2).unwrap();
                for call in 0..slots as u64 - 2 {
                    rank.gather_into(0, 5, 10 + call);
                    holds(&first, 2);
                }
                rank.poison_on(&rank.stream);
                let in_use = GatherError::SlotInUse {
                    ubatch: 0,
                    epoch: 2,
                };
                assert_eq!(lend(20).unwrap_err(), in_use);
                assert_eq!(rank.attempt(0, 5, 20).unwrap_err(), in_use);
                rank.output_untouched();
                holds(&first, 2);
                drop(first);
                let second = lend(21).unwrap();
                holds(&second, 21);
                drop(second);
                rank.gather_into(0, 5, 22);
                rank.meet();
            });
        }
    });
}

/// A reader on another stream delays the next call, which would let the peer overwrite its rows.
#[test]
fn slots_are_released_after_another_stream() {
    Machine::new(2).run("slots_are_released_after_another_stream", |_| {
        threads(2, |group| {
            let device = group.rank() as u32;
            let rank = Rank::new(group, device, options(2).way(Way::Push)).unwrap();
            let reader = Stream::new(rank.context()).unwrap();
            let bytes = 9 * rank.row_bytes();
            let word = DeviceBuffer::new(rank.context(), 4).unwrap();
            let kept = DeviceBuffer::new(rank.context(), 2 * bytes).unwrap();
            word.upload(&rank.stream, 0, &[0; 4]).unwrap();
            rank.fill_on(&rank.stream, 1, bytes);
            let gathered = rank.gather.gather(0, &rank.stream, rank.local(bytes));
            let gathered = gathered.unwrap();
            rank.gather.wait(&rank.stream).unwrap();
            if rank.rank() == 0 {
                let equal = direct_dcp_cuda::WaitCondition::Equal;
                // SAFETY: the word and both spans live until the reader is waited for.
                unsafe { reader.wait_value_u32(word.address(), 7, equal) }.unwrap();
                let address = gathered.address().unwrap();
                // SAFETY: as above.
                unsafe { reader.copy_on_device(kept.address(), address, 2 * bytes) }.unwrap();
            }
            gathered.release_after(&reader).unwrap();
            // The peer makes three calls, of which the second stores into the slot that is read.
            for call in 2..5 {
                rank.fill_on(&rank.stream, call, bytes);
                rank.poison_on(&rank.stream);
                rank.submit_on(&rank.stream, 0, 9).unwrap();
                if call == 2 {
                    sleep(Duration::from_millis(60));
                    assert!(!rank.stream.is_idle().unwrap(), "waits for the reader");
                    rank.group.barrier().unwrap();
                    if rank.rank() == 0 {
                        let other = Stream::new(rank.context()).unwrap();
                        word.upload(&other, 0, &7_u32.to_ne_bytes()).unwrap();
                    }
                }
                rank.gather.wait(&rank.stream).unwrap();
                rank.check_output(9, call);
            }
            reader.synchronize().unwrap();
            if rank.rank() == 0 {
                let mut got = vec![0; 2 * bytes];
                kept.download(&reader, 0, &mut got).unwrap();
                assert!(got == rows_of_all(1, 0..2, bytes), "what was lent changed");
            }
            rank.meet();
        });
    });
}

/// Many calls under way at once, on two streams in turn.
#[test]
fn calls_on_two_streams_keep_their_order() {
    const CALLS: usize = 9;
    Machine::new(3).run("calls_on_two_streams_keep_their_order", |_| {
        for (way, devices) in [
            (Way::Push, 1),
            (Way::Pull, 3),
            (Way::CopyEngine, 3),
            (Way::Multicast, 3),
        ] {
            threads(3, |group| {
                let device = (group.rank() % devices) as u32;
                let rank = Rank::new(group, device, options(3).way(way)).unwrap();
                let other = Stream::new(rank.context()).unwrap();
                let rows = |call: usize| 1 + 13 * call;
                let bytes = |call| rows(call) * rank.row_bytes();
                let local = DeviceBuffer::new(rank.context(), CALLS * bytes(CALLS)).unwrap();
                let out = DeviceBuffer::new(rank.context(), 3 * CALLS * bytes(CALLS)).unwrap();
                for call in 0..CALLS {
                    let at = call * bytes(CALLS);
                    let mine = rows_of(call as u64, rank.rank(), bytes(call));
                    local.upload(&rank.stream, at, &mine).unwrap();
                    let poison = vec![0xee; 3 * bytes(CALLS)];
                    out.upload(&rank.stream, 3 * at, &poison).unwrap();
                }
                rank.meet();
                for call in 0..CALLS {
                    let at = (call * bytes(CALLS)) as u64;
                    let stream = if call % 2 == 0 { &rank.stream } else { &other };
                    // SAFETY: the buffers live until both streams are waited for; every call has
                    // parts of its own.
                    let local = unsafe { DeviceRows::new(local.address() + at, bytes(call)) };
                    let out = out.address() + 3 * at;
                    // SAFETY: as above.
                    let out = unsafe { DeviceRowsMut::new(out, 3 * bytes(call)) };
                    rank.gather.gather_into(0, stream, local, out).unwrap();
                }
                rank.gather.wait(&rank.stream).unwrap();
                rank.gather.wait(&other).unwrap();
                for call in 0..CALLS {
                    let mut got = vec![0; 3 * bytes(CALLS)];
                    let at = 3 * call * bytes(CALLS);
                    out.download(&other, at, &mut got).unwrap();
                    let (rows, rest) = got.split_at(3 * bytes(call));
                    let expected = rows_of_all(call as u64, 0..3, bytes(call));
                    assert!(rows == expected, "call {call}");
                    assert!(rest.iter().all(|&byte| byte == 0xee));
                }
                assert_eq!(rank.epochs(), [CALLS as u64]);
                rank.meet();
            });
        }
    });
}

/// A graph of two calls, one with a copy and one without, and the stream it was captured on.
fn capture(rank: &Rank, bytes: usize) -> (ExecutableGraph, u64) {
    let capture = rank.stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
    rank.submit_on(&rank.stream, 0, bytes / rank.row_bytes())
        .unwrap();
    let lent = rank
        .gather
        .gather(0, &rank.stream, rank.local(bytes))
        .unwrap();
    assert_eq!(lent.address(), None, "each replay has a slot of its own");
    let word = lent.address_word();
    drop(lent);
    (capture.end().unwrap().instantiate().unwrap(), word)
}

#[test]
fn graphs_and_eager_calls_share_the_epoch() {
    Machine::new(4).run("graphs_and_eager_calls_share_the_epoch", |_| {
        for (way, slots, devices) in [
            (Way::Push, 2, 4),
            (Way::Push, 3, 1),
            (Way::Pull, 2, 2),
            (Way::Multicast, 2, 4),
        ] {
            threads(4, |group| {
                let device = (group.rank() % devices) as u32;
                let options = options(4).way(way).slots(slots).ubatches(2);
                let rank = Rank::new(group, device, options).unwrap();
                let bytes = 33 * rank.row_bytes();
                rank.gather_into(0, 2, 1);
                let (graph, word) = capture(&rank, bytes);
                assert_eq!(rank.epochs(), [1, 0], "capturing executes nothing");
                let mut epoch = 1;
                for round in 0..4 {
                    rank.fill_on(&rank.stream, 10 + round, bytes);
                    rank.poison_on(&rank.stream);
                    // SAFETY: workspace and storage live until the stream is waited for; the
                    // other calls on the ubatch are on the same stream.
                    unsafe { graph.launch(&rank.stream) }.unwrap();
                    rank.gather.wait(&rank.stream).unwrap();
                    epoch += 2;
                    rank.check_output(33, 10 + round);
                    let address = read(&rank.stream, word, 8).try_into().unwrap();
                    let lent = read(&rank.stream, u64::from_ne_bytes(address), 4 * bytes);
                    assert!(lent == rows_of_all(10 + round, 0..4, bytes), "lent");
                    assert_eq!(rank.epochs(), [epoch, round]);
                    // Eager calls between replays, without and with a copy, an odd number of them.
                    for call in 0..=round {
                        match call % 2 {
                            0 => rank.gather_into(0, 7, 50 + call),
                            _ => rank.gather_lent(0, 128, 50 + call),
                        }
                        epoch += 1;
                    }
                    rank.gather_into(1, 3, 70 + round);
                    assert_eq!(rank.epochs(), [epoch, round + 1]);
                }
                drop(graph);
                rank.meet();
            });
        }
    });
}

/// Replays submitted in a row, then an eager call on another stream that is ordered after them.
#[test]
fn replays_in_a_row_need_no_host() {
    Machine::new(2).run("replays_in_a_row_need_no_host", |_| {
        threads(2, |group| {
            let device = group.rank() as u32;
            let rank = Rank::new(group, device, options(2)).unwrap();
            let other = Stream::new(rank.context()).unwrap();
            let bytes = 100 * rank.row_bytes();
            let (graph, _) = capture(&rank, bytes);
            rank.fill_on(&rank.stream, 1, bytes);
            rank.poison_on(&rank.stream);
            for _ in 0..10 {
                // SAFETY: as in the test above.
                unsafe { graph.launch(&rank.stream) }.unwrap();
            }
            let done = direct_dcp::cuda::Event::new(rank.context()).unwrap();
            done.record(&rank.stream).unwrap();
            other.wait(&done).unwrap();
            // Another slot than the host would guess from the calls that it has seen.
            let lent = rank.gather.gather(0, &other, rank.local(bytes)).unwrap();
            let got = read(&other, lent.address().unwrap(), 2 * bytes);
            assert!(got == rows_of_all(1, 0..2, bytes));
            rank.gather.wait(&rank.stream).unwrap();
            rank.check_output(100, 1);
            assert_eq!(rank.epochs(), [21]);
            drop((lent, graph));
            rank.meet();
        });
    });
}

/// An eager call on one stream is under way when a captured one makes the host ask for the epoch.
#[test]
fn the_epoch_is_asked_for_after_calls_under_way() {
    Machine::new(2).run("the_epoch_is_asked_for_after_calls_under_way", |_| {
        threads(2, |group| {
            let device = group.rank() as u32;
            let rank = Rank::new(group, device, options(2).slots(3)).unwrap();
            let other = Stream::new(rank.context()).unwrap();
            let bytes = 3 * rank.row_bytes();
            rank.fill_on(&rank.stream, 1, bytes);
            rank.poison_on(&rank.stream);
            rank.meet();
            if rank.rank() == 1 {
                sleep(Duration::from_millis(100));
            }
            rank.submit_on(&rank.stream, 0, 3).unwrap();
            let capturing = Stream::new(rank.context()).unwrap();
            let capture = capturing.begin_capture(CaptureMode::ThreadLocal).unwrap();
            rank.submit_on(&capturing, 0, 3).unwrap();
            let graph = capture.end().unwrap();
            let lent = rank.gather.gather(0, &other, rank.local(bytes)).unwrap();
            let got = read(&other, lent.address().unwrap(), 2 * bytes);
            assert!(got == rows_of_all(1, 0..2, bytes));
            let word = read(&other, lent.address_word(), 8);
            assert_eq!(word, lent.address().unwrap().to_ne_bytes());
            drop((lent, graph));
            rank.meet();
        });
    });
}

/// After a capture only the device knows how many calls there were. A call that copies out does
/// without the number, and so without waiting for the device to tell it.
#[test]
fn calls_after_a_capture_wait_for_nothing() {
    Machine::new(2).run("calls_after_a_capture_wait_for_nothing", |fake| {
        for (way, lends, waits) in [
            (Way::Push, false, false),
            (Way::Pull, false, false),
            (Way::Multicast, false, false),
            (Way::Push, true, true),
        ] {
            threads(2, |group| {
                let device = group.rank() as u32;
                let rank = Rank::new(group, device, options(2).way(way).slots(3)).unwrap();
                let bytes = 5 * rank.row_bytes();
                let (graph, _) = capture(&rank, bytes);
                // SAFETY: as in the tests above.
                unsafe { graph.launch(&rank.stream) }.unwrap();
                rank.meet();
                let held = lends.then(|| {
                    let lent = rank.gather.gather(0, &rank.stream, rank.local(bytes));
                    lent.unwrap()
                });
                rank.fill_on(&rank.stream, 7, bytes);
                rank.poison_on(&rank.stream);
                rank.meet();
                fake.clear_log();
                rank.group.barrier().unwrap();
                rank.submit_on(&rank.stream, 0, 5).unwrap();
                let log = fake.log();
                rank.group.barrier().unwrap();
                let waiting = |(name, _): &(String, i32)| {
                    ["Synchronize", "MemcpyDtoH"]
                        .iter()
                        .any(|part| name.contains(part))
                };
                assert_eq!(log.iter().any(waiting), waits, "{way}: {log:?}");
                rank.gather.wait(&rank.stream).unwrap();
                rank.check_output(5, 7);
                drop(held);
                // The next one that needs the number has it.
                rank.gather_lent(0, 9, 8);
                assert_eq!(rank.epochs(), [4 + u64::from(lends)]);
                drop(graph);
                rank.meet();
            });
        }
    });
}

/// The guard of a captured call does not stand for an eager one's.
#[test]
fn guards_of_captured_calls_release_nothing_else() {
    Machine::new(2).run("guards_of_captured_calls_release_nothing_else", |_| {
        threads(2, |group| {
            let device = group.rank() as u32;
            let rank = Rank::new(group, device, options(2).slots(3)).unwrap();
            let local = rank.local(3 * rank.row_bytes());
            let lend = || rank.gather.gather(0, &rank.stream, local);
            let capture = rank.stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
            let captured = lend().unwrap();
            drop(capture);
            rank.fill_on(&rank.stream, 1, local.bytes());
            let eager = lend().unwrap();
            drop(captured);
            drop(lend().unwrap());
            let in_use = GatherError::SlotInUse {
                ubatch: 0,
                epoch: 1,
            };
            assert_eq!(lend().map(drop), Err(in_use));
            drop(eager);
            drop(lend().unwrap());
            assert_eq!(rank.epochs(), [3]);
            rank.meet();
        });
    });
}

/// Replays count when the host says how long what was lent is good.
#[test]
fn replays_bring_the_end_of_what_is_lent_nearer() {
    Machine::new(2).run("replays_bring_the_end_of_what_is_lent_nearer", |_| {
        threads(2, |group| {
            let device = group.rank() as u32;
            let rank = Rank::new(group, device, options(2).slots(4)).unwrap();
            let bytes = 3 * rank.row_bytes();
            rank.poison_on(&rank.stream);
            let (graph, _) = capture(&rank, bytes);
            rank.fill_on(&rank.stream, 1, bytes);
            let lent = rank.gather.gather(0, &rank.stream, rank.local(bytes));
            let lent = lent.unwrap();
            // SAFETY: as in the tests above.
            unsafe { graph.launch(&rank.stream) }.unwrap();
            rank.gather.wait(&rank.stream).unwrap();
            let got = read(&rank.stream, lent.address().unwrap(), 2 * bytes);
            assert!(got == rows_of_all(1, 0..2, bytes));
            let in_use = GatherError::SlotInUse {
                ubatch: 0,
                epoch: 1,
            };
            assert_eq!(rank.submit_on(&rank.stream, 0, 3), Err(in_use));
            drop(lent);
            rank.gather_into(0, 3, 2);
            assert_eq!(rank.epochs(), [4]);
            drop(graph);
            rank.meet();
        });
    });
}

#[test]
fn the_copy_engines_cannot_be_captured() {
    Machine::new(2).run("the_copy_engines_cannot_be_captured", |_| {
        threads(2, |group| {
            let device = group.rank() as u32;
            let rank = Rank::new(group, device, options(2).way(Way::CopyEngine)).unwrap();
            rank.gather_into(0, 17, 1);
            rank.poison_on(&rank.stream);
            let capture = rank.stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
            let refused = rank.submit_on(&rank.stream, 0, 17).unwrap_err();
            assert!(
                matches!(refused, GatherError::Unsupported { .. }),
                "{refused}"
            );
            assert!(refused.to_string().contains("push or pull"), "{refused}");
            drop(capture);
            rank.output_untouched();
            rank.gather_into(0, 17, 2);
            assert_eq!(rank.epochs(), [2]);
            rank.meet();
        });
    });
}

/// Its kernels do not say where they have put the rows, so a graph cannot lend them.
#[test]
fn the_staged_algorithm_lends_nothing_in_a_graph() {
    Machine::new(2).run("the_staged_algorithm_lends_nothing_in_a_graph", |_| {
        threads(2, |group| {
            let device = group.rank() as u32;
            let rank = Rank::new(group, device, options(2).way(Way::Staged)).unwrap();
            let bytes = 17 * rank.row_bytes();
            let capture = rank.stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
            let lent = rank.gather.gather(0, &rank.stream, rank.local(bytes));
            assert!(
                matches!(lent, Err(GatherError::Unsupported { .. })),
                "{lent:?}"
            );
            rank.submit_on(&rank.stream, 0, 17).unwrap();
            let graph = capture.end().unwrap().instantiate().unwrap();
            for call in 1..4 {
                rank.fill_on(&rank.stream, call, bytes);
                rank.poison_on(&rank.stream);
                // SAFETY: as in the tests above.
                unsafe { graph.launch(&rank.stream) }.unwrap();
                rank.gather.wait(&rank.stream).unwrap();
                rank.check_output(17, call);
            }
            rank.gather_lent(0, 3, 4);
            assert_eq!(rank.epochs(), [4]);
            drop(graph);
            rank.meet();
        });
    });
}

/// What the group is made of makes no difference.
#[test]
fn workspaces_come_and_go() {
    Machine::new(2).run("workspaces_come_and_go", |_| {
        let groups = Group::threads(2).unwrap();
        each(groups, |group| {
            for way in [Way::Push, Way::Multicast, Way::Pull] {
                let device = group.rank() as u32;
                let rank = Rank::new(group.clone(), device, options(2).way(way)).unwrap();
                let bigger = Rank::new(group.clone(), 1 - device, options(2).slots(4)).unwrap();
                rank.gather_into(0, 128, 1);
                bigger.gather_into(0, 17, 2);
                rank.gather_into(0, 1, 3);
                rank.meet();
            }
        });
    });
}
