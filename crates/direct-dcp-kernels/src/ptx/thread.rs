//! [`Machine`] for one thread of a GPU.

use core::arch::nvptx::{_block_dim_x, _block_idx_x, _grid_dim_x, _thread_idx_x};
use core::marker::PhantomData;
use core::mem::offset_of;
use core::num::NonZeroU32;

use super::copy::{Job, copy};
use super::instructions::{self as gpu, Quad, Unit};
use crate::device::{Arguments, NEAR, Receiver, State, Status};
use crate::machine::{Call, Fault, FaultCode, Interrupt, Machine, Shape};
use crate::protocol::slot_of;
use crate::rotation::rotated;

/// Polls after which a waiting thread sleeps between polls, and for how long.
const BUSY_POLLS: u32 = 1 << 14;
const SLEEP_NS: u32 = 200;

/// How a launch's rows get from where the caller has them into a slot.
pub(super) trait Rows<T>: Copy {
    /// Whether rows can turn out to have no place.
    const CHECKED: bool;
    /// See [`Machine::store`].
    fn store<const COPY_OUT: bool>(
        &self,
        thread: &Thread<'_, T, COPY_OUT, Self>,
        slot: impl FnOnce() -> Option<u32>,
    ) -> Option<u32>;
}

/// A slice that goes to its rank's place as it is.
#[derive(Clone, Copy)]
pub(super) struct Slice;

/// A thread whose accesses are of one unit, of a launch that copies out or does not.
pub(super) struct Thread<'a, T, const COPY_OUT: bool, R = Slice> {
    pub(super) arguments: &'a Arguments,
    rows: R,
    /// The first words of the state, as the launch found them.
    epoch: u64,
    poisoned: bool,
    unit: PhantomData<T>,
}

impl<'a, T: Unit, const COPY_OUT: bool, R: Rows<T>> Thread<'a, T, COPY_OUT, R> {
    #[inline(always)]
    pub(super) fn new(arguments: &'a Arguments, rows: R) -> Self {
        let (epoch, flags) = if arguments.epoch == arguments.state {
            // SAFETY: the first 16 bytes of this rank's state.
            unsafe { gpu::load_u64_pair(arguments.state) }
        } else {
            // SAFETY: as above, and the caller's count of calls.
            let (_, flags) = unsafe { gpu::load_u64_pair(arguments.state) };
            // SAFETY: as above.
            (unsafe { gpu::load_u64(arguments.epoch) }, flags)
        };
        Thread {
            arguments,
            rows,
            epoch,
            // The low half is `poisoned`.
            poisoned: flags as u32 != 0,
            unit: PhantomData,
        }
    }

    /// The call that the arguments describe; `None` for sizes that no host of ours passes.
    #[inline(always)]
    pub(super) fn call(&self) -> Option<Call> {
        Some(Call {
            world_size: NonZeroU32::new(self.arguments.world_size)?,
            rank: self.arguments.rank,
            slots: NonZeroU32::new(self.arguments.slots)?,
            shape: self.arguments.shape,
            copy_out: COPY_OUT,
            timeout: self.arguments.timeout,
        })
    }

    /// Whether one store reaches all ranks.
    pub(super) const EVERYWHERE: bool = cfg!(feature = "multicast");

    #[inline(always)]
    fn index(&self, slot: u32, source: u32) -> u64 {
        u64::from(slot) * u64::from(self.arguments.world_size) + u64::from(source)
    }

    /// Where the slice of `source` begins, from the first slot on.
    #[inline(always)]
    fn place(&self, slot: u32, source: u32) -> u64 {
        let arguments = self.arguments;
        u64::from(slot) * arguments.slot_bytes + u64::from(source) * arguments.shape.bytes()
    }

    /// The address of the entry of receiver `receiver` in the table, for the field at `offset`.
    #[inline(always)]
    fn entry(&self, receiver: u32, offset: usize) -> u64 {
        let fields = offset as u64 / 8 * u64::from(self.arguments.receiver_count);
        self.arguments.receivers + 8 * (fields + u64::from(receiver))
    }

    /// The field at `offset` of receiver `receiver`.
    #[inline(always)]
    pub(super) fn receiver(&self, receiver: u32, offset: usize) -> u64 {
        // SAFETY: the table has receiver_count entries of each field, and the caller stays below
        // that.
        unsafe { gpu::load_u64(self.entry(receiver, offset)) }
    }

    /// Where the slots of receiver `receiver` begin.
    #[inline(always)]
    pub(super) fn rows_of(&self, receiver: u32) -> u64 {
        if receiver >= NEAR as u32 {
            return self.receiver(receiver, offset_of!(Receiver, rows));
        }
        // Not by an index: arguments have no addresses, and would be copied into local memory.
        let pick = |bit, unset, set| if receiver & bit == 0 { unset } else { set };
        let [a, b, c, d, e, f, g, h] = self.arguments.near_rows;
        pick(
            4,
            pick(2, pick(1, a, b), pick(1, c, d)),
            pick(2, pick(1, e, f), pick(1, g, h)),
        )
    }

    /// Brings close what the last block needs to publish.
    #[inline(always)]
    pub(super) fn prefetch(&self) {
        if self.thread() == 0 {
            gpu::prefetch(self.entry(0, offset_of!(Receiver, signals)));
            gpu::prefetch(self.entry(0, offset_of!(Receiver, shapes)));
        }
    }

    /// Where this rank's own rows go in the output, if there is one.
    #[inline(always)]
    fn own_out(&self) -> Option<u64> {
        let arguments = self.arguments;
        let place = u64::from(arguments.rank) * arguments.shape.bytes();
        (COPY_OUT && arguments.out != 0).then_some(arguments.out + place)
    }

    /// A job of this thread, to one place.
    #[inline(always)]
    pub(super) fn job(&self) -> Job {
        Job {
            from: 0,
            len: 0,
            thread: self.thread(),
            threads: self.threads().get(),
            block: self.block(),
            blocks: self.blocks().get(),
            count: 1,
            everywhere: 0,
        }
    }

    #[inline(always)]
    fn state(&self, offset: usize) -> u64 {
        self.arguments.state + offset as u64
    }

    #[inline(always)]
    fn status(&self, offset: usize) -> u64 {
        self.arguments.status + offset as u64
    }
}

impl<T: Unit> Rows<T> for Slice {
    const CHECKED: bool = false;

    #[inline(always)]
    fn store<const COPY_OUT: bool>(
        &self,
        thread: &Thread<'_, T, COPY_OUT>,
        slot: impl FnOnce() -> Option<u32>,
    ) -> Option<u32> {
        let arguments = thread.arguments;
        let everywhere = Thread::<T, COPY_OUT>::EVERYWHERE;
        if arguments.stored != 0 {
            return slot();
        }
        let count = thread.receivers();
        let pull = arguments.pull != 0;
        thread.prefetch();
        let stores = if pull { 1 } else { count.get() };
        // What is copied out goes to the output in the same pass, and then, where every rank has
        // memory of its own, not to our own slot, which nobody would read. That is the last step.
        let out = thread.own_out();
        let extra = pull || everywhere;
        let job = Job {
            from: arguments.local,
            len: arguments.shape.bytes(),
            count: stores + u32::from(out.is_some() && extra),
            everywhere: if everywhere && !pull { stores } else { 0 },
            ..thread.job()
        };
        let target = || {
            let slot = slot()?;
            Some((slot, thread.place(slot, arguments.rank)))
        };
        let to = |&(_, place): &(u32, u64), step| match out {
            Some(out) if step + 1 == job.count => out,
            _ if pull => arguments.own.rows + place,
            _ => {
                let receiver = rotated(arguments.rank, step, count);
                thread.rows_of(receiver) + place
            }
        };
        // SAFETY: the host made sure that the slices of all ranks fit a slot and the output, and
        // are of the unit. The slot rule (docs/protocol.md) keeps every reader out of these bytes
        // until we publish; nobody else writes this rank's part.
        unsafe { copy::<T, _>(job, target, to) }.map(|(slot, _)| slot)
    }
}

impl<T: Unit, const COPY_OUT: bool, R: Rows<T>> Machine for Thread<'_, T, COPY_OUT, R> {
    // A look reads host memory, which takes some microseconds: about one a millisecond.
    const POLLS_PER_LOOK: u32 = 1024;

    #[inline(always)]
    fn block(&self) -> u32 {
        // SAFETY: reads a special register.
        unsafe { _block_idx_x() as u32 }
    }

    #[inline(always)]
    fn blocks(&self) -> NonZeroU32 {
        // SAFETY: reads a special register.
        NonZeroU32::new(unsafe { _grid_dim_x() as u32 }).unwrap_or(NonZeroU32::MIN)
    }

    #[inline(always)]
    fn thread(&self) -> u32 {
        // SAFETY: reads a special register.
        unsafe { _thread_idx_x() as u32 }
    }

    #[inline(always)]
    fn threads(&self) -> NonZeroU32 {
        // SAFETY: reads a special register.
        NonZeroU32::new(unsafe { _block_dim_x() as u32 }).unwrap_or(NonZeroU32::MIN)
    }

    #[inline(always)]
    fn barrier(&self) {
        gpu::barrier();
    }

    #[inline(always)]
    fn any(&self, vote: bool) -> bool {
        gpu::barrier_any(vote)
    }

    #[inline(always)]
    fn epoch(&self) -> u64 {
        self.epoch
    }

    #[inline(always)]
    fn poisoned(&self) -> bool {
        self.poisoned
    }

    #[inline(always)]
    fn advance(&self, epoch: u64) {
        let arguments = self.arguments;
        let slots = NonZeroU32::new(arguments.slots).unwrap_or(NonZeroU32::MIN);
        let rows = arguments.own.rows + u64::from(slot_of(epoch, slots)) * arguments.slot_bytes;
        // SAFETY: a word of this rank's state.
        unsafe { gpu::store_u64(self.state(offset_of!(State, rows)), rows) };
        let word = arguments.epoch;
        if !COPY_OUT {
            // No other block follows: the end of the launch orders this.
            // SAFETY: this rank's count of calls.
            return unsafe { gpu::store_u64(word, epoch) };
        }
        // SYNC: advance.
        // SAFETY: this rank's count of calls.
        unsafe { gpu::store_release_gpu_u64(word, epoch) }
    }

    #[inline(always)]
    fn poison(&self) {
        // SYNC: poison.
        // SAFETY: a word of this rank's state.
        unsafe { gpu::store_release_gpu_u32(self.state(offset_of!(State, poisoned)), 1) };
        // SYNC: report. The host acquires this word before it reads the rest.
        // SAFETY: a word of the status.
        unsafe { gpu::store_release_sys_u32(self.status(offset_of!(Status, ready)), 1) };
        for step in 0..self.arguments.receiver_count {
            let notice = self.receiver(step, offset_of!(Receiver, notice));
            if notice != 0 {
                // SAFETY: a word of a receiver.
                unsafe { gpu::store_everywhere_u32(notice, self.arguments.rank + 1) };
            }
        }
    }

    #[inline(always)]
    fn outcome(&self, epoch: u64) -> Option<bool> {
        // SYNC: advance.
        // SAFETY: this rank's count of calls.
        if unsafe { gpu::load_acquire_gpu_u64(self.arguments.epoch) } == epoch {
            return Some(true);
        }
        // SYNC: poison.
        // SAFETY: a word of this rank's state.
        let poisoned =
            unsafe { gpu::load_acquire_gpu_u32(self.state(offset_of!(State, poisoned))) };
        if poisoned == 0 { None } else { Some(false) }
    }

    #[inline(always)]
    fn arrive(&self) -> u32 {
        // SYNC: arrive.
        // SAFETY: a word of this rank's state.
        unsafe { gpu::add_one_acq_rel_gpu(self.state(offset_of!(State, arrivals))) }
    }

    #[inline(always)]
    fn reset_arrivals(&self) {
        // SAFETY: a word of this rank's state; the next launch comes after this one.
        unsafe { gpu::store_u32(self.state(offset_of!(State, arrivals)), 0) }
    }

    #[inline(always)]
    fn store(&self, slot: impl FnOnce() -> Option<u32>) -> Option<u32> {
        self.rows.store(self, slot)
    }

    #[inline(always)]
    fn refused(&self) -> bool {
        if !R::CHECKED {
            return false;
        }
        // SAFETY: a word of this rank's state. Blocks that set it have arrived since.
        let reported = unsafe { gpu::load_u32(self.state(offset_of!(State, reported))) };
        gpu::barrier_any(reported != 0)
    }

    #[inline(always)]
    fn take(&self, slot: u32, source: u32) {
        let arguments = self.arguments;
        if source == arguments.rank {
            return; // `store` has put our own rows there
        }
        let place = self.place(slot, source);
        let from = if arguments.pull != 0 {
            self.rows_of(source) + place
        } else {
            arguments.own.rows + place
        };
        let out = if arguments.out == 0 {
            arguments.own.rows + place
        } else {
            arguments.out + u64::from(source) * arguments.shape.bytes()
        };
        let job = Job {
            from,
            len: arguments.shape.bytes(),
            ..self.job()
        };
        // SAFETY: as in `store`; the source's signal was acquired, so its rows are complete, and
        // it stores into this slot again only after our own next publish.
        unsafe { copy::<T, _>(job, || Some(out), |&out, _| out) };
    }

    #[inline(always)]
    fn receivers(&self) -> NonZeroU32 {
        NonZeroU32::new(self.arguments.receiver_count).unwrap_or(NonZeroU32::MIN)
    }

    #[inline(always)]
    fn publish(&self, receiver: u32, slot: u32, shape: Shape, epoch: u32) {
        let index = self.index(slot, self.arguments.rank);
        let shapes = self.receiver(receiver, offset_of!(Receiver, shapes));
        let signals = self.receiver(receiver, offset_of!(Receiver, signals));
        if shapes != 0 {
            let record = shapes + index * size_of::<Shape>() as u64;
            // SAFETY: the record of this rank in a slot of the receiver.
            unsafe { store_shape(record, shape, Self::EVERYWHERE) };
        }
        let signal = signals + index * 4;
        // SYNC: publish. The rows and the shape went through the multicast address, and are read
        // through each replica's own: the alias fence orders the two.
        // SAFETY: the signal of this rank in a slot of the receiver.
        #[cfg(feature = "multicast")]
        unsafe {
            gpu::fence_alias();
            gpu::multimem_store_release_sys_u32(signal, epoch);
        }
        // SYNC: publish.
        // SAFETY: the signal of this rank in a slot of the receiver.
        #[cfg(not(feature = "multicast"))]
        unsafe {
            gpu::store_release_sys_u32(signal, epoch);
        }
    }

    #[inline(always)]
    fn observe(&self, slot: u32, source: u32) -> u32 {
        let signal = self.arguments.own.signals + self.index(slot, source) * 4;
        // SYNC: publish.
        // SAFETY: the signal of a source in a slot of this rank.
        let seen = unsafe { gpu::load_acquire_sys_u32(signal) };
        #[cfg(feature = "multicast")]
        gpu::fence_alias();
        seen
    }

    #[inline(always)]
    fn shape(&self, slot: u32, source: u32) -> Shape {
        let shapes = self.arguments.own.shapes;
        if shapes == 0 {
            return self.arguments.shape;
        }
        let record = shapes + self.index(slot, source) * size_of::<Shape>() as u64;
        // SAFETY: the record of a source in a slot of this rank.
        unsafe { Quad::load(record) }.into()
    }

    #[inline(always)]
    fn failed_peer(&self) -> Option<u32> {
        let notice = self.arguments.own.notice;
        if notice == 0 {
            return None;
        }
        // SAFETY: a word of this rank's own memory.
        unsafe { gpu::load_relaxed_sys_u32(notice) }.checked_sub(1)
    }

    #[inline(always)]
    fn now(&self) -> u64 {
        gpu::global_timer()
    }

    #[inline(always)]
    fn pause(
        &self,
        _slot: u32,
        source: u32,
        _seen: u32,
        polls: u32,
        _left: u64,
    ) -> Result<(), Interrupt> {
        if polls % Self::POLLS_PER_LOOK == Self::POLLS_PER_LOOK - 1 {
            let interrupts = self.arguments.interrupts;
            // SAFETY: a word of host memory that is mapped for the device.
            if unsafe { gpu::load_relaxed_sys_u32(interrupts) } != 0 {
                return Err(Interrupt::Aborted);
            }
            let lost = interrupts + 4 * (1 + u64::from(source));
            // SAFETY: as above.
            if unsafe { gpu::load_relaxed_sys_u32(lost) } != 0 {
                return Err(Interrupt::Lost);
            }
            if self.failed_peer() == Some(source) {
                return Err(Interrupt::Lost);
            }
        }
        if polls > BUSY_POLLS {
            gpu::sleep(SLEEP_NS);
        }
        Ok(())
    }

    #[inline(always)]
    fn relax(&self, polls: u32) {
        if polls > BUSY_POLLS {
            gpu::sleep(SLEEP_NS);
        }
    }

    #[inline(always)]
    fn fail(&self, fault: Fault) {
        // SAFETY: words of the state and the status. Only one thread wins the claim and writes
        // the fields; each thread writes the missing words of its own sources.
        unsafe {
            if gpu::claim_acq_rel_gpu(self.state(offset_of!(State, reported))) {
                gpu::store_u32(self.status(offset_of!(Status, code)), fault.code as u32);
                gpu::store_u32(self.status(offset_of!(Status, source)), fault.source);
                gpu::store_u64(self.status(offset_of!(Status, epoch)), fault.epoch);
                gpu::store_u64(self.status(offset_of!(Status, ours)), fault.ours);
                gpu::store_u64(self.status(offset_of!(Status, theirs)), fault.theirs);
            }
            if fault.code == FaultCode::Timeout {
                let missing = self.status(size_of::<Status>()) + u64::from(fault.source) * 4;
                gpu::store_u32(missing, 1);
            }
        }
    }
}

/// # Safety
/// `record` is the address of a shape in global memory, multicast if `everywhere` is set.
#[inline(always)]
unsafe fn store_shape(record: u64, shape: Shape, everywhere: bool) {
    // SAFETY: the caller's.
    unsafe { Quad::from(shape).store(record, everywhere) }
}
