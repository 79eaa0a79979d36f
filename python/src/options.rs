//! What workspaces are asked to be, and what they take.

use std::path::Path;

use direct_dcp::tuning::Tuning;
use direct_dcp::{DType, RowFormat, Way, WorkspaceError, WorkspaceOptions};
use pyo3::prelude::*;

use crate::errors;

/// What a workspace is asked to be.
#[expect(
    clippy::too_many_arguments,
    reason = "the package passes all of them, by position"
)]
pub(crate) fn options(
    capacity_rows: usize,
    dtype: &str,
    dim: usize,
    slots: usize,
    ubatches: usize,
    way: Option<&str>,
    blocks: Option<usize>,
    tuning: Option<&Path>,
) -> PyResult<WorkspaceOptions> {
    let dtypes = [DType::F16, DType::BF16, DType::F8E4M3, DType::Bytes];
    let dtype = dtypes
        .into_iter()
        .find(|candidate| candidate.to_string() == dtype)
        .ok_or_else(|| errors::invalid(format!("dtype: {dtype:?} is unknown")))?;
    let mut options = WorkspaceOptions::new(capacity_rows, RowFormat::new(dtype, dim))
        .slots(slots)
        .ubatches(ubatches);
    if let Some(name) = way {
        let way = Way::CPU.into_iter().chain(Way::CUDA);
        let way = way
            .clone()
            .find(|way| way.to_string() == name)
            .ok_or_else(|| {
                let mut names: Vec<String> = Vec::new();
                for name in way.map(|way| way.to_string()) {
                    // Some are ways on CPUs and on GPUs.
                    if !names.contains(&name) {
                        names.push(name);
                    }
                }
                errors::invalid(format!(
                    "way: expected one of {}, got {name:?}",
                    names.join(", ")
                ))
            })?;
        options = options.way(way);
    }
    if let Some(blocks) = blocks {
        options = options.blocks(blocks);
    }
    if let Some(path) = tuning {
        let table = Tuning::load(path).map_err(|error| errors::invalid(error.to_string()))?;
        options = options.tuning(table);
    }
    Ok(options)
}

/// Bytes that a workspace takes: on CPUs over all ranks, on GPUs on each rank's device.
#[pyfunction]
#[pyo3(signature = (on_gpu, world_size, capacity_rows, row_bytes, slots, ubatches, way))]
pub(crate) fn memory_bytes(
    on_gpu: bool,
    world_size: usize,
    capacity_rows: usize,
    row_bytes: usize,
    slots: usize,
    ubatches: usize,
    way: Option<&str>,
) -> PyResult<usize> {
    let options = options(
        capacity_rows,
        "bytes",
        row_bytes,
        slots,
        ubatches,
        way,
        None,
        None,
    )?;
    let bytes = match on_gpu {
        true => options.device_bytes(world_size),
        false => options.memory_bytes(world_size),
    };
    bytes.map_err(|error| errors::workspace(in_bytes(error)))
}

/// An error about rows that are so many bytes, which to their caller have no `dim`.
pub(crate) fn in_bytes(error: WorkspaceError) -> WorkspaceError {
    match error {
        WorkspaceError::InvalidArgument {
            what: "dim", got, ..
        } => WorkspaceError::InvalidArgument {
            what: "row_bytes",
            expected: "a positive number of bytes in a row".into(),
            got,
        },
        WorkspaceError::Mismatch {
            source_rank,
            field: "dim",
            ours,
            theirs,
        } => WorkspaceError::Mismatch {
            source_rank,
            field: "row_bytes",
            ours,
            theirs,
        },
        error => error,
    }
}
