//! A sender and reader of windows, with bytes that the host has: for benchmarks of gathers that go on
//! while earlier results are read.
#![allow(unsafe_code)] // work on buffers that live here

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use direct_dcp_kernels::Shape;

use super::lane::{Held, Lane, LaunchError};
use super::pass::Pass;
use super::route::CallOptions;
use super::rows::DeviceRows;
use super::timeline::Timeline;
use crate::buffer::DeviceBuffer;
use crate::error::{CudaError, Result};
use crate::stream::Stream;

/// What a reader of windows has: rows to send, a stream, and a [`Pass`] that copies rows of a window.
///
/// Windows are gathered on another stream. What this submits to its own is over when it is dropped,
/// and so are the gathers that send its rows, which makes its methods safe.
pub struct Reader {
    timeline: Timeline,
    pass: Option<(Pass, usize)>,
    local: DeviceBuffer,
    shape: Shape,
    lane: Arc<Lane>,
}

impl Reader {
    /// A reader of gathers of `shape` through `lane`, on the lane's stream.
    ///
    /// It allocates, for which drivers may wait until the device is idle: no rank may wait for this
    /// one meanwhile. The same goes for dropping it.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(lane: &Arc<Lane>, shape: Shape) -> Result<Self> {
        let too_large = |_| CudaError::invalid("rows", "a size that memory can hold", shape.rows);
        let slice = usize::try_from(shape.bytes()).map_err(too_large)?;
        Ok(Reader {
            timeline: Timeline::new(lane.stream()),
            pass: None,
            local: DeviceBuffer::new(lane.context(), slice)?,
            shape,
            lane: lane.clone(),
        })
    }

    /// Waits for the last gather, and sets this rank's rows.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for more bytes than a call gathers, else the driver's.
    pub fn set_rows(&mut self, rows: &[u8]) -> Result<()> {
        self.lane.settle();
        self.local.upload(self.timeline.stream(), 0, rows)
    }

    /// Takes the pass that [`read`](Reader::read) makes over the first `rows` rows of a window, as
    /// many as the pass is for.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for more rows than a window has, else the driver's.
    pub fn set_pass(&mut self, pass: Pass, rows: u32) -> Result<()> {
        let most = u64::from(self.shape.rows) * u64::from(self.lane.options().layout.world_size);
        if u64::from(rows) > most {
            let expected = format!("at most {most}");
            return Err(CudaError::invalid("rows of a window", expected, rows));
        }
        self.timeline.wait()?;
        let bytes = rows as usize * self.shape.row_bytes as usize;
        self.pass = Some((pass, bytes));
        Ok(())
    }

    /// The stream of the reader.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        self.timeline.stream()
    }

    /// Submits a gather of the rows to `side`, and lends the window.
    ///
    /// # Errors
    /// See [`LaunchError`]; [`LaunchError::Capturing`] where `side` is captured.
    pub fn send(&self, side: &Stream, call: CallOptions) -> std::result::Result<Held, LaunchError> {
        if side.is_capturing()? {
            return Err(LaunchError::Capturing);
        }
        // SAFETY: the buffer is this object's, written only by `set_rows`, and freed after the
        // lane's last call.
        let local = unsafe { DeviceRows::new(self.local.address(), self.local.bytes()) };
        self.lane.gather(side, self.shape, local, call)
    }

    /// Submits a pass over a window to the reader's stream.
    ///
    /// # Errors
    /// See [`LaunchError`]. [`CudaError::InvalidArgument`] for a window of another lane,
    /// [`CudaError::WrongOrder`] without a pass.
    pub fn read(&mut self, window: &Held) -> std::result::Result<(), LaunchError> {
        let (pass, bytes) = self.pass.as_mut().ok_or(CudaError::WrongOrder {
            what: "read",
            needed: "a pass to have been set",
        })?;
        let Some(address) = window.address().filter(|_| window.is_of(&self.lane)) else {
            let error = CudaError::invalid("window", "one of this lane", "one of another");
            return Err(error.into());
        };
        // SAFETY: rows of a slot, in memory that the lane keeps.
        let rows = unsafe { DeviceRows::new(address, *bytes) };
        pass.submit(self.timeline.stream(), rows)
    }

    /// Marks this point of the reader's stream, for [`laps`](Reader::laps).
    ///
    /// # Errors
    /// The driver's.
    pub fn mark(&mut self) -> Result<()> {
        self.timeline.mark()
    }

    /// Waits, and gives the times from each mark to the next. The marks are gone then.
    ///
    /// # Errors
    /// The driver's.
    pub fn laps(&mut self) -> Result<Vec<Duration>> {
        self.timeline.laps()
    }

    /// Waits for the reader's stream, and reads a window to the host.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for more bytes than the window has, else the driver's.
    pub fn download(&self, window: &Held, to: &mut [u8]) -> Result<()> {
        window.read(self.timeline.stream(), 0, to)
    }

    /// Waits, and reads what the last pass copied of its window.
    ///
    /// # Errors
    /// [`CudaError::WrongOrder`] before there was a pass, [`CudaError::InvalidArgument`] for more
    /// bytes than it copied, else the driver's.
    pub fn download_copy(&self, to: &mut [u8]) -> Result<()> {
        let (pass, _) = self.pass.as_ref().ok_or(CudaError::WrongOrder {
            what: "read",
            needed: "a pass to have been set",
        })?;
        pass.read(self.timeline.stream(), 0, to)
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("lane", &self.lane)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // Gathers on other streams read the rows.
        self.lane.settle();
    }
}
