//! Rows stored in their final places by copies that the host submits, run by run.
#![allow(unsafe_code)] // copies

use super::end::End;
use super::lane::Lane;
use super::place::DevicePlacement;
use super::rows::DeviceRows;
use crate::error::Result;
use crate::stream::Stream;

/// Rows that follow one another among those of the rank, and in the result.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    from: u64,
    to: u64,
    rows: u64,
}

impl Run {
    /// The runs of rows with these places; those without one are in none.
    pub(super) fn of(places: &[i32]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (from, &place) in (0..).zip(places) {
            let Ok(to) = u64::try_from(place) else {
                continue;
            };
            match runs.last_mut() {
                Some(run) if (run.from + run.rows, run.to + run.rows) == (from, to) => {
                    run.rows += 1;
                }
                _ => runs.push(Run { from, to, rows: 1 }),
            }
        }
        runs
    }

    /// The place behind the last row's.
    pub(super) fn end(&self) -> u64 {
        self.to + self.rows
    }
}

impl Lane {
    /// Copies each run of rows, plane by plane, to its place in slot `slot` of every rank. The rows
    /// are as many as the placement's, one behind the other; no run ends behind the rows of the
    /// result, and those fit the slot.
    pub(super) fn place_by_copies(
        &self,
        end: &End,
        stream: &Stream,
        placement: &DevicePlacement,
        rows: DeviceRows,
        slot: u64,
    ) -> Result<()> {
        let capacity = u64::from(self.options().layout.capacity_rows);
        let row_bytes = placement.row_bytes as usize;
        for receiver in self.in_turn(end) {
            let mut before = 0;
            for width in placement.planes.iter().copied().filter(|width| *width > 0) {
                let plane = receiver.rows + slot * self.slot_bytes() + capacity * before;
                for run in &placement.runs {
                    let to = (plane + run.to * u64::from(width), width as usize);
                    let from = rows.address() + run.from * placement.row_bytes + before;
                    let from = (from, row_bytes);
                    // SAFETY: the slot rule, which the caller enforces, keeps every reader out of
                    // the slot until the call publishes. The rows of a run are among the rank's,
                    // and their places below the rows of the result, which fit each plane's.
                    unsafe {
                        stream.copy_rows_on_device(to, from, width as usize, run.rows as usize)
                    }?;
                }
                before += u64::from(width);
            }
        }
        Ok(())
    }
}
