//! What every rank does in a benchmark of windows in flight on GPUs.
//!
//! Windows are gathered on a stream of the pipeline's, and read on another: the first rows of each are
//! copied by few blocks, so that the reading, like attention, takes its time and leaves
//! multiprocessors to the gathers. How many rows are read is found out in the run.

use super::clock::{agree_on_start, wait_until};
use super::device::{Gpu, TIMEOUT};
use super::device_loop::slowest;
use super::measure::Task;
use super::pattern;
use super::pipeline::{Row, SEED, say};
use super::round::sum;
use crate::gpu;
use crate::ranks::{Emit, RankError, WayChoice};
use direct_dcp::Group;
use direct_dcp::cuda::{KvGather, WindowRehearsal, Workspace};

/// Blocks that read a window: a fraction of any device that gathers are made on.
const READERS: u32 = 8;
/// How often the number of rows that are read is adapted, until reading them takes as long as a
/// gather.
const TRIES: usize = 5;
/// By what it changes at most each time.
const STEP: f64 = 16.0;

/// One rank's part.
pub(super) fn measure(
    task: &Task,
    gpu: Gpu,
    group: &Group,
    emit: &mut Emit<'_>,
) -> Result<(), RankError> {
    for &way in &task.ways {
        for &rows in &task.rows {
            let row = Case::new(task, gpu, group, way, rows)?.measure()?;
            say(group, &row, emit)?;
        }
    }
    Ok(())
}

/// One rank's part of one row of the result.
struct Case<'a> {
    task: &'a Task,
    group: &'a Group,
    two: WindowRehearsal,
    three: WindowRehearsal,
    /// Rows of a window.
    rows: usize,
    wrong: u64,
}

impl<'a> Case<'a> {
    fn new(
        task: &'a Task,
        gpu: Gpu,
        group: &'a Group,
        way: WayChoice,
        rows: usize,
    ) -> Result<Self, RankError> {
        let ranks = group.world_size();
        let ordinal = gpu::ordinal(gpu.device, group.rank())?;
        let mut local = vec![0; rows * task.row_bytes];
        pattern::fill(&mut local, SEED, group.rank());
        let gather = |slots| -> Result<_, RankError> {
            let options = task.options(rows * ranks, way, gpu.blocks).slots(slots);
            let gather = KvGather::new(Workspace::new(group, ordinal, options)?);
            Ok(gather.timeout(TIMEOUT).first_timeout(TIMEOUT))
        };
        // Both, before anything is allocated that ranks do not wait for each other for.
        let (two, three) = (gather(2)?, gather(3)?);
        let windows = |gather| -> Result<_, RankError> {
            let mut windows = WindowRehearsal::new(gather, 0, local.len())?;
            windows.set_rows(&local)?;
            Ok(windows)
        };
        Ok(Case {
            task,
            group,
            two: windows(two)?,
            three: windows(three)?,
            rows: rows * ranks,
            wrong: 0,
        })
    }

    fn measure(mut self) -> Result<Row, RankError> {
        self.group.barrier()?;
        for slots in [2, 3] {
            self.windows(slots, self.task.warmup + 1, false)?;
        }
        let gather = self.median(3, false)?;
        let read = self.calibrate(gather)?;
        let mut times = [Vec::new(), Vec::new()];
        // In turn, so that what else the device does hits both alike.
        for _ in 0..self.task.loops {
            for (slots, times) in [2, 3].into_iter().zip(&mut times) {
                times.push(self.windows(slots, self.task.iters, true)?);
            }
        }
        if self.task.check {
            self.check()?;
        }
        // Freeing memory waits for the device, and so for ranks that wait for this one.
        self.group.barrier()?;
        let [mut two, mut three] = times;
        let (two, _) = slowest(self.group, &mut two)?;
        let (three, _) = slowest(self.group, &mut three)?;
        let wrong = sum(self.group, self.wrong)?;
        Ok(Row {
            size: (self.rows * self.task.row_bytes) as u64,
            rows: self.rows / self.group.world_size(),
            way: self.two.gather().workspace().way().to_string(),
            gather_us: gather / 1e3,
            copies: read as f64 / self.rows as f64,
            two_slots_us: two / 1e3,
            three_slots_us: three / 1e3,
            ratio: three / two,
            wrong: self.task.check.then_some(wrong),
        })
    }

    /// Collective: how many rows are read of each window, for that to take as long as a gather.
    fn calibrate(&mut self, gather: f64) -> Result<usize, RankError> {
        let mut rows = (self.rows / STEP as usize).max(1);
        for left in (0..TRIES).rev() {
            self.two.set_reading(rows, READERS)?;
            self.three.set_reading(rows, READERS)?;
            // Nobody allocates while others wait for it.
            self.group.barrier()?;
            if left > 0 {
                // The same on all ranks, and so is what follows from it.
                let reading = self.median(2, true)? - gather;
                let scale = (gather / reading.max(1.0)).clamp(1.0 / STEP, STEP);
                rows = ((rows as f64 * scale) as usize).clamp(1, self.rows);
            }
        }
        Ok(rows)
    }

    /// Collective: nanoseconds of a window on the slowest rank, the median of the loops.
    fn median(&mut self, slots: usize, reads: bool) -> Result<f64, RankError> {
        let loops = 0..self.task.loops;
        let times: Result<Vec<_>, _> = loops
            .map(|_| self.windows(slots, self.task.iters, reads))
            .collect();
        Ok(slowest(self.group, &mut times?)?.0)
    }

    /// Collective: nanoseconds of a window in a loop of `count`, after one that lets the ranks start
    /// together.
    fn windows(&mut self, slots: usize, count: usize, reads: bool) -> Result<f64, RankError> {
        let start = agree_on_start(self.group, 1)?;
        wait_until(start, false);
        let windows = if slots == 2 {
            &mut self.two
        } else {
            &mut self.three
        };
        let time = windows.run(count + 1, reads)?;
        Ok(time.as_secs_f64() * 1e9 / count as f64)
    }

    /// Counts wrong bytes of the last windows, and of what was read of them.
    fn check(&mut self) -> Result<(), RankError> {
        for windows in [&self.two, &self.three] {
            let (rows, copied) = windows.read()?;
            self.wrong += pattern::wrong(&rows, SEED, self.group.world_size());
            let pairs = copied.iter().zip(&rows);
            self.wrong += pairs.filter(|(a, b)| a != b).count() as u64;
        }
        Ok(())
    }
}
