//! Random plans against a reference that knows nothing but who owns a token.
//!
//! All plans are checked by arithmetic on their parts, one in eight by the runs of the row maps of
//! all ranks too, and small plans of their own row by row. `DIRECT_DCP_PLANS` says how many.

use direct_dcp::plan::{Chunk, ChunkPlanner, RowMap, Sharding};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::env;

/// A list of requests and how they are to be planned.
#[derive(Debug)]
struct Case {
    ranks: usize,
    interleave: usize,
    block: usize,
    rows: usize,
    contexts: Vec<usize>,
}

impl Case {
    fn random(dice: &mut StdRng, longest: usize, requests: usize, rows: usize) -> Case {
        let contexts = (0..dice.random_range(1..=requests))
            .map(|_| match dice.random_range(0..8) {
                0 => 0,
                1 => dice.random_range(0..=longest.min(64)),
                _ => dice.random_range(0..=longest),
            })
            .collect();
        Case {
            ranks: dice.random_range(2..=16),
            interleave: dice.random_range(1..=64),
            block: *[1, 16, 48, 64].get(dice.random_range(0..4)).unwrap(),
            rows: dice.random_range(1..=rows),
            contexts,
        }
    }

    fn owner(&self, token: usize) -> usize {
        token / self.interleave % self.ranks
    }

    /// How many of the first `tokens` tokens `rank` owns: whole rounds, and the rest of one.
    fn owned(&self, tokens: usize, rank: usize) -> usize {
        let round = self.ranks * self.interleave;
        let begin = (rank * self.interleave).min(tokens % round);
        let end = ((rank + 1) * self.interleave).min(tokens % round);
        tokens / round * self.interleave + (end - begin)
    }

    /// The chunks, after what can be said about their parts has been checked.
    fn chunks(&self) -> Vec<Chunk> {
        let sharding = Sharding::new(self.ranks, self.interleave).unwrap();
        let planner = ChunkPlanner::new(sharding, self.block, self.rows).unwrap();
        let budget = planner.budget_rows();
        let least = self.rows.next_multiple_of(planner.alignment());
        assert_eq!(budget, least, "{self:?}");
        let round = self.ranks * self.interleave;
        assert!(planner.alignment().is_multiple_of(self.block));
        assert!(planner.alignment().is_multiple_of(round));

        let plan = planner.plan(&self.contexts).unwrap();
        let mut covered = vec![0; self.contexts.len()];
        let mut last = 0;
        for chunk in plan.chunks() {
            assert!(!chunk.parts().is_empty(), "{self:?}");
            let (mut local_rows, mut total_rows) = (0, 0);
            let mut before = None;
            for part in chunk.parts() {
                assert!(before.is_none_or(|before| before < part.request) && last <= part.request);
                (before, last) = (Some(part.request), part.request);
                // Each request's tokens follow one another, and shards are cut where it says.
                assert_eq!(part.start, covered[part.request], "{self:?}");
                assert!(part.len > 0 && part.start.is_multiple_of(planner.alignment()));
                covered[part.request] += part.len;
                let end = covered[part.request];
                assert_eq!(
                    part.local_start,
                    part.start.div_ceil(round) * self.interleave
                );
                let padded = end.div_ceil(round) * self.interleave - part.local_start;
                assert_eq!(part.padded_len, padded, "{self:?}");
                let mut valid_rows = 0;
                for rank in 0..self.ranks {
                    assert_eq!(part.local_start, self.owned(part.start, rank), "{self:?}");
                    let valid = self.owned(end, rank) - part.local_start;
                    assert_eq!(part.valid_rows(rank), valid, "{self:?}");
                    assert!(valid <= padded);
                    valid_rows += valid;
                }
                assert_eq!(valid_rows, part.len, "{self:?}");
                local_rows += padded;
                total_rows += part.len;
            }
            assert_eq!(chunk.local_rows(), local_rows);
            assert_eq!(chunk.total_rows(), total_rows);
            assert!(local_rows * self.ranks <= budget, "{self:?}");
        }
        assert_eq!(covered, self.contexts, "{self:?}");
        // A second rank plans the same.
        assert!(
            planner
                .chunks(&self.contexts)
                .eq(plan.chunks().iter().cloned())
        );
        plan.chunks().to_vec()
    }

    /// Checks the runs of the maps of all ranks: request by request, and in each rank by rank.
    fn check_runs(&self, chunk: &Chunk) {
        let mut dst = 0;
        let mut src = 0;
        let maps = self.maps(chunk);
        for (index, part) in chunk.parts().iter().enumerate() {
            for (rank, map) in maps.iter().enumerate() {
                let run = map.runs()[index];
                let valid = self.owned(part.start + part.len, rank) - self.owned(part.start, rank);
                assert_eq!((run.src, run.dst, run.len), (src, dst, valid), "{self:?}");
                dst += valid;
            }
            src += part.padded_len;
        }
        let requests: Vec<usize> = chunk.parts().iter().map(|part| part.len).collect();
        RowMap::check_group(&maps, &requests).unwrap();
    }

    fn maps(&self, chunk: &Chunk) -> Vec<RowMap> {
        let maps: Vec<_> = (0..self.ranks)
            .map(|rank| chunk.row_map(rank).unwrap())
            .collect();
        for map in &maps {
            assert_eq!(map.local_rows(), chunk.local_rows());
            assert_eq!(map.total_rows(), chunk.total_rows());
            assert_eq!(map.digest(), maps[0].digest());
        }
        maps
    }

    /// Moves every row of every chunk, and says how many.
    fn check_rows(&self) -> usize {
        // Of every request and rank, the tokens of its shard.
        let shards: Vec<Vec<Vec<usize>>> = self
            .contexts
            .iter()
            .map(|&context| {
                let mut shards = vec![Vec::new(); self.ranks];
                (0..context).for_each(|token| shards[self.owner(token)].push(token));
                shards
            })
            .collect();
        let mut seen: Vec<Vec<bool>> = self.contexts.iter().map(|&len| vec![false; len]).collect();
        for chunk in self.chunks() {
            let mut result = vec![None; chunk.total_rows()];
            for (rank, map) in self.maps(&chunk).iter().enumerate() {
                let local = chunk.parts().iter().flat_map(|part| {
                    let shard = &shards[part.request][rank];
                    let rows = part.local_start..part.local_start + part.padded_len;
                    rows.map(|row| Some((part.request, rank, *shard.get(row)?)))
                });
                // A row past the end of a rank's shard is padding.
                for (row, dst) in local.zip(map.dst_rows()) {
                    match (row, usize::try_from(dst)) {
                        (Some(row), Ok(dst)) => assert_eq!(result[dst].replace(row), None),
                        (None, Err(_)) => {}
                        wrong => panic!("{wrong:?} of {self:?}"),
                    }
                }
            }
            let result: Option<Vec<_>> = result.into_iter().collect();
            let result = result.expect("no gaps");
            // By request, then by rank, then by token.
            assert!(result.is_sorted(), "{self:?}");
            for (request, rank, token) in result {
                assert_eq!(self.owner(token), rank);
                assert!(!std::mem::replace(&mut seen[request][token], true));
            }
        }
        assert!(seen.iter().flatten().all(|&seen| seen), "{self:?}");
        self.contexts.iter().sum()
    }
}

fn plans() -> usize {
    let asked = env::var("DIRECT_DCP_PLANS").ok();
    asked.map_or(100_000, |text| text.parse().expect("a number"))
}

#[test]
fn parts_and_runs() {
    let mut dice = StdRng::seed_from_u64(0x706c_616e);
    let (mut chunks, mut mapped) = (0, 0);
    for number in 0..plans() {
        let case = Case::random(&mut dice, 100_000, 64, 262_144);
        let found = case.chunks();
        chunks += found.len();
        if number % 8 == 0 {
            mapped += found.len();
            found.iter().for_each(|chunk| case.check_runs(chunk));
        }
    }
    println!("{chunks} chunks, the maps of {mapped}");
}

#[test]
fn row_by_row() {
    let mut dice = StdRng::seed_from_u64(0x726f_7773);
    let rows: usize = (0..plans().div_ceil(100))
        .map(|_| Case::random(&mut dice, 3_000, 8, 6_000).check_rows())
        .sum();
    println!("{rows} rows");
}
