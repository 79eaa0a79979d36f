//! What every rank does in a benchmark.

use super::ceiling::Ceiling;
use super::clock::{agree_on_start, now, wait_until, word};
use super::device::{self, Gpu};
use super::round::{Measured, Round, Row};
use super::split::Split;
use super::{Found, device_pipeline, device_request_major, pattern, pipeline, request_major};
use crate::machine;
use crate::ranks::{Emit, Message, RankError, WayChoice};
use crate::tuning::Table;
use direct_dcp::cuda::Delivery;
use direct_dcp::{DType, Group, KvGather, RowFormat, Way, Workspace, WorkspaceOptions};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Fills what rows are copied into.
pub(super) const POISON: u8 = 0xA5;

/// How long a loop of plain copies takes at least, in nanoseconds, for the ranks' starts not to
/// matter.
const SHORTEST_LOOP: u64 = 2_000_000;
/// The most copies in a loop.
const MOST_COPIES: u64 = 100_000;

/// What arrives where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Mode {
    /// Rows are copied into the caller's buffer: `gather_into`.
    CopyOut,
    /// Rows are lent where they arrived: `gather`.
    ZeroCopy,
}

impl Mode {
    /// How often a byte of a gather is stored to the memory of a rank.
    pub(super) fn arrivals(self) -> u64 {
        match self {
            Mode::CopyOut => 2,
            Mode::ZeroCopy => 1,
        }
    }
}

impl From<Mode> for Delivery {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::CopyOut => Delivery::CopyOut,
            Mode::ZeroCopy => Delivery::ZeroCopy,
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Delivery::from(*self).fmt(f)
    }
}

/// What to measure: every way, with every number of rows, in every mode.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(super) rows: Vec<usize>,
    pub(super) row_bytes: usize,
    pub(super) ways: Vec<WayChoice>,
    /// What the ways that are not forced go by.
    pub(super) tuning: Option<Table>,
    pub(super) modes: Vec<Mode>,
    pub(super) blocks: usize,
    pub(super) iters: usize,
    pub(super) warmup: usize,
    pub(super) loops: usize,
    pub(super) check: bool,
    /// Whether to measure windows in flight, instead of modes.
    pub(super) pipeline: bool,
    /// None if the ranks are on CPUs.
    pub(super) gpu: Option<Gpu>,
    /// Of gathers in final layout, what they deliver.
    pub(super) request_major: Option<Split>,
}

impl Task {
    pub(super) fn cases(&self) -> usize {
        let modes = |&way: &WayChoice| self.modes_of(way).count();
        self.rows.len() * self.ways.iter().map(modes).sum::<usize>()
    }

    /// The modes that are measured of a way. In a graph the staged algorithm cannot lend: nobody
    /// would know where.
    pub(super) fn modes_of(&self, way: WayChoice) -> impl Iterator<Item = Mode> {
        let graph = self.gpu.is_some_and(|gpu| gpu.launches.is_some());
        let copies_only = graph && way.forced() == Some(Way::Staged);
        let modes = self.modes.iter().copied();
        modes.filter(move |mode| !copies_only || *mode == Mode::CopyOut)
    }

    /// The host memory that all ranks need together, at most; none if it cannot be counted.
    pub(super) fn memory(&self, ranks: usize) -> Option<usize> {
        if self.gpu.is_some() {
            // The rank's rows, what is read back to be checked, and in final layout what that has to
            // be.
            let most = self.rows.iter().max()?.checked_mul(self.row_bytes)?;
            let slices = match self.request_major {
                Some(_) => ranks.checked_mul(2)?,
                None => ranks,
            };
            return most.checked_mul(slices.checked_add(1)?)?.checked_mul(ranks);
        }
        let mut most = 0;
        for &rows in &self.rows {
            let slice = rows.checked_mul(self.row_bytes)?;
            // The rank's rows, a buffer for those of all, and what plain copies need.
            let private = slice
                .checked_mul(ranks.checked_add(1)?)?
                .checked_add(Ceiling::memory(slice, ranks)?)?
                .checked_mul(ranks)?;
            for &way in &self.ways {
                let shared = self.options(rows.checked_mul(ranks)?, way, Some(self.blocks));
                let shared = shared.memory_bytes(ranks).ok()?;
                most = most.max(private.checked_add(shared)?);
            }
        }
        Some(most)
    }

    /// The device memory that each rank needs, at most; none if it cannot be counted.
    pub(super) fn device_memory(&self, ranks: usize) -> Option<usize> {
        let rows = *self.rows.iter().max()?;
        let slice = rows.checked_mul(self.row_bytes)?;
        let options = self.options(rows.checked_mul(ranks)?, WayChoice::Auto, None);
        // Slices for which a rank has room: its own, and what is copied out.
        let (options, slices) = match (&self.request_major, self.pipeline) {
            // Its own twice, and what passes make in turns. Places are a word for each row.
            (Some(_), _) => (options.ubatches(2), ranks.checked_mul(4)?.checked_add(2)?),
            // Of two workspaces, its own, and what a reader copies.
            (None, true) => (options.slots(5), ranks.checked_mul(4)?.checked_add(2)?),
            (None, false) => (options, ranks.checked_add(1)?),
        };
        let shared = options.device_bytes(ranks).ok()?;
        shared.checked_add(slice.checked_mul(slices)?)
    }

    pub(super) fn options(
        &self,
        capacity: usize,
        way: WayChoice,
        blocks: Option<usize>,
    ) -> WorkspaceOptions {
        let format = RowFormat::new(DType::Bytes, self.row_bytes);
        let options = WorkspaceOptions::new(capacity, format);
        let options = match blocks {
            Some(blocks) => options.blocks(blocks),
            None => options,
        };
        let tables = self.tuning.iter().map(|table| table.0.clone());
        let options = tables.fold(options, WorkspaceOptions::tuning);
        match way.forced() {
            Some(way) => options.way(way),
            None => options,
        }
    }

    /// One rank's part.
    pub(crate) fn run(&self, group: &Group, emit: &mut Emit<'_>) -> Result<(), RankError> {
        if self.pipeline {
            return match self.gpu {
                Some(gpu) => device_pipeline::measure(self, gpu, group, emit),
                None => pipeline::measure(self, group, emit),
            };
        }
        match (self.gpu, &self.request_major) {
            (Some(gpu), Some(split)) => {
                return device_request_major::run(self, split, gpu, group, emit);
            }
            (Some(gpu), None) => return device::run(self, gpu, group, emit),
            (None, Some(split)) => return request_major::run(self, split, group, emit),
            (None, None) => {}
        }
        for &way in &self.ways {
            for &rows in &self.rows {
                let options = self.options(rows * group.world_size(), way, Some(self.blocks));
                let gather = KvGather::new(Workspace::new(group, options)?);
                for &mode in &self.modes {
                    let row = Case::new(self, group, &gather, rows, mode).measure()?;
                    say(group, row, emit)?;
                }
            }
        }
        Ok(())
    }
}

/// Rank 0 tells what was measured.
pub(super) fn say(group: &Group, row: Row, emit: &mut Emit<'_>) -> Result<(), RankError> {
    if group.rank() > 0 {
        return Ok(());
    }
    let text = serde_json::to_string(&Found::Row(row)).map_err(|error| error.to_string())?;
    emit(Message::Text(text))
}

/// One rank's part of one row of the result.
struct Case<'a> {
    task: &'a Task,
    group: &'a Group,
    gather: &'a KvGather,
    rows: usize,
    mode: Mode,
    way: Way,
    local: Vec<u8>,
    /// Where rows are copied out to.
    out: Vec<u8>,
    seed: u64,
    wrong: u64,
    crowded: bool,
}

impl<'a> Case<'a> {
    fn new(
        task: &'a Task,
        group: &'a Group,
        gather: &'a KvGather,
        rows: usize,
        mode: Mode,
    ) -> Self {
        let slice = rows * task.row_bytes;
        Case {
            task,
            group,
            gather,
            rows,
            mode,
            way: gather.workspace().way(),
            local: vec![0; slice],
            out: match mode {
                Mode::CopyOut => vec![POISON; slice * group.world_size()],
                Mode::ZeroCopy => Vec::new(),
            },
            seed: 0,
            wrong: 0,
            crowded: group.world_size() * task.blocks > machine::cores(),
        }
    }

    fn measure(mut self) -> Result<Row, RankError> {
        let (ranks, blocks) = (self.group.world_size(), self.task.blocks);
        let key = (self.way, self.mode);
        let mut ceiling = Ceiling::new(key, self.local.len(), ranks, blocks, self.crowded);
        self.refill();
        for _ in 0..self.task.warmup {
            self.calls(1, |_| ())?;
            // New rows for the next call, so that what an old one left is not taken for right.
            self.refill();
        }
        let copies = self.copies_per_loop(&mut ceiling)?;
        let mut measured = Measured::default();
        for _ in 0..self.task.loops {
            let round = self.round(&mut ceiling, copies)?;
            measured.add(self.group, &round, copies)?;
        }
        let wrong = self.task.check.then_some(self.wrong);
        measured.row(self.group, self.task, self.rows, self.mode, self.way, wrong)
    }

    /// One loop of each kind, all ranks together.
    fn round(&mut self, ceiling: &mut Ceiling, copies: usize) -> Result<Round, RankError> {
        self.refill();
        let start = agree_on_start(self.group, self.task.blocks)?;
        wait_until(start, self.crowded);
        let gather = self.calls(self.task.iters, |_| ())?;

        let start = agree_on_start(self.group, self.task.blocks)?;
        let copies = ceiling.run(copies, start);

        self.refill();
        let mut ends = Vec::with_capacity(self.task.iters + 1);
        let start = agree_on_start(self.group, self.task.blocks)?;
        wait_until(start, self.crowded);
        let (begin, _) = self.calls(self.task.iters, |()| ends.push(now()))?;
        ends.insert(0, begin);
        let calls = ends.windows(2).map(|pair| pair[1] - pair[0]).collect();
        Ok(Round {
            gather,
            copies,
            calls,
        })
    }

    /// Calls `count` times, and checks what the last one delivered. Returns when the first began
    /// and the last ended.
    fn calls(&mut self, count: usize, mut after: impl FnMut(())) -> Result<(u64, u64), RankError> {
        let (seed, ranks) = (self.seed, self.group.world_size());
        let mut wrong = 0;
        let mut check = |rows: &[u8]| {
            if self.task.check {
                wrong = pattern::wrong(rows, seed, ranks);
            }
        };
        let begin = now();
        let end;
        match self.mode {
            Mode::CopyOut => {
                for _ in 0..count {
                    self.gather.gather_into(0, &self.local, &mut self.out)?;
                    after(());
                }
                end = now();
                check(&self.out);
            }
            Mode::ZeroCopy => {
                let mut held = None;
                for _ in 0..count {
                    // As a caller would: the rows of one call are let go before the next.
                    drop(held.take());
                    held = Some(self.gather.gather(0, &self.local)?);
                    after(());
                }
                end = now();
                held.iter().for_each(|rows| check(rows));
            }
        }
        self.wrong += wrong;
        Ok((begin, end))
    }

    /// New rows to send, and nothing of the old ones where they are copied to.
    fn refill(&mut self) {
        if self.task.check || self.seed == 0 {
            self.seed += 1;
            pattern::fill(&mut self.local, self.seed, self.group.rank());
            self.out.fill(POISON);
        }
    }

    /// Collective: how many plain copies make a loop that is long enough to time.
    fn copies_per_loop(&self, ceiling: &mut Ceiling) -> Result<usize, RankError> {
        let mut copies = self.task.iters as u64;
        loop {
            let start = agree_on_start(self.group, self.task.blocks)?;
            let (begin, end) = ceiling.run(copies as usize, start);
            let shortest = self.group.all_gather(&(end - begin).to_le_bytes())?;
            let shortest = shortest.iter().filter_map(|time| word(time)).min();
            // The same on all ranks.
            let shortest = shortest.unwrap_or(SHORTEST_LOOP).max(1);
            if shortest >= SHORTEST_LOOP || copies >= MOST_COPIES {
                return Ok(copies as usize);
            }
            let enough = copies * SHORTEST_LOOP * 5 / 4 / shortest + 1;
            copies = enough.clamp(copies + 1, (copies * 16).min(MOST_COPIES).max(copies + 1));
        }
    }
}
