//! What a workspace is asked to be, and how the ranks agree on it.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::thread::available_parallelism;

use direct_dcp_cuda::gather::{Delivery, Layout};
use direct_dcp_kernels::host::{Geometry, Way as HostWay};

use crate::format::RowFormat;
use crate::group::{Group, GroupError};
use crate::tuning::{Setting, Tuning};

/// Blocks of a launch at most.
pub(crate) const MOST_BLOCKS: usize = 1024;

/// How rows travel between ranks.
///
/// A group chooses when it builds its workspace. On CPUs the memory is laid out for one way, which
/// all calls take. On GPUs each call takes one by its kind and size, the same on all ranks:
/// [`cuda::Workspace::way_of`](crate::cuda::Workspace::way_of) says which. An option,
/// [`WorkspaceOptions::way`], forces one for all calls, and a table of measurements,
/// [`WorkspaceOptions::tuning`], is followed where it has entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Way {
    /// CPU. All ranks map the same slots, so each row is written once for everybody. The default
    /// there: the least memory and the fewest copies.
    SharedSlot,
    /// GPU. One store reaches the memory of all ranks. The default for all calls where every device
    /// offers it and the group's self-test passes.
    Multicast,
    /// Every rank has slots of its own and stores its rows into those of all ranks. The default on
    /// GPUs without multicast for calls that lend their rows, and for final layouts.
    Push,
    /// Every rank stages its rows once, and the others read them there. The default on GPUs without
    /// multicast for calls that copy out. The zero-copy gather of the CPU lends a private copy.
    Pull,
    /// GPU. Rows are pushed by the copy engines, which leaves the multiprocessors to others; in a
    /// final layout run by run, if they are neither paged nor converted. Cannot be captured into a
    /// graph: forced, such a call is refused; chosen by a [tuning table](crate::tuning), it is
    /// captured by push.
    CopyEngine,
    /// GPU. The algorithm that the others replace: rows are pushed, published and copied out of
    /// staging by three launches. For comparison only, never chosen by a group.
    Staged,
}

impl Way {
    /// The ways between CPU ranks.
    pub const CPU: [Way; 3] = [Way::SharedSlot, Way::Push, Way::Pull];

    /// The ways between GPU ranks.
    pub const CUDA: [Way; 5] = [
        Way::Multicast,
        Way::Push,
        Way::Pull,
        Way::CopyEngine,
        Way::Staged,
    ];
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Way::SharedSlot => "shared-slot",
            Way::Multicast => "multicast",
            Way::Push => "push",
            Way::Pull => "pull",
            Way::CopyEngine => "copy-engine",
            Way::Staged => "staged",
        })
    }
}

/// The size of a workspace. All ranks must ask for the same.
#[derive(Clone, Debug)]
pub struct WorkspaceOptions {
    pub(crate) capacity_rows: usize,
    pub(crate) format: RowFormat,
    pub(crate) slots: usize,
    pub(crate) ubatches: usize,
    pub(crate) way: Option<Way>,
    pub(crate) tuning: Option<Arc<Tuning>>,
    pub(crate) blocks: Option<usize>,
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
            tuning: None,
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

    /// Forces a way for all calls. By default the group takes the best ones that work for every
    /// rank.
    #[must_use]
    pub fn way(mut self, way: Way) -> Self {
        self.way = Some(way);
        self
    }

    /// Has calls take the ways that `table` names, where it has entries for this group. A forced
    /// way goes before it, and so does a number of blocks. All ranks need equal tables.
    ///
    /// On GPUs that is decided for each call. On CPUs the memory is laid out once: by the entry for
    /// zero-copy calls of the workspace's capacity, or where there is none, for those that copy out.
    /// If that is [`Way::Pull`] there are no final layouts.
    #[must_use]
    pub fn tuning(mut self, table: Tuning) -> Self {
        self.tuning = Some(Arc::new(table));
        self
    }

    /// Blocks that share a rank's copies, 1 to 1,024. On CPUs a block is a thread, and the default
    /// is the machine's cores divided by the ranks, 8 at most. On GPUs this is a limit, for those
    /// who leave the multiprocessors to other work; the default is as many as pay, and fit.
    ///
    /// On a GPU all blocks of a call that copies out, or goes by [`Way::Pull`], wait for the peers,
    /// and keep their places. Those of one workspace's calls, on all ubatches, fit together. Where
    /// calls of several workspaces are under way at once, in orders that may differ between ranks,
    /// their limits must add up to two for each multiprocessor at most, over ubatches and ranks on the
    /// device; and beside kernels of others that wait for peers on another stream, to what leaves room
    /// for those.
    #[must_use]
    pub fn blocks(mut self, blocks: usize) -> Self {
        self.blocks = Some(blocks);
        self
    }

    /// Bytes of shared memory that a CPU workspace of these options takes on this machine, over
    /// all `world_size` ranks, plus the private memory of [`Way::Pull`]. With a tuning table that is
    /// the most that it may come to.
    ///
    /// # Errors
    /// [`WorkspaceError::InvalidArgument`] and [`WorkspaceError::Unsupported`], as
    /// [`Workspace::new`](crate::Workspace::new) would say.
    pub fn memory_bytes(&self, world_size: usize) -> Result<usize, WorkspaceError> {
        // What it is for, threads or processes, is not known yet.
        let settings = [true, false].map(|threads| Setting::cpu(threads, world_size));
        let mut most = 0;
        for setting in &settings {
            most = most.max(self.settled(setting).memory_of_way(world_size)?);
        }
        Ok(most)
    }

    /// The same for the way that is forced, or the default one.
    fn memory_of_way(&self, world_size: usize) -> Result<usize, WorkspaceError> {
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

    /// Bytes of device memory that a GPU workspace of these options takes for each rank, before
    /// the driver rounds up to its granularity (2 MiB on an H200).
    ///
    /// # Errors
    /// [`WorkspaceError::InvalidArgument`], as
    /// [`cuda::Workspace::new`](crate::cuda::Workspace::new) would say.
    pub fn device_bytes(&self, world_size: usize) -> Result<usize, WorkspaceError> {
        let bytes = self.layout(world_size)?.bytes();
        bytes
            .and_then(|bytes| bytes.try_into().ok())
            .ok_or_else(|| self.too_large())
    }

    /// These options, with what a table says of a CPU workspace in place of the table.
    pub(crate) fn settled(&self, setting: &Setting) -> Self {
        let slice = self.capacity_rows / setting.ranks.max(1);
        let slice = slice.saturating_mul(self.format.row_bytes());
        let entry = |delivery| self.tuning.as_ref()?.entry(setting, delivery, slice);
        let entry = entry(Delivery::ZeroCopy).or_else(|| entry(Delivery::CopyOut));
        let entry = entry.filter(|_| self.way.is_none());
        WorkspaceOptions {
            way: self.way.or(entry.map(|entry| entry.way)),
            blocks: self.blocks.or(entry.and_then(|entry| entry.blocks)),
            tuning: None,
            ..self.clone()
        }
    }

    /// What a CPU workspace looks like, if it can be.
    pub(crate) fn geometry(&self, world_size: usize) -> Result<Geometry, WorkspaceError> {
        let layout = self.layout(world_size)?;
        let way = match self.way {
            None | Some(Way::SharedSlot) => HostWay::Shared,
            Some(Way::Push) => HostWay::Push,
            Some(Way::Pull) => HostWay::Pull,
            Some(way @ (Way::Multicast | Way::CopyEngine | Way::Staged)) => {
                return Err(WorkspaceError::Unsupported {
                    capability: way.to_string(),
                    reason: "the ranks are on CPUs".into(),
                    instead: "shared-slot, push or pull".into(),
                });
            }
        };
        let Layout {
            world_size,
            slots,
            ubatches,
            capacity_rows,
            row_bytes,
        } = layout;
        Ok(Geometry {
            world_size,
            slots,
            ubatches,
            capacity_rows,
            row_bytes,
            way,
        })
    }

    /// Checks everything that needs neither the peers nor a device.
    pub(crate) fn layout(&self, world_size: usize) -> Result<Layout, WorkspaceError> {
        let row_bytes = self.format.row_bytes();
        if world_size < 2 {
            return Err(invalid("world_size", "at least two ranks", world_size));
        }
        if self.ubatches == 0 {
            return Err(invalid("ubatches", "at least one ubatch", 0));
        }
        if self.slots < 2 {
            let expected = "at least 2, or a peer overwrites rows in use";
            return Err(invalid("slots", expected, self.slots));
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
        if let Some(blocks) = self.blocks
            && !(1..=MOST_BLOCKS).contains(&blocks)
        {
            return Err(invalid("blocks", format!("1 to {MOST_BLOCKS}"), blocks));
        }
        let narrow = |value: usize| u32::try_from(value).map_err(|_| self.too_large());
        Ok(Layout {
            world_size: narrow(world_size)?,
            slots: narrow(self.slots)?,
            ubatches: narrow(self.ubatches)?,
            capacity_rows: narrow(self.capacity_rows)?,
            row_bytes: narrow(row_bytes)?,
        })
    }

    pub(crate) fn too_large(&self) -> WorkspaceError {
        let got = format!(
            "{} rows of {} bytes, {} slots, {} ubatches",
            self.capacity_rows,
            self.format.row_bytes(),
            self.slots,
            self.ubatches
        );
        invalid("workspace", "a size that memory can hold", got)
    }

    pub(crate) fn blocks_or_default(&self, world_size: usize) -> NonZeroU32 {
        let blocks = self
            .blocks
            .unwrap_or_else(|| (cores() / world_size).clamp(1, 8));
        u32::try_from(blocks)
            .ok()
            .and_then(NonZeroU32::new)
            .unwrap_or(NonZeroU32::MIN)
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
    /// The machine or the group cannot do what was asked.
    #[error("{capability} cannot be had: {reason}; use {instead}")]
    Unsupported {
        /// What was asked.
        capability: String,
        /// Why it cannot be had.
        reason: String,
        /// What can.
        instead: String,
    },
    /// The group failed during set-up.
    #[error(transparent)]
    Group(#[from] GroupError),
}

pub(crate) fn cores() -> usize {
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

pub(crate) fn refused(group: &Group, reason: impl fmt::Display) -> WorkspaceError {
    WorkspaceError::Refused {
        rank: group.rank(),
        reason: reason.to_string(),
    }
}

/// Exchanges outcomes, so that one rank's failure is everybody's.
pub(crate) fn everybody<T>(
    group: &Group,
    ours: Result<T, WorkspaceError>,
) -> Result<T, WorkspaceError> {
    let reason = match &ours {
        Ok(_) => String::new(),
        // The peers' error will say so itself.
        Err(WorkspaceError::Refused { reason, .. }) => reason.clone(),
        Err(error) => error.to_string(),
    };
    let reasons = group.all_gather(reason.as_bytes());
    // What is wrong with this rank says more than that the others did not come.
    let ours = ours?;
    let reasons = reasons?;
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
pub(crate) fn agree<T>(
    group: &Group,
    options: &WorkspaceOptions,
    checked: Result<T, WorkspaceError>,
) -> Result<T, WorkspaceError> {
    const FIELDS: [&str; 7] = [
        "capacity_rows",
        "dtype",
        "dim",
        "slots",
        "ubatches",
        "way",
        "tuning",
    ];
    let asked = [
        options.capacity_rows.to_string(),
        options.format.dtype().to_string(),
        options.format.dim().to_string(),
        options.slots.to_string(),
        options.ubatches.to_string(),
        options
            .way
            .map_or("automatic".to_string(), |way| way.to_string()),
        options
            .tuning
            .as_ref()
            .map_or("no table".to_string(), |table| table.digest()),
    ];
    let agreed = everybody(group, checked)?;
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
    Ok(agreed)
}
