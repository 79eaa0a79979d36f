//! Groups that are brought up and gather, to see whether they can.

use super::{Check, Verdict};
use crate::error::Error;
use crate::gpu::{self, Place};
use crate::ranks::{self, Backend, Emit, Message, RankError};
use direct_dcp::cuda::{self, Delivery, Rehearsal};
use direct_dcp::{DType, Group, KvGather, RowFormat, Way, Workspace, WorkspaceOptions};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Rows of each rank.
const ROWS: usize = 4;

/// How long a call waits on a GPU.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Brings up a group of two and gathers by every way.
pub(super) fn probe(backend: Backend, place: Place) -> Result<Check, Error> {
    let what = backend.name();
    let mut found: Option<Found> = None;
    let task = ranks::Task::Probe(Task { place });
    let result = ranks::run(backend, 2, &task, &mut |message| {
        if let Message::Text(text) = message {
            found = serde_json::from_str(&text).ok();
        }
        Ok(())
    });
    let (uses, change) = match backend {
        Backend::Threads => (
            "memfd, seals, futex",
            "allow memfd_create, fcntl(F_ADD_SEALS), mmap and futex; a container's seccomp profile \
             may refuse them",
        ),
        Backend::Processes => (
            "memfd, seals, futex, Unix sockets, SCM_RIGHTS, a private directory",
            "make the temporary directory writable or set TMPDIR to a short path, and allow Unix \
             sockets with SCM_RIGHTS between processes of one user",
        ),
        Backend::Cuda => (
            "virtual memory, PTX, launches",
            "see what the lines above say of the driver and its devices",
        ),
        Backend::CudaProcesses => (
            "virtual memory, memory as descriptors, SCM_RIGHTS, PTX, launches",
            "see what the lines above say of posix fd and of processes, or make the ranks threads",
        ),
    };
    match (result, found) {
        (Ok(()), Some(found)) => {
            let ways = found.works.join(", ");
            let takes = match found.takes {
                Some(way) => format!("; a group takes {way} unless told otherwise"),
                None => String::new(),
            };
            let found = format!("2 ranks gathered by {ways}{takes} (tried {uses})");
            Ok(Check::new(what, Verdict::Ok, found))
        }
        (Ok(()), None) => Ok(Check::new(
            what,
            Verdict::Failed,
            "the ranks did not report",
        )),
        (Err(Error::Failed(why)), _) => Ok(Check::new(what, Verdict::Failed, why).change(change)),
        (Err(other), _) => Err(other),
    }
}

/// Gathers a few rows by every way.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    place: Place,
}

/// What the ranks found.
#[derive(Debug, Serialize, Deserialize)]
struct Found {
    works: Vec<String>,
    /// What the group takes by itself, if it was left to it.
    takes: Option<String>,
}

impl Task {
    /// One rank's part.
    pub(crate) fn run(&self, group: &Group, emit: &mut Emit<'_>) -> Result<(), RankError> {
        let found = match self.place {
            Place::Cpu => on_cpu(group)?,
            Place::Cuda { device } => on_gpu(group, device)?,
        };
        // Everybody has succeeded when this returns.
        group.barrier()?;
        if group.rank() == 0 {
            let text = serde_json::to_string(&found).map_err(|error| error.to_string())?;
            emit(Message::Text(text))?;
        }
        Ok(())
    }
}

fn on_cpu(group: &Group) -> Result<Found, RankError> {
    let gather = |way: Option<Way>| {
        let gather = KvGather::new(Workspace::new(group, options(group, way))?);
        let way = gather.workspace().way().to_string();
        check(group, &way, &gather.gather(0, &rows(group.rank()))?)?;
        Ok::<_, RankError>(way)
    };
    let takes = gather(None)?;
    let works = Way::CPU.into_iter().map(|way| gather(Some(way)));
    Ok(Found {
        works: works.collect::<Result<_, _>>()?,
        takes: Some(takes),
    })
}

/// Left to itself, a group might try multicast.
fn on_gpu(group: &Group, device: Option<u32>) -> Result<Found, RankError> {
    let ordinal = gpu::ordinal(device, group.rank())?;
    let mut works = Vec::new();
    for way in [Way::Push, Way::Pull, Way::CopyEngine] {
        let workspace = cuda::Workspace::new(group, ordinal, options(group, Some(way)))?;
        let gather = cuda::KvGather::new(workspace)
            .timeout(TIMEOUT)
            .first_timeout(TIMEOUT);
        let local = rows(group.rank());
        let mut rehearsal = Rehearsal::new(&gather, 0, local.len())?;
        rehearsal.set_rows(&local)?;
        // Ranks wait for each other until the next barrier, and nobody allocates or frees.
        group.barrier()?;
        for delivery in [Delivery::CopyOut, Delivery::ZeroCopy] {
            rehearsal.call(delivery)?;
            check(group, &way.to_string(), &rehearsal.read()?)?;
            group.barrier()?;
        }
        works.push(way.to_string());
    }
    Ok(Found { works, takes: None })
}

fn options(group: &Group, way: Option<Way>) -> WorkspaceOptions {
    let options = WorkspaceOptions::new(ROWS * group.world_size(), format());
    match way {
        Some(way) => options.way(way),
        None => options,
    }
}

fn format() -> RowFormat {
    RowFormat::new(DType::Bytes, 1152)
}

fn rows(rank: usize) -> Vec<u8> {
    vec![rank as u8 + 1; ROWS * format().row_bytes()]
}

fn check(group: &Group, way: &str, gathered: &[u8]) -> Result<(), RankError> {
    let expected = (0..group.world_size()).flat_map(rows);
    match gathered.iter().copied().eq(expected) {
        true => Ok(()),
        false => Err(format!("{way} delivered wrong bytes").into()),
    }
}
