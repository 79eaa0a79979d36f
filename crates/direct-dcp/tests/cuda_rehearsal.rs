//! Rehearsals: what programs that check and time gathers between GPUs are given.

mod cuda_common;

use cuda_common::{Machine, Rank, rows_of, rows_of_all, threads};
use direct_dcp::cuda::{Delivery, FinalRehearsal, Rehearsal, WindowRehearsal};
use direct_dcp::plan::{RowMap, Run};
use direct_dcp::{DType, FinalLayout, GatherError, Pages, RowFormat, WorkspaceOptions};

/// Rows that are split after 5 of 7 elements.
const FORMAT: RowFormat = RowFormat::new(DType::BF16, 7);
const PLANES: [usize; 2] = [5, 2];
/// Rows of each rank, of which the last is padding.
const ROWS: usize = 4;

/// Where row `row` of rank `rank` of two belongs, last rows first.
fn place(rank: usize, row: usize) -> usize {
    2 * (ROWS - 2 - row) + rank
}

/// The layout that has each row of these ranks, one behind the other, in its place.
fn layout(ranks: &[usize]) -> FinalLayout {
    let runs = ranks.iter().enumerate().flat_map(|(index, &rank)| {
        (0..ROWS - 1).map(move |row| Run {
            src: index * ROWS + row,
            dst: place(rank, row),
            len: 1,
        })
    });
    let map = RowMap::from_runs(runs.collect(), ranks.len() * ROWS, 2 * (ROWS - 1)).unwrap();
    FinalLayout::new(&map.with_digest(7), FORMAT, &PLANES).unwrap()
}

/// The planes that call `call` has to come to.
fn planes(call: u64) -> Vec<Vec<u8>> {
    let row_bytes = FORMAT.row_bytes();
    let mut rows = vec![vec![]; 2 * (ROWS - 1)];
    for rank in 0..2 {
        let sent = rows_of(call, rank, ROWS * row_bytes);
        for (row, bytes) in sent.chunks(row_bytes).take(ROWS - 1).enumerate() {
            rows[place(rank, row)] = bytes.to_vec();
        }
    }
    let width = PLANES[0] * FORMAT.dtype().size();
    let cut = |from: usize, to: usize| rows.iter().flat_map(|row| row[from..to].to_vec()).collect();
    vec![cut(0, width), cut(width, row_bytes)]
}

fn on_one_device(slots: usize, body: impl Fn(&Rank) + Sync) {
    threads(2, |group| {
        let options = WorkspaceOptions::new(2 * ROWS, FORMAT).slots(slots);
        let rank = Rank::new(group, 0, options).unwrap();
        body(&rank);
        rank.meet();
    });
}

#[test]
fn a_pass_follows_every_call() {
    Machine::new(1).run("a_pass_follows_every_call", |_| {
        for slots in [2, 3] {
            on_one_device(slots, |rank| {
                let bytes = ROWS * FORMAT.row_bytes();
                let mut rehearsal = Rehearsal::new(&rank.gather, 0, bytes).unwrap();
                rehearsal.set_pass(&layout(&[0, 1])).unwrap();
                let mut call = 0;
                // Other rows for each call, so that those of one before are not taken for right.
                let mut check = |rehearsal: &mut Rehearsal<'_>, replays, delivery| {
                    call += 1;
                    let rows = rows_of(call, rank.rank(), bytes);
                    rehearsal.set_rows(&rows).unwrap();
                    match replays {
                        true => rehearsal.replay().unwrap(),
                        false => rehearsal.call(delivery).unwrap(),
                    }
                    let found = rehearsal.read_planes().unwrap();
                    assert!(
                        found == planes(call),
                        "{slots} slots, call {call}, {delivery:?}"
                    );
                    assert!(rehearsal.read().unwrap() == rows_of_all(call, 0..2, bytes));
                    rank.group.barrier().unwrap();
                };
                for delivery in [Delivery::CopyOut, Delivery::ZeroCopy] {
                    check(&mut rehearsal, false, delivery);
                    // Replays begin with every slot, also behind a single call.
                    for length in [1, 2, 3, 5] {
                        rehearsal.record(delivery, length).unwrap();
                        for round in 0..7 {
                            check(&mut rehearsal, true, delivery);
                            if round % 3 == 0 {
                                check(&mut rehearsal, false, delivery);
                            }
                        }
                    }
                }
            });
        }
    });
}

#[test]
fn rows_from_bytes_and_from_pages_reach_their_places() {
    Machine::new(1).run("rows_from_bytes_and_from_pages_reach_their_places", |_| {
        on_one_device(2, |rank| {
            let row_bytes = FORMAT.row_bytes();
            let bytes = ROWS * row_bytes;
            let mut rehearsal = FinalRehearsal::new(&rank.gather, 0, 3 * bytes).unwrap();
            let layout = layout(&[rank.rank()]);
            let start = 5 * row_bytes;
            let dense = rehearsal.add_dense(&layout, start..start + bytes).unwrap();
            let pages = Pages::dense(2, row_bytes);
            let paged = rehearsal
                .add_paged(&layout, pages, &[11, 0, 10, u32::MAX])
                .unwrap();
            assert_eq!((dense, paged), (0, 1));
            rank.group.barrier().unwrap();
            let mut call = 0;
            let mut check = |rehearsal: &mut FinalRehearsal<'_>, index, replays| {
                call += 1;
                let rows = rows_of(call, rank.rank(), bytes);
                let mut all = rows_of(call + 1000, rank.rank(), 3 * bytes);
                if index == dense {
                    all[start..start + bytes].copy_from_slice(&rows);
                } else {
                    for (row, slot) in rows.chunks(row_bytes).zip([11, 0, 10]) {
                        all[slot * row_bytes..][..row_bytes].copy_from_slice(row);
                    }
                }
                rehearsal.set_rows(&all).unwrap();
                match replays {
                    true => rehearsal.replay().unwrap(),
                    false => rehearsal.call(index).unwrap(),
                }
                assert!(
                    rehearsal.read().unwrap() == planes(call),
                    "call {call} of {index}"
                );
                rank.group.barrier().unwrap();
            };
            for index in [dense, paged, paged, dense] {
                check(&mut rehearsal, index, false);
            }
            for length in [1, 3] {
                rehearsal.record(length).unwrap();
                check(&mut rehearsal, dense, true);
                check(&mut rehearsal, dense, true);
                check(&mut rehearsal, dense, false);
            }
        });
    });
}

#[test]
fn windows_are_read_while_others_are_gathered() {
    Machine::new(1).run("windows_are_read_while_others_are_gathered", |_| {
        for slots in [2, 3, 4] {
            threads(2, |group| {
                let options = WorkspaceOptions::new(2 * ROWS, FORMAT).slots(slots);
                let Rank { gather, group, .. } = Rank::new(group, 0, options).unwrap();
                let bytes = ROWS * FORMAT.row_bytes();
                let mut windows = WindowRehearsal::new(gather, 0, bytes).unwrap();
                for (call, read) in [(1, 0), (2, 1), (3, 5), (4, 2 * ROWS)] {
                    windows
                        .set_rows(&rows_of(call, group.rank(), bytes))
                        .unwrap();
                    if read > 0 {
                        windows.set_reading(read, 1).unwrap();
                    }
                    group.barrier().unwrap();
                    let time = windows.run(7, read > 0).unwrap();
                    assert!(!time.is_zero());
                    let (rows, copied) = windows.read().unwrap();
                    assert!(
                        rows == rows_of_all(call, 0..2, bytes),
                        "{slots} slots, {call}"
                    );
                    assert!(
                        copied == rows[..read * FORMAT.row_bytes()],
                        "{slots} slots, {call}"
                    );
                    group.barrier().unwrap();
                }
            });
        }
    });
}

#[test]
fn what_cannot_be_rehearsed_is_refused() {
    #[track_caller]
    fn refused<T: std::fmt::Debug>(result: Result<T, GatherError>, word: &str) {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
    Machine::new(1).run("what_cannot_be_rehearsed_is_refused", |_| {
        on_one_device(2, |rank| {
            let bytes = ROWS * FORMAT.row_bytes();
            let other = RowMap::uneven(&[2 * ROWS], 0).unwrap();
            let other = FinalLayout::new(&other, RowFormat::new(DType::F16, 7), &[7]).unwrap();

            let mut rehearsal = Rehearsal::new(&rank.gather, 0, bytes).unwrap();
            refused(rehearsal.set_pass(&layout(&[0])), "8 of");
            refused(rehearsal.set_pass(&other), "8 of");
            refused(rehearsal.read_planes(), "pass");
            rehearsal.set_pass(&layout(&[0, 1])).unwrap();
            refused(rehearsal.read_planes(), "pass");
            refused(rehearsal.replay(), "recorded");

            let mut finals = FinalRehearsal::new(&rank.gather, 0, bytes).unwrap();
            let own = layout(&[rank.rank()]);
            refused(finals.add_dense(&other, 0..bytes), "row format");
            refused(finals.add_dense(&own, 1..bytes + 1), "rows");
            refused(finals.add_dense(&own, usize::MAX..bytes), "rows");
            let pages = Pages::dense(2, FORMAT.row_bytes());
            refused(finals.add_paged(&own, pages, &[0; ROWS - 1]), "slots");
            refused(finals.call(0), "call");
            refused(finals.dequantize(0, 1.0), "call");
            refused(finals.dequantize(0, f32::NAN), "scale");
            refused(finals.record(1), "call");
            refused(finals.replay(), "recorded");
            refused(finals.set_rows(&vec![1; bytes + 1]), "upload");
            refused(FinalRehearsal::new(&rank.gather, 1, bytes), "ubatch");
            // A call that takes other rows than its layout has.
            finals.add_dense(&own, 0..bytes - 1).unwrap();
            refused(finals.call(0), "local bytes");
        });
        threads(2, |group| {
            let options = WorkspaceOptions::new(2 * ROWS, FORMAT);
            let Rank { gather, group, .. } = Rank::new(group, 0, options).unwrap();
            let bytes = ROWS * FORMAT.row_bytes();
            let mut windows = WindowRehearsal::new(gather, 0, bytes).unwrap();
            refused(windows.set_reading(0, 1), "1 to 8");
            refused(windows.set_reading(2 * ROWS + 1, 1), "1 to 8");
            refused(windows.set_rows(&vec![1; bytes - 1]), "local bytes");
            group.barrier().unwrap();
            // Nobody has said what to read.
            refused(windows.run(1, true), "pass");
            group.barrier().unwrap();
        });
    });
}
