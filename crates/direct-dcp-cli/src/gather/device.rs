//! The gathers of a rank whose rows are on a GPU.

use super::plan::Plan;
use super::request_major::in_token_order;
use super::task::{Gathered, POISON, Task};
use crate::gpu;
use crate::ranks::RankError;
use direct_dcp::Group;
use direct_dcp::cuda::{Delivery, FinalRehearsal, KvGather, Rehearsal, Workspace};
use direct_dcp::plan::Sharding;

impl Task {
    pub(super) fn on_gpu(
        &self,
        group: &Group,
        sharding: Sharding,
        local: &[u8],
        device: Option<u32>,
    ) -> Result<Gathered, RankError> {
        let ranks = group.world_size();
        let options = self.options(ranks * self.padded_rows(sharding));
        let ordinal = gpu::ordinal(device, group.rank())?;
        let gather = KvGather::new(Workspace::new(group, ordinal, options)?);
        let mut rehearsal = Rehearsal::new(&gather, 0, local.len())?;
        rehearsal.set_rows(local)?;
        // Once without calls in between, so that no mark has to be made while calls are timed.
        for _ in 0..=self.iterations {
            rehearsal.mark()?;
        }
        rehearsal.laps()?;
        // From here to the next barrier ranks wait for each other, and nobody allocates or frees.
        group.barrier()?;
        let mut timed = |delivery, mode| {
            rehearsal.fill_out(POISON)?;
            rehearsal.call(delivery)?;
            self.verify(sharding, &rehearsal.read()?, mode)?;
            rehearsal.fill_out(POISON)?;
            group.barrier()?;
            // The first call lets the ranks start together on the device.
            rehearsal.call(delivery)?;
            rehearsal.mark()?;
            for _ in 0..self.iterations {
                rehearsal.call(delivery)?;
                rehearsal.mark()?;
            }
            let laps = rehearsal.laps()?;
            let rows = rehearsal.read()?;
            self.verify(sharding, &rows, mode)?;
            // Nobody goes on while a slot is being read.
            group.barrier()?;
            let micros = laps.iter().map(|lap| lap.as_secs_f64() * 1e6).collect();
            Ok::<_, RankError>((micros, rows))
        };
        let (copy_out, rows) = timed(Delivery::CopyOut, "copy-out")?;
        let (zero_copy, _) = timed(Delivery::ZeroCopy, "zero-copy")?;
        let rows_of_rank = self.padded_rows(sharding);
        let ways = [Delivery::CopyOut, Delivery::ZeroCopy]
            .map(|delivery| gather.workspace().way_of(delivery, rows_of_rank));
        Ok(Gathered {
            way: match ways {
                [copy_out, zero_copy] if copy_out == zero_copy => copy_out.to_string(),
                [copy_out, zero_copy] => format!("{copy_out}/{zero_copy}"),
            },
            times: vec![("copy_out", copy_out), ("zero_copy", zero_copy)],
            rows,
        })
    }

    pub(super) fn request_major_on_gpu(
        &self,
        plan: &Plan,
        group: &Group,
        sharding: Sharding,
        device: Option<u32>,
    ) -> Result<Gathered, RankError> {
        let chunks = plan.chunks(sharding)?;
        let capacity = Plan::capacity(&chunks, sharding);
        let ordinal = gpu::ordinal(device, group.rank())?;
        let gather = KvGather::new(Workspace::new(group, ordinal, self.options(capacity))?);
        let cache = self.cache(plan, sharding, group.rank())?;
        let mut rehearsal = FinalRehearsal::new(&gather, 0, cache.bytes().len())?;
        rehearsal.set_rows(cache.bytes())?;
        for part in self.parts(plan, &chunks, &cache, group.rank())? {
            match cache.pages() {
                Some(pages) => rehearsal.add_paged(&part.layout, pages, &part.slots)?,
                None => rehearsal.add_dense(&part.layout, part.bytes)?,
            };
        }
        // Nothing is right in any slot before the first gather.
        let slice = capacity / group.world_size() * self.source.row_bytes();
        let mut poison = Rehearsal::new(&gather, 0, slice)?;
        poison.set_rows(&vec![POISON; slice])?;
        for _ in 0..=self.iterations {
            rehearsal.mark()?;
        }
        rehearsal.laps()?;
        // From here to the last barrier ranks wait for each other, and nobody allocates or frees.
        group.barrier()?;
        for _ in 0..gather.workspace().slots() {
            poison.call(Delivery::ZeroCopy)?;
        }
        poison.release();
        let mut out = vec![POISON; self.source.rows() * self.source.row_bytes()];
        let mut collect = |rehearsal: &mut FinalRehearsal<'_>| -> Result<(), RankError> {
            out.fill(POISON);
            for (index, chunk) in chunks.chunks().iter().enumerate() {
                rehearsal.call(index)?;
                let planes = rehearsal.read()?;
                in_token_order(&planes, chunk, &plan.requests, sharding, &mut out);
                // Nobody goes on while a slot is being read.
                group.barrier()?;
            }
            Ok(self.verify_tokens(&out)?)
        };
        collect(&mut rehearsal)?;
        group.barrier()?;
        // The first call lets the ranks start together on the device.
        rehearsal.call(0)?;
        rehearsal.mark()?;
        for _ in 0..self.iterations {
            for index in 0..chunks.chunks().len() {
                rehearsal.call(index)?;
            }
            rehearsal.mark()?;
        }
        let laps = rehearsal.laps()?;
        group.barrier()?;
        collect(&mut rehearsal)?;
        let micros = laps.iter().map(|lap| lap.as_secs_f64() * 1e6).collect();
        Ok(Gathered {
            way: gather.workspace().way().to_string(),
            times: vec![("request_major", micros)],
            rows: out,
        })
    }
}
