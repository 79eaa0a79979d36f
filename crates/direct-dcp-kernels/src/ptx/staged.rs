//! The algorithm that this project replaces, for comparison in benchmarks: three launches, a fence
//! by every thread, a relaxed count, and a copy out of a staging slot by a launch of its own.
//!
//! Its relaxed count is the reason why it is kept apart: by the letter of the memory model the
//! last block does not acquire what the other blocks stored (see docs/protocol.md). Its waits are
//! those of the gather, by one thread: they end, and what ends them is reported.

use core::mem::offset_of;

use super::instructions::{self as gpu, Quad, Unit};
use super::thread::{Slice, Thread};
use crate::device::{Arguments, Receiver, State};
use crate::machine::Machine;
use crate::protocol::{slot_of, wait_for_all};

/// First launch, one thread: the epoch of the call.
///
/// # Safety
/// As for a gather kernel.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "ptx-kernel" fn direct_dcp_staged_advance(arguments: Arguments) {
    let thread = Thread::<Quad, false>::new(&arguments, Slice);
    if !thread.poisoned() {
        // SAFETY: this rank's count of calls.
        unsafe { gpu::store_u64(arguments.epoch, thread.epoch().wrapping_add(1)) };
    }
}

/// Second launch: stores the rows to every rank, publishes, waits.
///
/// # Safety
/// As for a gather kernel.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "ptx-kernel" fn direct_dcp_staged_publish(arguments: Arguments) {
    let thread = Thread::<Quad, false>::new(&arguments, Slice);
    let Some(call) = thread.call().filter(|_| !thread.poisoned()) else {
        return;
    };
    let epoch = thread.epoch();
    let slot = slot_of(epoch, call.slots);
    let bytes = arguments.shape.bytes();
    let place = u64::from(slot) * arguments.slot_bytes + u64::from(arguments.rank) * bytes;
    one_at_a_time(&thread, bytes, |at| {
        // SAFETY: `at` lies in the slice, which the local rows and every slot hold.
        let unit = unsafe { Quad::load(arguments.local + at) };
        for receiver in 0..arguments.receiver_count {
            let rows = thread.receiver(receiver, offset_of!(Receiver, rows));
            // SAFETY: as for the load.
            unsafe { unit.store(rows + place + at, false) };
        }
    });
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
    if !wait_for_all(&thread, &call, 0..arguments.world_size, slot, epoch) {
        // The call does not count.
        // SAFETY: this rank's count of calls.
        unsafe { gpu::store_u64(arguments.epoch, epoch.wrapping_sub(1)) };
        thread.poison();
    }
}

/// Third launch: copies the slot to the output.
///
/// # Safety
/// As for a gather kernel.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "ptx-kernel" fn direct_dcp_staged_copy(arguments: Arguments) {
    let thread = Thread::<Quad, false>::new(&arguments, Slice);
    let Some(call) = thread.call().filter(|_| !thread.poisoned()) else {
        return;
    };
    let slot = u64::from(slot_of(thread.epoch(), call.slots));
    let gathered = u64::from(arguments.world_size) * arguments.shape.bytes();
    let from = arguments.own.rows + slot * arguments.slot_bytes;
    one_at_a_time(&thread, gathered, |at| {
        // SAFETY: the slot and the output hold the gathered rows.
        unsafe { Quad::load(from + at).store(arguments.out + at, false) };
    });
}

/// Calls `each` with the places of this thread's units in `bytes` bytes: one in flight, then the
/// next, a grid further.
#[inline(always)]
fn one_at_a_time(thread: &Thread<'_, Quad, false>, bytes: u64, each: impl Fn(u64)) {
    let threads = u64::from(thread.threads().get());
    let first = u64::from(thread.block()) * threads + u64::from(thread.thread());
    let mut at = first * Quad::BYTES;
    while at < bytes {
        each(at);
        at += u64::from(thread.blocks().get()) * threads * Quad::BYTES;
    }
}
