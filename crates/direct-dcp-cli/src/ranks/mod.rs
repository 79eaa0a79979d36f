//! Running one task on every rank of a group, with threads or processes as the ranks.

mod processes;
mod threads;
mod wire;

pub(crate) use processes::serve;

use crate::error::Error;
use crate::{bench, doctor, gather};
use direct_dcp::tuning;
use direct_dcp::{GatherError, Group, GroupError, Way, WorkspaceError};
use serde::{Deserialize, Serialize};
use std::fmt;

/// What the ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Backend {
    /// Threads of this process.
    Threads,
    /// Processes of their own.
    Processes,
    /// Threads of this process, each with a stream of a GPU.
    Cuda,
    /// Processes of their own, each with a stream of a GPU. On one GPU they take turns, unless MPS
    /// runs.
    CudaProcesses,
}

impl Backend {
    pub(crate) fn on_gpus(self) -> bool {
        matches!(self, Backend::Cuda | Backend::CudaProcesses)
    }

    /// As on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Backend::Threads => "threads",
            Backend::Processes => "processes",
            Backend::Cuda => "cuda",
            Backend::CudaProcesses => "cuda-processes",
        }
    }

    /// As in a tuning table.
    pub(crate) fn tuned(self) -> tuning::Backend {
        match self {
            Backend::Threads => tuning::Backend::Threads,
            Backend::Processes => tuning::Backend::Processes,
            Backend::Cuda => tuning::Backend::Cuda,
            Backend::CudaProcesses => tuning::Backend::CudaProcesses,
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Threads => "threads",
            Backend::Processes => "processes",
            Backend::Cuda => "threads on GPUs",
            Backend::CudaProcesses => "processes on GPUs",
        })
    }
}

/// How rows travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum WayChoice {
    /// As the group decides.
    Auto,
    /// All ranks map the same slots; each row is written once. CPUs only.
    SharedSlot,
    /// One store reaches all ranks. GPUs only.
    Multicast,
    /// Every rank stores its rows into the slots of all.
    Push,
    /// Every rank stages its rows, and the others read them.
    Pull,
    /// As push, by copy engines. GPUs only.
    CopyEngine,
    /// Three launches with a copy out of staging, which the others replace. GPUs only.
    Staged,
}

impl WayChoice {
    /// Refuses a way that the backend does not have.
    pub(crate) fn check(self, backend: Backend) -> Result<(), Error> {
        let ways: &[Way] = match backend.on_gpus() {
            true => &Way::CUDA,
            false => &Way::CPU,
        };
        match self.forced() {
            Some(way) if !ways.contains(&way) => {
                let ways: Vec<String> = ways.iter().map(Way::to_string).collect();
                Err(Error::Usage(format!(
                    "--way {way} is not for --backend {}; its ways are {}",
                    backend.name(),
                    ways.join(", ")
                )))
            }
            _ => Ok(()),
        }
    }

    /// As on the command line.
    pub(crate) fn name(self) -> String {
        self.forced().map_or("auto".into(), |way| way.to_string())
    }

    pub(crate) fn forced(self) -> Option<Way> {
        match self {
            WayChoice::Auto => None,
            WayChoice::SharedSlot => Some(Way::SharedSlot),
            WayChoice::Push => Some(Way::Push),
            WayChoice::Pull => Some(Way::Pull),
            WayChoice::Multicast => Some(Way::Multicast),
            WayChoice::CopyEngine => Some(Way::CopyEngine),
            WayChoice::Staged => Some(Way::Staged),
        }
    }
}

/// Refuses ways by which no rows arrive in final layout, or none from pages.
pub(crate) fn check_final(ways: &[WayChoice], paged: bool) -> Result<(), Error> {
    let mut refused = ways.iter().filter_map(|way| match way.forced() {
        Some(way @ Way::Pull) => Some((way, "whose rows stay where they are")),
        Some(way @ Way::Staged) => Some((way, "whose rows travel in one piece")),
        Some(way @ Way::CopyEngine) if paged => {
            Some((way, "which does not know where in its pages a row is"))
        }
        _ => None,
    });
    match refused.next() {
        None => Ok(()),
        Some((way, why)) => Err(Error::Usage(format!(
            "--layout request-major{} is not for --way {way}, {why}; use push, or shared-slot on CPUs \
             and multicast on GPUs",
            if paged { " with --paged" } else { "" },
        ))),
    }
}

/// What every rank is to do. It travels to processes as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Task {
    Gather(gather::Task),
    Bench(bench::Task),
    Replay(bench::ReplayTask),
    Tune(bench::TuneTask),
    Probe(doctor::Task),
}

impl Task {
    /// The part of the rank that `group` is. What rank 0 emits arrives where the ranks were started.
    fn run(&self, group: Group, emit: &mut Emit<'_>) -> Result<(), RankError> {
        match self {
            Task::Gather(task) => task.run(&group, emit),
            Task::Bench(task) => task.run(&group, emit),
            Task::Replay(task) => task.run(&group, emit),
            Task::Tune(task) => task.run(&group, emit),
            Task::Probe(task) => task.run(&group, emit),
        }
    }
}

/// Takes what a rank has to say, while it runs.
pub(crate) type Emit<'a> = dyn FnMut(Message) -> Result<(), RankError> + 'a;

/// Something that a rank says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// JSON.
    Text(String),
    /// Rows.
    Bytes(Vec<u8>),
}

/// Why a rank did not finish.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RankError {
    message: String,
    /// Whether it is only the echo of another rank's failure.
    echo: bool,
    /// Whether all ranks say the same, with the name of the one that it is about.
    common: bool,
}

impl From<String> for RankError {
    fn from(message: String) -> Self {
        RankError {
            message,
            echo: false,
            common: false,
        }
    }
}

impl From<GatherError> for RankError {
    fn from(error: GatherError) -> Self {
        let echo = matches!(
            error,
            GatherError::PeerLost { .. }
                | GatherError::Aborted { .. }
                | GatherError::Poisoned { .. }
                | GatherError::Timeout { .. }
        );
        RankError {
            message: error.to_string(),
            echo,
            common: false,
        }
    }
}

impl From<GroupError> for RankError {
    fn from(error: GroupError) -> Self {
        let echo = matches!(
            error,
            GroupError::PeerLost { .. }
                | GroupError::Rebuilding { .. }
                | GroupError::Aborted { .. }
                | GroupError::PeerFailed { .. }
                | GroupError::Timeout { .. }
        );
        RankError {
            message: error.to_string(),
            echo,
            common: false,
        }
    }
}

impl From<WorkspaceError> for RankError {
    fn from(error: WorkspaceError) -> Self {
        match error {
            WorkspaceError::Group(error) => error.into(),
            error => RankError {
                common: matches!(
                    error,
                    WorkspaceError::Refused { .. } | WorkspaceError::Unsupported { .. }
                ),
                ..error.to_string().into()
            },
        }
    }
}

/// Runs `task` on `world_size` ranks, and passes on what rank 0 says. When it returns, all ranks
/// have ended.
///
/// If a rank fails, the error is the first cause, not one of its echoes on other ranks.
pub(crate) fn run(
    backend: Backend,
    world_size: usize,
    task: &Task,
    on_message: &mut dyn FnMut(Message) -> Result<(), Error>,
) -> Result<(), Error> {
    match backend {
        Backend::Threads | Backend::Cuda => threads::run(world_size, task, on_message),
        Backend::Processes | Backend::CudaProcesses => processes::run(world_size, task, on_message),
    }
}

/// The failures of a run, from which the one to report is chosen.
#[derive(Debug, Default)]
struct Failures(Vec<(usize, RankError)>);

impl Failures {
    fn add(&mut self, rank: usize, error: RankError) {
        self.0.push((rank, error));
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The failure of which the others are most likely the consequence.
    fn cause(&self) -> Option<Error> {
        let causes = self.0.iter().min_by_key(|(_, error)| error.echo);
        causes.map(|(rank, error)| {
            Error::Failed(match error.common {
                true => error.message.clone(),
                false => format!("rank {rank}: {}", error.message),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_comes_before_its_echoes() {
        let mut failures = Failures::default();
        assert!(failures.cause().is_none());
        failures.add(0, GatherError::PeerLost { rank: 2 }.into());
        failures.add(1, GroupError::PeerLost { rank: 2 }.into());
        failures.add(2, String::from("the disk is full").into());
        let Some(Error::Failed(text)) = failures.cause() else {
            panic!("a failure was added");
        };
        assert_eq!(text, "rank 2: the disk is full");
    }

    #[test]
    fn what_all_ranks_say_names_one_of_them_once() {
        let mut failures = Failures::default();
        let refused = WorkspaceError::Refused {
            rank: 1,
            reason: "no memory".into(),
        };
        failures.add(0, refused.into());
        let Some(Error::Failed(text)) = failures.cause() else {
            panic!("a failure was added");
        };
        assert_eq!(text, "rank 1 could not build the workspace: no memory");
    }
}
