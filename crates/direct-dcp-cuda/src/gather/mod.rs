//! One rank's end of a gather on a GPU: the kernel, its memory, its launches.
//!
//! A [`Lane`] is to a GPU what `direct_dcp_kernels::host::Lane` is to a CPU. Who the peers are,
//! and how their memory came here, is the caller's.

mod end;
mod guest;
mod held_rows;
mod kernel;
mod lane;
mod layout;
mod pass;
mod place;
mod place_rehearsal;
mod reader;
mod rehearsal;
mod route;
mod rows;
mod runs;
mod timeline;
mod words;

pub use end::Reach;
pub use guest::{GuestLane, GuestOptions};
pub use kernel::{Kernel, Transport};
pub use lane::{Held, Lane, LaneOptions, LaunchError};
pub use layout::Layout;
pub use pass::Pass;
pub use place::{DevicePlacement, PlacedRows};
pub use place_rehearsal::{PlaceRehearsal, RowSource};
pub use reader::Reader;
pub use rehearsal::Rehearsal;
pub use route::{CallOptions, Delivery, Route};
pub use rows::{DeviceRows, DeviceRowsMut};
pub use words::Report;
