//! What every rank does.

use super::super::measure::Mode;
use super::subject::{OnCpu, OnGpu, Subject};
use crate::gpu::{self, Place};
use crate::machine;
use crate::ranks::{Emit, Message, RankError, WayChoice};
use crate::report::median;
use direct_dcp::tuning::Setting;
use direct_dcp::{
    DType, Group, KvGather, RowFormat, Workspace, WorkspaceError, WorkspaceOptions, cuda,
};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How long a call waits for its peers. Nothing that is measured takes so long.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What to measure: every way, with every number of rows, in every mode.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(super) place: Place,
    /// In ascending order.
    pub(super) rows: Vec<usize>,
    pub(super) row_bytes: usize,
    pub(super) ways: Vec<WayChoice>,
    /// Whether those are simply all that there are, so that some may be left out.
    pub(super) all: bool,
    pub(super) modes: Vec<Mode>,
    pub(super) blocks: Option<usize>,
    pub(super) iters: usize,
    /// How often a loop launches a graph of all its calls; none if calls are submitted one by one.
    pub(super) launches: Option<usize>,
    pub(super) warmup: usize,
    pub(super) loops: usize,
}

/// What was measured of one size in one mode.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    pub(super) mode: Mode,
    pub(super) rows: usize,
    pub(super) devices: usize,
    pub(super) device: String,
    /// Microseconds of a call by each way.
    pub(super) times: Vec<(WayChoice, f64)>,
}

impl Measured {
    pub(super) fn fastest(&self) -> Option<WayChoice> {
        let mut times = self.times.iter().copied();
        let first = times.next()?;
        let least = times.fold(
            first,
            |least, next| if next.1 < least.1 { next } else { least },
        );
        Some(least.0)
    }
}

impl Task {
    fn options(&self, rows: usize, ranks: usize, way: WayChoice) -> WorkspaceOptions {
        let format = RowFormat::new(DType::Bytes, self.row_bytes);
        let options = WorkspaceOptions::new(rows.saturating_mul(ranks), format);
        let options = way
            .forced()
            .into_iter()
            .fold(options, WorkspaceOptions::way);
        self.blocks
            .into_iter()
            .fold(options, WorkspaceOptions::blocks)
    }

    /// Bytes of a rank's rows and of a buffer for those of all, for each way; none if too many.
    fn private(&self, ranks: usize) -> Option<usize> {
        let slice = self.rows.last()?.checked_mul(self.row_bytes)?;
        slice
            .checked_mul(ranks.checked_add(1)?)?
            .checked_mul(self.ways.len())
    }

    /// The host memory that all ranks need together, at most; none if it cannot be counted.
    pub(super) fn memory(&self, ranks: usize) -> Option<usize> {
        let mut bytes = self.private(ranks)?.checked_mul(ranks)?;
        if self.place == Place::Cpu {
            for &way in &self.ways {
                let options = self.options(*self.rows.last()?, ranks, way);
                bytes = bytes.checked_add(options.memory_bytes(ranks).ok()?)?;
            }
        }
        Some(bytes)
    }

    /// The device memory that each rank needs, at most; none if it cannot be counted.
    pub(super) fn device_memory(&self, ranks: usize) -> Option<usize> {
        let options = self.options(*self.rows.last()?, ranks, WayChoice::Auto);
        let shared = options
            .device_bytes(ranks)
            .ok()?
            .checked_mul(self.ways.len())?;
        self.private(ranks)?.checked_add(shared)
    }

    /// One rank's part.
    pub(crate) fn run(&self, group: &Group, emit: &mut Emit<'_>) -> Result<(), RankError> {
        for &rows in &self.rows {
            match self.place {
                Place::Cpu => self.on_cpu(group, rows, emit)?,
                Place::Cuda { device } => self.on_gpu(group, rows, device, emit)?,
            }
            // Freeing memory may wait for the device, and so for ranks that wait for this one.
            group.barrier()?;
        }
        Ok(())
    }

    fn on_cpu(&self, group: &Group, rows: usize, emit: &mut Emit<'_>) -> Result<(), RankError> {
        let ranks = group.world_size();
        let blocks = self
            .blocks
            .unwrap_or_else(|| machine::default_blocks(ranks));
        let crowded = ranks * blocks > machine::cores();
        let build = |&way: &WayChoice| {
            let gather = KvGather::new(Workspace::new(group, self.options(rows, ranks, way))?);
            Ok((way, OnCpu::new(gather, rows * self.row_bytes, crowded)))
        };
        let mut subjects: Vec<_> = self
            .ways
            .iter()
            .map(build)
            .collect::<Result<_, RankError>>()?;
        let Some(setting) = subjects
            .first()
            .map(|(_, subject)| subject.setting().clone())
        else {
            return Ok(());
        };
        self.take_turns(group, rows, &setting, &mut subjects, emit)
    }

    fn on_gpu(
        &self,
        group: &Group,
        rows: usize,
        device: Option<u32>,
        emit: &mut Emit<'_>,
    ) -> Result<(), RankError> {
        let ranks = group.world_size();
        let ordinal = gpu::ordinal(device, group.rank())?;
        let mut gathers = Vec::new();
        for &way in &self.ways {
            let workspace = cuda::Workspace::new(group, ordinal, self.options(rows, ranks, way));
            let workspace = match workspace {
                // The same on all ranks.
                Err(WorkspaceError::Unsupported { .. }) if self.all => continue,
                workspace => workspace?,
            };
            // Such ranks share the engines, too; on an H200 a call once did not start in time.
            let shared = workspace.setting().devices < ranks;
            if self.all && way == WayChoice::CopyEngine && shared {
                continue;
            }
            let gather = cuda::KvGather::new(workspace)
                .timeout(TIMEOUT)
                .first_timeout(TIMEOUT);
            gathers.push((way, gather));
        }
        let Some(setting) = gathers
            .first()
            .map(|(_, gather)| gather.workspace().setting())
        else {
            return Err("no way works for all ranks".to_string().into());
        };
        let setting = setting.clone();
        let mut subjects = Vec::with_capacity(gathers.len());
        for (way, gather) in &gathers {
            let subject = OnGpu::new(gather, rows * self.row_bytes, self.launches)?;
            subjects.push((*way, subject));
        }
        // From here to the next barrier ranks wait for each other, and nobody allocates or frees.
        group.barrier()?;
        self.take_turns(group, rows, &setting, &mut subjects, emit)?;
        Ok(group.barrier()?)
    }

    /// Collective: loops of the ways in turns, mode by mode, after a look at every byte of a call.
    fn take_turns(
        &self,
        group: &Group,
        rows: usize,
        setting: &Setting,
        subjects: &mut [(WayChoice, impl Subject)],
        emit: &mut Emit<'_>,
    ) -> Result<(), RankError> {
        for &mode in &self.modes {
            for (way, subject) in &mut *subjects {
                let wrong = subject.check(group, mode, self.warmup)?;
                if wrong > 0 {
                    let way = way.name();
                    return Err(format!("{wrong} bytes were not as sent, {mode} by {way}").into());
                }
                subject.prepare(group, mode, self.iters)?;
            }
            let mut times = vec![Vec::with_capacity(self.loops); subjects.len()];
            for _ in 0..self.loops {
                for ((_, subject), times) in subjects.iter_mut().zip(&mut times) {
                    times.push(subject.time(group, mode, self.iters)?);
                }
            }
            let times = subjects.iter().zip(&mut times).map(|((way, _), times)| {
                times.sort_unstable_by(f64::total_cmp);
                (*way, median(times) / 1e3)
            });
            let measured = Measured {
                mode,
                rows,
                devices: setting.devices,
                device: setting.device.clone(),
                times: times.collect(),
            };
            if group.rank() == 0 {
                let text = serde_json::to_string(&measured).map_err(|error| error.to_string())?;
                emit(Message::Text(text))?;
            }
        }
        Ok(())
    }
}
