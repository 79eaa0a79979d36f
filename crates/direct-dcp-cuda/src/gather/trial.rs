//! A gather of bytes of the host's, in buffers of its own: for self-tests, not for speed.
#![allow(unsafe_code)] // work on buffers that live here

use std::sync::Arc;
use std::time::Duration;

use direct_dcp_kernels::Shape;

use super::lane::{Lane, LaunchError};
use super::rows::{DeviceRows, DeviceRowsMut};
use crate::buffer::DeviceBuffer;
use crate::error::CudaError;
use crate::stream::Stream;

/// What the output holds before the call.
const POISON: u8 = 0xa5;

/// Rows, and room for those of all ranks.
///
/// A call that it has submitted is waited for when it is dropped. Making and dropping it may wait
/// until the device is idle: no call on this device may be waiting for this rank meanwhile.
#[derive(Debug)]
pub struct Trial {
    lane: Arc<Lane>,
    stream: Stream,
    shape: Shape,
    local: DeviceBuffer,
    out: DeviceBuffer,
}

impl Trial {
    /// Puts `local`, which has this shape, where `lane` can gather it.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(lane: &Arc<Lane>, shape: Shape, local: &[u8]) -> Result<Self, CudaError> {
        let context = lane.context();
        let gathered = local.len() * lane.options().layout.world_size as usize;
        let trial = Trial {
            lane: lane.clone(),
            stream: Stream::new(context)?,
            shape,
            local: DeviceBuffer::new(context, local.len())?,
            out: DeviceBuffer::new(context, gathered)?,
        };
        trial.local.upload(&trial.stream, 0, local)?;
        let poison = vec![POISON; gathered];
        trial.out.upload(&trial.stream, 0, &poison)?;
        Ok(trial)
    }

    /// Submits the call.
    ///
    /// # Errors
    /// See [`LaunchError`].
    pub fn submit(&mut self, timeout: Duration) -> Result<(), LaunchError> {
        // SAFETY: the buffer is this object's, and outlives the call: `drop` waits for it.
        let from = unsafe { DeviceRows::new(self.local.address(), self.local.bytes()) };
        // SAFETY: as above; the two do not overlap.
        let to = unsafe { DeviceRowsMut::new(self.out.address(), self.out.bytes()) };
        let lane = &self.lane;
        lane.gather_into(&self.stream, self.shape, from, to, timeout)
    }

    /// Waits for the call, and returns what it delivered.
    ///
    /// # Errors
    /// [`LaunchError::Failed`] where the call did, else the driver's.
    pub fn finish(&mut self) -> Result<Vec<u8>, LaunchError> {
        self.stream.synchronize()?;
        if let Some(report) = self.lane.report() {
            return Err(LaunchError::Failed(report));
        }
        let mut delivered = vec![0; self.out.bytes()];
        self.out.download(&self.stream, 0, &mut delivered)?;
        Ok(delivered)
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        // A failure here is the call's, and said already, or nobody asked.
        let _ = self.stream.synchronize();
    }
}
