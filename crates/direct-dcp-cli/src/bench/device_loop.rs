//! Loops of calls between two marks of a rank's stream, and what all ranks measured.

use super::clock::{agree_on_start, wait_until, word};
use super::device::Gpu;
use super::measure::Task;
use crate::ranks::RankError;
use crate::report::{median, p99};
use direct_dcp::cuda::{Delivery, FinalRehearsal, Rehearsal};
use direct_dcp::{GatherError, Group};
use std::time::Duration;

/// What is timed: calls on a stream, one by one or in a graph.
pub(super) trait Calls {
    fn call(&mut self) -> Result<(), GatherError>;
    fn record(&mut self, calls: usize) -> Result<(), GatherError>;
    fn replay(&mut self) -> Result<(), GatherError>;
    fn mark(&mut self) -> Result<(), GatherError>;
    fn laps(&mut self) -> Result<Vec<Duration>, GatherError>;
}

/// Gathers rank by rank, with the pass that follows them if there is one.
impl Calls for (&mut Rehearsal<'_>, Delivery) {
    fn call(&mut self) -> Result<(), GatherError> {
        self.0.call(self.1)
    }
    fn record(&mut self, calls: usize) -> Result<(), GatherError> {
        self.0.record(self.1, calls)
    }
    fn replay(&mut self) -> Result<(), GatherError> {
        self.0.replay()
    }
    fn mark(&mut self) -> Result<(), GatherError> {
        self.0.mark()
    }
    fn laps(&mut self) -> Result<Vec<Duration>, GatherError> {
        self.0.laps()
    }
}

/// Gathers in final layout.
impl Calls for &mut FinalRehearsal<'_> {
    fn call(&mut self) -> Result<(), GatherError> {
        FinalRehearsal::call(self, 0)
    }
    fn record(&mut self, calls: usize) -> Result<(), GatherError> {
        FinalRehearsal::record(self, calls)
    }
    fn replay(&mut self) -> Result<(), GatherError> {
        FinalRehearsal::replay(self)
    }
    fn mark(&mut self) -> Result<(), GatherError> {
        FinalRehearsal::mark(self)
    }
    fn laps(&mut self) -> Result<Vec<Duration>, GatherError> {
        FinalRehearsal::laps(self)
    }
}

/// Collective: calls that are not timed, and a graph of those that are.
pub(super) fn warm_up(
    mut calls: impl Calls,
    task: &Task,
    gpu: Gpu,
    group: &Group,
) -> Result<(), RankError> {
    for _ in 0..task.warmup {
        calls.call()?;
        meet(&mut calls, group)?;
    }
    if gpu.launches.is_some() {
        calls.record(task.iters)?;
    }
    Ok(())
}

/// Collective: nanoseconds of one call in a loop of `iters`, on this rank's stream; or in loops of a
/// graph of so many, launched so often.
pub(super) fn time(
    mut calls: impl Calls,
    iters: usize,
    launches: Option<usize>,
    group: &Group,
) -> Result<f64, RankError> {
    let start = agree_on_start(group, 1)?;
    wait_until(start, false);
    // What the hosts' starts differ by is over when this has been delivered.
    calls.call()?;
    calls.mark()?;
    let launches = match launches {
        Some(launches) => {
            for _ in 0..launches {
                calls.replay()?;
            }
            launches
        }
        None => {
            for _ in 0..iters {
                calls.call()?;
            }
            1
        }
    };
    calls.mark()?;
    let laps = calls.laps()?;
    let lap = laps.first().copied().unwrap_or_default();
    Ok(lap.as_secs_f64() * 1e9 / (launches * iters) as f64)
}

/// Collective: waits for what was submitted. A loop that failed on the device does not count.
pub(super) fn meet(calls: &mut impl Calls, group: &Group) -> Result<(), RankError> {
    calls.laps()?;
    Ok(group.barrier()?)
}

/// Collective: over all ranks, the largest of the medians, and the 99th percentile of all loops.
pub(super) fn slowest(group: &Group, times: &mut [f64]) -> Result<(f64, f64), RankError> {
    times.sort_unstable_by(f64::total_cmp);
    let words = times.iter().map(|time| time.to_bits());
    let words = std::iter::once(median(times).to_bits()).chain(words);
    let own: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    let (mut slowest, mut all) = (0.0_f64, Vec::new());
    for bytes in group.all_gather(&own)? {
        let mut words = bytes.chunks(8).filter_map(word).map(f64::from_bits);
        slowest = slowest.max(words.next().unwrap_or_default());
        all.extend(words);
    }
    all.sort_unstable_by(f64::total_cmp);
    // Times of an event's resolution at least, or the rates would be infinite.
    Ok((slowest.max(1.0), p99(&all)))
}
