//! `bench --trace --time`: the gathers of a trace, made.

use super::clock::{agree_on_start, now, wait_until, word};
use crate::machine;
use crate::ranks::{Emit, Message, RankError};
use crate::report::median;
use direct_dcp::plan::{Chunk, ChunkPlanner, PlanError, Sharding};
use direct_dcp::{
    DType, FinalLayout, Group, GroupError, KvGather, RowFormat, Rows, Workspace, WorkspaceOptions,
};
use serde::{Deserialize, Serialize};
use std::hint::black_box;
use std::slice;

/// How many loops of copies are made for the median from which their rate is taken.
const LOOPS: usize = 21;
/// Bytes that such a loop copies at least.
const LOOP_BYTES: usize = 32 << 20;

/// What every rank gathers: each context by itself, in order.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(super) contexts: Vec<usize>,
    pub(super) interleave: usize,
    pub(super) block: usize,
    pub(super) budget: usize,
    pub(super) row_bytes: usize,
}

/// What all ranks measured, and counted where the rows arrived.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Timed {
    pub(super) way: String,
    pub(super) gathers: u64,
    pub(super) bytes_gathered: u64,
    pub(super) seconds: f64,
    /// Of plain copies of each rank, all at once.
    pub(super) copy_gbs: f64,
}

impl Task {
    /// The gathers, and the most rows that one takes of every rank.
    fn chunks(&self, ranks: usize) -> Result<(Vec<Chunk>, usize), PlanError> {
        let sharding = Sharding::new(ranks, self.interleave)?;
        let planner = ChunkPlanner::new(sharding, self.block, self.budget)?;
        let contexts = self.contexts.iter();
        let chunks = contexts.flat_map(|context| planner.chunks(slice::from_ref(context)));
        let chunks: Vec<Chunk> = chunks.collect();
        let most = chunks.iter().map(Chunk::local_rows).max();
        Ok((chunks, most.unwrap_or_default()))
    }

    fn options(&self, capacity: usize) -> WorkspaceOptions {
        WorkspaceOptions::new(capacity, RowFormat::new(DType::Bytes, self.row_bytes))
    }

    /// The memory that all ranks need together; none if it cannot be counted.
    pub(super) fn memory(&self, ranks: usize) -> Option<usize> {
        let (_, rows) = self.chunks(ranks).ok()?;
        let shared = self.options(rows.checked_mul(ranks)?);
        let private = rows.checked_mul(self.row_bytes)?;
        // Two buffers for the rows of a gather of mean size, which is not above the largest.
        let copies = private.checked_mul(ranks)?.checked_mul(2)?;
        let private = private.checked_add(copies)?.checked_mul(ranks)?;
        private.checked_add(shared.memory_bytes(ranks).ok()?)
    }

    /// One rank's part.
    pub(crate) fn run(&self, group: &Group, emit: &mut Emit<'_>) -> Result<(), RankError> {
        let text = |error: PlanError| error.to_string();
        let (rank, ranks) = (group.rank(), group.world_size());
        let (chunks, most) = self.chunks(ranks).map_err(text)?;
        let gather = KvGather::new(Workspace::new(group, self.options(most * ranks))?);
        let format = gather.workspace().format();
        let row = |rank: usize, row: usize| {
            (0..self.row_bytes).map(move |byte| (rank * 89 + row * 7 + byte) as u8)
        };
        let local: Vec<u8> = (0..most).flat_map(|index| row(rank, index)).collect();
        let mut gathers = Vec::with_capacity(chunks.len());
        for chunk in &chunks {
            let map = chunk.row_map(rank).map_err(text)?;
            let layout = FinalLayout::new(&map, format, &[self.row_bytes]).map_err(text)?;
            // The last row is of the last rank that has any.
            let valid = |rank| -> usize {
                let parts = chunk.parts().iter();
                parts.map(|part| part.valid_rows(rank)).sum()
            };
            let last = (0..ranks).rev().map(|rank| (rank, valid(rank)));
            let last = last.into_iter().find(|(_, valid)| *valid > 0);
            let (rank, valid) = last.unwrap_or((0, 1));
            gathers.push((layout, row(rank, valid - 1).collect::<Vec<u8>>()));
        }
        let first: Vec<u8> = row(0, 0).collect();
        let crowded = ranks > machine::cores();
        let rows: usize = chunks.iter().map(Chunk::total_rows).sum();
        let mean = (rows / chunks.len().max(1)).max(1) * self.row_bytes;
        let copy_gbs = copy_rate(group, mean, crowded)?;

        let mut bytes = 0;
        wait_until(agree_on_start(group, 1)?, crowded);
        let begin = now();
        for (layout, last) in &gathers {
            let rows = Rows::dense(&local[..layout.local_rows() * self.row_bytes]);
            let planes = gather.gather_final(0, &rows, layout)?;
            let rows = planes.plane(0).unwrap_or_default();
            if !rows.starts_with(&first) || !rows.ends_with(last) {
                let epoch = planes.epoch();
                return Err(format!("wrong bytes after gather {epoch} of the trace").into());
            }
            bytes += rows.len() as u64;
        }
        let nanoseconds = span(group, begin, now())?;
        if rank == 0 {
            let timed = Timed {
                way: gather.workspace().way().to_string(),
                gathers: gather.status().epochs.iter().sum(),
                bytes_gathered: bytes,
                seconds: nanoseconds / 1e9,
                copy_gbs,
            };
            let text = serde_json::to_string(&timed).map_err(|error| error.to_string())?;
            emit(Message::Text(text))?;
        }
        Ok(())
    }
}

/// Collective: bytes per nanosecond that each rank copies when all do, `bytes` at a time.
fn copy_rate(group: &Group, bytes: usize, crowded: bool) -> Result<f64, RankError> {
    // Not zeroed, or the system could lend one page of zeros for all of them.
    let (source, mut destination) = (vec![1_u8; bytes], vec![2_u8; bytes]);
    let copies = LOOP_BYTES.div_ceil(bytes);
    let mut spans = Vec::with_capacity(LOOPS);
    for _ in 0..LOOPS {
        wait_until(agree_on_start(group, 1)?, crowded);
        let begin = now();
        for _ in 0..copies {
            destination.copy_from_slice(black_box(&source));
            black_box(&mut destination);
        }
        spans.push(span(group, begin, now())?);
    }
    spans.sort_unstable_by(f64::total_cmp);
    Ok((copies * bytes) as f64 / median(&spans))
}

/// Collective: nanoseconds from the first rank's begin to the last one's end.
fn span(group: &Group, begin: u64, end: u64) -> Result<f64, GroupError> {
    let own = [begin, end].map(u64::to_le_bytes).concat();
    let all = group.all_gather(&own)?;
    let edge = |index: usize| {
        let edges = all.iter();
        edges.filter_map(move |words| word(words.chunks(8).nth(index)?))
    };
    let (begin, end) = (edge(0).min(), edge(1).max());
    Ok(begin
        .zip(end)
        .map_or(0.0, |(begin, end)| (end - begin) as f64))
}
