//! Rows stored in their final places.
#![allow(unsafe_code)] // rows, by address

use direct_dcp_kernels::{Fault, FaultCode, Machine, bf16_from_e4m3, rotated};

use crate::launch::Placing;
use crate::memory;
use crate::thread::Thread;

impl Thread<'_> {
    /// Stores this thread's rows in their places in `slot`.
    pub(crate) fn store_places(&self, slot: u32, placing: &Placing) {
        let a = &placing.arguments;
        let (this, all) = self.among_all();
        for row in (this..a.local_rows).step_by(all as usize) {
            // SAFETY: the launch checked the table.
            let place = unsafe { memory::read::<u32>(a.places + u64::from(row) * 4) };
            if place == u32::MAX {
                continue;
            }
            if place >= a.gather.shape.rows {
                self.misplaced(FaultCode::Place, place, a.gather.shape.rows);
                continue;
            }
            if let Some(bytes) = self.source_row(row, placing) {
                self.store_row(slot, place, placing, &bytes);
            }
        }
    }

    /// The bytes that a row has in the result.
    fn source_row(&self, row: u32, placing: &Placing) -> Option<Vec<u8>> {
        let a = &placing.arguments;
        let start = if a.cache_slots == 0 {
            u64::from(row) * a.row_stride
        } else {
            // SAFETY: the launch checked the table.
            let slot = unsafe { memory::read::<u32>(a.cache_slots + u64::from(row) * 4) };
            if slot >= a.cache_rows {
                self.misplaced(FaultCode::CacheSlot, slot, a.cache_rows);
                return None;
            }
            let (page, row) = (slot / a.page_rows, slot % a.page_rows);
            u64::from(page) * a.page_stride + u64::from(row) * a.row_stride
        };
        let row_bytes = a.gather.shape.row_bytes;
        let bytes = if placing.converts {
            row_bytes / 2
        } else {
            row_bytes
        };
        let from = a.gather.local + start;
        if !self.launch.may_read(from, bytes.into()) {
            return None;
        }
        // SAFETY: bytes of a span that the device may read.
        let read = |at| unsafe { memory::read::<u8>(from + u64::from(at)) };
        let bytes = (0..bytes).map(read);
        Some(if placing.converts {
            bytes
                .flat_map(|element| bf16_from_e4m3(element, a.scale).to_ne_bytes())
                .collect()
        } else {
            bytes.collect()
        })
    }

    fn store_row(&self, slot: u32, place: u32, placing: &Placing, mut row: &[u8]) {
        let a = &placing.arguments;
        let mut plane = u64::from(slot) * a.gather.slot_bytes;
        for width in a.planes {
            let (part, rest) = row.split_at(width as usize);
            let at = plane + u64::from(place) * u64::from(width);
            let count = self.receivers();
            for step in 0..count.get() {
                let receiver = rotated(a.gather.rank, step, count) as usize;
                let to = self.launch.receivers[receiver].rows + at;
                let targets = match self.launch.everywhere {
                    true => self.launch.replicas_or_fail(to, width.into()),
                    false => vec![to],
                };
                for to in targets {
                    // SAFETY: a place of the result, which the launch saw to fit the slots of every
                    // receiver; the slot rule keeps every reader out until the call publishes.
                    unsafe {
                        memory::copy(to, part.as_ptr().expose_provenance() as u64, width.into());
                    }
                }
            }
            plane += u64::from(a.capacity_rows) * u64::from(width);
            row = rest;
        }
    }

    fn misplaced(&self, code: FaultCode, ours: u32, theirs: u32) {
        self.fail(Fault {
            code,
            source: self.launch.arguments.rank,
            epoch: self.epoch() + 1,
            ours: ours.into(),
            theirs: theirs.into(),
        });
    }
}
