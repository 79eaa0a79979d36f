//! Rounds of loops that take turns, and what comes out of them.

use super::clock::word;
use super::measure::{Mode, Task};
use crate::ranks::RankError;
use crate::report::{median, p99};
use direct_dcp::{Group, Way};
use serde::{Deserialize, Serialize};

/// What was measured.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) size: u64,
    pub(super) rows: usize,
    pub(super) way: String,
    pub(super) mode: Mode,
    pub(super) time_us: f64,
    pub(super) p99_us: f64,
    pub(super) algbw_gbs: f64,
    pub(super) busbw_gbs: f64,
    pub(super) ceiling_us: f64,
    pub(super) ratio: f64,
    /// Of gathers in final layout, the bytes stored to one rank's memory, by them and by what they
    /// are compared with.
    #[serde(flatten)]
    pub(super) stored: Option<Stored>,
    /// None if nothing was checked.
    pub(super) wrong: Option<u64>,
}

/// Bytes stored to one rank's memory by one call.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Stored {
    pub(super) bytes_final: u64,
    pub(super) bytes_staged: u64,
}

/// What one rank measured in one round: when a loop of gathers began and ended, and one of what they
/// are compared with, on the clock of the machine.
pub(super) struct Round {
    pub(super) gather: (u64, u64),
    pub(super) copies: (u64, u64),
    /// How long each call took.
    pub(super) calls: Vec<u64>,
}

/// What all ranks measured, in nanoseconds.
#[derive(Default)]
pub(super) struct Measured {
    times: Vec<f64>,
    ceilings: Vec<f64>,
    calls: Vec<f64>,
}

impl Measured {
    /// Collective: adds a round with as many gathers as it has calls, and `copies` of what they are
    /// compared with.
    pub(super) fn add(
        &mut self,
        group: &Group,
        round: &Round,
        copies: usize,
    ) -> Result<(), RankError> {
        let edges = [
            round.gather.0,
            round.gather.1,
            round.copies.0,
            round.copies.1,
        ];
        let words = edges.iter().chain(&round.calls);
        let own: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
        let all: Vec<Vec<u64>> = group
            .all_gather(&own)?
            .iter()
            .map(|bytes| bytes.chunks(8).filter_map(word).collect())
            .collect();
        let span = |first: usize| {
            let begin = all.iter().filter_map(|words| words.get(first)).min();
            let end = all.iter().filter_map(|words| words.get(first + 1)).max();
            end.zip(begin)
                .map_or(0.0, |(end, begin)| (end - begin) as f64)
        };
        let iters = round.calls.len();
        for call in 0..iters {
            let times = all.iter().filter_map(|words| words.get(edges.len() + call));
            self.calls.extend(times.max().map(|&time| time as f64));
        }
        self.times.push(span(0) / iters as f64);
        self.ceilings.push(span(2) / copies as f64);
        Ok(())
    }

    /// Collective: the row of the result. `wrong` are this rank's wrong bytes, if they were counted.
    pub(super) fn row(
        mut self,
        group: &Group,
        task: &Task,
        rows: usize,
        mode: Mode,
        way: Way,
        wrong: Option<u64>,
    ) -> Result<Row, RankError> {
        let ranks = group.world_size();
        let all = group.all_gather(&wrong.unwrap_or_default().to_le_bytes())?;
        let sum = all.iter().filter_map(|count| word(count)).sum();
        for values in [&mut self.times, &mut self.ceilings, &mut self.calls] {
            values.sort_unstable_by(f64::total_cmp);
        }
        let size = (ranks * rows * task.row_bytes) as u64;
        let (time, ceiling) = (median(&self.times), median(&self.ceilings));
        let algbw = size as f64 / time;
        Ok(Row {
            size,
            rows,
            way: way.to_string(),
            mode,
            time_us: time / 1e3,
            p99_us: p99(&self.calls) / 1e3,
            // Bytes per nanosecond.
            algbw_gbs: algbw,
            busbw_gbs: algbw * (ranks as f64 - 1.0) / ranks as f64,
            ceiling_us: ceiling / 1e3,
            ratio: time / ceiling,
            stored: None,
            wrong: wrong.map(|_| sum),
        })
    }
}

/// Collective: what every rank has counted, added up.
pub(super) fn sum(group: &Group, count: u64) -> Result<u64, RankError> {
    let all = group.all_gather(&count.to_le_bytes())?;
    Ok(all.iter().filter_map(|count| word(count)).sum())
}
