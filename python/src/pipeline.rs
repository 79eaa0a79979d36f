//! Windows in flight: gathers that go on while earlier results are read.

use std::sync::{Mutex, PoisonError};

use direct_dcp::cuda;
use direct_dcp::{AbortHandle, GatherError, Gathered, Planes};
use pyo3::prelude::*;

use crate::errors;
use crate::gather;
use crate::layout::Layout;
use crate::lent::{DeviceResult, Held, Lent, OnDevice};
use crate::memory::{self, Kept, Span};
use crate::signals::{self, Pace};
use crate::stream::{self, Streams};

/// Gathers on one ubatch that overlap with the reading of earlier results.
#[pyclass(frozen, module = "direct_dcp._native")]
pub(crate) struct Pipeline {
    /// None once it is closed.
    on: Mutex<Option<On>>,
    abort: AbortHandle,
    /// When windows were acquired: only then peers are known to have come.
    pace: Pace,
}

enum On {
    Cpu(direct_dcp::Pipeline),
    Gpu(cuda::Pipeline, Streams),
}

/// A window that was submitted.
#[pyclass(frozen, module = "direct_dcp._native")]
pub(crate) struct Ticket {
    epoch: u64,
    window: Mutex<Window>,
}

enum Window {
    Rows(direct_dcp::Ticket<Gathered>),
    Planes(direct_dcp::Ticket<Planes>),
    OnDevice(cuda::Ticket),
}

impl Ticket {
    fn new(window: Window) -> Self {
        let epoch = match &window {
            Window::Rows(ticket) => ticket.epoch(),
            Window::Planes(ticket) => ticket.epoch(),
            Window::OnDevice(ticket) => ticket.epoch(),
        };
        Ticket {
            epoch,
            window: Mutex::new(window),
        }
    }
}

impl On {
    /// Waits for a window, on a GPU by `stream`.
    fn acquire(&mut self, window: &Window, stream: u64) -> PyResult<Held> {
        match (self, window) {
            (On::Cpu(pipeline), Window::Rows(ticket)) => {
                let rows = pipeline.acquire(ticket).map_err(errors::gather)?;
                Ok(Held::Rows(rows))
            }
            (On::Cpu(pipeline), Window::Planes(ticket)) => {
                let planes = pipeline.acquire(ticket).map_err(errors::gather)?;
                Ok(Held::Planes(planes))
            }
            (On::Gpu(pipeline, streams), Window::OnDevice(ticket)) => {
                let stream = streams.get(stream)?;
                let rows = pipeline.acquire(ticket, &stream).map_err(errors::gather)?;
                Ok(Held::OnDevice(OnDevice {
                    result: DeviceResult::Rows(rows),
                    context: pipeline.gather().workspace().context().clone(),
                    // The gather has a stream of its own, which does not wait for the caller's.
                    own: None,
                }))
            }
            _ => Err(errors::invalid(
                "ticket: expected one of this pipeline, got one of another",
            )),
        }
    }
}

impl Pipeline {
    /// Makes a call that may wait for peers.
    fn call<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut On) -> PyResult<R> + Send,
    ) -> PyResult<R> {
        let call = || {
            let mut on = self.on.lock().unwrap_or_else(PoisonError::into_inner);
            let closed = || errors::invalid("the pipeline is closed");
            call(on.as_mut().ok_or_else(closed)?)
        };
        match self.pace.is_slow(0) {
            true => signals::aborting(py, &self.abort, call)?,
            false => py.detach(call),
        }
    }

    /// A pipeline on `ubatch` of `on`; `abort` ends waits for it.
    pub(crate) fn new(
        py: Python<'_>,
        on: &gather::On,
        abort: AbortHandle,
        ubatch: usize,
    ) -> PyResult<Self> {
        let on = match on {
            gather::On::Cpu(gather) => {
                let gather = gather.clone();
                py.detach(|| direct_dcp::Pipeline::new(gather, ubatch).map(On::Cpu))
            }
            gather::On::Gpu(on) => {
                let gather = on.gather.clone();
                let streams = Streams::of(gather.workspace().context());
                py.detach(|| {
                    let pipeline = cuda::Pipeline::new(gather, ubatch);
                    pipeline.map(|pipeline| On::Gpu(pipeline, streams))
                })
            }
        };
        Ok(Pipeline {
            on: Mutex::new(Some(on.map_err(errors::gather)?)),
            abort,
            pace: Pace::new(1),
        })
    }
}

#[pymethods]
impl Pipeline {
    /// Submits the next window. `owner` keeps `local` in place: in host memory, it is held until
    /// the rows were gathered. On a GPU, they are ready after what `stream` has to do so far.
    fn submit(
        &self,
        py: Python<'_>,
        local: Span,
        owner: Py<PyAny>,
        #[pyo3(from_py_with = stream::raw)] stream: u64,
    ) -> PyResult<Ticket> {
        self.call(py, move |on| {
            let window = match on {
                On::Cpu(pipeline) => pipeline.submit(Kept::new(local, owner)).map(Window::Rows),
                On::Gpu(pipeline, streams) => pipeline
                    .submit(&*streams.get(stream)?, memory::device_rows(local))
                    .map(Window::OnDevice),
            };
            window.map(Ticket::new).map_err(errors::gather)
        })
    }

    /// Submits the next window, in its final layout.
    fn submit_final(
        &self,
        py: Python<'_>,
        local: Span,
        owner: Py<PyAny>,
        layout: &Layout,
    ) -> PyResult<Ticket> {
        let layout = layout.host.clone();
        self.call(py, move |on| {
            let window = match on {
                On::Cpu(pipeline) => pipeline
                    .submit_final(Kept::new(local, owner), layout)
                    .map(Window::Planes),
                On::Gpu(..) => Err(GatherError::Unsupported {
                    capability: "a window in its final layout",
                    reason: "between GPUs, a pipeline has rows in rank order",
                    instead: "KvGather.gather_final, on a stream of its own",
                }),
            };
            window.map(Ticket::new).map_err(errors::gather)
        })
    }

    /// Waits for a window, on a GPU by `stream`, and lends it.
    fn acquire(
        &self,
        py: Python<'_>,
        ticket: &Ticket,
        #[pyo3(from_py_with = stream::raw)] stream: u64,
    ) -> PyResult<Lent> {
        let held = self.call(py, |on| {
            let window = ticket.window.lock();
            on.acquire(&window.unwrap_or_else(PoisonError::into_inner), stream)
        });
        self.pace.made(0);
        Lent::new(held?)
    }

    /// Ends it: windows that were submitted are gathered. On a GPU, `stream` waits for them.
    fn close(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = stream::raw)] stream: u64,
    ) -> PyResult<()> {
        signals::aborting(py, &self.abort, || {
            let on = self
                .on
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .take();
            match on {
                Some(On::Gpu(pipeline, streams)) => pipeline
                    .join(&*streams.get(stream)?)
                    .map_err(errors::gather),
                _ => Ok(()),
            }
        })?
    }
}

impl Drop for Pipeline {
    /// It waits for the windows that were submitted.
    fn drop(&mut self) {
        let on = self.on.get_mut();
        crate::drop_detached(on.unwrap_or_else(PoisonError::into_inner).take());
    }
}

#[pymethods]
impl Ticket {
    #[getter]
    fn epoch(&self) -> u64 {
        self.epoch
    }
}
