//! Gathers in final layout: the rows of request after request, without padding, split into planes.

use super::cache::Cache;
use super::plan::Plan;
use super::task::{Gathered, POISON, Task};
use crate::ranks::{Emit, Message, RankError};
use direct_dcp::plan::{Chunk, ChunkPlan, Sharding};
use direct_dcp::{FinalLayout, Group, KvGather, Planes, Workspace};
use std::ops::Range;
use std::time::Instant;

/// Bytes of rows that are passed on at a time.
const PIECE: usize = 4 << 20;

impl Task {
    pub(super) fn request_major(
        &self,
        plan: &Plan,
        group: &Group,
        sharding: Sharding,
    ) -> Result<Gathered, RankError> {
        let row_bytes = self.source.row_bytes();
        let chunks = plan.chunks(sharding)?;
        let capacity = Plan::capacity(&chunks, sharding);
        let gather = KvGather::new(Workspace::new(group, self.options(capacity))?);
        let cache = self.cache(plan, sharding, group.rank())?;
        let gathers = self.parts(plan, &chunks, &cache, group.rank())?;
        let call = |index: usize| -> Result<Planes, RankError> {
            let part: &Part = &gathers[index];
            let rows = cache.rows(&part.slots, part.bytes.clone());
            Ok(gather.gather_final(0, &rows, &part.layout)?)
        };

        // Nothing is right in any slot before the first gather.
        let poison = vec![POISON; capacity / group.world_size() * row_bytes];
        for _ in 0..gather.workspace().slots() {
            gather.gather(0, &poison)?;
        }
        let mut out = vec![POISON; self.source.rows() * row_bytes];
        let mut collect = || -> Result<(), RankError> {
            out.fill(POISON);
            for (index, chunk) in chunks.chunks().iter().enumerate() {
                let planes = call(index)?;
                let planes: Vec<&[u8]> = planes.iter().collect();
                in_token_order(&planes, chunk, &plan.requests, sharding, &mut out);
            }
            Ok(self.verify_tokens(&out)?)
        };
        collect()?;
        let mut times = Vec::with_capacity(self.iterations);
        group.barrier()?;
        for _ in 0..self.iterations {
            let start = Instant::now();
            for index in 0..gathers.len() {
                call(index)?;
            }
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        collect()?;
        Ok(Gathered {
            way: gather.workspace().way().to_string(),
            times: vec![("request_major", times)],
            rows: out,
        })
    }

    /// What `rank` passes to each gather of the plan.
    pub(super) fn parts(
        &self,
        plan: &Plan,
        chunks: &ChunkPlan,
        cache: &Cache,
        rank: usize,
    ) -> Result<Vec<Part>, String> {
        let row_bytes = self.source.row_bytes();
        let mut first = 0;
        let part = |chunk: &Chunk| {
            let map = chunk.row_map(rank).map_err(|error| error.to_string())?;
            let layout = FinalLayout::new(&map, self.row_format(), &plan.planes);
            let rows = first..first + chunk.local_rows();
            first = rows.end;
            Ok(Part {
                layout: layout.map_err(|error| error.to_string())?,
                slots: cache.slots(chunk, rank)?,
                bytes: rows.start * row_bytes..rows.end * row_bytes,
            })
        };
        chunks.chunks().iter().map(part).collect()
    }

    /// Compares rows in token order with the file.
    pub(super) fn verify_tokens(&self, out: &[u8]) -> Result<(), String> {
        let row_bytes = self.source.row_bytes();
        self.source.each_chunk(|token, expected| {
            let found = &out[token * row_bytes..][..expected.len()];
            match found.iter().zip(expected).position(|(a, b)| a != b) {
                None => Ok(()),
                Some(at) => Err(format!(
                    "wrong bytes after a request-major gather: token {} is {:#04x} at byte {} \
                     where the file has {:#04x}",
                    token + at / row_bytes,
                    found[at],
                    at % row_bytes,
                    expected[at]
                )),
            }
        })
    }
}

/// What a rank passes to one gather.
pub(super) struct Part {
    pub(super) layout: FinalLayout,
    /// Of each row, if rows are in pages.
    pub(super) slots: Vec<u32>,
    /// Where the rows are, if not.
    pub(super) bytes: Range<usize>,
}

/// Puts the rows of a chunk where their tokens are in the file.
pub(super) fn in_token_order(
    planes: &[impl AsRef<[u8]>],
    chunk: &Chunk,
    requests: &[usize],
    sharding: Sharding,
    out: &mut [u8],
) {
    let total = chunk.total_rows();
    let row_bytes: usize = planes
        .iter()
        .map(|plane| plane.as_ref().len())
        .sum::<usize>()
        / total;
    // The tokens in the order in which their rows must arrive.
    let tokens = chunk.parts().iter().flat_map(|part| {
        let first: usize = requests[..part.request].iter().sum();
        let of = move |rank| {
            let tokens = part.start..part.start + part.len;
            tokens.filter(move |&token| sharding.owner(token) == rank)
        };
        (0..sharding.world_size())
            .flat_map(of)
            .map(move |token| first + token)
    });
    for (row, token) in tokens.enumerate() {
        let mut rest = &mut out[token * row_bytes..][..row_bytes];
        for plane in planes.iter().map(AsRef::as_ref) {
            let width = plane.len() / total;
            let (to, more) = rest.split_at_mut(width);
            to.copy_from_slice(&plane[row * width..][..width]);
            rest = more;
        }
    }
}

/// Passes on rows that are in token order.
pub(super) fn pass_on(rows: &[u8], emit: &mut Emit<'_>) -> Result<(), RankError> {
    let mut pieces = rows.chunks(PIECE);
    pieces.try_for_each(|piece| emit(Message::Bytes(piece.to_vec())))
}
