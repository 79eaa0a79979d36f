//! The memory that ranks on CPUs share.

use std::fmt;
use std::sync::Arc;

use direct_dcp_kernels::host::{Lane, LaneOptions, Way as HostWay};
use direct_dcp_shm::SharedMemory;

use crate::format::RowFormat;
use crate::group::Group;
use crate::options::{Way, WorkspaceError, WorkspaceOptions, agree, cores, everybody, refused};
use crate::tuning::Setting;

/// Symmetric memory of a group: `[ubatches, slots, capacity_rows, row_bytes]` and its signals.
///
/// Building one is collective: every rank of the group calls [`Workspace::new`], with the same
/// options, in the same order as its other collective calls.
pub struct Workspace {
    group: Group,
    options: WorkspaceOptions,
    way: Way,
    setting: Setting,
    lanes: Vec<Arc<Lane>>,
}

impl Workspace {
    /// Allocates and shares the memory.
    ///
    /// # Errors
    /// [`WorkspaceError::InvalidArgument`] for options that no group could use, before anything
    /// is exchanged; [`WorkspaceError::Mismatch`] where ranks ask for different options;
    /// [`WorkspaceError::Refused`] where some rank could not allocate or map, on every rank;
    /// [`WorkspaceError::Group`] where a peer is late or lost.
    pub fn new(group: &Group, options: WorkspaceOptions) -> Result<Self, WorkspaceError> {
        let setting = Setting::cpu(group.one_process(), group.world_size());
        let settled = options.settled(&setting);
        let geometry = agree(group, &options, settled.geometry(group.world_size()))?;
        let creates = match geometry.way {
            HostWay::Shared => group.rank() == 0,
            HostWay::Push | HostWay::Pull => true,
        };
        let memory = geometry
            .mapping_bytes()
            .ok_or_else(|| options.too_large())
            .and_then(|len| {
                if !creates {
                    return Ok(None);
                }
                SharedMemory::create("direct-dcp workspace", len)
                    .map(Some)
                    .map_err(|error| refused(group, error))
            });
        let memory = everybody(group, memory)?;
        let mappings: Vec<_> = group.share(memory)?.into_iter().flatten().collect();
        let blocks = settled.blocks_or_default(group.world_size());
        let lanes = (0..geometry.ubatches)
            .map(|ubatch| {
                let lane = LaneOptions {
                    geometry,
                    rank: group.rank() as u32,
                    ubatch,
                    blocks,
                    one_process: group.one_process(),
                    spin: group.world_size().saturating_mul(blocks.get() as usize) <= cores(),
                };
                Lane::new(lane, &mappings, group.control().clone())
                    .map(Arc::new)
                    .map_err(|error| refused(group, error))
            })
            .collect::<Result<Vec<_>, _>>();
        let lanes = everybody(group, lanes)?;
        let way = settled.way.unwrap_or(Way::SharedSlot);
        if group.rank() == 0 {
            log::info!(
                "direct-dcp: {} {} gather by {way}, {} rows of {} bytes, {} slots, {} ubatches, {blocks} blocks",
                group.world_size(),
                if group.one_process() {
                    "threads"
                } else {
                    "processes"
                },
                options.capacity_rows,
                options.format.row_bytes(),
                options.slots,
                options.ubatches,
            );
        }
        Ok(Workspace {
            group: group.clone(),
            options,
            way,
            setting,
            lanes,
        })
    }

    /// The way that the group has taken, for all calls.
    #[must_use]
    pub fn way(&self) -> Way {
        self.way
    }

    /// Which entries of a [tuning table](crate::tuning) are for it.
    #[must_use]
    pub fn setting(&self) -> &Setting {
        &self.setting
    }

    /// The rows that it was built for.
    #[must_use]
    pub fn format(&self) -> RowFormat {
        self.options.format
    }

    /// Rows that a gather may deliver, over all ranks.
    #[must_use]
    pub fn capacity_rows(&self) -> usize {
        self.options.capacity_rows
    }

    /// Slots per ubatch.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.options.slots
    }

    /// Independent sequences of calls.
    #[must_use]
    pub fn ubatches(&self) -> usize {
        self.options.ubatches
    }

    /// The group it belongs to.
    #[must_use]
    pub fn group(&self) -> &Group {
        &self.group
    }

    pub(crate) fn lane(&self, ubatch: usize) -> Option<&Arc<Lane>> {
        self.lanes.get(ubatch)
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workspace")
            .field("options", &self.options)
            .field("way", &self.way)
            .finish_non_exhaustive()
    }
}
