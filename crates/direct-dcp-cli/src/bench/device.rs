//! What every rank does in a benchmark on GPUs.

use super::clock::word;
use super::device_loop::{meet, slowest, time, warm_up};
use super::measure::{Mode, POISON, Task};
use super::round::{Row, sum};
use super::{Found, pattern};
use crate::gpu;
use crate::ranks::{Emit, Message, RankError};
use direct_dcp::cuda::{
    Context, CudaError, Delivery, Device, Driver, KvGather, Rehearsal, Workspace,
};
use direct_dcp::{Group, Way};
use direct_dcp_cuda::probe::copy_time;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Bytes of the copies that the floor is taken from: far more than a device's caches hold.
const COPY_BYTES: usize = 256 << 20;

/// How long a call waits for its peers. Nothing that a benchmark does takes so long.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);

/// What is asked of GPUs only.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Gpu {
    /// The device of all ranks.
    pub(super) device: Option<u32>,
    /// How often a loop launches a graph of all its calls; none if calls are submitted one by one.
    pub(super) launches: Option<usize>,
    /// The most blocks of a launch.
    pub(super) blocks: Option<usize>,
}

/// How fast plain copies are.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Copies {
    /// Bytes copied, in GB/s: each is read once and written once.
    pub(super) gbs: f64,
    /// Whether they are from one device to another.
    pub(super) across: bool,
    /// Ranks on the device of rank 0.
    pub(super) sharing: usize,
}

impl Copies {
    /// Collective: rank 0 copies, and tells all.
    fn measure(group: &Group, device: Option<u32>) -> Result<Self, RankError> {
        let own = gpu::ordinal(device, group.rank())?;
        let all = group.all_gather(&u64::from(own).to_le_bytes())?;
        let all: Vec<u64> = all.iter().filter_map(|ordinal| word(ordinal)).collect();
        let first = all.first().copied().unwrap_or_default();
        let other = all.iter().copied().find(|&ordinal| ordinal != first);
        let sharing = all.iter().filter(|&&ordinal| ordinal == first).count();
        let time = if group.rank() == 0 {
            let time = time_copies(first as u32, other.unwrap_or(first) as u32);
            time.map_err(|error| error.to_string())?
        } else {
            Duration::ZERO
        };
        let nanoseconds = time.as_nanos() as u64;
        let times = group.all_gather(&nanoseconds.to_le_bytes())?;
        let nanoseconds = times.first().and_then(|time| word(time)).unwrap_or(1);
        Ok(Copies {
            gbs: COPY_BYTES as f64 / nanoseconds.max(1) as f64,
            across: other.is_some(),
            sharing,
        })
    }

    /// Nanoseconds below which no gather of `slice` bytes of each of `ranks` ranks can be by much.
    fn floor(&self, slice: usize, ranks: usize) -> f64 {
        let slices = if self.across {
            // What comes in over a device's link.
            self.sharing * (ranks - self.sharing)
        } else {
            // Each slice is read once, and written once for every rank. A copy reads and writes,
            // so that it moves two bytes for each one copied.
            ranks + ranks * ranks
        };
        let per_byte = if self.across {
            self.gbs
        } else {
            2.0 * self.gbs
        };
        slices as f64 * slice as f64 / per_byte
    }
}

fn time_copies(from: u32, to: u32) -> Result<Duration, CudaError> {
    let driver = Driver::load()?;
    let source = Context::new(&Device::new(&driver, from)?)?;
    let destination = Context::new(&Device::new(&driver, to)?)?;
    copy_time(&source, &destination, COPY_BYTES)
}

/// One rank's part.
pub(super) fn run(
    task: &Task,
    gpu: Gpu,
    group: &Group,
    emit: &mut Emit<'_>,
) -> Result<(), RankError> {
    let mut say = |found: &Found| {
        if group.rank() != 0 {
            return Ok(());
        }
        let text = serde_json::to_string(found).map_err(|error| error.to_string())?;
        emit(Message::Text(text))
    };
    let copies = Copies::measure(group, gpu.device)?;
    say(&Found::Copies(copies))?;
    let ordinal = gpu::ordinal(gpu.device, group.rank())?;
    for &way in &task.ways {
        for &rows in &task.rows {
            let options = task.options(rows * group.world_size(), way, gpu.blocks);
            let gather = KvGather::new(Workspace::new(group, ordinal, options)?)
                .timeout(TIMEOUT)
                .first_timeout(TIMEOUT);
            let slice = rows * task.row_bytes;
            let mut case = Case {
                task,
                gpu,
                group,
                workspace: gather.workspace(),
                rehearsal: Rehearsal::new(&gather, 0, slice)?,
                local: vec![0; slice],
                seed: 0,
                wrong: 0,
            };
            for mode in task.modes_of(way) {
                say(&Found::Row(case.measure(rows, mode, &copies)?))?;
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
    gpu: Gpu,
    group: &'a Group,
    workspace: &'a Workspace,
    rehearsal: Rehearsal<'a>,
    local: Vec<u8>,
    seed: u64,
    wrong: u64,
}

impl Case<'_> {
    fn measure(&mut self, rows: usize, mode: Mode, copies: &Copies) -> Result<Row, RankError> {
        let ranks = self.group.world_size();
        let (task, gpu, group) = (self.task, self.gpu, self.group);
        let delivery = Delivery::from(mode);
        self.wrong = 0;
        self.refill()?;
        warm_up((&mut self.rehearsal, delivery), task, gpu, group)?;
        let mut times = Vec::with_capacity(task.loops);
        for left in (0..task.loops).rev() {
            // Rows that no call before has delivered, and a look at every byte of every rank, which
            // for large rows takes the host far longer than all loops take the device: once, after
            // the last.
            if left == 0 {
                self.refill()?;
            }
            times.push(time(
                (&mut self.rehearsal, delivery),
                task.iters,
                gpu.launches,
                group,
            )?);
            if left == 0 && task.check {
                let rows = self.rehearsal.read()?;
                self.wrong += pattern::wrong(&rows, self.seed, ranks);
            }
            // Nobody goes on before all have looked.
            meet(&mut (&mut self.rehearsal, delivery), group)?;
        }
        let (time, tail) = slowest(group, &mut times)?;
        let wrong = sum(group, self.wrong)?;
        let size = (ranks * self.local.len()) as u64;
        let floor = copies.floor(self.local.len(), ranks);
        let algbw = size as f64 / time;
        Ok(Row {
            size,
            rows,
            way: self.way(delivery, rows).to_string(),
            mode,
            time_us: time / 1e3,
            p99_us: tail / 1e3,
            // Bytes per nanosecond.
            algbw_gbs: algbw,
            busbw_gbs: algbw * (ranks as f64 - 1.0) / ranks as f64,
            ceiling_us: floor / 1e3,
            ratio: time / floor,
            stored: None,
            wrong: task.check.then_some(wrong),
        })
    }

    /// How the rows of the loops' calls travel.
    fn way(&self, delivery: Delivery, rows: usize) -> Way {
        match self.workspace.way_of(delivery, rows) {
            // What a table chose, and a graph cannot have.
            Way::CopyEngine if self.gpu.launches.is_some() => Way::Push,
            way => way,
        }
    }

    /// New rows to send, and nothing of the old ones where they are copied to.
    fn refill(&mut self) -> Result<(), RankError> {
        if self.task.check || self.seed == 0 {
            self.seed += 1;
            pattern::fill(&mut self.local, self.seed, self.group.rank());
            self.rehearsal.set_rows(&self.local)?;
            self.rehearsal.fill_out(POISON)?;
        }
        Ok(())
    }
}
