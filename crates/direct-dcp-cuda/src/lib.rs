//! The NVIDIA driver for direct-dcp: found at run time, checked, and given back in order.
//!
//! ```no_run
//! use direct_dcp_cuda::{Context, Device, DeviceBuffer, Driver, Stream};
//!
//! # fn main() -> direct_dcp_cuda::Result<()> {
//! let driver = Driver::load()?; // a machine without a driver ends here, with a sentence
//! let context = Context::new(&Device::new(&driver, 0)?)?;
//! let stream = Stream::new(&context)?;
//! let buffer = DeviceBuffer::new(&context, 1024)?;
//! buffer.upload(&stream, 0, b"rows")?;
//! # Ok(())
//! # }
//! ```
//!
//! It does: open `libcuda` with each function optional; devices, primary contexts, streams, events,
//! graphs; plain, pinned and virtual memory that other processes can map; multicast objects; PTX
//! modules and launches. It does not: need a CUDA toolkit, link anything of CUDA's, panic, change
//! the context that is current for the caller, or touch memory and streams that it does not own.
//!
//! # Layers
//! - `sys`: the driver's types and constants, by hand, checked against NVIDIA's header in tests.
//! - `driver`: the table of functions and the step from codes to [`CudaError`].
//! - everything else: objects that own one thing each and give it back on drop. `Drop` cannot
//!   return a failure; [`Driver::take_release_error`] tells the first.
//!
//! What is `unsafe` for callers is what the device does *later*: asynchronous copies, launches,
//! graph replays and foreign stream handles.
//!
//! # Multicast
//! The order across ranks; the barriers are the caller's:
//!
//! ```text
//! rank 0          MulticastObject::create, export
//! other ranks     MulticastObject::import_fd
//! every rank      add_device
//!                 -------- BARRIER: every rank has added its device --------
//! every rank      complete() -> MulticastTeam, bind, bound() -> BoundMulticast
//!                 -------- BARRIER: every rank has bound its memory --------
//! every rank      map -> Mapping, used by multimem instructions only
//!                 -------- BARRIER: no rank stores through the mapping any more --------
//! every rank      drop: unmap, unbind, release
//! ```
//!
//! A bind before the first barrier waits in the driver, without a deadline, for devices that may
//! never be added.

mod buffer;
mod context;
mod copy;
mod device;
mod driver;
mod error;
mod event;
mod function;
pub mod gather;
mod graph;
mod memops;
mod module;
mod multicast;
mod pinned;
pub mod probe;
mod stream;
pub mod sys;
mod vmm;

pub use buffer::DeviceBuffer;
pub use context::{Context, Entered};
pub use device::{Device, DeviceAttribute, PeerLink};
pub use driver::{Driver, LIBRARY_VARIABLE, SymbolGroup, SymbolReport};
pub use error::{CudaError, Result};
pub use event::Event;
pub use function::{Function, FunctionAttributes, LaunchShape, MAX_PARAMETERS, Param};
pub use graph::{Capture, CaptureMode, CaptureStatus, ExecutableGraph, Graph};
pub use memops::WaitCondition;
pub use module::Module;
pub use multicast::{BoundMulticast, MulticastObject, MulticastTeam};
pub use pinned::PinnedBuffer;
pub use stream::Stream;
pub use vmm::{AddressRange, Allocation, FabricHandle, Granularity, HandleTypes, Mapping};
