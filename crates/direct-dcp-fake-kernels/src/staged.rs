//! The three launches of the staged algorithm, which the gather is compared with.

#![allow(unsafe_code)] // device memory

use core::num::NonZeroU32;
use core::sync::atomic::Ordering;

use direct_dcp_kernels::Machine;
use direct_dcp_kernels::protocol::{slot_of, wait_for_all};

use crate::launch::Launch;
use crate::memory;

/// The epoch of the call.
pub(crate) fn advance(launch: &Launch) {
    launch.each_thread(NonZeroU32::MIN, false, |thread| {
        if !thread.poisoned() {
            thread.epoch_word().fetch_add(1, Ordering::Relaxed);
        }
    });
}

/// Stores the rows to every rank, publishes, waits.
pub(crate) fn publish(launch: &Launch) {
    let call = launch.call(false);
    launch.each_thread(NonZeroU32::MIN, false, |thread| {
        if thread.poisoned() {
            return;
        }
        let epoch = thread.epoch();
        let slot = slot_of(epoch, launch.slots);
        thread.store_share(slot);
        // A CPU has no count that orders less.
        if thread.arrive() + 1 != launch.blocks.get() {
            return;
        }
        thread.reset_arrivals();
        for receiver in 0..launch.arguments.receiver_count {
            thread.publish(receiver, slot, launch.arguments.shape, epoch as u32);
        }
        if !wait_for_all(thread, &call, 0..launch.world_size.get(), slot, epoch) {
            // The call does not count.
            thread.epoch_word().store(epoch - 1, Ordering::Relaxed);
            thread.poison();
        }
    });
}

/// Copies the slot to the output.
pub(crate) fn copy(launch: &Launch) {
    launch.each_thread(NonZeroU32::MIN, false, |thread| {
        if thread.poisoned() {
            return;
        }
        let arguments = &launch.arguments;
        let all = arguments.shape.bytes() * u64::from(arguments.world_size);
        let slot = u64::from(slot_of(thread.epoch(), launch.slots));
        let from = arguments.own.rows + slot * arguments.slot_bytes;
        let share = thread.share(all);
        // SAFETY: spans that the launch checked; the launch before waited for all rows.
        unsafe {
            memory::copy(
                arguments.out + share.start,
                from + share.start,
                share.end - share.start,
            );
        }
    });
}
