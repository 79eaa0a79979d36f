//! A kernel and the addresses that it stores to.

use direct_dcp_kernels::device::Receiver;

use super::kernel::{Kernel, Transport};
use crate::buffer::DeviceBuffer;
use crate::error::CudaError;
use crate::stream::Stream;

/// A kernel, and where its stores go: one receiver that reaches all ranks, or each rank's in rank
/// order.
#[derive(Clone, Debug)]
pub struct Reach {
    /// The kernel.
    pub kernel: Kernel,
    /// Where rows and signals go.
    pub receivers: Vec<Receiver>,
}

impl Reach {
    /// Whether there are as many receivers as the kernel stores to.
    pub(super) fn fits(&self, world_size: u32) -> bool {
        let expected = match self.kernel.transport {
            Transport::Unicast => world_size as usize,
            Transport::Multicast => 1,
        };
        self.receivers.len() == expected
    }
}

/// What the calls of one transport use.
pub(super) struct End {
    pub(super) kernel: Kernel,
    pub(super) receivers: Box<[Receiver]>,
    /// `receivers`, in device memory.
    pub(super) table: DeviceBuffer,
}

impl End {
    pub(super) fn new(reach: Reach, stream: &Stream) -> Result<Self, CudaError> {
        let Reach { kernel, receivers } = reach;
        let bytes = receivers.len() * size_of::<Receiver>();
        let table = DeviceBuffer::new(kernel.context(), bytes)?;
        let entries: Vec<u8> = Receiver::table(&receivers)
            .flat_map(u64::to_ne_bytes)
            .collect();
        table.upload(stream, 0, &entries)?;
        Ok(End {
            kernel,
            receivers: receivers.into(),
            table,
        })
    }
}
