//! The gather kernel, loaded into a context, and how many of its blocks fit the device.

use std::sync::Arc;

use direct_dcp_kernels::device::{GATHER_ENTRY, MULTICAST_PTX, UNICAST_PTX};

use crate::context::Context;
use crate::device::DeviceAttribute;
use crate::error::Result;
use crate::function::Function;
use crate::module::Module;

/// Threads of a block.
pub(super) const THREADS: u32 = 512;

/// How the kernel's stores reach the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// One store for each rank.
    Unicast,
    /// One store for all.
    Multicast,
}

/// The gather kernel of one context.
#[derive(Clone, Debug)]
pub struct Kernel {
    pub(super) function: Function,
    pub(super) transport: Transport,
    resident_blocks: u32,
}

impl Kernel {
    /// Compiles the embedded PTX for the context's device.
    ///
    /// # Errors
    /// [`CudaError::Jit`](crate::CudaError::Jit) where the device or the driver is too old for it,
    /// else the driver's.
    pub fn load(context: &Context, transport: Transport) -> Result<Self> {
        let text = match transport {
            Transport::Unicast => UNICAST_PTX,
            Transport::Multicast => MULTICAST_PTX,
        };
        let function = Module::load_ptx(context, text)?.function(GATHER_ENTRY)?;
        let each = function.max_active_blocks_per_multiprocessor(THREADS, 0)?;
        let multiprocessors = context
            .device()
            .attribute(DeviceAttribute::MultiprocessorCount)?;
        Ok(Kernel {
            function,
            transport,
            resident_blocks: each.saturating_mul(multiprocessors.unsigned_abs()).max(1),
        })
    }

    /// Blocks that are resident at once on a device that does nothing else.
    #[must_use]
    pub fn resident_blocks(&self) -> u32 {
        self.resident_blocks
    }

    /// The context it is loaded into.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.function.module().context()
    }

    /// The module, which lives as long as the kernel.
    #[must_use]
    pub fn module(&self) -> &Arc<Module> {
        self.function.module()
    }
}
