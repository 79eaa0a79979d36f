//! What a rank that waits in a gather on the CPU asks about its group.

use super::Control;
use direct_dcp_kernels::host::Watch;

impl Watch for Control {
    fn aborted(&self) -> bool {
        self.aborted_by().is_some()
    }

    fn lost(&self, rank: u32) -> bool {
        Control::lost(self, rank as usize)
    }

    fn failed(&self, ubatch: u32, epoch: u64) -> Option<u32> {
        // A group has far fewer ranks than that.
        self.failed_in(ubatch, epoch)
            .and_then(|rank| u32::try_from(rank).ok())
    }
}
