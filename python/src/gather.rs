//! Gathers in workspaces of ours.

use std::path::PathBuf;
use std::sync::Arc;

use direct_dcp::cuda::{self, Driver, Stream};
use direct_dcp::{AbortHandle, KvGather, Workspace};
use pyo3::prelude::*;

use crate::errors;
use crate::group::Group;
use crate::layout::{Layout, Source};
use crate::lent::{DeviceResult, Held, Lent, OnDevice};
use crate::memory::{self, Span};
use crate::options::{in_bytes, options};
use crate::pipeline::Pipeline;
use crate::row_map::RowMap;
use crate::signals::{self, Pace};
use crate::stream::{self, Streams};

/// A ubatch as Python has it.
fn ubatch(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    errors::count("ubatch", value)
}

/// A gather and its workspace.
#[pyclass(frozen, module = "direct_dcp._native")]
pub(crate) struct Gather {
    /// None only while it is dropped.
    on: Option<On>,
    abort: AbortHandle,
    pace: Pace,
}

pub(crate) enum On {
    Cpu(Arc<KvGather>),
    Gpu(OnGpu),
}

pub(crate) struct OnGpu {
    pub(crate) gather: Arc<cuda::KvGather>,
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

impl OnGpu {
    fn held(&self, result: DeviceResult, stream: &Stream) -> Held {
        Held::OnDevice(OnDevice {
            result,
            context: self.gather.workspace().context().clone(),
            // The next call comes after what is on the gather's own stream.
            own: Some(stream.as_raw()),
        })
    }
}

impl Drop for Gather {
    /// Without the lock of the interpreter: a workspace on a GPU waits for its last call, and that
    /// for peers, which may be threads of this process.
    fn drop(&mut self) {
        crate::drop_detached(self.on.take());
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
        tuning: Option<PathBuf>,
        timeout: f64,
        first_timeout: f64,
    ) -> PyResult<Self> {
        let options = options(
            capacity_rows,
            dtype,
            dim,
            slots,
            ubatches,
            way,
            blocks,
            tuning.as_deref(),
        )?;
        let timeout = errors::seconds("timeout", timeout)?;
        let first = errors::seconds("first_timeout", first_timeout)?;
        let group = &group.inner;
        let abort = group.abort_handle();
        let on = signals::aborting(py, &abort, || match device {
            None => Workspace::new(group, options).map(|workspace| {
                let gather = KvGather::new(workspace);
                On::Cpu(Arc::new(gather.timeout(timeout).first_timeout(first)))
            }),
            Some(device) => cuda::Workspace::new(group, device, options).map(|workspace| {
                let streams = Streams::of(workspace.context());
                let gather = cuda::KvGather::new(workspace);
                let gather = gather.timeout(timeout).first_timeout(first);
                On::Gpu(OnGpu {
                    gather: Arc::new(gather),
                    streams,
                })
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
        #[pyo3(from_py_with = ubatch)] ubatch: usize,
        local: Span,
        out: Span,
        #[pyo3(from_py_with = stream::raw)] stream: u64,
    ) -> PyResult<()> {
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
    fn gather(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = ubatch)] ubatch: usize,
        local: Span,
        #[pyo3(from_py_with = stream::raw)] stream: u64,
    ) -> PyResult<Lent> {
        let held = match self.on()? {
            On::Cpu(gather) => {
                let call = || memory::with_rows(local, |local| gather.gather(ubatch, local));
                let rows = self.call(py, ubatch, call)?;
                Held::Rows(rows.map_err(errors::gather)?)
            }
            On::Gpu(on) => {
                let stream = on.streams.get(stream)?;
                let local = memory::device_rows(local);
                let rows = py
                    .detach(|| on.gather.gather(ubatch, &stream, local))
                    .map_err(errors::gather)?;
                on.held(DeviceResult::Rows(rows), &stream)
            }
        };
        Lent::new(held)
    }

    /// Gathers `rows` of all ranks to the places of `layout`, and lends the slot where they are.
    fn gather_final(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = ubatch)] ubatch: usize,
        rows: Source,
        layout: &Layout,
        #[pyo3(from_py_with = stream::raw)] stream: u64,
    ) -> PyResult<Lent> {
        let held = match self.on()? {
            On::Cpu(gather) => {
                let call = || {
                    memory::with_source(rows, |rows| {
                        gather.gather_final(ubatch, rows, &layout.host)
                    })
                };
                let planes = self.call(py, ubatch, call)?;
                Held::Planes(planes.map_err(errors::gather)?)
            }
            On::Gpu(on) => {
                let stream = on.streams.get(stream)?;
                let rows = memory::placed_rows(rows, layout.host.local_rows())?;
                let layout = layout.device.as_ref();
                let layout = layout.ok_or_else(|| errors::invalid("the layout is gone"))?;
                let planes = py
                    .detach(|| on.gather.gather_final(ubatch, &stream, &rows, layout))
                    .map_err(errors::gather)?;
                on.held(DeviceResult::Planes(planes), &stream)
            }
        };
        Lent::new(held)
    }

    /// The layout of `map` for its rows, split after each of `planes` elements.
    fn layout(&self, py: Python<'_>, map: &RowMap, planes: Vec<usize>) -> PyResult<Layout> {
        Layout::new(py, self.on()?, map, &planes)
    }

    /// A pipeline on `ubatch`.
    fn pipeline(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = ubatch)] ubatch: usize,
    ) -> PyResult<Pipeline> {
        Pipeline::new(py, self.on()?, self.abort.clone(), ubatch)
    }

    /// On a GPU, raises what an earlier call failed with on the device.
    fn check(&self) -> PyResult<()> {
        match self.on()? {
            On::Cpu(_) => Ok(()),
            On::Gpu(on) => on.gather.check().map_err(errors::gather),
        }
    }

    /// On a GPU, waits for the stream, then checks.
    fn wait(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = stream::raw)] stream: u64,
    ) -> PyResult<()> {
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
        #[pyo3(from_py_with = stream::raw)] stream: u64,
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
