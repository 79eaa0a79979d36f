//! Gathers in final layout: the rows of request after request, without padding, split into planes.

use super::plan::Plan;
use super::task::{Gathered, POISON, Task};
use crate::ranks::{Emit, Message, RankError};
use direct_dcp::plan::{Chunk, Sharding};
use direct_dcp::{FinalLayout, Group, KvGather, Planes, Workspace};
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
        let (rank, row_bytes) = (group.rank(), self.source.row_bytes());
        let chunks = plan.chunks(sharding)?;
        let capacity = Plan::capacity(&chunks, sharding);
        let gather = KvGather::new(Workspace::new(group, self.options(capacity))?);
        let format = gather.workspace().format();
        let cache = self.cache(plan, sharding, rank)?;
        let mut gathers = Vec::new();
        let mut first = 0;
        for chunk in chunks.chunks() {
            let map = chunk.row_map(rank).map_err(|error| error.to_string())?;
            let layout = FinalLayout::new(&map, format, &plan.planes);
            let rows = first..first + chunk.local_rows();
            first = rows.end;
            gathers.push((
                layout.map_err(|error| error.to_string())?,
                cache.slots(chunk, rank)?,
                rows.start * row_bytes..rows.end * row_bytes,
            ));
        }
        let call = |index: usize| -> Result<Planes, RankError> {
            let (layout, slots, range) = &gathers[index];
            let rows = cache.rows(slots, range.clone());
            Ok(gather.gather_final(0, &rows, layout)?)
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

    /// Compares rows in token order with the file.
    fn verify_tokens(&self, out: &[u8]) -> Result<(), String> {
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

/// Puts the rows of a chunk where their tokens are in the file.
fn in_token_order(
    planes: &Planes,
    chunk: &Chunk,
    requests: &[usize],
    sharding: Sharding,
    out: &mut [u8],
) {
    let total = chunk.total_rows();
    let row_bytes: usize = planes.iter().map(<[u8]>::len).sum::<usize>() / total;
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
        for plane in planes.iter() {
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
