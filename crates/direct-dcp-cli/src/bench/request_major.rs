//! Gathers in final layout, in turns with what they replace: a gather rank by rank, and a pass over
//! what arrived that drops the padding, puts the rows in order and splits them.

use super::arrival;
use super::clock::{agree_on_start, now, wait_until};
use super::measure::{Mode, POISON, Task, say};
use super::round::{Measured, Round, Row, Stored};
use super::split::Split;
use crate::machine;
use crate::ranks::{Emit, RankError};
use direct_dcp::plan::{Chunk, PlanError, Run, Sharding};
use direct_dcp::{FinalLayout, Group, KvGather, Rows, Workspace};

/// One rank's part.
pub(super) fn run(
    task: &Task,
    split: &Split,
    group: &Group,
    emit: &mut Emit<'_>,
) -> Result<(), RankError> {
    for &way in &task.ways {
        for &rows in &task.rows {
            let options = task.options(rows * group.world_size(), way, Some(1));
            let gather = KvGather::new(Workspace::new(group, options)?);
            for &mode in &task.modes {
                let row = Case::new(task, split, group, &gather, rows, mode)?.measure()?;
                say(group, row, emit)?;
            }
        }
    }
    Ok(())
}

/// One rank's part of one row of the result.
struct Case<'a> {
    task: &'a Task,
    split: &'a Split,
    group: &'a Group,
    gather: &'a KvGather,
    chunk: Chunk,
    rows: usize,
    /// How rows are gathered before the pass.
    mode: Mode,
    layout: FinalLayout,
    /// From which rows of all ranks to which rows of the result the pass copies.
    runs: Vec<Run>,
    local: Vec<u8>,
    /// Where rows are copied out to.
    out: Vec<u8>,
    /// Where the pass puts them.
    planes: Vec<Vec<u8>>,
    expected: Vec<Vec<u8>>,
    seed: u64,
    wrong: u64,
    crowded: bool,
}

impl<'a> Case<'a> {
    fn new(
        task: &'a Task,
        split: &'a Split,
        group: &'a Group,
        gather: &'a KvGather,
        rows: usize,
        mode: Mode,
    ) -> Result<Self, RankError> {
        let text = |error: PlanError| error.to_string();
        let ranks = group.world_size();
        let chunk = split.chunk(rows, Sharding::new(ranks, 1).map_err(text)?)?;
        let map = chunk.row_map(group.rank()).map_err(text)?;
        let slice = rows * task.row_bytes;
        let planes = split.planes.iter();
        let planes: Vec<_> = planes
            .map(|width| vec![POISON; chunk.total_rows() * width])
            .collect();
        Ok(Case {
            task,
            split,
            group,
            gather,
            rows,
            mode,
            layout: FinalLayout::new(&map, gather.workspace().format(), &split.planes)
                .map_err(text)?,
            runs: arrival::runs(&chunk, rows, ranks).map_err(text)?,
            chunk,
            local: vec![0; slice],
            out: vec![POISON; slice * ranks],
            expected: planes.clone(),
            planes,
            seed: 0,
            wrong: 0,
            crowded: ranks > machine::cores(),
        })
    }

    fn measure(mut self) -> Result<Row, RankError> {
        self.refill();
        for _ in 0..self.task.warmup {
            self.finals(1)?;
            self.staged(1)?;
            self.refill();
        }
        let mut measured = Measured::default();
        for _ in 0..self.task.loops {
            self.refill();
            self.start_together()?;
            let calls = self.finals(self.task.iters)?;
            self.start_together()?;
            let copies = self.staged(self.task.iters)?;
            let round = Round {
                gather: (calls[0], calls[self.task.iters]),
                copies,
                calls: calls.windows(2).map(|pair| pair[1] - pair[0]).collect(),
            };
            measured.add(self.group, &round, self.task.iters)?;
        }
        let way = self.gather.workspace().way();
        let wrong = self.task.check.then_some(self.wrong);
        let mut row = measured.row(self.group, self.task, self.rows, self.mode, way, wrong)?;
        let valid = (self.chunk.total_rows() * self.task.row_bytes) as u64;
        row.stored = Some(Stored {
            bytes_final: valid,
            bytes_staged: self.mode.arrivals() * row.size + valid,
        });
        Ok(row)
    }

    fn start_together(&self) -> Result<(), RankError> {
        wait_until(agree_on_start(self.group, 1)?, self.crowded);
        Ok(())
    }

    /// Gathers in final layout `count` times. Returns when the first began, and when each ended.
    fn finals(&mut self, count: usize) -> Result<Vec<u64>, RankError> {
        let rows = Rows::dense(&self.local);
        let mut held = None;
        let mut times = Vec::with_capacity(count + 1);
        times.push(now());
        for _ in 0..count {
            drop(held.take());
            held = Some(self.gather.gather_final(0, &rows, &self.layout)?);
            times.push(now());
        }
        if let (true, Some(planes)) = (self.task.check, held) {
            self.wrong += arrival::differences(planes.iter(), &self.expected);
        }
        Ok(times)
    }

    /// Gathers rank by rank and passes over what arrived `count` times. Returns when the first began
    /// and the last ended.
    fn staged(&mut self, count: usize) -> Result<(u64, u64), RankError> {
        let (widths, runs, row) = (&self.split.planes, &self.runs, self.task.row_bytes);
        let begin = now();
        for _ in 0..count {
            match self.mode {
                Mode::CopyOut => {
                    self.gather.gather_into(0, &self.local, &mut self.out)?;
                    pass(&self.out, row, runs, widths, &mut self.planes);
                }
                Mode::ZeroCopy => {
                    let rows = self.gather.gather(0, &self.local)?;
                    pass(&rows, row, runs, widths, &mut self.planes);
                }
            }
        }
        let end = now();
        if self.task.check {
            let planes = self.planes.iter().map(Vec::as_slice);
            self.wrong += arrival::differences(planes, &self.expected);
        }
        Ok((begin, end))
    }

    /// New rows to send, nothing of the old ones where they are put, and what has to arrive.
    fn refill(&mut self) {
        if !self.task.check && self.seed > 0 {
            return;
        }
        self.seed += 1;
        self.out.fill(POISON);
        self.planes.iter_mut().for_each(|plane| plane.fill(POISON));
        arrival::fill(
            &self.chunk,
            &self.split.planes,
            self.seed,
            (self.group.rank(), self.group.world_size()),
            &mut self.local,
            &mut self.expected,
        );
    }
}

/// Copies rows to their places in the planes, and nothing else of `gathered`.
fn pass(gathered: &[u8], row_bytes: usize, runs: &[Run], widths: &[usize], planes: &mut [Vec<u8>]) {
    for run in runs {
        let rows = &gathered[run.src * row_bytes..][..run.len * row_bytes];
        if let [plane] = planes {
            plane[run.dst * row_bytes..][..rows.len()].copy_from_slice(rows);
            continue;
        }
        for (i, mut from) in rows.chunks_exact(row_bytes).enumerate() {
            for (plane, &width) in planes.iter_mut().zip(widths) {
                let (piece, rest) = from.split_at(width);
                plane[(run.dst + i) * width..][..width].copy_from_slice(piece);
                from = rest;
            }
        }
    }
    std::hint::black_box(planes);
}
