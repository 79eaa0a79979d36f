//! Ranks that share one GPU: streams of this process, or processes.

mod final_layout;
mod plan;
mod rank;
mod scenarios;

use std::path::PathBuf;
use std::process::ExitCode;

use direct_dcp::{Group, GroupError, Way};

use super::processes::{Killed, Processes, work};
use super::threads;
use crate::case::Case;
use crate::failure::{Failure, Outcome};
use crate::scenarios::Scenario;
use crate::{Backend, scenarios as common};

pub use rank::{CudaGather, CudaRank, CudaRows};

/// The ways between ranks that share a device and report what goes wrong.
const WAYS: [Way; 3] = [Way::Push, Way::Pull, Way::CopyEngine];

/// Common scenarios that say nothing of devices: a call is over for the host as soon as it is
/// submitted, so no second thread finds it under way.
const LEFT_OUT: [&str; 1] = ["one_call_at_a_time"];

/// What is run on a device, in these worlds and with these numbers of blocks.
fn plan(worlds: &'static [usize], blocks: &'static [usize]) -> Vec<Scenario> {
    let common = common::all().iter();
    let common = common.filter(|scenario| !LEFT_OUT.contains(&scenario.name));
    let limited = common.chain(scenarios::ALL).map(|scenario| Scenario {
        worlds,
        blocks: match scenario.blocks {
            [1] => &[1],
            _ => blocks,
        },
        // What is left to chance differs by world and way, too.
        repeats: scenario.repeats.min(2),
        ..*scenario
    });
    limited.collect()
}

fn play(group: Group, device: u32, case: &Case) -> Outcome {
    let rank = CudaRank { group, device };
    match scenarios::part(&case.scenario) {
        Some(part) => part(rank, case),
        None => common::play(rank, case),
    }
}

/// Ranks that are streams of this process, on one device.
#[derive(Clone, Copy, Debug)]
pub struct Streams {
    /// The device.
    pub device: u32,
}

impl Backend for Streams {
    fn name(&self) -> &'static str {
        "cuda-streams"
    }

    fn ways(&self) -> &[Way] {
        &WAYS
    }

    fn scenarios(&self) -> Vec<Scenario> {
        plan(&[2, 4, 8], &[1, 2])
    }

    fn run(&self, case: &Case) -> Vec<Outcome> {
        let device = self.device;
        threads::run(case, move |group, case| play(group, device, case))
    }

    fn alone(&self) -> Option<GroupError> {
        Group::threads(1).err()
    }
}

/// Ranks that are processes, on one device.
#[derive(Clone, Debug)]
pub struct DeviceProcesses(Processes);

impl DeviceProcesses {
    /// Starts `worker` for each rank, with these arguments and the case after them. Its main
    /// function calls [`device_worker`].
    #[must_use]
    pub fn of(worker: impl Into<PathBuf>, arguments: &[&str]) -> Self {
        let with = |processes: Processes, argument: &&str| processes.with(argument);
        DeviceProcesses(arguments.iter().fold(Processes::of(worker), with))
    }

    /// As [`Processes::kill`].
    ///
    /// # Errors
    /// As there.
    pub fn kill(
        &self,
        case: &Case,
        victim: usize,
        after: std::time::Duration,
    ) -> Result<Killed, Failure> {
        self.0.kill(case, victim, after)
    }
}

impl Backend for DeviceProcesses {
    fn name(&self) -> &'static str {
        "cuda-processes"
    }

    fn ways(&self) -> &[Way] {
        &WAYS
    }

    fn scenarios(&self) -> Vec<Scenario> {
        plan(&[2, 4], &[1])
    }

    fn run(&self, case: &Case) -> Vec<Outcome> {
        self.0.run(case)
    }

    fn alone(&self) -> Option<GroupError> {
        self.0.alone()
    }
}

/// What a worker on a device does: as [`worker`](super::worker).
#[must_use]
pub fn device_worker(device: u32) -> ExitCode {
    work(|group, case| play(group, device, case))
}
