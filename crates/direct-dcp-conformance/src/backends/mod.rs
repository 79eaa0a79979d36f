//! The backends that the suite is run on.

mod cuda;
mod group;
mod processes;
mod threads;

pub use cuda::{CudaGather, CudaRank, CudaRows, DeviceProcesses, Streams, device_worker};
pub use group::GroupRank;
pub use processes::{Killed, Processes, worker};
pub use threads::Threads;
