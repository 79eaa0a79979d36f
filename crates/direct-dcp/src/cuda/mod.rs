//! Gathers between GPUs: ranks on one device or several, in one process or several.
//!
//! The same [`Group`](crate::Group) and the same protocol as on CPUs; the memory lies on devices,
//! and a gather is one kernel launch on the caller's stream, eager or captured into a graph. Only
//! the NVIDIA driver is needed, and only when a workspace is built.
//!
//! ```no_run
//! use direct_dcp::cuda::{DeviceRows, DeviceRowsMut, KvGather, Stream, Workspace};
//! use direct_dcp::{DType, Group, RowFormat, WorkspaceOptions};
//!
//! # fn rank(group: Group, local: u64, out: u64) -> Result<(), Box<dyn std::error::Error>> {
//! let format = RowFormat::new(DType::BF16, 576);
//! let device = 0;
//! let workspace = Workspace::new(&group, device, WorkspaceOptions::new(4096, format))?;
//! let stream = Stream::new(workspace.context())?; // or `Stream::borrow`, for an engine's own
//! let gather = KvGather::new(workspace);
//!
//! // `local` is [128, 576] and `out` [world_size · 128, 576], both in device memory.
//! let bytes = 128 * format.row_bytes();
//! // SAFETY: the memory is there, ours, and stays until the stream is done with it.
//! let (local, out) = unsafe {
//!     (DeviceRows::new(local, bytes), DeviceRowsMut::new(out, bytes * group.world_size()))
//! };
//! gather.gather_into(0, &stream, local, out)?;
//! gather.wait(&stream)?; // or go on submitting work, and `check` now and then
//! # Ok(())
//! # }
//! ```

mod choice;
mod final_rehearsal;
mod gather;
mod layout;
mod memory;
mod multicast;
mod outlook;
mod pipeline;
mod rehearsal;
mod watcher;
mod window_rehearsal;
mod workspace;

pub use direct_dcp_cuda::gather::{Delivery, DeviceRows, DeviceRowsMut, PlacedRows};
pub use direct_dcp_cuda::{
    Capture, CaptureMode, Context, CudaError, Device, DeviceBuffer, Driver, Event, ExecutableGraph,
    Graph, Stream,
};
pub use final_rehearsal::FinalRehearsal;
pub use gather::{Gathered, KvGather};
pub use layout::{FinalLayout, Planes};
pub use outlook::{Outlook, multicast_forbidden_by};
pub use pipeline::{Pipeline, Ticket};
pub use rehearsal::Rehearsal;
pub use window_rehearsal::WindowRehearsal;
pub use workspace::Workspace;
