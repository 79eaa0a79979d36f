//! Copy-out between ranks of one process: peers read the rows where the caller has them.
//!
//! One copy less than through a slot, and one wait more: the caller lends its rows for the call
//! only, so the call must not return while anybody may still read them. The *gate* of a source
//! counts, for one call:
//!
//! ```text
//! bits  0..15   readers    blocks of peers that read the rows at this moment
//! bits 15..30   done       peers that have read all they want
//! bit  31       closed     nobody may begin to read any more
//! ```
//!
//! A call that delivers waits until all peers are done. One that fails closes the gate, and then
//! waits only for the readers inside, who are live threads in the middle of a copy.

use std::sync::atomic::{AtomicU32, Ordering};

const READER: u32 = 1;
const READERS: u32 = (1 << 15) - 1;
const DONE: u32 = 1 << 15;
const CLOSED: u32 = 1 << 31;

/// The most ranks, and blocks of a rank, that the gate can count.
pub(super) const MAX_READERS: u32 = READERS;

/// Makes the gate ready for a call, before the call is published.
pub(super) fn open(gate: &AtomicU32) {
    // The publish that follows orders it.
    gate.store(0, Ordering::Relaxed);
}

/// Begins to read, or says that the rows are no longer there.
pub(super) fn enter(gate: &AtomicU32) -> bool {
    // SYNC: lease. Either the source sees us inside when it closes the gate, or we see it closed.
    let before = gate.fetch_add(READER, Ordering::Acquire);
    if before & CLOSED == 0 {
        return true;
    }
    leave(gate);
    false
}

/// Ends what [`enter`] began.
pub(super) fn leave(gate: &AtomicU32) {
    // SYNC: lease. What was read was read before the source sees nobody inside.
    gate.fetch_sub(READER, Ordering::Release);
}

/// Says that this peer has read all it wants.
pub(super) fn finish(gate: &AtomicU32) {
    // SYNC: lease.
    gate.fetch_add(DONE, Ordering::Release);
}

/// Whether all `peers` have finished.
pub(super) fn finished(gate: &AtomicU32, peers: u32) -> bool {
    // SYNC: lease. The rows are the caller's again.
    (gate.load(Ordering::Acquire) & !CLOSED) / DONE >= peers
}

/// Lets nobody in any more, and waits for those inside.
pub(super) fn close(gate: &AtomicU32) {
    // SYNC: lease.
    let mut inside = gate.fetch_or(CLOSED, Ordering::AcqRel) & READERS;
    while inside != 0 {
        std::thread::yield_now();
        // SYNC: lease.
        inside = gate.load(Ordering::Acquire) & READERS;
    }
}
