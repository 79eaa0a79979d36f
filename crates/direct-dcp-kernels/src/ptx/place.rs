//! Rows with a place each: from where the caller has them, converted, into the planes of a slot.

use core::marker::PhantomData;
use core::num::NonZeroU32;

use super::instructions::{self as gpu, Double, Quad, Unit};
#[cfg(not(feature = "multicast"))]
use super::instructions::{Byte, Half};
use super::thread::{Rows, Thread};
use crate::convert::bf16_from_e4m3;
use crate::device::PlaceArguments;
use crate::machine::{Fault, FaultCode, Machine};
use crate::rotation::rotated;

/// What a unit of a row becomes on its way.
pub(super) trait Convert: Copy {
    /// What is read.
    type From: Unit;
    /// What is stored.
    type To: Unit;
    /// The one from the other.
    fn convert(unit: Self::From, scale: f32) -> Self::To;
}

/// The same bytes.
#[derive(Clone, Copy)]
pub(super) struct Same<T>(PhantomData<T>);

impl<T: Unit> Convert for Same<T> {
    type From = T;
    type To = T;

    #[inline(always)]
    fn convert(unit: T, _scale: f32) -> T {
        unit
    }
}

/// e4m3 elements become bf16 ones.
#[derive(Clone, Copy)]
pub(super) struct Dequantize<T>(PhantomData<T>);

impl Convert for Dequantize<Double> {
    type From = Double;
    type To = Quad;

    #[inline(always)]
    fn convert(unit: Double, scale: f32) -> Quad {
        let pair = |shift: u32| {
            let element =
                |at: u32| u32::from(bf16_from_e4m3((unit.0 >> (shift + at)) as u8, scale));
            element(0) | element(8) << 16
        };
        Quad(pair(0), pair(16), pair(32), pair(48))
    }
}

#[cfg(not(feature = "multicast"))]
impl Convert for Dequantize<Byte> {
    type From = Byte;
    type To = Half;

    #[inline(always)]
    fn convert(unit: Byte, scale: f32) -> Half {
        Half(bf16_from_e4m3(unit.0 as u8, scale))
    }
}

/// The rows of a launch that stores each in its place.
#[derive(Clone, Copy)]
pub(super) struct Placed<'a, C> {
    arguments: &'a PlaceArguments,
    convert: PhantomData<C>,
}

/// Where a unit comes from, and where in a slot it goes.
#[derive(Clone, Copy)]
struct Move {
    from: u64,
    to: u64,
}

impl<'a, C: Convert> Placed<'a, C> {
    #[inline(always)]
    pub(super) fn new(arguments: &'a PlaceArguments) -> Self {
        Placed {
            arguments,
            convert: PhantomData,
        }
    }

    /// The way of unit `unit` of row `row`: `None` for padding. `Err` for a row that has none.
    #[inline(always)]
    fn path(&self, row: u32, unit: u32) -> Result<Option<Move>, (FaultCode, u32, u32)> {
        let a = self.arguments;
        // SAFETY: the table has a word for each local row.
        let place = unsafe { gpu::load_u32(a.places + u64::from(row) * 4) };
        if place == u32::MAX {
            return Ok(None);
        }
        if place >= a.gather.shape.rows {
            return Err((FaultCode::Place, place, a.gather.shape.rows));
        }
        let start = if a.cache_slots == 0 {
            u64::from(row) * a.row_stride
        } else {
            // SAFETY: as above.
            let slot = unsafe { gpu::load_u32(a.cache_slots + u64::from(row) * 4) };
            if slot >= a.cache_rows {
                return Err((FaultCode::CacheSlot, slot, a.cache_rows));
            }
            let page_rows = NonZeroU32::new(a.page_rows).unwrap_or(NonZeroU32::MIN);
            u64::from(slot / page_rows) * a.page_stride + u64::from(slot % page_rows) * a.row_stride
        };
        let from = a.gather.local + start + u64::from(unit) * C::From::BYTES;

        // The plane that has the unit's column.
        let mut column = unit * C::To::BYTES as u32;
        let mut plane = 0;
        let [first, second, third, fourth] = a.planes;
        let mut width = first;
        for next in [second, third, fourth] {
            if column >= width && next != 0 {
                column -= width;
                plane += u64::from(a.capacity_rows) * u64::from(width);
                width = next;
            } else {
                break;
            }
        }
        let to = plane + u64::from(place) * u64::from(width) + u64::from(column);
        Ok(Some(Move { from, to }))
    }

    #[inline(always)]
    fn converted(&self, loaded: Option<(u64, C::From)>) -> Option<(u64, C::To)> {
        loaded.map(|(to, unit)| (to, C::convert(unit, self.arguments.scale)))
    }

    /// The way of unit `at` of all local rows, of `units` each, if there is one; a row that has no
    /// place is a fault.
    #[inline(always)]
    fn path_or_fault<T: Unit, const COPY_OUT: bool>(
        &self,
        thread: &Thread<'_, T, COPY_OUT, Self>,
        at: u32,
        units: NonZeroU32,
    ) -> Option<Move>
    where
        Self: Rows<T>,
    {
        let a = self.arguments;
        if at >= a.local_rows * units.get() {
            return None;
        }
        match self.path(at / units, at % units) {
            Ok(path) => path,
            Err((code, ours, theirs)) => {
                thread.fail(Fault {
                    code,
                    source: a.gather.rank,
                    epoch: thread.epoch() + 1,
                    ours: ours.into(),
                    theirs: theirs.into(),
                });
                None
            }
        }
    }
}

impl<C: Convert<To = T>, T: Unit> Rows<T> for Placed<'_, C> {
    const CHECKED: bool = true;

    #[inline(always)]
    fn store<const COPY_OUT: bool>(
        &self,
        thread: &Thread<'_, T, COPY_OUT, Self>,
        slot: impl FnOnce() -> Option<u32>,
    ) -> Option<u32> {
        let slot = slot()?;
        thread.prefetch();
        let a = self.arguments;
        let slot_start = u64::from(slot) * a.gather.slot_bytes;
        let count = thread.receivers();
        let Some(units) = NonZeroU32::new(a.gather.shape.row_bytes / T::BYTES as u32) else {
            return Some(slot);
        };
        let threads = thread.blocks().get() * thread.threads().get();
        // The host passes no more units than 31 bits count.
        let all = a.local_rows * units.get();
        let mut at = thread.block() * thread.threads().get() + thread.thread();
        while at < all {
            // Not by a loop: that would put them into local memory.
            let path = |index| at + index * threads;
            let paths = [
                self.path_or_fault(thread, path(0), units),
                self.path_or_fault(thread, path(1), units),
                self.path_or_fault(thread, path(2), units),
                self.path_or_fault(thread, path(3), units),
            ];
            let [first, second, third, fourth] = paths.map(|path| {
                // SAFETY: a unit of a row that the caller has, by the row's slot or number.
                path.map(|path| (path.to, unsafe { C::From::load(path.from) }))
            });
            let moves = [
                self.converted(first),
                self.converted(second),
                self.converted(third),
                self.converted(fourth),
            ];
            for step in 0..count.get() {
                let receiver = rotated(a.gather.rank, step, count);
                let rows = thread.rows_of(receiver) + slot_start;
                for placed in &moves {
                    let Some((to, unit)) = placed else { continue };
                    let everywhere = Thread::<T, COPY_OUT, Self>::EVERYWHERE;
                    // SAFETY: the place is one of the result's, which the host saw to fit a slot.
                    // The slot rule keeps every reader out of these bytes until we publish; the
                    // plan gives no other row this place.
                    unsafe { unit.stream(rows + to, everywhere) };
                }
            }
            at += 4 * threads;
        }
        Some(slot)
    }
}
