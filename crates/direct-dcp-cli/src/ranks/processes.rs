//! Ranks that are processes of their own: this program again, with a hidden subcommand.
//!
//! The parent writes each one a ticket on its standard input and reads frames from its standard
//! output. The ranks meet in a private directory that the parent made. No rank outlives its parent:
//! the kernel kills it when the parent ends, however that happens.

use super::wire::Frame;
use super::{Failures, Message, RankError, Task};
use crate::error::{Error, plain};
use crate::{again, interrupt, machine};
use direct_dcp::Group;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use std::fs::{self, Permissions};
use std::io::{BufReader, BufWriter, IsTerminal, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// The subcommand that makes this program a rank.
pub(crate) const SUBCOMMAND: &str = "rank";

/// How often it is looked whether a signal came.
const TICK: Duration = Duration::from_millis(50);

/// How long the other ranks may take to say what they know of a failure, before they are killed.
const GRACE: Duration = Duration::from_millis(500);

/// Descriptors that a process needs besides one for each rank.
const OTHER_DESCRIPTORS: usize = 64;

/// What a rank needs to know.
#[derive(Debug, Serialize, Deserialize)]
struct Ticket<T> {
    rank: usize,
    world_size: usize,
    /// Where to meet, as bytes.
    dir: Vec<u8>,
    /// Who starts it.
    parent: u32,
    task: T,
}

/// What a rank's reader reports.
enum Event {
    Said(usize, Message),
    /// It is the rank's last: why it failed, or whether it said that it is done.
    Ended(usize, Result<bool, RankError>),
}

pub(super) fn run(
    world_size: usize,
    task: &Task,
    on_message: &mut dyn FnMut(Message) -> Result<(), Error>,
) -> Result<(), Error> {
    machine::want_descriptors(2 * world_size + OTHER_DESCRIPTORS);
    let dir = tempfile::Builder::new()
        .prefix("direct-dcp-")
        .permissions(Permissions::from_mode(0o700))
        .tempdir()
        .map_err(Error::io("making a directory for the ranks to meet in"))?;
    let (sender, events) = sync_channel(64);
    // Declared after the directory, and so dropped before it.
    let mut ranks = Ranks(Vec::new());
    for rank in 0..world_size {
        interrupt::check()?;
        let ticket = Ticket {
            rank,
            world_size,
            dir: dir.path().as_os_str().as_bytes().to_vec(),
            parent: std::process::id(),
            task,
        };
        let child = start(&ticket, sender.clone())
            .map_err(|why| Error::Failed(format!("starting rank {rank}: {why}")))?;
        ranks.0.push(child);
    }
    drop(sender);
    watch(&mut ranks, &events, on_message)
}

/// Starts one rank, and a thread that reads what it says.
fn start(ticket: &Ticket<&Task>, events: SyncSender<Event>) -> Result<Child, String> {
    let mut program = again::program().ok_or("it is not known how")?;
    let mut child = program
        .arg(SUBCOMMAND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| plain(&error))?;
    let started = (|| {
        let text = serde_json::to_vec(ticket).map_err(|error| error.to_string())?;
        if let Some(mut input) = child.stdin.take() {
            // If the rank has ended already, its status tells more than we could.
            let _ = input.write_all(&text);
        }
        let output = child.stdout.take().ok_or("it has no output")?;
        let rank = ticket.rank;
        thread::Builder::new()
            .name(format!("reader of rank {rank}"))
            .stack_size(128 << 10)
            .spawn(move || listen(rank, output, &events))
            .map_err(|error| plain(&error))?;
        Ok(())
    })();
    if started.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    started.map(|()| child)
}

/// Passes on what a rank says, until it ends or nobody listens.
fn listen(rank: usize, output: impl Read, events: &SyncSender<Event>) {
    let mut output = BufReader::new(output);
    loop {
        let (event, last) = match Frame::read(&mut output) {
            Some(Frame::Said(message)) => (Event::Said(rank, message), false),
            Some(Frame::Failed(error)) => (Event::Ended(rank, Err(error)), true),
            Some(Frame::Done) => (Event::Ended(rank, Ok(true)), true),
            None => (Event::Ended(rank, Ok(false)), true),
        };
        if events.send(event).is_err() || last {
            return;
        }
    }
}

/// Waits for all ranks, or for the first that fails and then not long for the others.
fn watch(
    ranks: &mut Ranks,
    events: &Receiver<Event>,
    on_message: &mut dyn FnMut(Message) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut failures = Failures::default();
    let mut running = ranks.0.len();
    let mut until = None;
    while running > 0 && until.is_none_or(|until| Instant::now() < until) {
        match events.recv_timeout(TICK) {
            Ok(Event::Said(0, message)) => on_message(message)?,
            Ok(Event::Said(..)) | Err(RecvTimeoutError::Timeout) => {}
            Ok(Event::Ended(rank, ended)) => {
                running -= 1;
                let status = ranks.0[rank]
                    .wait()
                    .map_err(Error::io("waiting for a rank"))?;
                match ended {
                    Ok(true) if status.success() => {}
                    Ok(_) => failures.add(rank, died(status)),
                    Err(error) => failures.add(rank, error),
                }
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if until.is_none() && !failures.is_empty() {
            until = Some(Instant::now() + GRACE);
        }
        interrupt::check()?;
    }
    if !failures.is_empty() {
        // A terminal sends its signal to the ranks as well, and they may be faster to obey.
        thread::sleep(TICK);
        interrupt::check()?;
    }
    failures.cause().map_or(Ok(()), Err)
}

/// How a rank ended that did not say why.
fn died(status: ExitStatus) -> RankError {
    let how = match (status.signal(), status.code()) {
        (Some(9), _) => "killed by signal 9; if nobody did, the system ran out of memory".into(),
        (Some(signal), _) => format!("killed by signal {signal}"),
        (None, code) => format!("gone without a result, exit status {}", code.unwrap_or(-1)),
    };
    format!("its process was {how}").into()
}

/// The ranks that were started. None is left when this is dropped.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Fails only if it was waited for already.
            let _ = child.kill();
        }
        for child in &mut self.0 {
            let _ = child.wait();
        }
    }
}

/// The rank's side: takes a ticket from standard input, and plays the part it describes.
pub(crate) fn serve() -> Result<(), Error> {
    // Before anything else: from here on the parent cannot leave this process behind.
    let bound = set_parent_process_death_signal(Some(Signal::KILL));
    let refused = || {
        Error::Failed(format!(
            "{SUBCOMMAND} is what the program calls itself with; try gather --backend processes"
        ))
    };
    if std::io::stdin().is_terminal() {
        return Err(refused());
    }
    let mut text = Vec::new();
    std::io::stdin()
        .take(1 << 20)
        .read_to_end(&mut text)
        .map_err(Error::io("standard input"))?;
    let ticket: Ticket<Task> = serde_json::from_slice(&text).map_err(|_| refused())?;
    bound.map_err(|error| Error::io("binding to the parent")(error.into()))?;
    let parent = getppid().map(|pid| pid.as_raw_nonzero().get());
    if parent.and_then(|pid| u32::try_from(pid).ok()) != Some(ticket.parent) {
        return Err(Error::Failed(
            "the process that started this rank has ended".into(),
        ));
    }
    machine::want_descriptors(ticket.world_size + OTHER_DESCRIPTORS);
    let mut output = BufWriter::new(std::io::stdout());
    let last = match play(ticket, &mut output) {
        Ok(()) => Frame::Done,
        Err(error) => Frame::Failed(error),
    };
    // The parent reads until we end; if it has ended, nobody is left to tell.
    let _ = last.write(&mut output);
    Ok(())
}

fn play(ticket: Ticket<Task>, output: &mut impl Write) -> Result<(), RankError> {
    let Ticket {
        rank,
        world_size,
        dir,
        task,
        ..
    } = ticket;
    let dir = PathBuf::from(std::ffi::OsString::from_vec(dir));
    let group = meet(&dir, rank, world_size)?;
    group.barrier()?;
    if rank == 0 {
        // All have met, and the program may be killed, which would leave it behind.
        let _ = fs::remove_dir_all(&dir);
    }
    task.run(group, &mut |message| {
        let written = Frame::Said(message).write(output);
        written.map_err(|error| plain(&error).into())
    })
}

/// The more ranks, the longer the last one takes to be started.
fn meet(dir: &Path, rank: usize, world_size: usize) -> Result<Group, RankError> {
    let patience = Duration::from_secs(60 + world_size as u64 / 4);
    Ok(Group::directory(dir, rank, world_size, patience)?)
}
