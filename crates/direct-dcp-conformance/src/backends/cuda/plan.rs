//! Random plans of gathers in final layout, the caches that ranks gather from, and what has to
//! arrive, computed token by token.

use std::ops::Range;

use direct_dcp::plan::{Chunk, ChunkPlanner, Part, PlanError, Sharding};
use direct_dcp::{Pages, RowFormat};
use rand::rngs::StdRng;
use rand::{Rng, RngExt};

/// What e4m3 elements are multiplied by: a power of two and three, so that no product is rounded.
pub(super) const SCALE: f32 = 0.375;

/// Rows, and what becomes of them.
#[derive(Debug)]
pub(super) struct Kind {
    /// Those of the result.
    pub(super) format: RowFormat,
    /// Elements of each plane.
    pub(super) planes: &'static [usize],
    /// Whether they come from e4m3 elements.
    pub(super) converts: bool,
}

impl Kind {
    /// Stores rows in a slot, in planes that have room for all of it.
    pub(super) fn store<'a>(&self, rows: impl Iterator<Item = &'a [u8]>, slot: &mut [u8]) {
        let capacity = slot.len() / self.format.row_bytes();
        for (place, row) in rows.enumerate() {
            let row = match self.converts {
                true => row
                    .iter()
                    .flat_map(|&element| dequantized(element))
                    .collect(),
                false => row.to_vec(),
            };
            let (mut plane, mut column) = (0, 0);
            for elements in self.planes {
                let width = elements * self.format.dtype().size();
                slot[plane + place * width..][..width].copy_from_slice(&row[column..][..width]);
                plane += capacity * width;
                column += width;
            }
        }
    }

    /// Bytes of a row before it is gathered.
    pub(super) fn source_bytes(&self) -> usize {
        match self.converts {
            true => self.format.dim(),
            false => self.format.row_bytes(),
        }
    }
}

/// Contexts, dealt to ranks and cut into chunks: the same on all ranks.
pub(super) struct Plan<'a> {
    pub(super) kind: &'a Kind,
    pub(super) chunks: Vec<Chunk>,
    world: usize,
    interleave: usize,
    /// Rows of a page; none if rows lie one behind the other.
    block: Option<usize>,
    /// The tokens of each context.
    contexts: Vec<Vec<u8>>,
}

impl<'a> Plan<'a> {
    /// Up to four contexts, some without a token for some rank, in chunks of up to `most` rows of each
    /// rank, 48 at least.
    pub(super) fn random(
        rng: &mut StdRng,
        world: usize,
        most: usize,
        kind: &'a Kind,
    ) -> Result<Self, PlanError> {
        let interleave = [1, 3, 16][rng.random_range(0..3)];
        let block = [None, Some(1), Some(4), Some(16)][rng.random_range(0..4)];
        // Chunks are whole rounds and pages: these go into 48 rows of a rank, or 16, or fewer.
        let budget = rng.random_range(1..=most / 48 * 48) * world;
        let sharding = Sharding::new(world, interleave)?;
        let planner = ChunkPlanner::new(sharding, block.unwrap_or(1), budget)?;
        let longest = [2 * world, 60, 40 * world][rng.random_range(0..3)];
        let contexts: Vec<Vec<u8>> = (0..rng.random_range(1..=4))
            .map(|_| {
                let mut tokens = vec![0; rng.random_range(0..longest) * kind.source_bytes()];
                rng.fill_bytes(&mut tokens);
                tokens
            })
            .collect();
        let tokens = |bytes: &Vec<u8>| bytes.len() / kind.source_bytes();
        let lens: Vec<usize> = contexts.iter().map(tokens).collect();
        Ok(Plan {
            kind,
            chunks: planner.plan(&lens)?.chunks().to_vec(),
            world,
            interleave,
            block,
            contexts,
        })
    }

    /// The tokens of `part` that `rank` has, in order.
    fn owned(&self, part: &Part, rank: usize) -> impl Iterator<Item = &[u8]> {
        let bytes = self.kind.source_bytes();
        let context = &self.contexts[part.request];
        (part.start..part.start + part.len)
            .filter(move |token| token / self.interleave % self.world == rank)
            .map(move |token| &context[token * bytes..][..bytes])
    }

    /// Stores the rows of a chunk where they have to be in a slot: request by request, inside a request
    /// rank by rank.
    pub(super) fn store(&self, chunk: &Chunk, slot: &mut [u8]) {
        let parts = chunk.parts().iter();
        let rows =
            parts.flat_map(|part| (0..self.world).flat_map(move |rank| self.owned(part, rank)));
        self.kind.store(rows, slot);
    }
}

/// An e4m3 element times [`SCALE`], as the bytes of a bf16 one.
fn dequantized(element: u8) -> [u8; 2] {
    let (exponent, mantissa) = (i32::from(element >> 3 & 15), f32::from(element & 7));
    let value = match (exponent, element & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 8.0 * 2_f32.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2_f32.powi(exponent - 7),
    };
    let bits = match value.is_nan() {
        true => 0x7fc0,
        false => ((value * SCALE).to_bits() >> 16) as u16,
    };
    (bits | u16::from(element & 0x80) << 8).to_ne_bytes()
}

/// The rows of a rank, for each chunk: in pages in no order, with gaps, or one behind the other. What
/// is padding, or a gap, is random too.
pub(super) struct Cache {
    pub(super) bytes: Vec<u8>,
    pub(super) pages: Option<Pages>,
    /// Of each chunk the slots of its rows; where there are no pages, its bytes.
    pub(super) chunks: Vec<(Vec<u32>, Range<usize>)>,
}

impl Cache {
    pub(super) fn new(plan: &Plan<'_>, rank: usize, rng: &mut StdRng) -> Self {
        let row_bytes = plan.kind.source_bytes();
        let pages = plan.block.map(|page_rows| Pages {
            page_rows,
            page_stride: page_rows * (row_bytes + 16) + 32,
            row_stride: row_bytes + 16,
        });
        let rows: usize = plan.chunks.iter().map(Chunk::local_rows).sum();
        let (size, mut free) = match pages {
            Some(pages) => {
                let count = rows.div_ceil(pages.page_rows) + 1;
                let slots = 0..(count * pages.page_rows) as u32;
                (count * pages.page_stride, slots.collect())
            }
            None => (rows * row_bytes, Vec::new()),
        };
        let mut bytes = vec![0; size];
        rng.fill_bytes(&mut bytes);
        let mut chunks = Vec::new();
        let mut next = 0;
        for chunk in &plan.chunks {
            let (mut slots, start) = (Vec::new(), next);
            for part in chunk.parts() {
                let mut place = next;
                next += part.padded_len * row_bytes;
                for row in plan.owned(part, rank) {
                    if let Some(pages) = pages {
                        let slot: u32 = free.swap_remove(rng.random_range(0..free.len()));
                        let (page, row) = (
                            slot as usize / pages.page_rows,
                            slot as usize % pages.page_rows,
                        );
                        place = page * pages.page_stride + row * pages.row_stride;
                        slots.push(slot);
                    }
                    bytes[place..place + row_bytes].copy_from_slice(row);
                    place += row_bytes;
                }
                // Nobody looks at the slots of padding.
                let padded = slots.len() + part.padded_len - part.valid_rows(rank);
                slots.resize(padded, u32::MAX);
            }
            chunks.push((slots, start..next));
        }
        Cache {
            bytes,
            pages,
            chunks,
        }
    }
}
