//! A way whose calls are timed.

use super::super::clock::{agree_on_start, now, wait_until, word};
use super::super::measure::{Mode, POISON};
use super::super::round::sum;
use super::super::{device_loop, pattern};
use crate::ranks::RankError;
use direct_dcp::cuda::{self, Delivery, Rehearsal};
use direct_dcp::tuning::Setting;
use direct_dcp::{Group, KvGather};

/// One rank's end of a way. All its methods are collective.
pub(super) trait Subject {
    /// Makes `calls` calls, and then another whose bytes it looks at: how many are wrong, over all
    /// ranks.
    fn check(&mut self, group: &Group, mode: Mode, calls: usize) -> Result<u64, RankError>;

    /// Makes ready for loops of `iters` calls.
    fn prepare(&mut self, group: &Group, mode: Mode, iters: usize) -> Result<(), RankError>;

    /// Nanoseconds of a call in a loop of `iters`, over all ranks.
    fn time(&mut self, group: &Group, mode: Mode, iters: usize) -> Result<f64, RankError>;
}

/// A way between CPUs.
pub(super) struct OnCpu {
    gather: KvGather,
    local: Vec<u8>,
    out: Vec<u8>,
    crowded: bool,
    seed: u64,
}

impl OnCpu {
    pub(super) fn new(gather: KvGather, slice: usize, crowded: bool) -> Self {
        let ranks = gather.workspace().group().world_size();
        OnCpu {
            gather,
            local: vec![0; slice],
            out: vec![POISON; slice * ranks],
            crowded,
            seed: 0,
        }
    }

    pub(super) fn setting(&self) -> &Setting {
        self.gather.workspace().setting()
    }

    fn call(&mut self, mode: Mode) -> Result<(), RankError> {
        match mode {
            Mode::CopyOut => self.gather.gather_into(0, &self.local, &mut self.out)?,
            Mode::ZeroCopy => drop(self.gather.gather(0, &self.local)?),
        }
        Ok(())
    }
}

impl Subject for OnCpu {
    fn check(&mut self, group: &Group, mode: Mode, calls: usize) -> Result<u64, RankError> {
        for _ in 0..calls {
            self.call(mode)?;
        }
        self.seed += 1;
        pattern::fill(&mut self.local, self.seed, group.rank());
        self.out.fill(POISON);
        let ranks = group.world_size();
        let wrong = match mode {
            Mode::CopyOut => {
                self.call(mode)?;
                pattern::wrong(&self.out, self.seed, ranks)
            }
            Mode::ZeroCopy => {
                let rows = self.gather.gather(0, &self.local)?;
                pattern::wrong(&rows, self.seed, ranks)
            }
        };
        sum(group, wrong)
    }

    fn prepare(&mut self, _: &Group, _: Mode, _: usize) -> Result<(), RankError> {
        Ok(())
    }

    fn time(&mut self, group: &Group, mode: Mode, iters: usize) -> Result<f64, RankError> {
        wait_until(agree_on_start(group, 1)?, self.crowded);
        let begin = now();
        for _ in 0..iters {
            self.call(mode)?;
        }
        let own: Vec<u8> = [begin, now()]
            .into_iter()
            .flat_map(u64::to_le_bytes)
            .collect();
        let all = group.all_gather(&own)?;
        let edge = |range: std::ops::Range<usize>| {
            let range = &range;
            all.iter()
                .filter_map(move |bytes| word(bytes.get(range.clone())?))
                .collect::<Vec<_>>()
        };
        let begin = edge(0..8).into_iter().min().unwrap_or_default();
        let end = edge(8..16).into_iter().max().unwrap_or_default();
        Ok(end.saturating_sub(begin) as f64 / iters as f64)
    }
}

/// A way between GPUs.
pub(super) struct OnGpu<'a> {
    rehearsal: Rehearsal<'a>,
    local: Vec<u8>,
    launches: Option<usize>,
    seed: u64,
}

impl<'a> OnGpu<'a> {
    pub(super) fn new(
        gather: &'a cuda::KvGather,
        slice: usize,
        launches: Option<usize>,
    ) -> Result<Self, RankError> {
        Ok(OnGpu {
            rehearsal: Rehearsal::new(gather, 0, slice)?,
            local: vec![0; slice],
            launches,
            seed: 0,
        })
    }

    /// Calls of one kind.
    fn calls(&mut self, mode: Mode) -> (&mut Rehearsal<'a>, Delivery) {
        (&mut self.rehearsal, mode.into())
    }
}

impl Subject for OnGpu<'_> {
    fn check(&mut self, group: &Group, mode: Mode, calls: usize) -> Result<u64, RankError> {
        let delivery = Delivery::from(mode);
        for _ in 0..calls {
            self.rehearsal.call(delivery)?;
            device_loop::meet(&mut self.calls(mode), group)?;
        }
        self.seed += 1;
        pattern::fill(&mut self.local, self.seed, group.rank());
        self.rehearsal.set_rows(&self.local)?;
        self.rehearsal.fill_out(POISON)?;
        self.rehearsal.call(delivery)?;
        let rows = self.rehearsal.read()?;
        // Nobody goes on before all have looked.
        sum(group, pattern::wrong(&rows, self.seed, group.world_size()))
    }

    fn prepare(&mut self, group: &Group, mode: Mode, iters: usize) -> Result<(), RankError> {
        if self.launches.is_some() {
            self.rehearsal.record(mode.into(), iters)?;
        }
        device_loop::meet(&mut self.calls(mode), group)
    }

    fn time(&mut self, group: &Group, mode: Mode, iters: usize) -> Result<f64, RankError> {
        let launches = self.launches;
        let own = device_loop::time(self.calls(mode), iters, launches, group)?;
        // The slowest rank's.
        let all = group.all_gather(&own.to_bits().to_le_bytes())?;
        let all = all.iter().filter_map(|bits| word(bits)).map(f64::from_bits);
        Ok(all.fold(0.0, f64::max))
    }
}
