//! The layout of a mapping, and the few places where its bytes are touched.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use direct_dcp_shm::Mapping;

use crate::machine::Shape;

/// Rows, and the words of each slot, begin on a line of their own.
const LINE: usize = 128;
const PAGE: usize = 4096;

/// How rows travel between ranks that share a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// All ranks map the same physical slots, so a row is written once for everybody.
    Shared,
    /// Every rank has slots of its own, and stores its rows into those of all ranks.
    Push,
    /// Every rank stores its rows into a slot of its own, and the others read them there.
    Pull,
}

/// The sizes that fix the layout of a mapping, the same on all ranks.
///
/// Per ubatch, each part aligned: `sleepers: u32`, `signal: [S][W] u32`, `shape: [S][W]`
/// 16-byte records, `source: [S][W]` 16-byte records, `rows: [S][slot_bytes]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Ranks of the group.
    pub world_size: u32,
    /// Slots per ubatch.
    pub slots: u32,
    /// Ubatches.
    pub ubatches: u32,
    /// Rows that a gather may deliver: the sum over all ranks.
    pub capacity_rows: u32,
    /// Bytes of one row.
    pub row_bytes: u32,
    /// How rows travel.
    pub way: Way,
}

impl Geometry {
    /// Mappings of this layout that each rank reaches: one that all share, or one per rank.
    #[must_use]
    pub fn mappings(&self) -> u32 {
        if self.way == Way::Shared {
            1
        } else {
            self.world_size
        }
    }

    /// Bytes of one mapping, or `None` where that overflows.
    #[must_use]
    pub fn mapping_bytes(&self) -> Option<usize> {
        self.ubatch_bytes()?
            .checked_mul(self.ubatches.try_into().ok()?)
    }

    /// Bytes that the rows of all ranks may take in one slot.
    #[must_use]
    pub(super) fn gathered_bytes(&self) -> Option<usize> {
        usize::try_from(self.capacity_rows)
            .ok()?
            .checked_mul(self.row_bytes.try_into().ok()?)
    }

    /// Bytes of one slot: a staging slot of `Way::Pull` holds the rows of one rank only.
    fn slot_bytes(&self) -> Option<usize> {
        let whole = self.gathered_bytes()?;
        let ranks = if self.way == Way::Pull {
            self.world_size.try_into().ok()?
        } else {
            1
        };
        whole.checked_div(ranks)?.checked_next_multiple_of(PAGE)
    }

    fn words(&self) -> Option<usize> {
        usize::try_from(self.slots)
            .ok()?
            .checked_mul(self.world_size.try_into().ok()?)
    }

    fn signals_at() -> usize {
        LINE
    }

    fn shapes_at(&self) -> Option<usize> {
        let signals = self.words()?.checked_mul(size_of::<u32>())?;
        Self::signals_at()
            .checked_add(signals)?
            .checked_next_multiple_of(LINE)
    }

    fn sources_at(&self) -> Option<usize> {
        let shapes = self.words()?.checked_mul(size_of::<Shape>())?;
        self.shapes_at()?
            .checked_add(shapes)?
            .checked_next_multiple_of(LINE)
    }

    fn rows_at(&self) -> Option<usize> {
        let sources = self.words()?.checked_mul(size_of::<Source>())?;
        self.sources_at()?
            .checked_add(sources)?
            .checked_next_multiple_of(PAGE)
    }

    fn ubatch_bytes(&self) -> Option<usize> {
        let rows = self
            .slot_bytes()?
            .checked_mul(self.slots.try_into().ok()?)?;
        self.rows_at()?.checked_add(rows)
    }
}

/// Rows that stay where the caller has them, for ranks of one process to read there.
///
/// Its rank writes the address before it publishes a call, and returns from the call only once
/// the gate says that nobody reads any more: see `direct.rs`.
#[derive(Debug)]
#[repr(C, align(16))]
pub(super) struct Source {
    /// Where the rows are, in the one address space of all ranks.
    pub(super) address: AtomicUsize,
    /// Who reads them.
    pub(super) gate: AtomicU32,
}

/// One ubatch of one mapping.
#[derive(Debug)]
pub(super) struct Region {
    mapping: Arc<Mapping>,
    world_size: usize,
    slots: usize,
    start: usize,
    shapes: usize,
    sources: usize,
    rows: usize,
    slot_bytes: usize,
}

impl Region {
    /// Ubatch `ubatch` of `mapping`, or `None` where the mapping is too small for it.
    pub(super) fn new(mapping: Arc<Mapping>, geometry: &Geometry, ubatch: u32) -> Option<Self> {
        let needed = geometry.mapping_bytes()?;
        if ubatch >= geometry.ubatches || mapping.len() < needed {
            return None;
        }
        let start = geometry
            .ubatch_bytes()?
            .checked_mul(ubatch.try_into().ok()?)?;
        Some(Region {
            world_size: geometry.world_size.try_into().ok()?,
            slots: geometry.slots.try_into().ok()?,
            start,
            shapes: start + geometry.shapes_at()?,
            sources: start + geometry.sources_at()?,
            rows: start + geometry.rows_at()?,
            slot_bytes: geometry.slot_bytes()?,
            mapping,
        })
    }

    /// Ranks that sleep until a signal of this region changes.
    pub(super) fn sleepers(&self) -> &AtomicU32 {
        // SAFETY: the word is at the ubatch's start, which is a multiple of the page size.
        unsafe { self.word(self.start) }
    }

    pub(super) fn signal(&self, slot: u32, source: u32) -> &AtomicU32 {
        let at = self.start + Geometry::signals_at() + self.index(slot, source) * size_of::<u32>();
        // SAFETY: `index` is below slots · world_size, so the word lies within the signals; they
        // begin at a multiple of 128 and each takes four bytes.
        unsafe { self.word(at) }
    }

    pub(super) fn write_shape(&self, slot: u32, source: u32, shape: Shape) {
        let [head, digest] = self.shape_words(slot, source);
        let sizes = u64::from(shape.row_bytes) << 32 | u64::from(shape.rows);
        head.store(sizes, Ordering::Relaxed);
        digest.store(shape.digest, Ordering::Relaxed);
    }

    pub(super) fn read_shape(&self, slot: u32, source: u32) -> Shape {
        let [head, digest] = self.shape_words(slot, source);
        let sizes = head.load(Ordering::Relaxed);
        Shape {
            rows: sizes as u32,
            row_bytes: (sizes >> 32) as u32,
            digest: digest.load(Ordering::Relaxed),
        }
    }

    /// The rows of `source`, where ranks of one process read them in place.
    pub(super) fn source(&self, slot: u32, source: u32) -> &Source {
        let at = self.sources + self.index(slot, source) * size_of::<Source>();
        let record = self.mapping.as_ptr().wrapping_add(at).cast::<Source>();
        // SAFETY: `index` is below slots · world_size, so the record lies within the sources; they
        // begin at a multiple of 128 and each takes 16 bytes. The mapping lives as long as `self`,
        // zero is a valid record, and all access to these bytes is atomic.
        unsafe { &*record }
    }

    /// Where `slot` begins; valid for `slot_bytes` bytes as long as the region lives: `new` saw
    /// that the mapping holds all slots of all ubatches.
    pub(super) fn slot(&self, slot: u32) -> *mut u8 {
        let at = self.rows + (slot as usize % self.slots) * self.slot_bytes;
        self.mapping.as_ptr().wrapping_add(at)
    }

    /// The word of a slot and a source. Out-of-range arguments cannot come from this crate, and
    /// are brought into range rather than trusted.
    fn index(&self, slot: u32, source: u32) -> usize {
        (slot as usize % self.slots) * self.world_size + source as usize % self.world_size
    }

    fn shape_words(&self, slot: u32, source: u32) -> [&AtomicU64; 2] {
        let at = self.shapes + self.index(slot, source) * size_of::<Shape>();
        let record = self
            .mapping
            .as_ptr()
            .wrapping_add(at)
            .cast::<[AtomicU64; 2]>();
        // SAFETY: `index` is below slots · world_size, so the record lies within the shapes; they
        // begin at a multiple of 128 and each takes 16 bytes. The mapping lives as long as `self`,
        // and all access to these bytes is atomic.
        unsafe { (*record).each_ref() }
    }

    /// # Safety
    /// `at` is a multiple of four and lies within the words of this region.
    unsafe fn word(&self, at: usize) -> &AtomicU32 {
        let word = self.mapping.as_ptr().wrapping_add(at).cast::<AtomicU32>();
        // SAFETY: the mapping is page aligned, lives as long as `self`, and these bytes are only
        // ever accessed as this atomic word.
        unsafe { &*word }
    }
}
