//! Gathers in final layout: random plans, from pages or not, converted or not, beside bytes that are
//! not to be touched.

use std::time::Duration;

use direct_dcp::cuda::{Delivery, FinalRehearsal, KvGather, Rehearsal};
use direct_dcp::plan::{PlanError, RowMap};
use direct_dcp::{DType, FinalLayout, GatherError, RowFormat, Way, WorkspaceOptions};
use rand::RngExt;
use rand::rngs::StdRng;

use super::plan::{Cache, Kind, Plan, SCALE};
use super::rank::CudaRank;
use crate::Rank;
use crate::case::Case;
use crate::failure::{Failure, Outcome, ensure};
use crate::reference::{Key, dice, difference, gathered, rows};

const TIMEOUT: Duration = Duration::from_secs(30);

/// Rows of each rank in a full workspace.
const MOST: usize = 60;
/// Plans for each kind of rows, and gathers of uneven numbers of rows.
const ROUNDS: u64 = 3;

const KINDS: [Kind; 6] = [
    kind(RowFormat::new(DType::BF16, 576), &[512, 64], false),
    // As fp8 caches pack them: 512 values, 4 scales, 64 rotary keys.
    kind(RowFormat::new(DType::Bytes, 656), &[512, 16, 128], false),
    kind(RowFormat::new(DType::BF16, 576), &[512, 64], true),
    kind(RowFormat::new(DType::BF16, 7), &[2, 4, 1], true),
    kind(RowFormat::new(DType::F8E4M3, 576), &[576], false),
    kind(RowFormat::new(DType::Bytes, 13), &[1, 5, 3, 4], false),
];

const fn kind(format: RowFormat, planes: &'static [usize], converts: bool) -> Kind {
    Kind {
        format,
        planes,
        converts,
    }
}

/// Every row is in its place on every rank, and every other byte of the slot is as it was.
pub(super) fn final_layout(rank: CudaRank, case: &Case) -> Outcome {
    let mut checked = 0;
    for (number, kind) in (0..).zip(&KINDS) {
        let mut rng = dice(&[case.seed, 17, number]);
        let options = WorkspaceOptions::new(MOST * case.world, kind.format)
            .way(case.way)
            .slots(rng.random_range(2..=3));
        let gather = rank.with(options, TIMEOUT)?;
        for round in 0..ROUNDS {
            let key = Key {
                seed: case.seed ^ number,
                ubatch: 0,
                call: round << 32,
            };
            let mut desk = Desk::new(&rank, gather.inner(), kind, key)?;
            checked += desk.plan(&mut rng)? + desk.uneven(&mut rng)?;
            // Freeing memory may wait for the device, and so for a rank that waits for this one.
            rank.meet()?;
        }
    }
    Ok(checked)
}

fn text(error: PlanError) -> Failure {
    Failure(error.to_string())
}

/// A rank's gathers of one kind of rows.
struct Desk<'a> {
    rank: &'a CudaRank,
    gather: &'a KvGather,
    kind: &'a Kind,
    /// Slots are filled with its rows before each call.
    key: Key,
    before: Rehearsal<'a>,
}

impl<'a> Desk<'a> {
    fn new(
        rank: &'a CudaRank,
        gather: &'a KvGather,
        kind: &'a Kind,
        key: Key,
    ) -> Result<Self, Failure> {
        let slice = MOST * kind.format.row_bytes();
        Ok(Desk {
            rank,
            gather,
            kind,
            key,
            before: Rehearsal::new(gather, 0, slice)?,
        })
    }

    /// The chunks of a random plan, from a cache of this rank's.
    fn plan(&mut self, rng: &mut StdRng) -> Outcome {
        let (me, world) = (self.rank.rank(), self.rank.world_size());
        let plan = Plan::random(rng, world, MOST, self.kind).map_err(text)?;
        let own = &mut dice(&[self.key.seed, self.key.call, me as u64]);
        let cache = Cache::new(&plan, me, own);
        let mut finals = FinalRehearsal::new(self.gather, 0, cache.bytes.len())?;
        finals.set_rows(&cache.bytes)?;
        for (chunk, (slots, bytes)) in plan.chunks.iter().zip(&cache.chunks) {
            let layout = self.layout(&chunk.row_map(me).map_err(text)?)?;
            let call = match cache.pages {
                Some(pages) => finals.add_paged(&layout, pages, slots)?,
                None => finals.add_dense(&layout, bytes.clone())?,
            };
            self.convert(&mut finals, call)?;
        }
        // Making memory may wait for the device, too.
        self.rank.meet()?;
        for (call, chunk) in plan.chunks.iter().enumerate() {
            let stored = |slot: &mut [u8]| plan.store(chunk, slot);
            let can = self.can(cache.pages.is_some());
            self.check(
                &mut finals,
                call,
                can.then_some(stored),
                &format!("{chunk:?}"),
            )?;
        }
        Ok(plan.chunks.len() as u64)
    }

    /// Any number of rows of each rank, none of one of them, in rank order.
    fn uneven(&mut self, rng: &mut StdRng) -> Outcome {
        let (me, world) = (self.rank.rank(), self.rank.world_size());
        let mut counts: Vec<usize> = (0..world).map(|_| rng.random_range(0..=MOST)).collect();
        counts[rng.random_range(0..world)] = 0;
        let (key, row_bytes) = (self.key, self.kind.source_bytes());
        let sent = |rank: usize| rows(key, rank, counts[rank] * row_bytes);
        let own = sent(me);
        let mut finals = FinalRehearsal::new(self.gather, 0, own.len())?;
        finals.set_rows(&own)?;
        let layout = self.layout(&RowMap::uneven(&counts, me).map_err(text)?)?;
        let call = finals.add_dense(&layout, 0..own.len())?;
        self.convert(&mut finals, call)?;
        self.rank.meet()?;
        let all: Vec<u8> = (0..world).flat_map(sent).collect();
        let kind = self.kind;
        let stored = |slot: &mut [u8]| kind.store(all.chunks(row_bytes), slot);
        let stored = self.can(false).then_some(stored);
        self.check(&mut finals, call, stored, &format!("{counts:?} rows"))?;
        Ok(1)
    }

    /// Whether the way can put such rows in their places.
    fn can(&self, paged: bool) -> bool {
        match self.gather.workspace().way() {
            Way::Push => true,
            Way::CopyEngine => !paged && !self.kind.converts,
            _ => false,
        }
    }

    fn layout(&self, map: &RowMap) -> Result<FinalLayout, Failure> {
        FinalLayout::new(map, self.kind.format, self.kind.planes).map_err(text)
    }

    fn convert(&self, finals: &mut FinalRehearsal<'_>, call: usize) -> Result<(), Failure> {
        match self.kind.converts {
            true => Ok(finals.dequantize(call, SCALE)?),
            false => Ok(()),
        }
    }

    /// Makes a call into slots that are full of other rows, and looks at every byte of its slot, in
    /// which `stored` puts what has to arrive. Without that, the call has to be refused.
    fn check(
        &mut self,
        finals: &mut FinalRehearsal<'_>,
        call: usize,
        stored: Option<impl Fn(&mut [u8])>,
        what: &str,
    ) -> Result<(), Failure> {
        self.key.call += 1;
        let slice = MOST * self.kind.format.row_bytes();
        let own = rows(self.key, self.rank.rank(), slice);
        self.before.set_rows(&own)?;
        // Nor may any of that.
        self.rank.meet()?;
        for _ in 0..self.gather.workspace().slots() {
            self.before.call(Delivery::ZeroCopy)?;
        }
        self.before.release();
        let told = finals.call(call);
        let Some(stored) = stored else {
            let refused = matches!(told, Err(GatherError::Unsupported { .. }));
            ensure(refused, || format!("{told:?} of {what} in final layout"))?;
            return Ok(self.rank.meet()?);
        };
        told?;
        let found = finals.read_slot()?;
        finals.release();
        let mut wanted = gathered(self.key, self.rank.world_size(), slice);
        stored(&mut wanted);
        ensure(found == wanted, || {
            let Kind { format, planes, .. } = self.kind;
            let wrong = difference(&found, &wanted, found.len());
            format!("a slot after {what} of {format} in {planes:?}: {wrong}")
        })?;
        // Nobody goes on while a slot is being read.
        Ok(self.rank.meet()?)
    }
}
