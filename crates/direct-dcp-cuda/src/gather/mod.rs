//! One rank's end of a gather on a GPU: the kernel, its memory, its launches.
//!
//! A [`Lane`] is to a GPU what `direct_dcp_kernels::host::Lane` is to a CPU. Who the peers are,
//! and how their memory came here, is the caller's.

mod guest;
mod kernel;
mod lane;
mod layout;
mod place;
mod rehearsal;
mod rows;
mod trial;
mod words;

pub use guest::{GuestLane, GuestOptions};
pub use kernel::{Kernel, Transport};
pub use lane::{Held, Lane, LaneOptions, LaunchError};
pub use layout::Layout;
pub use place::{DevicePlacement, PlacedRows};
pub use rehearsal::{Delivery, Rehearsal};
pub use rows::{DeviceRows, DeviceRowsMut};
pub use trial::Trial;
pub use words::Report;
