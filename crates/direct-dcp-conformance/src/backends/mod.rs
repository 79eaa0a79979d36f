//! The backends that the suite is run on.

mod group;
mod processes;
mod threads;

pub use group::GroupRank;
pub use processes::{Killed, Processes, worker};
pub use threads::Threads;
