//! The gathers of a rank whose rows are on a GPU.

use super::task::{Gathered, POISON, Task};
use crate::gpu;
use crate::ranks::RankError;
use direct_dcp::Group;
use direct_dcp::cuda::{Delivery, KvGather, Rehearsal, Workspace};
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
}
