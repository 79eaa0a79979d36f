//! The gather itself, as one thread of one block performs it.
//!
//! Call `e = epoch + 1` uses slot `s = e mod S`:
//!
//! 1. every block stores its part of the rank's rows into slot `s` of every receiver;
//! 2. the block's threads meet, and its leader counts the block as arrived (`SYNC: arrive`);
//!    (rows with a place each may turn out to have none: then the call ends here, as a failed one);
//! 3. the last block to arrive publishes `signal[s][rank] = e` to every receiver
//!    (`SYNC: publish`);
//! 4. the last block waits until `signal[s][source] = e` for every source;
//! 5. its leader records `epoch = e` (`SYNC: advance`);
//! 6. where the caller wants a copy, every block copies its part of each slice out of the slot.
//!
//! Everything here is inlined into the kernel that calls it: on a GPU a call that is not would put
//! its arguments into local memory.
//!
//! A launch with a copy has every block wait for step 5, so all its blocks must be running at
//! once; without one only the last block ever waits.

use crate::machine::{Call, Fault, FaultCode, Interrupt, Machine};
use crate::rotation::rotated;

/// The slot of call `epoch`, from the 64-bit epoch: the 32 published bits wrap, the slots do not.
#[must_use]
#[inline(always)]
pub fn slot_of(epoch: u64, slots: core::num::NonZeroU32) -> u32 {
    // Less than `slots`, so it fits.
    (epoch % core::num::NonZeroU64::from(slots)) as u32
}

/// Performs one gather. A fault is recorded with [`Machine::fail`], poisons the generation and
/// leaves the epoch as it was.
#[inline(always)]
pub fn gather<M: Machine>(machine: &M, call: &Call) {
    // Both are written only by the last block, after every block of the launch has arrived and so
    // has read them: all blocks of a launch see the same.
    let poisoned = machine.poisoned();
    let epoch = machine.epoch().wrapping_add(1);

    let slot = machine.store(|| (!poisoned).then(|| slot_of(epoch, call.slots)));
    let Some(slot) = slot else { return };
    let last = arrive(machine);
    if last && machine.refused() {
        // The other blocks have left, or learn of it where they follow.
        if machine.thread() == 0 {
            machine.poison();
        }
        return;
    }
    if last {
        publish(machine, call, slot, epoch);
    }
    if call.copy_out {
        // Our own rows need no peer: copy them while the peers' rows are on their way.
        machine.take(slot, call.rank);
    }
    let whole = if last {
        settle(machine, call, slot, epoch)
    } else {
        call.copy_out && follow(machine, epoch)
    };
    if call.copy_out && whole {
        // The last step of the rotation is this rank itself, which has its rows already.
        for step in 0..call.world_size.get() - 1 {
            machine.take(slot, rotated(call.rank, step, call.world_size));
        }
    }
}

/// Counts the block in, and tells all its threads whether it is the last one.
#[inline(always)]
fn arrive<M: Machine>(machine: &M) -> bool {
    machine.barrier();
    if machine.blocks().get() == 1 {
        // Nobody else stores: the barrier ordered everything.
        return true;
    }
    // SYNC: arrive. The count releases the block's stores and acquires those of the blocks that
    // arrived earlier, so the last block publishes for all of them.
    let last = machine.thread() == 0 && machine.arrive().wrapping_add(1) == machine.blocks().get();
    if last {
        machine.reset_arrivals();
    }
    machine.any(last)
}

/// The sources or receivers that this thread handles, in rotated order.
#[inline(always)]
fn mine<M: Machine>(
    machine: &M,
    rank: u32,
    count: core::num::NonZeroU32,
) -> impl Iterator<Item = u32> {
    let (first, stride) = (machine.thread(), machine.threads().get());
    core::iter::successors(Some(first), move |step| step.checked_add(stride))
        .take_while(move |step| *step < count.get())
        .map(move |step| rotated(rank, step, count))
}

#[inline(always)]
fn publish<M: Machine>(machine: &M, call: &Call, slot: u32, epoch: u64) {
    for receiver in mine(machine, call.rank, machine.receivers()) {
        // SYNC: publish. The low 32 bits suffice: a slot only ever holds e or e - S.
        machine.publish(receiver, slot, call.shape, epoch as u32);
    }
}

/// Waits for every source, then completes the call, or records why it cannot and says no.
#[inline(always)]
fn settle<M: Machine>(machine: &M, call: &Call, slot: u32, epoch: u64) -> bool {
    // Asked first, so that the answer is there when the rows are.
    let gave_up = machine.failed_peer();
    let sources = mine(machine, call.rank, call.world_size);
    let failed = !wait_for_all(machine, call, sources, slot, epoch);
    let failed = machine.any(failed);
    let mut whole = false;
    if machine.thread() == 0 {
        if failed {
            machine.poison();
        } else if let Some(source) = gave_up {
            // We have all rows, but a peer gave up on this generation: there is no next call.
            machine.fail(Fault {
                code: FaultCode::PeerLost,
                source,
                epoch,
                ours: 0,
                theirs: 0,
            });
            machine.poison();
        } else {
            // SYNC: advance.
            machine.advance(epoch);
            whole = true;
        }
    }
    // Only a copy goes on from here.
    call.copy_out && machine.any(whole)
}

/// Waits until `sources` have published `epoch`, one after another. Where one cannot be waited for,
/// it records why, and says no.
#[inline(always)]
pub fn wait_for_all<M: Machine>(
    machine: &M,
    call: &Call,
    sources: impl Iterator<Item = u32>,
    slot: u32,
    epoch: u64,
) -> bool {
    let mut started = None;
    let mut all = true;
    for source in sources {
        if let Err(fault) = wait_for(machine, call, source, slot, epoch, &mut started) {
            machine.fail(fault);
            all = false;
            // After a timeout, the deadline has passed for the other sources too: one look at
            // each names all that are missing. Any other fault says enough by itself.
            if fault.code != FaultCode::Timeout {
                break;
            }
        }
    }
    all
}

/// Waits until `source` has published `epoch`, and compares its shape with ours.
#[inline(always)]
fn wait_for<M: Machine>(
    machine: &M,
    call: &Call,
    source: u32,
    slot: u32,
    epoch: u64,
    started: &mut Option<u64>,
) -> Result<(), Fault> {
    let fault = |code, ours, theirs| Fault {
        code,
        source,
        epoch,
        ours,
        theirs,
    };
    let mut given_up = None;
    let mut polls: u32 = 0;
    loop {
        // SYNC: publish.
        let seen = machine.observe(slot, source);
        let ahead = seen.wrapping_sub(epoch as u32).cast_signed();
        if ahead > 0 {
            return Err(fault(
                FaultCode::Ahead,
                epoch,
                epoch.wrapping_add(u64::from(ahead.unsigned_abs())),
            ));
        }
        if ahead == 0 {
            break;
        }
        // A reason to give up counts only if a look taken after it still shows no signal: a
        // source may publish and leave.
        if let Some(code) = given_up {
            return Err(fault(code, 0, 0));
        }
        // The clock starts at the first look at it: most waits end before.
        let left = if polls % M::POLLS_PER_LOOK == M::POLLS_PER_LOOK - 1 {
            let now = machine.now();
            let waited = now.saturating_sub(*started.get_or_insert(now));
            call.timeout.saturating_sub(waited)
        } else {
            u64::MAX
        };
        given_up = if left == 0 {
            Some(FaultCode::Timeout)
        } else {
            match machine.pause(slot, source, seen, polls, left) {
                Ok(()) => None,
                Err(Interrupt::Aborted) => Some(FaultCode::Aborted),
                Err(Interrupt::Lost) => Some(FaultCode::PeerLost),
            }
        };
        polls = polls.saturating_add(1);
    }

    let (ours, theirs) = (call.shape, machine.shape(slot, source));
    if ours.rows != theirs.rows {
        return Err(fault(FaultCode::Rows, ours.rows.into(), theirs.rows.into()));
    }
    if ours.row_bytes != theirs.row_bytes {
        return Err(fault(
            FaultCode::RowBytes,
            ours.row_bytes.into(),
            theirs.row_bytes.into(),
        ));
    }
    if ours.digest != theirs.digest {
        return Err(fault(FaultCode::Digest, ours.digest, theirs.digest));
    }
    Ok(())
}

/// Waits, as a block that was not the last, until the last one has completed the call or failed.
#[inline(always)]
fn follow<M: Machine>(machine: &M, epoch: u64) -> bool {
    let mut whole = false;
    if machine.thread() == 0 {
        let mut polls: u32 = 0;
        loop {
            // SYNC: advance. The last block has acquired every source; we acquire it.
            if let Some(outcome) = machine.outcome(epoch) {
                whole = outcome;
                break;
            }
            machine.relax(polls);
            polls = polls.saturating_add(1);
        }
    }
    machine.any(whole)
}
