//! Starting the ranks of a group as child processes.
//!
//! Each child gets its sockets without ever leaving them open to others. Its standard input is a
//! channel on which its sockets, one for each peer, wait to be received; the kernel puts standard
//! input in place in that child only. The usual way, clearing close-on-exec before the child is
//! started, would let any child that another thread starts at that moment keep a copy, and a copy
//! keeps a killed rank looking alive.

use super::bringup::check_world;
use super::error::{GroupError, io_error, shm_error};
use super::fabric::deadline;
use super::hub::lock;
use direct_dcp_shm::{Channel, ShmError};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

/// Says where a child finds its sockets.
pub(super) const SOCKETS: &str = "DIRECT_DCP_SOCKETS";

/// The one place known so far.
const STANDARD_INPUT: &str = "stdin";

/// How long a child that receives nothing is waited for. Only groups of some hundred ranks fill
/// a socket's buffer and depend on it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Starts the ranks of one group as child processes, which join it by
/// [`Group::from_env`](super::Group::from_env).
///
/// Every rank is started once, or its sockets are [taken](Self::take) for a rank in this process. A
/// launcher that is dropped before all are started leaves the others to find that out.
///
/// ```no_run
/// use direct_dcp::Launcher;
/// use std::process::Command;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut launcher = Launcher::new(4)?;
/// let mut children = Vec::new();
/// for rank in 0..4 {
///     children.push(launcher.spawn(rank, Command::new("my-engine").arg("--worker"))?);
/// }
/// for mut child in children {
///     child.wait()?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Launcher {
    /// By rank, until it is started.
    ranks: Vec<Option<Vec<Option<OwnedFd>>>>,
}

impl Launcher {
    /// Makes the sockets of `world_size` ranks: one pair for any two of them.
    ///
    /// # Errors
    /// [`GroupError::InvalidArgument`] unless `world_size` is 2 to 1,024, [`GroupError::Shm`] if
    /// the process may not open as many descriptors: `world_size` × (`world_size` − 1).
    pub fn new(world_size: usize) -> Result<Launcher, GroupError> {
        check_world(world_size)?;
        let mut ranks: Vec<Vec<Option<OwnedFd>>> = Vec::with_capacity(world_size);
        for _ in 0..world_size {
            let mut own = Vec::with_capacity(world_size);
            for peer in &mut ranks {
                let (ours, theirs) = Channel::pair().map_err(shm_error(format!(
                    "making the sockets of {world_size} ranks; see ulimit -n"
                )))?;
                own.push(Some(ours.into_fd()));
                peer.push(Some(theirs.into_fd()));
            }
            own.push(None);
            ranks.push(own);
        }
        Ok(Launcher {
            ranks: ranks.into_iter().map(Some).collect(),
        })
    }

    /// Starts `command` as `rank`.
    ///
    /// It sets the child's standard input, which belongs to the launcher and later reads as empty,
    /// and RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and DIRECT_DCP_SOCKETS. Everything else
    /// about the command is the caller's.
    ///
    /// # Errors
    /// [`GroupError::InvalidArgument`] if there is no such rank or it was started or taken already,
    /// [`GroupError::Io`] if the command cannot be started, [`GroupError::Shm`] if the child cannot
    /// be given its sockets; it is then ended.
    pub fn spawn(&mut self, rank: usize, command: &mut Command) -> Result<Child, GroupError> {
        let world = self.ranks.len().to_string();
        let sockets = self.take(rank)?;
        let what = || format!("handing rank {rank} its sockets");
        let (ours, theirs) = Channel::pair().map_err(shm_error(what()))?;
        let program = command.get_program().to_string_lossy().into_owned();
        let started = command
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", &world)
            .env("LOCAL_WORLD_SIZE", &world)
            .env(SOCKETS, STANDARD_INPUT)
            .stdin(Stdio::from(theirs.into_fd()))
            .spawn();
        // The command keeps what it was given; it must not keep the child's end open.
        command.stdin(Stdio::null());
        let mut child = started.map_err(io_error(format!("starting {program} as rank {rank}")))?;
        let until = deadline(PATIENCE);
        for socket in sockets.iter().flatten() {
            match ours.send(&[], Some(socket.as_fd()), until) {
                Ok(()) => {}
                // It has ended already; its status tells more than we could.
                Err(ShmError::Closed) => break,
                Err(error) => {
                    // Only if it ended this very moment, in which case nothing is left to do.
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(shm_error(what())(error));
                }
            }
        }
        Ok(child)
    }

    /// The sockets of a rank, for [`Group::from_sockets`](super::Group::from_sockets) in this
    /// process, or for a launcher that has its own way to start one.
    ///
    /// # Errors
    /// [`GroupError::InvalidArgument`] if there is no such rank or it was started or taken already.
    pub fn take(&mut self, rank: usize) -> Result<Vec<Option<OwnedFd>>, GroupError> {
        let world = self.ranks.len();
        let taken = self.ranks.get_mut(rank).and_then(Option::take);
        taken.ok_or_else(|| GroupError::InvalidArgument {
            what: "rank",
            expected: format!("each of 0 to {} once", world - 1),
            got: rank.to_string(),
        })
    }
}

/// The sockets that the launcher has left for this process.
pub(super) fn inherited(
    value: &str,
    rank: usize,
    world: usize,
    timeout: Duration,
) -> Result<Vec<Option<OwnedFd>>, GroupError> {
    let wrong = |reason: &str| GroupError::Environment {
        variable: SOCKETS,
        reason: reason.into(),
    };
    if value != STANDARD_INPUT {
        return Err(wrong(
            "is not \"stdin\"; leave it to the Launcher, or unset it",
        ));
    }
    // Two that ask at once must not get half each.
    static ASKING: Mutex<()> = Mutex::new(());
    let _turn = lock(&ASKING);
    let input = std::io::stdin().as_fd().try_clone_to_owned();
    let channel = input.ok().and_then(|input| Channel::from_fd(input).ok());
    // A launcher that is done has hung up, which makes the socket look unconnected.
    let channel = channel.ok_or_else(|| {
        wrong(
            "promises sockets on standard input, which is something else; \
             do not redirect the input of what the Launcher starts",
        )
    })?;
    let until = deadline(timeout);
    let mut sockets = Vec::with_capacity(world);
    for peer in 0..world {
        if peer == rank {
            sockets.push(None);
            continue;
        }
        match channel.recv(until) {
            Ok((_, Some(socket))) => sockets.push(Some(socket)),
            Ok((_, None)) => return Err(wrong("promises sockets, and something else came")),
            Err(ShmError::Closed) => {
                return Err(wrong(
                    "promises sockets that are used up; a process can join one group by them",
                ));
            }
            Err(error) => return Err(shm_error("receiving the launcher's sockets")(error)),
        }
    }
    Ok(sockets)
}
