//! Gathers in workspaces of ours.

use std::sync::{Arc, Mutex, PoisonError};

use direct_dcp::cuda::{self, Driver, Stream};
use direct_dcp::{
    AbortHandle, DType, GatherError, KvGather, RowFormat, Way, Workspace, WorkspaceError,
    WorkspaceOptions,
};
use pyo3::prelude::*;

use crate::errors;
use crate::group::Group;
use crate::memory::{self, Span};
use crate::signals::{self, Pace};
use crate::stream::Streams;

/// What a workspace is asked to be.
fn options(
    capacity_rows: usize,
    dtype: &str,
    dim: usize,
    slots: usize,
    ubatches: usize,
    way: Option<&str>,
    blocks: Option<usize>,
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
    )?;
    let bytes = match on_gpu {
        true => options.device_bytes(world_size),
        false => options.memory_bytes(world_size),
    };
    bytes.map_err(|error| errors::workspace(in_bytes(error)))
}

/// An error about rows that are so many bytes, which to their caller have no `dim`.
fn in_bytes(error: WorkspaceError) -> WorkspaceError {
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

/// A ubatch as Python has it.
fn index(ubatch: isize) -> PyResult<usize> {
    let negative = |_| errors::invalid(format!("ubatch: expected 0 or more, got {ubatch}"));
    usize::try_from(ubatch).map_err(negative)
}

/// A gather and its workspace.
#[pyclass(frozen, module = "direct_dcp._native")]
pub(crate) struct Gather {
    /// None only while it is dropped.
    on: Option<On>,
    abort: AbortHandle,
    pace: Pace,
}

enum On {
    Cpu(Box<KvGather>),
    Gpu(Box<OnGpu>),
}

struct OnGpu {
    gather: cuda::KvGather,
    streams: Streams,
}

impl Gather {
    fn on(&self) -> PyResult<&On> {
        // It is there as long as anybody can call.
        self.on
            .as_ref()
            .ok_or_else(|| errors::invalid("the gather is gone"))
    }

    /// Makes a call in host memory, which waits for peers.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        ubatch: usize,
        call: impl FnOnce() -> R + Send,
    ) -> PyResult<R> {
        let result = match self.pace.is_slow(ubatch) {
            true => signals::aborting(py, &self.abort, call)?,
            false => py.detach(call),
        };
        self.pace.made(ubatch);
        Ok(result)
    }
}

impl Drop for Gather {
    /// Without the lock of the interpreter: a workspace on a GPU waits for its last call, and that
    /// for peers, which may be threads of this process.
    fn drop(&mut self) {
        let on = self.on.take();
        let _ = Python::try_attach(|py| py.detach(move || drop(on)));
    }
}

#[pymethods]
impl Gather {
    /// Collective: builds the workspace, on device `device` or in host memory.
    #[new]
    #[expect(
        clippy::too_many_arguments,
        reason = "the package passes all of them, by position"
    )]
    fn new(
        py: Python<'_>,
        group: &Group,
        device: Option<u32>,
        capacity_rows: usize,
        dtype: &str,
        dim: usize,
        slots: usize,
        ubatches: usize,
        way: Option<&str>,
        blocks: Option<usize>,
        timeout: f64,
        first_timeout: f64,
    ) -> PyResult<Self> {
        let options = options(capacity_rows, dtype, dim, slots, ubatches, way, blocks)?;
        let timeout = errors::seconds("timeout", timeout)?;
        let first = errors::seconds("first_timeout", first_timeout)?;
        let group = &group.inner;
        let abort = group.abort_handle();
        let on = signals::aborting(py, &abort, || match device {
            None => Workspace::new(group, options).map(|workspace| {
                let gather = KvGather::new(workspace);
                On::Cpu(Box::new(gather.timeout(timeout).first_timeout(first)))
            }),
            Some(device) => cuda::Workspace::new(group, device, options).map(|workspace| {
                let streams = Streams::of(workspace.context());
                let gather = cuda::KvGather::new(workspace);
                On::Gpu(Box::new(OnGpu {
                    gather: gather.timeout(timeout).first_timeout(first),
                    streams,
                }))
            }),
        })?;
        let on = on.map_err(|error| match dtype {
            "bytes" => errors::workspace(in_bytes(error)),
            _ => errors::workspace(error),
        });
        let on = on.map_err(|error| match device.map(|_| Driver::load()) {
            // That says more than that some rank could not.
            Some(Err(missing)) => errors::cuda(missing),
            _ => error,
        })?;
        Ok(Gather {
            on: Some(on),
            abort,
            pace: Pace::new(ubatches),
        })
    }

    /// Gathers `local` of all ranks into `out`; on a GPU, submits that to `stream`.
    fn gather_into(
        &self,
        py: Python<'_>,
        ubatch: isize,
        local: Span,
        out: Span,
        stream: u64,
    ) -> PyResult<()> {
        let ubatch = index(ubatch)?;
        let gathered = match self.on()? {
            On::Cpu(gather) => self.call(py, ubatch, || {
                memory::with_rows_and_room(local, out, |local, out| {
                    gather.gather_into(ubatch, local, out)
                })
            })??,
            On::Gpu(on) => {
                let stream = on.streams.get(stream)?;
                let (local, out) = memory::device_rows_and_room(local, out)?;
                py.detach(|| on.gather.gather_into(ubatch, &stream, local, out))
            }
        };
        gathered.map_err(errors::gather)
    }

    /// Gathers `local` of all ranks, and lends the slot where they are.
    fn gather(&self, py: Python<'_>, ubatch: isize, local: Span, stream: u64) -> PyResult<Lent> {
        let ubatch = index(ubatch)?;
        let held = match self.on()? {
            On::Cpu(gather) => {
                let call = || memory::with_rows(local, |local| gather.gather(ubatch, local));
                let rows = self.call(py, ubatch, call)?;
                Held::Cpu(rows.map_err(errors::gather)?)
            }
            On::Gpu(on) => {
                let stream = on.streams.get(stream)?;
                let local = memory::device_rows(local);
                let rows = py
                    .detach(|| on.gather.gather(ubatch, &stream, local))
                    .map_err(errors::gather)?;
                Held::Gpu(rows, stream)
            }
        };
        Lent::new(held)
    }

    /// On a GPU, raises what an earlier call failed with on the device.
    fn check(&self) -> PyResult<()> {
        match self.on()? {
            On::Cpu(_) => Ok(()),
            On::Gpu(on) => on.gather.check().map_err(errors::gather),
        }
    }

    /// On a GPU, waits for the stream, then checks.
    fn wait(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        match self.on()? {
            On::Cpu(_) => Ok(()),
            On::Gpu(on) => {
                let stream = on.streams.get(stream)?;
                signals::aborting(py, &self.abort, || on.gather.wait(&stream))?
                    .map_err(errors::gather)
            }
        }
    }

    /// Generation, way, epochs and failure, after the work of `stream`.
    fn status(
        &self,
        py: Python<'_>,
        stream: u64,
    ) -> PyResult<(u64, String, Vec<u64>, Option<String>)> {
        let status = match self.on()? {
            On::Cpu(gather) => gather.status(),
            On::Gpu(on) => {
                let stream = on.streams.get(stream)?;
                signals::aborting(py, &self.abort, || on.gather.status(&stream))?
                    .map_err(errors::gather)?
            }
        };
        Ok((
            status.generation,
            status.way.to_string(),
            status.epochs,
            status.failure,
        ))
    }

    #[getter]
    fn way(&self) -> PyResult<String> {
        Ok(match self.on()? {
            On::Cpu(gather) => gather.workspace().way(),
            On::Gpu(on) => on.gather.workspace().way(),
        }
        .to_string())
    }
}

/// The rows of all ranks in a slot, which nobody overwrites until they are released.
#[pyclass(frozen, module = "direct_dcp._native")]
pub(crate) struct Lent {
    address: u64,
    bytes: u64,
    held: Mutex<Option<Held>>,
}

enum Held {
    Cpu(direct_dcp::Gathered),
    Gpu(cuda::Gathered, Arc<Stream>),
}

impl Lent {
    fn new(held: Held) -> PyResult<Self> {
        let (address, bytes) = match &held {
            Held::Cpu(rows) => (rows.as_ptr().expose_provenance() as u64, rows.len() as u64),
            Held::Gpu(rows, _) => {
                let captured = || {
                    errors::gather(GatherError::Unsupported {
                        capability: "a zero-copy gather in a graph",
                        reason: "each replay delivers into another slot",
                        instead: "gather_into",
                    })
                };
                (rows.address().ok_or_else(captured)?, rows.bytes())
            }
        };
        Ok(Lent {
            address,
            bytes,
            held: Mutex::new(Some(held)),
        })
    }
}

#[pymethods]
impl Lent {
    #[getter]
    fn address(&self) -> u64 {
        self.address
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.bytes
    }

    /// Lets the slot go: on a GPU, after what `stream` has to do so far.
    fn release(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let held = self
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match held {
            // The next call comes after what is on the gather's own stream anyway.
            Some(Held::Gpu(rows, own)) if own.as_raw() != stream => {
                let stream = memory::stream(own.context(), stream).map_err(errors::cuda)?;
                py.detach(|| rows.release_after(&stream))
                    .map_err(errors::gather)
            }
            _ => Ok(()),
        }
    }
}
