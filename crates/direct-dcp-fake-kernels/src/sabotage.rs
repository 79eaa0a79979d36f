//! Hardware that does not do what it says.

use std::sync::{Mutex, PoisonError};

/// What goes wrong with rows that are stored to a peer. Signals arrive all the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sabotage {
    /// Nothing.
    #[default]
    None,
    /// One bit flips in the replica with this number, of stores through a multicast address.
    CorruptReplica(usize),
    /// Rows for the peer's device never arrive, of stores to one rank.
    DropRowsTo(usize),
    /// Rows that this rank stages for its peers to read never arrive in its own memory.
    DropStagedBy(usize),
}

static SABOTAGE: Mutex<Sabotage> = Mutex::new(Sabotage::None);

/// Sets what goes wrong in this process from now on.
pub fn sabotage(what: Sabotage) {
    *SABOTAGE.lock().unwrap_or_else(PoisonError::into_inner) = what;
}

pub(crate) fn current() -> Sabotage {
    *SABOTAGE.lock().unwrap_or_else(PoisonError::into_inner)
}
