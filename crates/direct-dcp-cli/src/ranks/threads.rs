//! Ranks that are threads of this process.

use super::{Failures, Message, RankError, Task};
use crate::error::Error;
use crate::interrupt;
use direct_dcp::Group;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

/// How often it is looked whether a signal came.
const TICK: Duration = Duration::from_millis(50);

/// What a rank's thread reports.
enum Event {
    Said(Message),
    Ended(usize, Result<(), RankError>),
}

pub(super) fn run(
    world_size: usize,
    task: &Task,
    on_message: &mut dyn FnMut(Message) -> Result<(), Error>,
) -> Result<(), Error> {
    let groups = Group::threads(world_size).map_err(|error| error.to_string())?;
    let abort = groups.first().map(Group::abort_handle);
    let abort = || abort.iter().for_each(|group| group.abort());
    let mut failures = Failures::default();
    // What ends the run from here, rather than from a rank.
    let mut stopped = None;
    thread::scope(|scope| {
        let (sender, events) = sync_channel(16);
        let mut running = 0;
        for group in groups {
            let sender = sender.clone();
            let rank = group.rank();
            let body = move || {
                let mut emit = |message| {
                    let sent = sender.send(Event::Said(message));
                    sent.map_err(|_| RankError::from(String::from("nobody listens any more")))
                };
                let ended = catch_unwind(AssertUnwindSafe(|| task.run(group, &mut emit)))
                    .unwrap_or_else(|_| Err(String::from("it panicked; this is a bug").into()));
                // Only if the receiver has gone, which outlives this thread.
                let _ = sender.send(Event::Ended(rank, ended));
            };
            let name = format!("rank {rank}");
            match thread::Builder::new().name(name).spawn_scoped(scope, body) {
                Ok(_) => running += 1,
                Err(error) => {
                    stopped = Some(Error::Failed(format!("starting rank {rank}: {error}")));
                    // The groups that are left are dropped, and their peers find them lost.
                    break;
                }
            }
        }
        drop(sender);
        while running > 0 {
            match events.recv_timeout(TICK) {
                Ok(Event::Said(message)) if stopped.is_none() => {
                    stopped = on_message(message).err();
                }
                Ok(Event::Said(_)) => {}
                Ok(Event::Ended(rank, ended)) => {
                    running -= 1;
                    if let Err(error) = ended {
                        failures.add(rank, error);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if stopped.is_none() {
                stopped = interrupt::check().err();
            }
            if stopped.is_some() {
                abort();
            }
        }
    });
    match stopped.or_else(|| failures.cause()) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
