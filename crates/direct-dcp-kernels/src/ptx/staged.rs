//! The algorithm that this project replaces, for comparison in benchmarks: three launches, a fence
//! by every thread, a relaxed count, and a copy out of a staging slot by a launch of its own.
//!
//! Its relaxed count is the reason why it is kept apart: by the letter of the memory model the
//! last block does not acquire what the other blocks stored (see docs/protocol.md).

use core::mem::offset_of;
use core::num::NonZeroU32;

use super::copy::{Job, copy};
use super::instructions::{self as gpu, Quad};
use super::thread::Thread;
use crate::device::{Arguments, State};
use crate::machine::Machine;
use crate::protocol::slot_of;

/// Polls before the wait gives up.
const POLLS: u32 = 100_000_000;

/// First launch, one thread: the epoch of the call.
///
/// # Safety
/// As for a gather kernel.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "ptx-kernel" fn direct_dcp_staged_advance(arguments: Arguments) {
    let word = arguments.state + offset_of!(State, epoch) as u64;
    // SAFETY: a word of this rank's state.
    let epoch = unsafe { gpu::load_u64(word) };
    // SAFETY: as above.
    unsafe { gpu::store_u64(word, epoch.wrapping_add(1)) };
}

/// Second launch: stores the rows to every rank, publishes, waits.
///
/// # Safety
/// As for a gather kernel.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "ptx-kernel" fn direct_dcp_staged_publish(arguments: Arguments) {
    let thread = Thread::<Quad, false>::new(&arguments);
    let Some(slots) = NonZeroU32::new(arguments.slots) else {
        return;
    };
    let epoch = thread.epoch();
    let slot = slot_of(epoch, slots);
    let _ = thread.store(|| Some(slot));
    gpu::fence_sc_sys();
    thread.barrier();
    if thread.thread() != 0 {
        return;
    }
    let arrivals = arguments.state + offset_of!(State, arrivals) as u64;
    // SAFETY: a word of this rank's state.
    let before = unsafe { gpu::add_one_relaxed_gpu(arrivals) };
    if before.wrapping_add(1) != thread.blocks().get() {
        return;
    }
    thread.reset_arrivals();
    for receiver in 0..arguments.receiver_count {
        thread.publish(receiver, slot, arguments.shape, epoch as u32);
    }
    for source in 0..arguments.world_size {
        let mut polls = 0;
        while thread.observe(slot, source) != epoch as u32 && polls < POLLS {
            polls += 1;
        }
    }
}

/// Third launch: copies the slot to the output.
///
/// # Safety
/// As for a gather kernel.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "ptx-kernel" fn direct_dcp_staged_copy(arguments: Arguments) {
    let thread = Thread::<Quad, false>::new(&arguments);
    let Some(slots) = NonZeroU32::new(arguments.slots) else {
        return;
    };
    let slot = u64::from(slot_of(thread.epoch(), slots));
    let gathered = u64::from(arguments.world_size) * arguments.shape.bytes();
    let from = arguments.own.rows + slot * arguments.slot_bytes;
    let job = Job {
        from,
        len: gathered,
        ..thread.job()
    };
    // SAFETY: the slot and the output hold the gathered rows.
    unsafe { copy::<Quad, u64>(job, || Some(arguments.out), |&out, _| out) };
}
