//! How one call goes.

use std::fmt;
use std::time::Duration;

use super::kernel::Transport;

/// Where a gather delivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Delivery {
    /// In a buffer of the caller's.
    CopyOut,
    /// In the slot, which is lent.
    ZeroCopy,
}

impl fmt::Display for Delivery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Delivery::CopyOut => "copy-out",
            Delivery::ZeroCopy => "zero-copy",
        })
    }
}

/// How the rows of one call travel. All ranks take the same for the same call; calls that follow
/// each other may take different ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Each rank stores its rows into the slots of all.
    Push,
    /// One store reaches the slots of all.
    Multicast,
    /// Rows stay with their rank, and the others read them there.
    Pull,
    /// As push, by the device's copy engines instead of its multiprocessors.
    CopyEngine,
    /// The three launches of the algorithm that this replaces.
    Staged,
}

impl Route {
    /// What the kernel of such a call has to store through.
    pub(super) fn transport(self) -> Transport {
        match self {
            Route::Multicast => Transport::Multicast,
            Route::Push | Route::Pull | Route::CopyEngine | Route::Staged => Transport::Unicast,
        }
    }
}

/// How one call goes.
#[derive(Clone, Copy, Debug)]
pub struct CallOptions {
    /// How its rows travel.
    pub route: Route,
    /// The most blocks of its launch, or `None` for as many as pay.
    pub max_blocks: Option<u32>,
    /// How long it waits for the peers once it runs.
    pub timeout: Duration,
}
