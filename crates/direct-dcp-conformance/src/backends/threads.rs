//! Ranks that are threads of this process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use direct_dcp::{Group, GroupError};

use super::GroupRank;
use crate::case::Case;
use crate::failure::{Failure, Outcome};
use crate::{Backend, scenarios, step};

/// Ranks that are threads of this process.
#[derive(Clone, Copy, Debug)]
pub struct Threads;

impl Backend for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn run(&self, case: &Case) -> Vec<Outcome> {
        run(case, |group, case| scenarios::play(GroupRank(group), case))
    }

    fn alone(&self) -> Option<GroupError> {
        Group::threads(1).err()
    }
}

/// Plays a case on a group of threads, each of which does its `part`.
pub(super) fn run<P>(case: &Case, part: P) -> Vec<Outcome>
where
    P: Fn(Group, &Case) -> Outcome + Clone + Send + 'static,
{
    let groups = match Group::threads(case.world) {
        Ok(groups) => groups,
        Err(error) => return vec![Err(error.into())],
    };
    let (results, ended) = mpsc::channel();
    let mut threads = Vec::new();
    for (rank, group) in groups.into_iter().enumerate() {
        let (case, results, part) = (case.clone(), results.clone(), part.clone());
        // A rank that hangs is left behind; the watchdog below has the last word.
        let rank = thread::spawn(move || results.send((rank, caught(|| part(group, &case)))));
        threads.push(rank.thread().id());
    }
    drop(results);
    let until = Instant::now() + case.patience();
    let mut outcomes: Vec<Option<Outcome>> = vec![None; case.world];
    while let Ok((rank, outcome)) =
        ended.recv_timeout(until.saturating_duration_since(Instant::now()))
    {
        outcomes[rank] = Some(outcome);
    }
    let hung = |step: Option<String>| {
        let last = step.map_or_else(String::new, |step| format!(", last: {step}"));
        Err(Failure(format!("no end after {:?}{last}", case.patience())))
    };
    let steps = threads.into_iter().map(step::take);
    let judged = outcomes.into_iter().zip(steps);
    judged
        .map(|(outcome, step)| outcome.unwrap_or_else(|| hung(step)))
        .collect()
}

/// Plays a rank's part; a panic is a failure, unless it was the part.
pub(super) fn caught(part: impl FnOnce() -> Outcome) -> Outcome {
    catch_unwind(AssertUnwindSafe(part)).unwrap_or_else(|panic| {
        if panic.is::<scenarios::Deliberate>() {
            return Ok(0);
        }
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied());
        Err(Failure(format!("panicked: {}", text.unwrap_or("?"))))
    })
}
