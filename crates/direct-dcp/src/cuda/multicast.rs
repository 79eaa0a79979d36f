//! One address whose stores reach the memory of all ranks.

use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use direct_dcp_cuda::{
    AddressRange, Context, CudaError, Granularity, HandleTypes, Mapping, MulticastObject,
};

use super::memory::{Fact, SymmetricMemory};
use crate::group::{Group, Passed};
use crate::options::{WorkspaceError, everybody, refused};

/// Variables by which users turn multicast off, and the value that does.
const SWITCHES: [(&str, &str); 3] = [
    ("DIRECT_DCP_DISABLE_MULTICAST", "1"),
    ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"),
    ("NCCL_NVLS_ENABLE", "0"),
];

/// The variable that forbids multicast on this rank, if one does.
pub(super) fn forbidden_by() -> Option<&'static str> {
    let set = |&&(name, off): &&(&str, &str)| std::env::var(name).is_ok_and(|value| value == off);
    SWITCHES.iter().find(set).map(|(name, _)| *name)
}

/// Why the group cannot use multicast, if it cannot.
pub(super) fn obstacle(facts: &[Fact], row_bytes: u32) -> Option<String> {
    if let Some(rank) = facts.iter().position(|fact| !fact.multicast) {
        return Some(format!(
            "rank {rank}'s device does not offer it, or a variable forbids it"
        ));
    }
    let twice = |(rank, fact): &(usize, &Fact)| {
        facts
            .iter()
            .take(*rank)
            .any(|other| other.uuid == fact.uuid)
    };
    if let Some((rank, _)) = facts.iter().enumerate().find(twice) {
        return Some(format!("rank {rank} shares its device with another rank"));
    }
    if !row_bytes.is_multiple_of(16) {
        return Some(format!(
            "rows of {row_bytes} bytes are no 16-byte multiples"
        ));
    }
    None
}

/// One address for the memory of all ranks.
#[derive(Debug)]
pub(super) struct Everywhere {
    own: Arc<Mapping>,
    /// What must stay while any rank may store through it. In one process that is every rank's
    /// part, so that none is unbound before the last rank lets go.
    keep: Vec<Arc<dyn Any + Send + Sync>>,
}

impl Everywhere {
    /// Where the memory begins. Only `multimem` instructions may use it.
    pub(super) fn address(&self) -> u64 {
        self.own.address()
    }

    /// What keeps it alive.
    pub(super) fn keep(&self) -> impl Iterator<Item = Arc<dyn Any + Send + Sync>> {
        self.keep.iter().cloned()
    }
}

/// Collective: maps one address for the `memory` of all ranks.
///
/// Rank 0 creates the object; everybody adds its device, and only when all have, binds its memory,
/// and only when all have, maps. Each step is voted on, since the driver would wait for a missing
/// rank without a deadline.
pub(super) fn map(
    group: &Group,
    context: &Context,
    memory: &SymmetricMemory,
) -> Result<Everywhere, WorkspaceError> {
    let bytes = memory.own().bytes();
    let devices = group.world_size() as u32;
    let cuda = |error: CudaError| refused(group, error);

    let created = (group.rank() == 0)
        .then(|| create(context, devices, bytes))
        .transpose();
    let created = everybody(group, created.map_err(cuda))?;
    let (own, fd) = created.unzip();
    let mut passed = match group.one_process() {
        true => {
            let object = fd.map(|fd| Arc::new(fd) as Arc<dyn Any + Send + Sync>);
            group.pass(Passed { object, fd: None })?
        }
        false => group.pass(Passed { object: None, fd })?,
    };
    let joined = match own {
        Some(own) => Ok(own),
        None => match descriptor(passed.first_mut()) {
            Some(fd) => MulticastObject::import_fd(context, fd, devices, bytes).map_err(cuda),
            None => Err(refused(group, "rank 0 passed no multicast object")),
        },
    };
    let joined = joined.and_then(|mut object| {
        object.add_device(context.device()).map_err(cuda)?;
        Ok(object)
    });
    // Every rank has added its device.
    let object = everybody(group, joined)?;
    let bound = object.complete().and_then(|mut team| {
        team.bind_mapping(0, memory.own(), 0, bytes)?;
        team.bound()
    });
    // Every rank has bound its memory.
    let bound = everybody(group, bound.map_err(cuda))?;
    let mapped = AddressRange::reserve(context, bytes, 0)
        .and_then(|range| bound.map(0, &range, 0, bytes, &[context.device()]));
    let own = everybody(group, mapped.map(Arc::new).map_err(cuda))?;
    let object: Arc<dyn Any + Send + Sync> = own.clone();
    let keep = match group.one_process() {
        false => vec![object],
        true => {
            let object = Some(object);
            let all = group.pass(Passed { object, fd: None })?;
            all.into_iter().filter_map(|passed| passed.object).collect()
        }
    };
    Ok(Everywhere { own, keep })
}

fn create(
    context: &Context,
    devices: u32,
    bytes: usize,
) -> Result<(MulticastObject, OwnedFd), CudaError> {
    let granularity = Granularity::Recommended;
    let handles = HandleTypes::POSIX_FD;
    let object = MulticastObject::create(context, devices, bytes, handles, granularity)?;
    let fd = object.export_fd()?;
    Ok((object, fd))
}

fn descriptor(passed: Option<&mut Passed>) -> Option<BorrowedFd<'_>> {
    let passed = passed?;
    match (&passed.object, &passed.fd) {
        (Some(object), _) => object.downcast_ref::<OwnedFd>().map(AsFd::as_fd),
        (None, fd) => fd.as_ref().map(AsFd::as_fd),
    }
}
