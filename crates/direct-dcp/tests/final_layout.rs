//! Rows in their final layout, between threads, against a cache that was never sharded.

mod group_common;

use direct_dcp::plan::{ChunkPlanner, RowMap, Run, Sharding};
use direct_dcp::{
    DType, FinalLayout, GatherError, Group, KvGather, Pages, RowFormat, Rows, Way, Workspace,
    WorkspaceOptions,
};
use group_common::watched;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use std::thread;
use std::time::Duration;

const WAYS: [Way; 2] = [Way::SharedSlot, Way::Push];

/// Runs `task` on every rank of a group of threads, and gives what they return in rank order.
fn ranks<T: Send + 'static>(
    options: &WorkspaceOptions,
    world: usize,
    task: impl Fn(usize, KvGather) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let groups = Group::threads(world).unwrap();
    let threads: Vec<_> = groups
        .into_iter()
        .map(|group| {
            let (options, task) = (options.clone(), task.clone());
            thread::spawn(move || {
                let rank = group.rank();
                let gather = KvGather::new(Workspace::new(&group, options).unwrap())
                    .timeout(Duration::from_secs(20))
                    .first_timeout(Duration::from_secs(20));
                task(rank, gather)
            })
        })
        .collect();
    threads
        .into_iter()
        .map(|rank| rank.join().unwrap())
        .collect()
}

fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    StdRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}

/// The columns `from..to` of all rows.
fn columns(rows: &[u8], row_bytes: usize, from: usize, to: usize) -> Vec<u8> {
    rows.chunks_exact(row_bytes)
        .flat_map(|row| row[from..to].to_vec())
        .collect()
}

/// Four ranks, rows of 576 elements split at 512, three requests of which some ranks have less:
/// 44 rows. The other slot, the other ubatch and what lies behind the rows stay as they are.
#[test]
fn three_requests_of_four_ranks() {
    const PADDED: [usize; 3] = [4, 4, 6];
    const STARTS: [usize; 3] = [4, 0, 0];
    const LENS: [[usize; 4]; 3] = [[8, 8, 7, 6], [4, 2, 2, 2], [6, 6, 5, 4]];
    watched(|| {
        for dtype in [DType::BF16, DType::F16, DType::F8E4M3] {
            for way in WAYS {
                three_requests(dtype, way, PADDED, STARTS, LENS);
            }
        }
    });
}

fn three_requests(
    dtype: DType,
    way: Way,
    padded: [usize; 3],
    starts: [usize; 3],
    lens: [[usize; 4]; 3],
) {
    let format = RowFormat::new(dtype, 576);
    let (row, split) = (format.row_bytes(), 512 * dtype.size());
    let valid = move |request: usize, rank: usize| {
        lens[request][rank]
            .saturating_sub(starts[request])
            .min(padded[request])
    };
    let shard = move |rank: usize| random_bytes(7 + rank as u64, 14 * row);
    // Request by request, rank by rank, the rows that are no padding.
    let mut expected = Vec::new();
    for request in 0..3 {
        for rank in 0..4 {
            let first = padded[..request].iter().sum::<usize>();
            let rows = first * row..(first + valid(request, rank)) * row;
            expected.extend_from_slice(&shard(rank)[rows]);
        }
    }
    assert_eq!(expected.len(), 44 * row);

    let options = WorkspaceOptions::new(64, format)
        .slots(2)
        .ubatches(2)
        .way(way);
    ranks(&options, 4, move |rank, gather| {
        let map = RowMap::for_requests(&padded, &lens, &starts, rank).unwrap();
        let layout = FinalLayout::new(&map, format, &[512, 64]).unwrap();
        // Something in every byte of both slots, of both ubatches.
        let before: Vec<Vec<u8>> = (0..2)
            .map(|call| {
                let junk = random_bytes(100 + call, 64 * row);
                let share = junk[rank * 16 * row..][..16 * row].to_vec();
                for ubatch in 0..2 {
                    assert_eq!(*gather.gather(ubatch, &share).unwrap(), junk);
                }
                junk
            })
            .collect();

        let planes = gather
            .gather_final(0, &Rows::dense(&shard(rank)), &layout)
            .unwrap();
        assert_eq!(planes.epoch(), 3);
        assert_eq!(planes.plane(0).unwrap(), columns(&expected, row, 0, split));
        assert_eq!(
            planes.plane(1).unwrap(),
            columns(&expected, row, split, row)
        );
        assert!(planes.plane(2).is_none());
        // Call 3 has the slot of call 1: what it did not write is what call 1 left there.
        let (first, second) = (44 * split, 64 * split + 44 * (row - split));
        assert_eq!(
            planes.slot()[first..64 * split],
            before[0][first..64 * split]
        );
        assert_eq!(planes.slot()[second..], before[0][second..]);
        drop(planes);
        assert_eq!(gather.status().epochs, [3, 2]);

        // The other slot is as call 2 left it, but for the one row of each rank that call 4 writes.
        let one = RowMap::from_rows(&[rank as i32], 4).unwrap();
        let one = FinalLayout::new(&one, format, &[576]).unwrap();
        let local = random_bytes(55 + rank as u64, row);
        let planes = gather.gather_final(0, &Rows::dense(&local), &one).unwrap();
        assert_eq!(planes.slot()[4 * row..], before[1][4 * row..]);
    });
}

/// One random plan, end to end: a paged cache a rank, chunks, planes, against the whole context.
fn end_to_end(seed: u64, way: Way) -> usize {
    let mut dice = StdRng::seed_from_u64(seed);
    let world = dice.random_range(2..=8);
    let interleave = dice.random_range(1..=16);
    let block = *[1, 4, 16].get(dice.random_range(0..3)).unwrap();
    // bf16, fp8 that becomes bf16, and packed records that stay packed.
    let kind = dice.random_range(0..3);
    let (format, source_bytes) = match kind {
        0 => (RowFormat::new(DType::BF16, 96), 192),
        1 => (RowFormat::new(DType::BF16, 96), 96),
        _ => (RowFormat::new(DType::Bytes, 656), 656),
    };
    let planes: &[usize] = match (kind, dice.random_range(0..3)) {
        (0 | 1, 0) => &[96],
        (0 | 1, 1) => &[64, 32],
        (0 | 1, _) => &[1, 50, 40, 5],
        (_, 0) => &[656],
        _ => &[528, 128],
    };
    let scale = 0.375_f32;
    let contexts: Vec<usize> = (0..dice.random_range(1..=5))
        .map(|_| dice.random_range(0..200))
        .collect();
    let sharding = Sharding::new(world, interleave).unwrap();
    let planner = ChunkPlanner::new(sharding, block, dice.random_range(1..400)).unwrap();
    let plan = planner.plan(&contexts).unwrap();
    // The tokens of all requests, never sharded.
    let tokens: Vec<Vec<u8>> = contexts
        .iter()
        .map(|&len| {
            let mut rows = vec![0; len * source_bytes];
            dice.fill_bytes(&mut rows);
            rows
        })
        .collect();
    let pages = Pages {
        page_rows: block,
        page_stride: block * (source_bytes + 3) + 5,
        row_stride: source_bytes + 3,
    };
    let options = WorkspaceOptions::new(planner.budget_rows(), format)
        .slots(dice.random_range(2..=4))
        .way(way);
    let shuffles = seed ^ 0x5eed;
    let calls = plan.chunks().len();
    let planes = planes.to_vec();
    ranks(&options, world, move |rank, gather| {
        let mut dice = StdRng::seed_from_u64(shuffles + rank as u64);
        // This rank's tokens, in pages in no order.
        let local: Vec<Vec<&[u8]>> = tokens
            .iter()
            .map(|rows| {
                let owned = |(token, _): &(usize, _)| token / interleave % world == rank;
                let rows = rows.chunks_exact(source_bytes).enumerate();
                rows.filter(owned).map(|(_, row)| row).collect()
            })
            .collect();
        let needed: usize = local.iter().map(|rows| rows.len().div_ceil(block)).sum();
        let mut free: Vec<u32> = (0..needed as u32 + 3).collect();
        let mut cache = vec![0; free.len() * pages.page_stride];
        dice.fill_bytes(&mut cache);
        let tables: Vec<Vec<u32>> = local
            .iter()
            .map(|rows| {
                let mut take = || free.swap_remove(dice.random_range(0..free.len()));
                let table: Vec<u32> = (0..rows.len().div_ceil(block)).map(|_| take()).collect();
                for (index, row) in rows.iter().enumerate() {
                    let page = table[index / block] as usize * pages.page_stride;
                    let at = page + index % block * pages.row_stride;
                    cache[at..at + source_bytes].copy_from_slice(row);
                }
                table
            })
            .collect();
        for chunk in plan.chunks() {
            let layout = FinalLayout::new(&chunk.row_map(rank).unwrap(), format, &planes).unwrap();
            // Padding has slots too, which nobody looks at.
            let mut slots = Vec::new();
            for part in chunk.parts() {
                let rows = part.local_start..part.local_start + part.valid_rows(rank);
                slots.extend(pages.slots(&tables[part.request], rows).unwrap());
                let padding = part.padded_len - part.valid_rows(rank);
                slots.extend(std::iter::repeat_n(u32::MAX, padding));
            }
            let rows = Rows::paged(&cache, pages, &slots);
            let rows = if kind == 1 {
                rows.dequantized(scale)
            } else {
                rows
            };
            let got = gather.gather_final(0, &rows, &layout).unwrap();

            let mut expected = Vec::new();
            for part in chunk.parts() {
                for source in 0..world {
                    for token in part.start..part.start + part.len {
                        if token / interleave % world == source {
                            let row = &tokens[part.request][token * source_bytes..][..source_bytes];
                            match kind {
                                1 => {
                                    expected.extend(row.iter().flat_map(|&e| dequantize(e, scale)))
                                }
                                _ => expected.extend_from_slice(row),
                            }
                        }
                    }
                }
            }
            let mut from = 0;
            for (index, width) in planes.iter().enumerate() {
                let to = from + width * format.dtype().size();
                let plane = columns(&expected, format.row_bytes(), from, to);
                assert!(
                    got.plane(index).unwrap() == plane,
                    "seed {seed}, plane {index}"
                );
                from = to;
            }
        }
    });
    calls
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

#[test]
fn random_plans_from_paged_caches() {
    watched(|| {
        let plans = std::env::var("DIRECT_DCP_LAYOUTS").map_or(60, |n| n.parse().unwrap());
        for way in WAYS {
            let calls: usize = (0..plans).map(|seed| end_to_end(seed, way)).sum();
            eprintln!("{way}: {plans} plans, {calls} gathers");
            assert!(calls > plans as usize);
        }
    });
}

/// As MPI's Allgatherv: any number of rows of each rank, none among them.
#[test]
fn uneven_ranks() {
    let format = RowFormat::new(DType::Bytes, 7);
    watched(move || {
        for counts in [[3, 0, 5], [0, 0, 1], [0, 0, 0], [30, 0, 0], [1, 29, 0]] {
            for way in WAYS {
                let options = WorkspaceOptions::new(30, format).way(way);
                let shard = move |rank: usize| random_bytes(rank as u64, counts[rank] * 7);
                let expected: Vec<u8> = (0..3).flat_map(shard).collect();
                ranks(&options, 3, move |rank, gather| {
                    let map = RowMap::uneven(&counts, rank).unwrap();
                    let layout = FinalLayout::new(&map, format, &[7]).unwrap();
                    for call in 1..=4 {
                        let local = shard(rank);
                        let planes = gather
                            .gather_final(0, &Rows::dense(&local), &layout)
                            .unwrap();
                        assert_eq!(planes.plane(0).unwrap(), expected);
                        assert_eq!(planes.epoch(), call);
                    }
                });
            }
        }
    });
}

/// The blocks of a rank share its rows, whatever their number.
#[test]
fn rows_are_shared_by_blocks() {
    let format = RowFormat::new(DType::Bytes, 5);
    watched(move || {
        for blocks in [1, 2, 3, 7] {
            let options = WorkspaceOptions::new(90, format).blocks(blocks);
            ranks(&options, 2, move |rank, gather| {
                // Even rows of rank 0, odd rows of rank 1, and every seventh is padding.
                let rows: Vec<i32> = (0..52_i32)
                    .map(|row| if row % 7 == 3 { -1 } else { row })
                    .scan(0, |next, row| {
                        let place = *next;
                        *next += i32::from(row >= 0);
                        Some(if row >= 0 {
                            2 * place + rank as i32
                        } else {
                            -1
                        })
                    })
                    .collect();
                let total = 2 * rows.iter().filter(|&&row| row >= 0).count();
                let map = RowMap::from_rows(&rows, total).unwrap();
                let layout = FinalLayout::new(&map, format, &[2, 3]).unwrap();
                let shard = |rank: usize| random_bytes(rank as u64, 52 * 5);
                let local = shard(rank);
                let planes = gather
                    .gather_final(0, &Rows::dense(&local), &layout)
                    .unwrap();
                let mut expected = vec![0; total * 5];
                for source in 0..2 {
                    let valid = (0..52).filter(|row| row % 7 != 3);
                    for (place, row) in valid.enumerate() {
                        let to = (2 * place + source) * 5;
                        expected[to..to + 5].copy_from_slice(&shard(source)[row * 5..][..5]);
                    }
                }
                assert_eq!(planes.plane(0).unwrap(), columns(&expected, 5, 0, 2));
                assert_eq!(planes.plane(1).unwrap(), columns(&expected, 5, 2, 5));
            });
        }
    });
}

/// What cannot work is refused before anything is written, and the group goes on.
#[test]
fn what_does_not_fit_is_refused() {
    let format = RowFormat::new(DType::BF16, 8);
    watched(move || {
        ranks(&WorkspaceOptions::new(8, format), 2, move |rank, gather| {
            let map = RowMap::uneven(&[3, 2], rank).unwrap();
            let layout = FinalLayout::new(&map, format, &[5, 3]).unwrap();
            let local = random_bytes(rank as u64, map.local_rows() * 16);
            let refused = |rows: &Rows<'_>, layout: &FinalLayout, word: &str| match gather
                .gather_final(0, rows, layout)
            {
                Err(error @ GatherError::InvalidArgument { .. }) => {
                    assert!(error.to_string().contains(word), "{error}");
                }
                other => panic!("{word}: {other:?}"),
            };
            refused(&Rows::dense(&local[16..]), &layout, "rows");
            refused(&Rows::dense(&local[1..]), &layout, "rows");
            refused(&Rows::dense(&local).dequantized(f32::NAN), &layout, "scale");
            let other = RowFormat::new(DType::F16, 8);
            let other = FinalLayout::new(&map, other, &[8]).unwrap();
            refused(&Rows::dense(&local), &other, "format");
            let large = RowMap::uneven(&[5, 4], rank).unwrap();
            let large = FinalLayout::new(&large, format, &[8]).unwrap();
            refused(
                &Rows::dense(&random_bytes(1, (5 - rank) * 16)),
                &large,
                "at most",
            );
            let slots: Vec<u32> = (0..3 - rank as u32).map(|slot| slot + 2).collect();
            for (pages, cache) in [
                (Pages::dense(2, 16), 4 * 16 - 1),
                (Pages::dense(0, 16), 4 * 16),
                (
                    Pages {
                        page_stride: usize::MAX,
                        ..Pages::dense(2, 16)
                    },
                    4 * 16,
                ),
            ] {
                let cache = random_bytes(2, cache);
                refused(&Rows::paged(&cache, pages, &slots), &layout, "slot");
            }
            for planes in [
                &[5, 4][..],
                &[8, 0],
                &[],
                &[2, 2, 2, 1, 1],
                &[usize::MAX, 9],
            ] {
                FinalLayout::new(&map, format, planes).unwrap_err();
            }
            // Nothing was counted, and the call that fits delivers.
            assert_eq!(gather.status().epochs, [0]);
            let planes = gather
                .gather_final(0, &Rows::dense(&local), &layout)
                .unwrap();
            let expected: Vec<u8> = [(0, 48), (1, 32)]
                .iter()
                .flat_map(|&(seed, len)| random_bytes(seed, len))
                .collect();
            assert_eq!(planes.plane(0).unwrap(), columns(&expected, 16, 0, 10));
        });
        ranks(
            &WorkspaceOptions::new(8, format).way(Way::Pull),
            2,
            move |rank, gather| {
                let map = RowMap::uneven(&[1, 1], rank).unwrap();
                let layout = FinalLayout::new(&map, format, &[8]).unwrap();
                let refused = gather.gather_final(0, &Rows::dense(&[1; 16]), &layout);
                assert!(
                    matches!(refused, Err(GatherError::Unsupported { .. })),
                    "{refused:?}"
                );
            },
        );
    });
}

/// Ranks that made different plans of as many rows find out, all of them.
#[test]
fn plans_that_differ() {
    let format = RowFormat::new(DType::Bytes, 16);
    watched(move || {
        let outcomes = ranks(&WorkspaceOptions::new(8, format), 2, move |rank, gather| {
            let map = RowMap::for_requests(&[2], &[[2, 2 - rank]], &[rank], rank).unwrap();
            let runs = map
                .runs()
                .iter()
                .map(|run| Run {
                    dst: run.dst.min(1),
                    ..*run
                })
                .collect();
            let digest = map.digest();
            let map = RowMap::from_runs(runs, 2, 4).unwrap().with_digest(digest);
            let layout = FinalLayout::new(&map, format, &[16]).unwrap();
            gather
                .gather_final(0, &Rows::dense(&[3; 32]), &layout)
                .map(drop)
        });
        for outcome in outcomes {
            match outcome {
                Err(GatherError::Mismatch { field: "plan", .. } | GatherError::PeerLost { .. }) => {
                }
                other => panic!("{other:?}"),
            }
        }
    });
}

/// A result is held until it is dropped, as any other.
#[test]
fn planes_are_held() {
    let format = RowFormat::new(DType::Bytes, 16);
    watched(move || {
        ranks(&WorkspaceOptions::new(8, format), 2, move |rank, gather| {
            let map = RowMap::uneven(&[1, 1], rank).unwrap();
            let layout = FinalLayout::new(&map, format, &[16]).unwrap();
            let local = random_bytes(rank as u64, 16);
            let planes = gather
                .gather_final(0, &Rows::dense(&local), &layout)
                .unwrap();
            let refused = gather.gather_final(0, &Rows::dense(&local), &layout);
            assert!(matches!(
                refused,
                Err(GatherError::SlotInUse { epoch: 1, .. })
            ));
            drop(planes);
            gather
                .gather_final(0, &Rows::dense(&local), &layout)
                .unwrap();
        });
    });
}

/// After a rebuild only the new generation gathers.
#[test]
fn a_rebuilt_group_ends_the_old_generation() {
    let format = RowFormat::new(DType::Bytes, 16);
    watched(move || {
        let groups = Group::threads(2).unwrap();
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                thread::spawn(move || {
                    let options = || WorkspaceOptions::new(8, format);
                    let old = KvGather::new(Workspace::new(&group, options()).unwrap());
                    old.gather(0, &[1; 16]).unwrap();
                    let group = group.rebuild(Duration::from_secs(20)).unwrap();
                    let over = old.gather(0, &[1; 16]);
                    assert!(
                        matches!(over, Err(GatherError::Poisoned { .. })),
                        "{over:?}"
                    );
                    let new = KvGather::new(Workspace::new(&group, options()).unwrap());
                    assert_eq!(new.gather(0, &[7; 16]).unwrap()[..], [7; 32]);
                })
            })
            .collect();
        threads.into_iter().for_each(|rank| rank.join().unwrap());
    });
}
