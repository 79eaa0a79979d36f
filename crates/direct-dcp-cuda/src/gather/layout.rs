//! What lies where in a rank's symmetric memory.

use direct_dcp_kernels::Shape;
use direct_dcp_kernels::device::Receiver;

/// Every part begins at a multiple of this.
const ALIGN: u64 = 256;

/// The sizes that fix the layout, the same on all ranks.
///
/// Per ubatch, each part aligned to 256 bytes: `notice: u32`, `signal: [S][W] u32`,
/// `shape: [S][W]` 16-byte records, `rows: [S][capacity_rows · row_bytes, rounded up]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Ranks of the group.
    pub world_size: u32,
    /// Slots per ubatch.
    pub slots: u32,
    /// Ubatches.
    pub ubatches: u32,
    /// Rows that a gather may deliver, over all ranks.
    pub capacity_rows: u32,
    /// Bytes of one row.
    pub row_bytes: u32,
}

impl Layout {
    /// Bytes of a rank's memory, or `None` where that overflows.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        self.ubatch_bytes()?.checked_mul(self.ubatches.into())
    }

    /// Bytes from one slot to the next.
    #[must_use]
    pub fn slot_bytes(&self) -> Option<u64> {
        u64::from(self.capacity_rows)
            .checked_mul(self.row_bytes.into())?
            .checked_next_multiple_of(ALIGN)
    }

    /// Bytes at the start of each ubatch that must be zero before the first call: everything but
    /// the rows.
    #[must_use]
    pub fn header_bytes(&self) -> Option<u64> {
        let shapes = self.words()?.checked_mul(size_of::<Shape>() as u64)?;
        self.shapes_at()?
            .checked_add(shapes)?
            .checked_next_multiple_of(ALIGN)
    }

    /// Bytes from one ubatch to the next.
    #[must_use]
    pub fn ubatch_bytes(&self) -> Option<u64> {
        let rows = self.slot_bytes()?.checked_mul(self.slots.into())?;
        self.header_bytes()?.checked_add(rows)
    }

    /// The places of `ubatch` in memory that begins at the device address `base`.
    #[must_use]
    pub fn receiver(&self, base: u64, ubatch: u32) -> Option<Receiver> {
        let start = base.checked_add(self.ubatch_bytes()?.checked_mul(ubatch.into())?)?;
        Some(Receiver {
            notice: start,
            signals: start.checked_add(ALIGN)?,
            shapes: start.checked_add(self.shapes_at()?)?,
            rows: start.checked_add(self.header_bytes()?)?,
        })
    }

    fn words(&self) -> Option<u64> {
        u64::from(self.slots).checked_mul(self.world_size.into())
    }

    fn shapes_at(&self) -> Option<u64> {
        let signals = self.words()?.checked_mul(4)?;
        ALIGN.checked_add(signals)?.checked_next_multiple_of(ALIGN)
    }
}
