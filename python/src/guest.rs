//! Gathers in memory that an engine owns: what the operators for torch launch.

use std::time::Duration;

use direct_dcp::cuda::{Context, Device, Driver};
use direct_dcp_cuda::gather::{GuestLane, GuestOptions, Transport};
use direct_dcp_kernels::Shape;
use direct_dcp_kernels::device::Receiver;
use pyo3::prelude::*;

use crate::errors;
use crate::memory::{self, Span};
use crate::stream::Streams;

/// The kernels of one device and one transport.
#[pyclass(frozen, module = "direct_dcp._native")]
pub(crate) struct Kernel(direct_dcp_cuda::gather::Kernel);

#[pymethods]
impl Kernel {
    /// Compiles them for device `device`.
    #[new]
    fn new(py: Python<'_>, device: u32, multicast: bool) -> PyResult<Self> {
        let transport = match multicast {
            true => Transport::Multicast,
            false => Transport::Unicast,
        };
        let kernel = py.detach(|| {
            let context = Context::new(&Device::new(&Driver::load()?, device)?)?;
            direct_dcp_cuda::gather::Kernel::load(&context, transport)
        });
        kernel.map(Kernel).map_err(errors::cuda)
    }

    /// A lane: `own` and each of `receivers` is the address of rows and of signals.
    #[expect(
        clippy::too_many_arguments,
        reason = "the package passes all of them, by position"
    )]
    fn lane(
        &self,
        py: Python<'_>,
        world_size: u32,
        rank: u32,
        slot_bytes: u64,
        own: (u64, u64),
        receivers: Vec<(u64, u64)>,
        epoch: u64,
        sharing: u32,
    ) -> PyResult<Lane> {
        let receiver = |(rows, signals)| Receiver {
            rows,
            signals,
            shapes: 0,
            notice: 0,
        };
        let options = GuestOptions {
            world_size,
            rank,
            slots: 2,
            slot_bytes,
            own: receiver(own),
            receivers: receivers.into_iter().map(receiver).collect(),
            epoch,
            sharing,
        };
        let kernel = self.0.clone();
        let lane = py.detach(|| memory::guest_lane(kernel, options));
        Ok(Lane {
            lane: Some(lane.map_err(errors::cuda)?),
            streams: Streams::of(self.0.context()),
        })
    }
}

/// One rank's end of one ubatch in an engine's memory.
#[pyclass(frozen, module = "direct_dcp._native")]
pub(crate) struct Lane {
    /// None only while it is dropped.
    lane: Option<GuestLane>,
    streams: Streams,
}

impl Lane {
    fn lane(&self) -> PyResult<&GuestLane> {
        // It is there as long as anybody can call.
        self.lane
            .as_ref()
            .ok_or_else(|| errors::invalid("the lane is gone"))
    }
}

impl Drop for Lane {
    /// Without the lock of the interpreter: it waits for calls, and those for peers.
    fn drop(&mut self) {
        crate::drop_detached(self.lane.take());
    }
}

#[pymethods]
impl Lane {
    /// Submits a gather of `rows` rows of `row_bytes` bytes to `stream`.
    #[expect(
        clippy::too_many_arguments,
        reason = "the package passes all of them, by position"
    )]
    fn gather_into(
        &self,
        py: Python<'_>,
        rows: u32,
        row_bytes: u32,
        local: Span,
        out: Span,
        stream: u64,
        timeout: f64,
    ) -> PyResult<()> {
        let timeout: Duration = errors::seconds("timeout", timeout)?;
        let stream = self.streams.get(stream)?;
        let (local, out) = memory::device_rows_and_room(local, out)?;
        let shape = Shape {
            rows,
            row_bytes,
            digest: 0,
        };
        let lane = self.lane()?;
        py.detach(|| lane.gather_into(&stream, shape, local, out, timeout))
            .map_err(errors::launch)
    }

    /// Raises what a call failed with on the device, if one has.
    fn check(&self) -> PyResult<()> {
        match self.lane()?.report() {
            Some(report) => Err(errors::launch(
                direct_dcp_cuda::gather::LaunchError::Failed(report),
            )),
            None => Ok(()),
        }
    }

    /// Ends every wait, now and until `forget`.
    fn abort(&self) -> PyResult<()> {
        self.lane()?.abort();
        Ok(())
    }

    /// Forgets a failure, after the work of `stream`.
    fn forget(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let stream = self.streams.get(stream)?;
        let lane = self.lane()?;
        py.detach(|| lane.forget(&stream)).map_err(errors::cuda)
    }
}
