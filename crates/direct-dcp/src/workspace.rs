//! The memory that the ranks of a group share.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::thread::available_parallelism;

use direct_dcp_kernels::host::{Geometry, Lane, LaneOptions, Way as HostWay};
use direct_dcp_shm::SharedMemory;

use crate::format::RowFormat;
use crate::group::{Group, GroupError};

/// How rows travel between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Way {
    /// All ranks map the same slots, so each row is written once for everybody. The default:
    /// the least memory and the fewest copies.
    SharedSlot,
    /// Every rank has slots of its own and stores its rows into those of all ranks, as GPUs do.
    Push,
    /// Every rank stages its rows once, and the others read them there. The zero-copy
    /// [`gather`](crate::KvGather::gather) lends a private copy.
    Pull,
}

impl Way {
    /// All ways of the CPU backends.
    pub const ALL: [Way; 3] = [Way::SharedSlot, Way::Push, Way::Pull];

    fn host(self) -> HostWay {
        match self {
            Way::SharedSlot => HostWay::Shared,
            Way::Push => HostWay::Push,
            Way::Pull => HostWay::Pull,
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::SharedSlot => "shared-slot",
            Way::Push => "push",
            Way::Pull => "pull",
        })
    }
}

/// The size of a workspace. All ranks must ask for the same.
#[derive(Clone, Debug)]
pub struct WorkspaceOptions {
    capacity_rows: usize,
    format: RowFormat,
    slots: usize,
    ubatches: usize,
    way: Option<Way>,
    blocks: Option<usize>,
}

impl WorkspaceOptions {
    /// Room for gathers that deliver up to `capacity_rows` rows, summed over the ranks: a
    /// multiple of the world size.
    #[must_use]
    pub fn new(capacity_rows: usize, format: RowFormat) -> Self {
        WorkspaceOptions {
            capacity_rows,
            format,
            slots: 2,
            ubatches: 1,
            way: None,
            blocks: None,
        }
    }

    /// Slots per ubatch, 2 by default and at least. With S slots, a zero-copy result is valid
    /// until the call S - 1 calls later is issued.
    #[must_use]
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// Independent sequences of calls, 1 by default, each with slots and an epoch of its own.
    #[must_use]
    pub fn ubatches(mut self, ubatches: usize) -> Self {
        self.ubatches = ubatches;
        self
    }

    /// Forces a way. By default the group takes the shared slot.
    #[must_use]
    pub fn way(mut self, way: Way) -> Self {
        self.way = Some(way);
        self
    }

    /// Threads that share a rank's copies, at least 1. By default the machine's cores divided by
    /// the ranks, 8 at most.
    #[must_use]
    pub fn blocks(mut self, blocks: usize) -> Self {
        self.blocks = Some(blocks);
        self
    }

    /// Bytes of shared memory that a workspace of these options takes on this machine, over all
    /// `world_size` ranks, plus the private memory of [`Way::Pull`].
    ///
    /// # Errors
    /// [`WorkspaceError::InvalidArgument`], as [`Workspace::new`] would say.
    pub fn memory_bytes(&self, world_size: usize) -> Result<usize, WorkspaceError> {
        let geometry = self.geometry(world_size)?;
        let private = match geometry.way {
            HostWay::Pull => self
                .capacity_rows
                .checked_mul(self.format.row_bytes())
                .and_then(|bytes| bytes.checked_mul(self.slots))
                .and_then(|bytes| bytes.checked_mul(self.ubatches)),
            HostWay::Shared | HostWay::Push => Some(0),
        };
        geometry
            .mapping_bytes()
            .and_then(|bytes| bytes.checked_mul(geometry.mappings() as usize))
            .and_then(|bytes| bytes.checked_add(private?.checked_mul(world_size)?))
            .ok_or_else(|| self.too_large())
    }

    /// Checks everything that does not need the peers.
    fn geometry(&self, world_size: usize) -> Result<Geometry, WorkspaceError> {
        let row_bytes = self.format.row_bytes();
        if world_size < 2 {
            return Err(invalid("world_size", "at least two ranks", world_size));
        }
        if self.ubatches == 0 {
            return Err(invalid("ubatches", "at least one ubatch", 0));
        }
        if self.slots < 2 {
            return Err(invalid(
                "slots",
                "at least 2, or a peer overwrites rows in use",
                self.slots,
            ));
        }
        if self.format.dim() == 0 {
            return Err(invalid("dim", "a positive number of elements in a row", 0));
        }
        if self.capacity_rows == 0 {
            return Err(invalid("capacity_rows", "a positive number of rows", 0));
        }
        if !self.capacity_rows.is_multiple_of(world_size) {
            let expected = format!("rows that divide evenly over {world_size} ranks");
            return Err(invalid("capacity_rows", expected, self.capacity_rows));
        }
        if self.blocks == Some(0) {
            return Err(invalid("blocks", "at least 1", 0));
        }
        let narrow = |value: usize| u32::try_from(value).map_err(|_| self.too_large());
        Ok(Geometry {
            world_size: narrow(world_size)?,
            slots: narrow(self.slots)?,
            ubatches: narrow(self.ubatches)?,
            capacity_rows: narrow(self.capacity_rows)?,
            row_bytes: narrow(row_bytes)?,
            way: self.way.unwrap_or(Way::SharedSlot).host(),
        })
    }

    fn too_large(&self) -> WorkspaceError {
        let got = format!(
            "{} rows of {} bytes, {} slots, {} ubatches",
            self.capacity_rows,
            self.format.row_bytes(),
            self.slots,
            self.ubatches
        );
        invalid("workspace", "a size that memory can hold", got)
    }

    fn blocks_or_default(&self, world_size: usize) -> NonZeroU32 {
        let blocks = self
            .blocks
            .unwrap_or_else(|| (cores() / world_size).clamp(1, 8));
        u32::try_from(blocks)
            .ok()
            .and_then(NonZeroU32::new)
            .unwrap_or(NonZeroU32::MIN)
    }
}

/// Symmetric memory of a group: `[ubatches, slots, capacity_rows, row_bytes]` and its signals.
///
/// Building one is collective: every rank of the group calls [`Workspace::new`], with the same
/// options, in the same order as its other collective calls.
pub struct Workspace {
    group: Group,
    options: WorkspaceOptions,
    way: Way,
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
        let checked = options.geometry(group.world_size());
        let geometry = agree(group, &options, checked)?;
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
        let blocks = options.blocks_or_default(group.world_size());
        let lanes = (0..geometry.ubatches)
            .map(|ubatch| {
                let lane = LaneOptions {
                    geometry,
                    rank: group.rank() as u32,
                    ubatch,
                    blocks,
                    spin: group.world_size().saturating_mul(blocks.get() as usize) <= cores(),
                };
                Lane::new(lane, &mappings, group.control().clone())
                    .map(Arc::new)
                    .map_err(|error| refused(group, error))
            })
            .collect::<Result<Vec<_>, _>>();
        let lanes = everybody(group, lanes)?;
        let way = options.way.unwrap_or(Way::SharedSlot);
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
            lanes,
        })
    }

    /// The way that the group has taken.
    #[must_use]
    pub fn way(&self) -> Way {
        self.way
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

/// Why a workspace could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkspaceError {
    /// An option that no group could use.
    #[error("{what}: expected {expected}, got {got}")]
    InvalidArgument {
        /// The option.
        what: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// Ranks asked for different workspaces: pass the same options on every rank.
    #[error(
        "rank {source_rank} asks for {field} {theirs}, this rank for {ours}: pass the same options on every rank"
    )]
    Mismatch {
        /// The rank that differs.
        source_rank: usize,
        /// The option that differs.
        field: &'static str,
        /// This rank's value.
        ours: String,
        /// That rank's value.
        theirs: String,
    },
    /// A rank could not do its part, so no rank has the workspace.
    #[error("rank {rank} could not build the workspace: {reason}")]
    Refused {
        /// The rank.
        rank: usize,
        /// What it said.
        reason: String,
    },
    /// The group failed during set-up.
    #[error(transparent)]
    Group(#[from] GroupError),
}

fn cores() -> usize {
    available_parallelism().map_or(1, usize::from)
}

fn invalid(
    what: &'static str,
    expected: impl Into<String>,
    got: impl fmt::Display,
) -> WorkspaceError {
    WorkspaceError::InvalidArgument {
        what,
        expected: expected.into(),
        got: got.to_string(),
    }
}

fn refused(group: &Group, reason: impl fmt::Display) -> WorkspaceError {
    WorkspaceError::Refused {
        rank: group.rank(),
        reason: reason.to_string(),
    }
}

/// Exchanges outcomes, so that one rank's failure is everybody's.
fn everybody<T>(group: &Group, ours: Result<T, WorkspaceError>) -> Result<T, WorkspaceError> {
    let reason = ours
        .as_ref()
        .err()
        .map(ToString::to_string)
        .unwrap_or_default();
    let reasons = group.all_gather(reason.as_bytes())?;
    let ours = ours?;
    match reasons.iter().position(|reason| !reason.is_empty()) {
        None => Ok(ours),
        Some(rank) => Err(WorkspaceError::Refused {
            rank,
            reason: String::from_utf8_lossy(&reasons[rank]).into_owned(),
        }),
    }
}

/// Exchanges what every rank asks for. A rank whose options are unusable says so, or its peers
/// would wait for it.
fn agree(
    group: &Group,
    options: &WorkspaceOptions,
    checked: Result<Geometry, WorkspaceError>,
) -> Result<Geometry, WorkspaceError> {
    const FIELDS: [&str; 6] = ["capacity_rows", "dtype", "dim", "slots", "ubatches", "way"];
    let asked = [
        options.capacity_rows.to_string(),
        options.format.dtype().to_string(),
        options.format.dim().to_string(),
        options.slots.to_string(),
        options.ubatches.to_string(),
        options
            .way
            .map_or("automatic".to_string(), |way| way.to_string()),
    ];
    let geometry = everybody(group, checked)?;
    for (source_rank, theirs) in group
        .all_gather(asked.join("\n").as_bytes())?
        .iter()
        .enumerate()
    {
        let theirs = String::from_utf8_lossy(theirs);
        let mut theirs = theirs.split('\n');
        for (field, ours) in FIELDS.into_iter().zip(&asked) {
            let theirs = theirs.next().unwrap_or_default();
            if ours != theirs {
                let (ours, theirs) = (ours.clone(), theirs.to_string());
                return Err(WorkspaceError::Mismatch {
                    source_rank,
                    field,
                    ours,
                    theirs,
                });
            }
        }
    }
    Ok(geometry)
}
