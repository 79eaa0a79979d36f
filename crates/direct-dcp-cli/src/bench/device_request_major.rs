//! Gathers in final layout on GPUs, in turns with what they replace: a gather rank by rank, and a
//! launch on each device that drops the padding of what arrived, puts the rows in order and splits
//! them.

use super::arrival;
use super::device::{Gpu, TIMEOUT};
use super::device_loop::{meet, slowest, time, warm_up};
use super::measure::{Mode, POISON, Task, say};
use super::round::{Row, Stored, sum};
use super::split::Split;
use crate::gpu;
use crate::ranks::{Emit, RankError};
use direct_dcp::cuda::{Delivery, FinalRehearsal, KvGather, Rehearsal, Workspace};
use direct_dcp::plan::{Chunk, PlanError, RowMap, Sharding};
use direct_dcp::{FinalLayout, Group, Way};

/// One rank's part.
pub(super) fn run(
    task: &Task,
    split: &Split,
    gpu: Gpu,
    group: &Group,
    emit: &mut Emit<'_>,
) -> Result<(), RankError> {
    let ordinal = gpu::ordinal(gpu.device, group.rank())?;
    for &way in &task.ways {
        for &rows in &task.rows {
            let options = task.options(rows * group.world_size(), way, gpu.blocks);
            // One for each of those that take turns: neither waits for what the other has lent.
            let options = options.ubatches(2);
            let gather = KvGather::new(Workspace::new(group, ordinal, options)?)
                .timeout(TIMEOUT)
                .first_timeout(TIMEOUT);
            let mut case = Case::new(task, split, gpu, group, &gather, rows)?;
            for mode in task.modes_of(way) {
                say(group, case.measure(rows, mode)?, emit)?;
            }
            // Freeing memory waits for the device, and so for ranks that wait for this one.
            group.barrier()?;
        }
    }
    Ok(())
}

/// One rank's part of some rows of the result.
struct Case<'a> {
    task: &'a Task,
    split: &'a Split,
    gpu: Gpu,
    group: &'a Group,
    way: Way,
    chunk: Chunk,
    finals: FinalRehearsal<'a>,
    staged: Rehearsal<'a>,
    local: Vec<u8>,
    expected: Vec<Vec<u8>>,
    seed: u64,
    wrong: u64,
}

impl<'a> Case<'a> {
    fn new(
        task: &'a Task,
        split: &'a Split,
        gpu: Gpu,
        group: &'a Group,
        gather: &'a KvGather,
        rows: usize,
    ) -> Result<Self, RankError> {
        let text = |error: PlanError| error.to_string();
        let (ranks, format) = (group.world_size(), gather.workspace().format());
        let chunk = split.chunk(rows, Sharding::new(ranks, 1).map_err(text)?)?;
        let layout = |map: RowMap| FinalLayout::new(&map, format, &split.planes).map_err(text);
        let slice = rows * task.row_bytes;

        let mut finals = FinalRehearsal::new(gather, 0, slice)?;
        let map = chunk.row_map(group.rank()).map_err(text)?;
        finals.add_dense(&layout(map)?, 0..slice)?;
        let mut staged = Rehearsal::new(gather, 1, slice)?;
        let runs = arrival::runs(&chunk, rows, ranks).map_err(text)?;
        let map = RowMap::from_runs(runs, ranks * rows, chunk.total_rows()).map_err(text)?;
        staged.set_pass(&layout(map)?)?;
        let planes = split.planes.iter();
        let planes = planes.map(|width| vec![POISON; chunk.total_rows() * width]);
        Ok(Case {
            task,
            split,
            gpu,
            group,
            way: gather.workspace().way(),
            expected: planes.collect(),
            chunk,
            finals,
            staged,
            local: vec![0; slice],
            seed: 0,
            wrong: 0,
        })
    }

    fn measure(&mut self, rows: usize, mode: Mode) -> Result<Row, RankError> {
        let (task, gpu, group) = (self.task, self.gpu, self.group);
        let delivery = Delivery::from(mode);
        self.wrong = 0;
        self.refill()?;
        // Nobody allocates from here to the last loop.
        group.barrier()?;
        warm_up(&mut self.finals, task, gpu, group)?;
        warm_up((&mut self.staged, delivery), task, gpu, group)?;
        let (mut times, mut passes) = (Vec::new(), Vec::new());
        for left in (0..task.loops).rev() {
            // New rows, and a look at every byte of every rank, once: after the last loop of each.
            if left == 0 {
                self.refill()?;
            }
            times.push(time(&mut self.finals, task.iters, gpu.launches, group)?);
            if left == 0 && task.check {
                let planes = self.finals.read()?;
                let planes = planes.iter().map(Vec::as_slice);
                self.wrong += arrival::differences(planes, &self.expected);
            }
            meet(&mut &mut self.finals, group)?;
            passes.push(time(
                (&mut self.staged, delivery),
                task.iters,
                gpu.launches,
                group,
            )?);
            if left == 0 && task.check {
                let planes = self.staged.read_planes()?;
                let planes = planes.iter().map(Vec::as_slice);
                self.wrong += arrival::differences(planes, &self.expected);
            }
            meet(&mut (&mut self.staged, delivery), group)?;
        }
        let (time, tail) = slowest(group, &mut times)?;
        let (staged, _) = slowest(group, &mut passes)?;
        let wrong = sum(group, self.wrong)?;
        let ranks = group.world_size();
        let size = (ranks * self.local.len()) as u64;
        let algbw = size as f64 / time;
        let valid = (self.chunk.total_rows() * task.row_bytes) as u64;
        Ok(Row {
            size,
            rows,
            way: self.way.to_string(),
            mode,
            time_us: time / 1e3,
            p99_us: tail / 1e3,
            // Bytes per nanosecond.
            algbw_gbs: algbw,
            busbw_gbs: algbw * (ranks as f64 - 1.0) / ranks as f64,
            ceiling_us: staged / 1e3,
            ratio: time / staged,
            stored: Some(Stored {
                bytes_final: valid,
                bytes_staged: mode.arrivals() * size + valid,
            }),
            wrong: task.check.then_some(wrong),
        })
    }

    /// New rows to send, nothing of the old ones where they are copied to, and what has to arrive.
    fn refill(&mut self) -> Result<(), RankError> {
        if !self.task.check && self.seed > 0 {
            return Ok(());
        }
        self.seed += 1;
        let place = (self.group.rank(), self.group.world_size());
        let (local, expected) = (&mut self.local, &mut self.expected);
        arrival::fill(
            &self.chunk,
            &self.split.planes,
            self.seed,
            place,
            local,
            expected,
        );
        self.finals.set_rows(local)?;
        self.staged.set_rows(local)?;
        Ok(self.staged.fill_out(POISON)?)
    }
}
