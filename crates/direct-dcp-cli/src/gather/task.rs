//! What every rank does.

use super::plan::Plan;
use super::report::{RankReport, Times};
use crate::gpu::Place;
use crate::ranks::{Emit, Message, RankError, WayChoice};
use crate::tensor_file::RowSource;
use crate::tuning::Table;
use direct_dcp::plan::Sharding;
use direct_dcp::{DType, Group, RowFormat, WorkspaceOptions};
use serde::{Deserialize, Serialize};

/// Fills the padding of shards. It travels, and must not come out.
pub(super) const JUNK: u8 = 0xEE;
/// Fills the buffers that rows are gathered into.
pub(super) const POISON: u8 = 0xA5;

/// What every rank does.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(super) source: RowSource,
    pub(super) dtype: Element,
    pub(super) dim: usize,
    pub(super) interleave: usize,
    pub(super) place: Place,
    pub(super) way: WayChoice,
    pub(super) tuning: Option<Table>,
    pub(super) iterations: usize,
    /// Whether rank 0 passes on the rows in token order.
    pub(super) restore: bool,
    /// None if rows are gathered rank by rank, with padding.
    pub(super) request_major: Option<Plan>,
}

/// The library's element type, as it travels to a rank.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Element {
    F16,
    BF16,
    F8E4M3,
    Bytes,
}

impl From<DType> for Element {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F16 => Element::F16,
            DType::BF16 => Element::BF16,
            DType::F8E4M3 => Element::F8E4M3,
            _ => Element::Bytes,
        }
    }
}

impl From<Element> for DType {
    fn from(element: Element) -> Self {
        match element {
            Element::F16 => DType::F16,
            Element::BF16 => DType::BF16,
            Element::F8E4M3 => DType::F8E4M3,
            Element::Bytes => DType::Bytes,
        }
    }
}

/// What a rank has when all of its gathers were right.
pub(super) struct Gathered {
    pub(super) way: String,
    /// Of each mode, microseconds of every call.
    pub(super) times: Vec<(&'static str, Vec<f64>)>,
    /// What was delivered last: in token order if it was request-major, and otherwise by copy-out.
    pub(super) rows: Vec<u8>,
}

impl Task {
    pub(super) fn sharding(&self, ranks: usize) -> Result<Sharding, String> {
        Sharding::new(ranks, self.interleave).map_err(|error| error.to_string())
    }

    /// Rows of every rank's shard.
    pub(super) fn padded_rows(&self, sharding: Sharding) -> usize {
        sharding.padded_rows(self.source.rows())
    }

    /// The host memory that all ranks need together; none if it cannot be counted.
    pub(super) fn memory(&self, ranks: usize) -> Option<usize> {
        let sharding = self.sharding(ranks).ok()?;
        let (capacity, private) = match &self.request_major {
            Some(plan) => {
                let chunks = plan.chunks(sharding).ok()?;
                // The cache and its slots, and the rows in token order.
                let cache = plan.cache_rows(sharding)?;
                let rows = cache.checked_add(self.source.rows())?;
                let slots = plan.rows(sharding, 0).1.checked_mul(size_of::<u32>())?;
                let private = rows.checked_mul(self.source.row_bytes())?;
                (
                    Plan::capacity(&chunks, sharding),
                    private.checked_add(slots)?,
                )
            }
            None => (
                self.padded_rows(sharding).checked_mul(ranks)?,
                self.rows_memory(ranks)?,
            ),
        };
        let shared = match self.place {
            Place::Cpu => self.options(capacity).memory_bytes(ranks).ok()?,
            Place::Cuda { .. } => 0,
        };
        shared.checked_add(private.checked_mul(ranks)?)
    }

    /// The device memory that each rank needs; none if it cannot be counted.
    pub(super) fn device_memory(&self, ranks: usize) -> Option<usize> {
        let sharding = self.sharding(ranks).ok()?;
        let (capacity, private) = match &self.request_major {
            Some(plan) => {
                let capacity = Plan::capacity(&plan.chunks(sharding).ok()?, sharding);
                let cache = plan.cache_rows(sharding)?;
                // The cache; the place and the slot of each row; and what slots are poisoned with.
                let tables = plan.rows(sharding, 0).1.checked_mul(2 * size_of::<u32>())?;
                let slices = capacity.checked_add(capacity / ranks)?;
                let rows = cache.checked_add(slices)?;
                let rows = rows.checked_mul(self.source.row_bytes())?;
                (capacity, rows.checked_add(tables)?)
            }
            None => (
                self.padded_rows(sharding).checked_mul(ranks)?,
                self.rows_memory(ranks)?,
            ),
        };
        let shared = self.options(capacity).device_bytes(ranks).ok()?;
        shared.checked_add(private)
    }

    /// Bytes of a rank's shard, and of a buffer for the rows of all.
    fn rows_memory(&self, ranks: usize) -> Option<usize> {
        let padded = self.padded_rows(self.sharding(ranks).ok()?);
        let slice = padded.checked_mul(self.source.row_bytes())?;
        slice.checked_mul(ranks.checked_add(1)?)
    }

    pub(super) fn options(&self, capacity: usize) -> WorkspaceOptions {
        let options = WorkspaceOptions::new(capacity, self.row_format());
        let tables = self.tuning.iter().map(|table| table.0.clone());
        let options = tables.fold(options, WorkspaceOptions::tuning);
        match self.way.forced() {
            Some(way) => options.way(way),
            None => options,
        }
    }

    pub(super) fn row_format(&self) -> RowFormat {
        RowFormat::new(self.dtype.into(), self.dim)
    }

    /// One rank's part.
    pub(crate) fn run(&self, group: &Group, emit: &mut Emit<'_>) -> Result<(), RankError> {
        let (rank, ranks) = (group.rank(), group.world_size());
        let sharding = self.sharding(ranks)?;
        let done = match (&self.request_major, self.place) {
            (Some(plan), Place::Cpu) => self.request_major(plan, group, sharding)?,
            (Some(plan), Place::Cuda { device }) => {
                self.request_major_on_gpu(plan, group, sharding, device)?
            }
            (None, Place::Cpu) => self.rank_major(group, sharding, &self.shard(sharding, rank)?)?,
            (None, Place::Cuda { device }) => {
                self.on_gpu(group, sharding, &self.shard(sharding, rank)?, device)?
            }
        };
        let (valid_rows, padded_rows) = match &self.request_major {
            Some(plan) => plan.rows(sharding, rank),
            None => (
                sharding.local_len(self.source.rows(), rank),
                self.padded_rows(sharding),
            ),
        };
        let times = done.times.into_iter();
        let report = RankReport {
            rank,
            valid_rows,
            padded_rows,
            bytes: done.rows.len(),
            way: done.way,
            times: times
                .map(|(mode, micros)| (mode.into(), Times::of(micros)))
                .collect(),
        };
        let report = serde_json::to_vec(&report).map_err(|error| error.to_string())?;
        // Everybody has verified when this returns.
        let reports = group.all_gather(&report)?;
        if rank == 0 {
            let reports = reports.join(&b","[..]);
            emit(Message::Text(format!(
                "[{}]",
                String::from_utf8_lossy(&reports)
            )))?;
            if self.restore {
                match self.request_major {
                    Some(_) => super::request_major::pass_on(&done.rows, emit)?,
                    None => self.restore(sharding, &done.rows, emit)?,
                }
            }
        }
        Ok(())
    }
}
