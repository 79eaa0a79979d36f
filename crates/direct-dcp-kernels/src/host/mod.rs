//! The instance that runs on CPU threads: a block is one thread, memory is a shared mapping.
//!
//! A [`Lane`] is one rank's end of one ubatch. It owns the rank's epoch, arrival count and held
//! slots, and is the only thing that touches the mapped rows; everything outside is safe.

mod direct;
mod lane;
mod machine;
mod part;
mod placement;
mod region;
mod store;

pub use lane::{Held, Lane, LaneOptions, LaunchError, Report, Watch};
pub use placement::{Conversion, MAX_PLANES, Misplaced, Paged, Placement, Rows, Run};
pub use region::{Geometry, Way};
