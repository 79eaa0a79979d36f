//! Rows in their final layout, between GPUs that are made up.

#![allow(unsafe_code)] // promises about rows that live here

mod cuda_common;

use std::thread::sleep;
use std::time::Duration;

use cuda_common::{Machine, Rank, read, threads};
use direct_dcp::cuda::{CaptureMode, DeviceBuffer, DeviceRows, FinalLayout, PlacedRows, Planes};
use direct_dcp::plan::{ChunkPlanner, RowMap, Sharding};
use direct_dcp::{DType, GatherError, RowFormat, Way, WorkspaceOptions};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};

/// Bytes in the memory of a rank's device.
fn upload(rank: &Rank, bytes: &[u8]) -> DeviceBuffer {
    let context = rank.gather.workspace().context();
    let buffer = DeviceBuffer::new(context, bytes.len().max(16)).unwrap();
    buffer.upload(&rank.stream, 0, bytes).unwrap();
    buffer
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// `bytes` bytes of a buffer, as rows.
fn rows(buffer: &DeviceBuffer, bytes: usize) -> DeviceRows {
    // SAFETY: the tests wait for their calls before they drop buffers.
    unsafe { DeviceRows::new(buffer.address(), bytes) }
}

fn plane(rank: &Rank, planes: &Planes, index: usize) -> Vec<u8> {
    rank.gather.wait(&rank.stream).unwrap();
    let span = planes.span(index).unwrap();
    read(&rank.stream, planes.address(index).unwrap(), span.len())
}

fn columns(rows: &[u8], row_bytes: usize, from: usize, to: usize) -> Vec<u8> {
    rows.chunks_exact(row_bytes)
        .flat_map(|row| row[from..to].to_vec())
        .collect()
}

/// An e4m3 element times a power of two and three, as bf16 bytes: all such products are exact.
fn dequantize(element: u8, scale: f32) -> [u8; 2] {
    let (exponent, mantissa) = (i32::from(element >> 3 & 15), f32::from(element & 7));
    let value = match (exponent, element & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2_f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2_f32.powi(exponent - 7),
    };
    let bits = if value.is_nan() {
        0x7fc0
    } else {
        ((value * scale).to_bits() >> 16) as u16
    };
    (bits | u16::from(element & 0x80) << 8).to_ne_bytes()
}

/// Contexts of random length in paged caches, chunk by chunk, against the contexts themselves.
#[test]
fn random_plans_from_paged_caches() {
    Machine::new(8).run("random_plans_from_paged_caches", |_| {
        let plans: u64 = std::env::var("DIRECT_DCP_LAYOUTS").map_or(12, |n| n.parse().unwrap());
        for way in [Way::Push, Way::Multicast] {
            for seed in 0..plans {
                end_to_end(seed, way);
            }
        }
    });
}

fn end_to_end(seed: u64, way: Way) {
    let mut dice = StdRng::seed_from_u64(seed);
    let world = dice.random_range(2..=8);
    let interleave = dice.random_range(1..=16);
    let block = [1, 4, 16][dice.random_range(0..3)];
    // The multicast kernels move 16 bytes at a time.
    let kinds = if way == Way::Multicast { 3 } else { 5 };
    let (kind, scale) = (seed % kinds, 0.375_f32);
    let (format, source_bytes, planes): (_, usize, &[usize]) = match kind {
        0 => (RowFormat::new(DType::BF16, 576), 1152, &[512, 64]),
        1 => (RowFormat::new(DType::BF16, 96), 96, &[64, 32]),
        2 => (RowFormat::new(DType::Bytes, 656), 656, &[512, 16, 128]),
        3 => (RowFormat::new(DType::BF16, 7), 7, &[2, 4, 1]),
        _ => (RowFormat::new(DType::Bytes, 13), 13, &[13]),
    };
    let converts = matches!(kind, 1 | 3);
    let contexts: Vec<usize> = (0..dice.random_range(1..=4))
        .map(|_| dice.random_range(0..90))
        .collect();
    let sharding = Sharding::new(world, interleave).unwrap();
    let planner = ChunkPlanner::new(sharding, block, dice.random_range(1..300)).unwrap();
    let plan = planner.plan(&contexts).unwrap();
    let tokens: Vec<Vec<u8>> = contexts
        .iter()
        .map(|&len| {
            let mut rows = vec![0; len * source_bytes];
            dice.fill_bytes(&mut rows);
            rows
        })
        .collect();
    let (row_stride, page_stride) = (source_bytes + 16, block * (source_bytes + 16) + 32);
    let options = WorkspaceOptions::new(planner.budget_rows(), format).way(way);

    threads(world, |group| {
        let device = group.rank() as u32;
        let rank = Rank::new(group, device, options.clone()).unwrap();
        let me = rank.group.rank();
        let mut dice = StdRng::seed_from_u64(seed ^ me as u64);
        let owned = |request: usize| {
            let rows = tokens[request].chunks_exact(source_bytes).enumerate();
            let mine = rows.filter(|(token, _)| token / interleave % world == me);
            mine.map(|(_, row)| row).collect::<Vec<_>>()
        };
        // Every row in a slot of its own, in no order.
        let local: Vec<_> = (0..contexts.len()).map(owned).collect();
        let count = local.iter().map(Vec::len).sum::<usize>() + 3;
        let pages = count.div_ceil(block);
        let mut free: Vec<u32> = (0..(pages * block) as u32).collect();
        let mut cache = vec![0; pages * page_stride];
        dice.fill_bytes(&mut cache);
        let slots: Vec<Vec<u32>> = local
            .iter()
            .map(|rows| {
                let mut store = |row: &[u8]| {
                    let slot = free.swap_remove(dice.random_range(0..free.len()));
                    let (page, place) = (slot as usize / block, slot as usize % block);
                    let at = page * page_stride + place * row_stride;
                    cache[at..at + source_bytes].copy_from_slice(row);
                    slot
                };
                rows.iter().map(|row| store(row)).collect()
            })
            .collect();
        let device_cache = upload(&rank, &cache);

        for chunk in plan.chunks() {
            let layout =
                direct_dcp::FinalLayout::new(&chunk.row_map(me).unwrap(), format, planes).unwrap();
            let layout = FinalLayout::new(rank.gather.workspace(), &layout).unwrap();
            let mut local_slots = Vec::new();
            for part in chunk.parts() {
                let valid = part.local_start..part.local_start + part.valid_rows(me);
                local_slots.extend_from_slice(&slots[part.request][valid.clone()]);
                local_slots.extend(std::iter::repeat_n(u32::MAX, part.padded_len - valid.len()));
            }
            let table = upload(&rank, &words(&local_slots));
            // SAFETY: as in `rows`.
            let from = unsafe {
                PlacedRows::paged(
                    rows(&device_cache, cache.len()),
                    block as u32,
                    page_stride as u64,
                    row_stride as u64,
                    table.address(),
                )
            };
            let from = if converts {
                from.dequantized(scale)
            } else {
                from
            };
            rank.meet();
            let got = rank
                .gather
                .gather_final(0, &rank.stream, &from, &layout)
                .unwrap();

            let mut expected = Vec::new();
            for part in chunk.parts() {
                for source in 0..world {
                    for token in part.start..part.start + part.len {
                        if token / interleave % world != source {
                            continue;
                        }
                        let row = &tokens[part.request][token * source_bytes..][..source_bytes];
                        if converts {
                            expected.extend(row.iter().flat_map(|&e| dequantize(e, scale)));
                        } else {
                            expected.extend_from_slice(row);
                        }
                    }
                }
            }
            let mut start = 0;
            for (index, width) in planes.iter().enumerate() {
                let end = start + width * format.dtype().size();
                let wanted = columns(&expected, format.row_bytes(), start, end);
                assert!(
                    plane(&rank, &got, index) == wanted,
                    "seed {seed} by {way}, plane {index}"
                );
                start = end;
            }
            drop(got);
            rank.meet();
        }
    });
}

/// The ranks of an uneven layout, as often as is asked for.
fn uneven<const W: usize>(rank: &Rank, counts: [usize; W], format: RowFormat) -> FinalLayout {
    let map = RowMap::uneven(&counts, rank.group.rank()).unwrap();
    let layout = direct_dcp::FinalLayout::new(&map, format, &[format.dim()]).unwrap();
    FinalLayout::new(rank.gather.workspace(), &layout).unwrap()
}

const FORMAT: RowFormat = RowFormat::new(DType::Bytes, 32);

/// Rows of [`FORMAT`] in two pages of two, at the places that `slots` names.
fn paged(local: &DeviceBuffer, slots: &DeviceBuffer) -> PlacedRows {
    // SAFETY: as in `rows`.
    unsafe { PlacedRows::paged(rows(local, 4 * 32), 2, 64, 32, slots.address()) }
}

/// Gathers, and says why that failed.
#[track_caller]
fn failure(rank: &Rank, from: &PlacedRows, layout: &FinalLayout) -> GatherError {
    let lent = rank.gather.gather_final(0, &rank.stream, from, layout);
    drop(lent.unwrap());
    rank.gather.wait(&rank.stream).unwrap_err()
}

fn bytes(seed: u64, rows: usize) -> Vec<u8> {
    let mut bytes = vec![0; rows * 32];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

/// A rank without rows takes part, as do ranks that all have none; and a layout is captured, its
/// places and rows written anew, and replayed between eager calls.
#[test]
fn uneven_ranks_and_replays() {
    Machine::new(2).run("uneven_ranks_and_replays", |_| {
        for way in [Way::Push, Way::Multicast] {
            threads(2, |group| {
                let device = group.rank() as u32;
                let rank =
                    Rank::new(group, device, WorkspaceOptions::new(8, FORMAT).way(way)).unwrap();
                let me = rank.group.rank();
                for counts in [[3, 0], [0, 0], [0, 5], [4, 4]] {
                    let layout = uneven(&rank, counts, FORMAT);
                    let local = upload(&rank, &bytes(me as u64, counts[me]));
                    let from = PlacedRows::dense(rows(&local, counts[me] * 32));
                    rank.meet();
                    let got = rank
                        .gather
                        .gather_final(0, &rank.stream, &from, &layout)
                        .unwrap();
                    let expected = [bytes(0, counts[0]), bytes(1, counts[1])].concat();
                    assert_eq!(plane(&rank, &got, 0), expected);
                    drop(got);
                    rank.meet();
                }
                assert_eq!(rank.epochs(), [4]);

                let layout = uneven(&rank, [2, 2], FORMAT);
                let local = upload(&rank, &bytes(10 + me as u64, 2));
                let from = PlacedRows::dense(rows(&local, 64));
                let capture = rank.stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
                let got = rank
                    .gather
                    .gather_final(0, &rank.stream, &from, &layout)
                    .unwrap();
                assert_eq!(got.address(0), None);
                let word = got.address_word();
                drop(got);
                let graph = capture.end().unwrap().instantiate().unwrap();
                for replay in 0..3 {
                    // The rows of both ranks take turns, in another order each time.
                    let places = [[0, 2], [3, 1], [2, 0]][replay];
                    let places = places.map(|place: u32| place ^ me as u32);
                    rank.stream.synchronize().unwrap();
                    // SAFETY: the words of the layout, which no launch is using.
                    unsafe {
                        let table = words(&places);
                        direct_upload(&rank, layout.places(), &table);
                    }
                    rank.meet();
                    // SAFETY: what was captured lives until the stream has come here.
                    unsafe { graph.launch(&rank.stream) }.unwrap();
                    rank.gather.wait(&rank.stream).unwrap();
                    let address = read(&rank.stream, word, 8).try_into().unwrap();
                    let got = read(&rank.stream, u64::from_ne_bytes(address), 4 * 32);
                    let mut expected = vec![0; 4 * 32];
                    for source in 0..2 {
                        let places = [[0, 2], [3, 1], [2, 0]][replay];
                        for (row, place) in bytes(10 + source, 2).chunks(32).zip(places) {
                            let at = (place ^ source as usize) * 32;
                            expected[at..at + 32].copy_from_slice(row);
                        }
                    }
                    assert_eq!(got, expected, "replay {replay}");
                    rank.meet();
                }
                assert_eq!(rank.epochs(), [7]);
                rank.meet();
            });
        }
    });
}

/// Writes words of device memory through a buffer of ours.
///
/// # Safety
/// They are there, and no launch is using them.
unsafe fn direct_upload(rank: &Rank, to: u64, bytes: &[u8]) {
    let from = upload(rank, bytes);
    // SAFETY: the caller's, and a buffer that lives until the stream has come here.
    unsafe { rank.stream.copy_on_device(to, from.address(), bytes.len()) }.unwrap();
    rank.stream.synchronize().unwrap();
}

/// Where what a stream does first waits for the kernels that run, a rank may still make its layout
/// when the others' gathers wait for it.
#[test]
fn a_late_layout_is_not_held_back() {
    Machine::new(1).with("DIRECT_DCP_FAKE_LATE_STREAMS", 1).run(
        "a_late_layout_is_not_held_back",
        |_| {
            threads(2, |group| {
                let rank = Rank::new(group, 0, WorkspaceOptions::new(8, FORMAT)).unwrap();
                let me = rank.rank();
                let local = upload(&rank, &bytes(me as u64, 3));
                rank.meet();
                if me == 1 {
                    sleep(Duration::from_millis(100));
                }
                let layout = uneven(&rank, [3, 3], FORMAT);
                let from = PlacedRows::dense(rows(&local, 3 * 32));
                let gather = &rank.gather;
                let got = gather.gather_final(0, &rank.stream, &from, &layout);
                let got = got.unwrap();
                gather.wait(&rank.stream).unwrap();
                assert_eq!(plane(&rank, &got, 0), [bytes(0, 3), bytes(1, 3)].concat());
                drop(got);
                rank.meet();
            });
        },
    );
}

/// A place or a slot out of range, which only the device sees, is an error of the rank that has it;
/// the others learn that it failed. Nothing is stored where it should not, and the devices go on.
#[test]
fn what_is_out_of_range_is_an_error() {
    Machine::new(2).run("what_is_out_of_range_is_an_error", |_| {
        for fault in ["place", "slot"] {
            threads(2, |group| {
                let device = group.rank() as u32;
                let options = WorkspaceOptions::new(8, FORMAT).way(Way::Push);
                let rank = Rank::new(group, device, options.clone()).unwrap();
                let me = rank.group.rank();
                let layout = uneven(&rank, [2, 2], FORMAT);
                let local = upload(&rank, &bytes(me as u64, 4));
                let bad = if me == 1 { 4 } else { 3 };
                let slots = upload(&rank, &words(&[0, if fault == "slot" { bad } else { 3 }]));
                if fault == "place" && me == 1 {
                    // SAFETY: the words of the layout, which no launch is using.
                    unsafe { direct_upload(&rank, layout.places(), &words(&[2, 4])) };
                }
                rank.meet();
                let error = failure(&rank, &paged(&local, &slots), &layout);
                match (me, &error) {
                    (
                        1,
                        GatherError::OutOfRange {
                            epoch: 1,
                            what,
                            got: 4,
                            count: 4,
                        },
                    ) => {
                        assert!(what.contains(fault), "{error}");
                    }
                    (0, GatherError::PeerLost { rank: 1 }) => {}
                    _ => panic!("rank {me}: {error:?}"),
                }
                // The context is alive, and a rebuilt group gathers.
                let group = rank.group.rebuild(Duration::from_secs(20)).unwrap();
                drop(rank);
                let rank = Rank::new(group, device, options.clone()).unwrap();
                rank.gather_into(0, 2, 77);
                rank.meet();
            });
        }
    });
}

/// The others learn that a rank had a slot out of range at whatever point of their calls they are:
/// also between two looks of theirs for faults of their own.
#[test]
fn what_is_out_of_range_elsewhere_ends_a_call_whole() {
    Machine::new(1).run("what_is_out_of_range_elsewhere_ends_a_call_whole", |_| {
        for round in 0..100 {
            threads(3, |group| {
                let options = WorkspaceOptions::new(9, FORMAT).way(Way::Push);
                let rank = Rank::new(group, 0, options).unwrap();
                let me = rank.group.rank();
                let layout = uneven(&rank, [2, 2, 2], FORMAT);
                let local = upload(&rank, &bytes(round, 4));
                let slots = upload(&rank, &words(&[0, if me == 0 { 4 } else { 3 }]));
                rank.meet();
                let error = failure(&rank, &paged(&local, &slots), &layout);
                if me == 0 {
                    assert!(
                        matches!(error, GatherError::OutOfRange { got: 4, .. }),
                        "{error:?}"
                    );
                } else {
                    // One of the others may have given up before rank 0 was asked.
                    assert!(matches!(error, GatherError::PeerLost { .. }), "{error:?}");
                }
                rank.meet();
            });
        }
    });
}

/// What cannot work is refused before anything is submitted.
#[test]
fn what_does_not_fit_is_refused() {
    Machine::new(2).run("what_does_not_fit_is_refused", |_| {
        threads(2, |group| {
            let device = group.rank() as u32;
            let options = WorkspaceOptions::new(8, FORMAT);
            let rank = Rank::new(group, device, options.way(Way::Push)).unwrap();
            let me = rank.group.rank();
            let local = upload(&rank, &bytes(me as u64, 6));
            let from = |count: usize| PlacedRows::dense(rows(&local, count * 32));
            let refused = |from: &PlacedRows, layout: &FinalLayout, word: &str| match rank
                .gather
                .gather_final(0, &rank.stream, from, layout)
            {
                Err(error @ GatherError::InvalidArgument { .. }) => {
                    assert!(error.to_string().contains(word), "{error}");
                }
                other => panic!("{word}: {other:?}"),
            };
            let layout = uneven(&rank, [2, 2], FORMAT);
            refused(&from(1), &layout, "local bytes");
            refused(&from(2).dequantized(f32::INFINITY), &layout, "format");
            refused(&from(5), &uneven(&rank, [5, 5], FORMAT), "at most");
            let other = RowFormat::new(DType::F16, 16);
            refused(&from(2), &uneven(&rank, [2, 2], other), "format");
            let held = rank
                .gather
                .gather_final(0, &rank.stream, &from(2), &layout)
                .unwrap();
            let second = rank.gather.gather_final(0, &rank.stream, &from(2), &layout);
            assert!(
                matches!(second, Err(GatherError::SlotInUse { epoch: 1, .. })),
                "{second:?}"
            );
            held.release_after(&rank.stream).unwrap();
            drop(
                rank.gather
                    .gather_final(0, &rank.stream, &from(2), &layout)
                    .unwrap(),
            );
            rank.gather.wait(&rank.stream).unwrap();
            assert_eq!(rank.epochs(), [2]);
            rank.meet();
        });
        for way in [Way::Pull, Way::Staged] {
            threads(2, |group| {
                let device = group.rank() as u32;
                let options = WorkspaceOptions::new(8, FORMAT);
                let rank = Rank::new(group, device, options.way(way)).unwrap();
                let local = upload(&rank, &bytes(0, 2));
                let layout = uneven(&rank, [2, 2], FORMAT);
                let from = PlacedRows::dense(rows(&local, 64));
                let refused = rank.gather.gather_final(0, &rank.stream, &from, &layout);
                assert!(
                    matches!(refused, Err(GatherError::Unsupported { .. })),
                    "{refused:?}"
                );
                rank.meet();
            });
        }
    });
}

/// Runs of random length, between padding, split into planes, copied by the engines: against the rows
/// themselves, put where a shuffled list says. What no row goes to keeps its bytes.
#[test]
fn the_copy_engines_place_runs() {
    Machine::new(3).run("the_copy_engines_place_runs", |_| {
        for (seed, world, devices, slots) in [(1, 2, 1, 2), (2, 3, 3, 3), (3, 3, 2, 2)] {
            copied_runs(seed, world, devices, slots);
        }
    });
}

fn copied_runs(seed: u64, world: usize, devices: usize, slots: usize) {
    const CAPACITY: usize = 60;
    let options = WorkspaceOptions::new(CAPACITY, FORMAT).slots(slots);
    let planes: [&[usize]; 3] = [&[32], &[20, 12], &[1, 15, 3, 13]];
    threads(world, |group| {
        let device = (group.rank() % devices) as u32;
        let rank = Rank::new(group, device, options.clone().way(Way::CopyEngine)).unwrap();
        // The same on all ranks.
        let mut dice = StdRng::seed_from_u64(seed);
        // What each slot held before, as far as it is known.
        let mut kept: Vec<Option<Vec<u8>>> = vec![None; slots];
        for call in 1..=20_usize {
            let total = [0, 1, 17, CAPACITY][dice.random_range(0..4)];
            // Runs of the result go to ranks by chance; and of each rank's, the order too.
            let mut local: Vec<Vec<i32>> = vec![Vec::new(); world];
            let (mut next, mut runs) = (0, Vec::new());
            while next < total {
                let end = (next + dice.random_range(1..8)).min(total);
                runs.push((next as i32..end as i32, dice.random_range(0..world)));
                next = end;
            }
            while !runs.is_empty() {
                let (run, owner) = runs.swap_remove(dice.random_range(0..runs.len()));
                local[owner].extend(run);
                local[owner].extend(std::iter::repeat_n(-1, dice.random_range(0..3)));
            }
            let split = planes[call % planes.len()];
            let row = |owner: usize, index: usize| {
                bytes(((call * world + owner) * 1000 + index) as u64, 1)
            };
            let mine = &local[rank.rank()];
            let map = RowMap::from_rows(mine, total).unwrap();
            let layout = direct_dcp::FinalLayout::new(&map, FORMAT, split).unwrap();
            let layout = FinalLayout::new(rank.gather.workspace(), &layout).unwrap();
            let rows_of = |owner: usize, len: usize| {
                (0..len)
                    .flat_map(|index| row(owner, index))
                    .collect::<Vec<u8>>()
            };
            let memory = rows_of(rank.rank(), mine.len());
            let source = upload(&rank, &memory);
            rank.meet();
            let from = PlacedRows::dense(rows(&source, memory.len()));
            let got = rank
                .gather
                .gather_final(0, &rank.stream, &from, &layout)
                .unwrap();
            rank.gather.wait(&rank.stream).unwrap();
            let start = got.address(0).unwrap();
            let slot = read(&rank.stream, start, CAPACITY * 32);
            let known = kept[call % slots].as_ref();
            let mut expected = known.cloned().unwrap_or_else(|| slot.clone());
            for (owner, places) in local.iter().enumerate() {
                for (index, &place) in places.iter().enumerate().filter(|(_, place)| **place >= 0) {
                    let row = row(owner, index);
                    let mut before = 0;
                    for &width in split {
                        let at = before * CAPACITY + place as usize * width;
                        expected[at..at + width].copy_from_slice(&row[before..before + width]);
                        before += width;
                    }
                }
            }
            assert!(slot == expected, "seed {seed}, call {call}");
            kept[call % slots] = Some(expected);
            drop(got);
            rank.meet();
        }
        assert_eq!(rank.epochs(), [20]);
        // What the last call used is freed, for which nobody may be waited for.
        rank.meet();
        // Other calls on the same slots.
        rank.gather_into(0, 3, 1);
        rank.gather_lent(0, 20, 2);
        rank.meet();
    });
}

#[test]
fn what_the_copy_engines_cannot_place_is_refused() {
    let test = "what_the_copy_engines_cannot_place_is_refused";
    Machine::new(2).run(test, |_| {
        const BF16: RowFormat = RowFormat::new(DType::BF16, 16);
        threads(2, |group| {
            let device = group.rank() as u32;
            let options = WorkspaceOptions::new(8, BF16).way(Way::CopyEngine);
            let rank = Rank::new(group, device, options).unwrap();
            let layout = uneven(&rank, [2, 2], BF16);
            let (local, table) = (upload(&rank, &bytes(0, 2)), upload(&rank, &words(&[1, 0])));
            let dense = PlacedRows::dense(rows(&local, 64));
            // SAFETY: as in `rows`.
            let paged = unsafe { PlacedRows::paged(rows(&local, 64), 1, 32, 32, table.address()) };
            let halves = PlacedRows::dense(rows(&local, 32)).dequantized(1.0);
            let refused = |from: &PlacedRows, word: &str| {
                let refused = rank.gather.gather_final(0, &rank.stream, from, &layout);
                let error = refused.unwrap_err();
                assert!(
                    matches!(error, GatherError::Unsupported { .. }),
                    "{error:?}"
                );
                assert!(error.to_string().contains(word), "{error}");
            };
            refused(&paged, "where in its pages");
            refused(&halves, "convert nothing");
            let capture = rank.stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
            refused(&dense, "graph");
            drop(capture);
            rank.meet();
            let got = rank.gather.gather_final(0, &rank.stream, &dense, &layout);
            assert!(plane(&rank, &got.unwrap(), 0)[..32] == bytes(0, 2)[..32]);
            assert_eq!(rank.epochs(), [1]);
            rank.meet();
        });
    });
}
