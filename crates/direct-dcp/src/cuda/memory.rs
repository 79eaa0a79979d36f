//! Device memory of all ranks, mapped by each.

use std::any::Any;
use std::os::fd::AsFd;
use std::sync::Arc;

use direct_dcp_cuda::{
    AddressRange, Allocation, Context, CudaError, Device, Granularity, HandleTypes, Mapping,
};

use crate::group::{Group, Passed};
use crate::options::{WorkspaceError, everybody, refused};
use crate::tuning::{Backend, Setting};

/// What each rank tells the others of its device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fact {
    /// Which device it is, the same name in every process.
    pub(super) uuid: [u8; 16],
    /// Whether the rank can and may use multicast.
    pub(super) multicast: bool,
    /// What its maker calls the device.
    pub(super) name: String,
}

impl Fact {
    /// Collective: what every rank tells, in rank order.
    pub(super) fn exchange(group: &Group, own: &Fact) -> Result<Vec<Fact>, WorkspaceError> {
        let mut bytes = own.uuid.to_vec();
        bytes.push(own.multicast.into());
        bytes.extend(own.name.as_bytes());
        let facts = group.all_gather(&bytes)?.into_iter().map(|bytes| {
            let (uuid, rest) = bytes.split_first_chunk()?;
            let (multicast, name) = rest.split_first()?;
            Some(Fact {
                uuid: *uuid,
                multicast: *multicast != 0,
                name: String::from_utf8_lossy(name).into_owned(),
            })
        });
        let facts: Option<Vec<Fact>> = facts.collect();
        facts.ok_or_else(|| refused(group, "a rank of another version sent its device"))
    }
}

/// What the group is to a tuning table, the same on all ranks.
pub(super) fn setting(one_process: bool, facts: &[Fact]) -> Setting {
    let mut devices: Vec<_> = facts.iter().map(|fact| fact.uuid).collect();
    devices.sort_unstable();
    devices.dedup();
    let name = facts.first().map_or("", |fact| &fact.name);
    Setting {
        backend: match one_process {
            true => Backend::Cuda,
            false => Backend::CudaProcesses,
        },
        ranks: facts.len(),
        devices: devices.len(),
        // As a line of a table can hold it.
        device: name.split_whitespace().collect::<Vec<_>>().join(" "),
    }
}

/// Memory of all ranks, in rank order. Ranks of one process share each rank's one mapping, so
/// that no memory has two addresses there.
#[derive(Debug)]
pub(super) struct SymmetricMemory {
    rank: usize,
    all: Vec<Arc<Mapping>>,
}

impl SymmetricMemory {
    /// Collective: allocates `bytes` on this rank's device and maps every rank's.
    pub(super) fn new(
        group: &Group,
        context: &Context,
        bytes: usize,
        facts: &[Fact],
    ) -> Result<Self, WorkspaceError> {
        let own = allocate(group, context, bytes, facts).map_err(|error| refused(group, error));
        let own = everybody(group, own)?;
        let fd = match group.one_process() {
            true => Ok(None),
            false => own
                .allocation()
                .map(|memory| memory.export_fd())
                .transpose(),
        };
        let fd = everybody(group, fd.map_err(|error| refused(group, error)))?;
        let size = own.bytes();
        let object: Arc<dyn Any + Send + Sync> = own.clone();
        let passed = group.pass(Passed {
            object: Some(object),
            fd,
        })?;
        let all = passed.into_iter().enumerate().map(|(rank, passed)| {
            if rank == group.rank() {
                return Ok(own.clone());
            }
            match (passed.object, passed.fd) {
                (Some(object), _) => object
                    .downcast::<Mapping>()
                    .map_err(|_| refused(group, format!("rank {rank} passed something else"))),
                (None, Some(fd)) => {
                    let memory = Allocation::import_fd(context, fd.as_fd(), size)
                        .and_then(|memory| map(context, &memory, &[context.device()]));
                    memory.map_err(|error| refused(group, error))
                }
                (None, None) => Err(refused(group, format!("rank {rank} passed no memory"))),
            }
        });
        let all = everybody(group, all.collect::<Result<Vec<_>, _>>())?;
        Ok(SymmetricMemory {
            rank: group.rank(),
            all,
        })
    }

    /// This rank's own memory.
    pub(super) fn own(&self) -> &Arc<Mapping> {
        // `new` put every rank's into the list.
        &self.all[self.rank]
    }

    /// Where each rank's memory begins, in this rank's addresses.
    pub(super) fn addresses(&self) -> impl Iterator<Item = u64> {
        self.all.iter().map(|mapping| mapping.address())
    }

    /// What keeps all of it alive.
    pub(super) fn keep(&self) -> Vec<Arc<dyn Any + Send + Sync>> {
        self.all
            .iter()
            .map(|mapping| mapping.clone() as Arc<dyn Any + Send + Sync>)
            .collect()
    }
}

/// Memory on this rank's device that every device of this process which the group uses may access.
fn allocate(
    group: &Group,
    context: &Context,
    bytes: usize,
    facts: &[Fact],
) -> Result<Arc<Mapping>, CudaError> {
    // What a multicast object is passed on by, the memory behind it must have as well.
    let passed_on = !group.one_process() || facts.iter().all(|fact| fact.multicast);
    let handles = match passed_on {
        true => HandleTypes::POSIX_FD,
        false => HandleTypes::NONE,
    };
    let memory = Allocation::create(context, bytes, handles, Granularity::Recommended)?;
    if !group.one_process() {
        return map(context, &memory, &[context.device()]);
    }
    let mut devices = Vec::new();
    for device in Device::all(context.driver())? {
        let uuid = device.uuid()?;
        if facts.iter().any(|fact| fact.uuid == uuid) {
            devices.push(device);
        }
    }
    map(context, &memory, &devices.iter().collect::<Vec<_>>())
}

fn map(
    context: &Context,
    memory: &Arc<Allocation>,
    devices: &[&Device],
) -> Result<Arc<Mapping>, CudaError> {
    let range = AddressRange::reserve(context, memory.bytes(), 0)?;
    Mapping::new(&range, 0, memory, memory.bytes(), devices).map(Arc::new)
}
