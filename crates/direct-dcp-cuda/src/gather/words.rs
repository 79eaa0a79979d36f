//! The words of host memory that a lane's launches and the host share.

use std::mem::offset_of;

use direct_dcp_kernels::device::Status;
use direct_dcp_kernels::{Fault, FaultCode};

use crate::context::Context;
use crate::error::Result;
use crate::pinned::PinnedBuffer;

/// What a failed launch left behind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The first fault.
    pub fault: Fault,
    /// The ranks that did not publish in time, if the fault is a timeout.
    pub missing: Vec<u32>,
}

/// The status, a missing word per rank, the abort word, and a lost word per rank.
#[derive(Debug)]
pub(super) struct Words {
    memory: PinnedBuffer,
    world_size: u32,
}

impl Words {
    /// Words that are all zero.
    pub(super) fn new(context: &Context, world_size: u32) -> Result<Self> {
        let bytes = size_of::<Status>() + 4 * (2 * world_size as usize + 1);
        let words = Words {
            memory: PinnedBuffer::new(context, bytes)?,
            world_size,
        };
        words.clear()?;
        Ok(words)
    }

    /// Forgets everything. No launch may be under way.
    pub(super) fn clear(&self) -> Result<()> {
        for offset in (0..self.memory.bytes()).step_by(4) {
            self.memory.store_u32(offset, 0)?;
        }
        Ok(())
    }

    /// The device address of the status.
    pub(super) fn status(&self) -> u64 {
        self.memory.device_address()
    }

    /// The device address of the abort word, which the lost words follow.
    pub(super) fn interrupts(&self) -> u64 {
        self.memory.device_address() + self.interrupts_at() as u64
    }

    /// The report of the first launch that failed, if one has.
    pub(super) fn report(&self) -> Option<Report> {
        let word = |offset| self.memory.load_u32(offset).unwrap_or(0);
        let wide = |offset| self.memory.load_u64(offset).unwrap_or(0);
        // SYNC: report.
        if word(offset_of!(Status, ready)) == 0 {
            return None;
        }
        let missing = (0..self.world_size)
            .filter(|&rank| word(size_of::<Status>() + 4 * rank as usize) != 0)
            .collect();
        let fault = Fault {
            code: FaultCode::from_u32(word(offset_of!(Status, code))),
            source: word(offset_of!(Status, source)),
            epoch: wide(offset_of!(Status, epoch)),
            ours: wide(offset_of!(Status, ours)),
            theirs: wide(offset_of!(Status, theirs)),
        };
        Some(Report { fault, missing })
    }

    /// Whether a launch has found a fault. It may be under way still, and there is no report then.
    pub(super) fn has_fault(&self) -> bool {
        let code = self.memory.load_u32(offset_of!(Status, code));
        code.is_ok_and(|code| code != 0)
    }

    /// Ends every wait, now and from now on.
    pub(super) fn abort(&self) {
        self.interrupt(0);
    }

    /// Ends every wait for `rank`.
    pub(super) fn lose(&self, rank: u32) {
        if rank < self.world_size {
            self.interrupt(1 + rank as usize);
        }
    }

    fn interrupt(&self, word: usize) {
        // Within bounds: `new` made room for a word to abort and one per rank.
        let _ = self.memory.store_u32(self.interrupts_at() + 4 * word, 1);
    }

    fn interrupts_at(&self) -> usize {
        size_of::<Status>() + 4 * self.world_size as usize
    }
}
