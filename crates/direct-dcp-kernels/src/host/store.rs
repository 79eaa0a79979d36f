//! The stores of a launch: slices to their rank's place, and rows that have a place each.
#![allow(unsafe_code)]

use super::machine::Block;
use super::placement::{Conversion, Placement, Rows, Run};
use crate::machine::Machine;

/// Rows are stored to all receivers in pieces of this many bytes, so that a piece is read from
/// memory once and from the cache for the other receivers.
const PIECE: usize = 32 << 10;

impl Block<'_> {
    /// Stores this block's share of a slice to every region.
    pub(super) fn store_slice(&self, slot: u32, rows: &[u8]) {
        let part = self.share();
        let (start, end) = (part.start as usize, (part.start + part.len) as usize);
        let at = self.place(self.launch.call.rank) + start;
        if let Some(bytes) = rows.get(start..end) {
            self.store_bytes(slot, at, bytes);
        }
    }

    /// Stores this block's share of rows that have a place each.
    pub(super) fn store_placed(
        &self,
        slot: u32,
        placement: &Placement,
        rows: Rows<'_>,
        conversion: Conversion,
    ) {
        let row_bytes = placement.row_bytes() as usize;
        let source_bytes = conversion.source_bytes(row_bytes);
        let mut converted = Vec::new();
        for run in self.share_of(placement.runs()) {
            // What is one piece here and there moves as one.
            if let ([_], Conversion::None, Some(bytes)) = (
                placement.planes(),
                conversion,
                rows.block(run.src, run.len, row_bytes),
            ) {
                self.store_bytes(slot, run.dst as usize * row_bytes, bytes);
                continue;
            }
            for index in 0..run.len {
                let Some(row) = rows.row(run.src + index, source_bytes) else {
                    return;
                };
                let row = conversion.convert(row, &mut converted);
                self.store_row(slot, placement.planes(), run.dst + index, row);
            }
        }
    }

    /// Stores a row to its place in every plane.
    fn store_row(&self, slot: u32, planes: &[u32], place: u32, mut row: &[u8]) {
        let capacity = self.launch.lane.geometry().capacity_rows as usize;
        let mut plane = 0;
        for &width in planes {
            let width = width as usize;
            let Some((part, rest)) = row.split_at_checked(width) else {
                return;
            };
            self.store_bytes(slot, plane + place as usize * width, part);
            plane += capacity * width;
            row = rest;
        }
    }

    /// Stores bytes at `at` of a slot of every region.
    fn store_bytes(&self, slot: u32, at: usize, bytes: &[u8]) {
        for (start, piece) in (at..).step_by(PIECE).zip(bytes.chunks(PIECE)) {
            for region in self.launch.lane.stores_to(self.launch.call.copy_out) {
                let to = region.slot(slot).wrapping_add(start);
                // SAFETY: of a slice, `Lane::check` saw that `world_size` of them fit a slot; of
                // rows with a place each, `Lane::place` saw that the capacity of a slot holds all
                // places, and that the planes make up a row. The slot rule (docs/protocol.md) keeps
                // every reader out of these bytes until we publish. No other block has this part or
                // this run, and no two rows of a placement share a place. No other rank writes a
                // slice's place; to keep placements apart is the ranks' plan's, whose digest is
                // compared before anybody reads.
                unsafe { to.copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
            }
        }
    }

    /// This block's share of the rows in `runs`: the rows are split evenly, in order.
    fn share_of(&self, runs: &[Run]) -> impl Iterator<Item = Run> {
        let total: u64 = runs.iter().map(|run| u64::from(run.len)).sum();
        let (block, blocks) = (u64::from(self.block), u64::from(self.blocks().get()));
        let (start, end) = (total * block / blocks, total * (block + 1) / blocks);
        let mut before = 0;
        runs.iter().filter_map(move |run| {
            let (first, next) = (before, before + u64::from(run.len));
            before = next;
            let (from, to) = (start.clamp(first, next), end.clamp(first, next));
            let skipped = (from - first) as u32;
            (from < to).then(|| Run {
                src: run.src + skipped,
                dst: run.dst + skipped,
                len: (to - from) as u32,
            })
        })
    }
}
