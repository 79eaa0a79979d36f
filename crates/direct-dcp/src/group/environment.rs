//! Bring-up by environment variables: torchrun's, and those of this crate.

use super::DEFAULT_TIMEOUT;
use super::bringup::{self, Places, check_rank, own_user};
use super::error::{GroupError, io_error};
use super::fabric::Generation;
use super::launcher;
use std::env;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A directory in which the ranks meet, if their launcher names one.
const DIR: &str = "DIRECT_DCP_DIR";

/// Seconds to wait for the other ranks.
const TIMEOUT: &str = "DIRECT_DCP_TIMEOUT";

/// The group that the environment describes, and its timeout: the one given, else the
/// environment's.
pub(super) fn from_environment(
    given: Option<Duration>,
) -> Result<(Generation, Duration), GroupError> {
    let rank: usize = required("RANK")?;
    let world: usize = required("WORLD_SIZE")?;
    check_rank(rank, world)?;
    check_one_machine(world)?;
    let timeout = match given {
        Some(timeout) => timeout,
        None => timeout()?,
    };
    let generation = match text(launcher::SOCKETS)? {
        Some(value) => {
            let sockets = launcher::inherited(&value, rank, world, timeout)?;
            bringup::over_sockets(rank, sockets, timeout)?
        }
        None => match env::var_os(DIR) {
            Some(dir) => in_directory(Path::new(&dir), rank, world, timeout, || ())?,
            None => {
                let dir = agreed_directory()?;
                // Only goes if it is empty. Nothing depends on it.
                let remove = || {
                    let _ = fs::remove_dir(&dir);
                };
                let met = || {
                    if rank == 0 {
                        remove();
                    }
                };
                let built = in_directory(&dir, rank, world, timeout, met);
                if built.is_err() {
                    // Whoever is the last to give up finds it empty.
                    remove();
                }
                built?
            }
        },
    };
    Ok((generation, timeout))
}

/// How long the environment says to wait.
fn timeout() -> Result<Duration, GroupError> {
    match parsed::<f64>(TIMEOUT)? {
        None => Ok(DEFAULT_TIMEOUT),
        Some(seconds) => Duration::try_from_secs_f64(seconds)
            .map_err(|_| wrong(TIMEOUT, "is no number of seconds; set it to 60, say".into())),
    }
}

/// In a directory that all ranks know.
pub(super) fn in_directory(
    dir: &Path,
    rank: usize,
    world: usize,
    timeout: Duration,
    met: impl FnOnce(),
) -> Result<Generation, GroupError> {
    check_rank(rank, world)?;
    let listener = bringup::listen(dir, rank)?;
    bringup::over_directories(rank, world, &Places::Shared(dir), listener, timeout, met)
}

/// Refuses what torchrun says about ranks on other machines.
fn check_one_machine(world: usize) -> Result<(), GroupError> {
    let local: usize = parsed("LOCAL_WORLD_SIZE")?.unwrap_or(world);
    if local != world {
        return Err(GroupError::Unsupported {
            capability: "a group across machines",
            reason: format!("WORLD_SIZE is {world}, but LOCAL_WORLD_SIZE is {local}"),
            instead: "make one group per machine, and use NCCL or MPI between them",
        });
    }
    match parsed::<usize>("LOCAL_RANK")? {
        Some(rank) if rank >= local => Err(wrong(
            "LOCAL_RANK",
            format!("is {rank}, but there are only {local} ranks here; number them from 0"),
        )),
        _ => Ok(()),
    }
}

/// The private directory in which the ranks of one run meet: its name follows from what they have
/// in common and no other run on this machine has.
fn agreed_directory() -> Result<PathBuf, GroupError> {
    let address: String = required("MASTER_ADDR")?;
    let port: u16 = required("MASTER_PORT")?;
    let run = text("TORCHELASTIC_RUN_ID")?.unwrap_or_default();
    let restart = text("TORCHELASTIC_RESTART_COUNT")?.unwrap_or_default();
    let base = match env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from) {
        Some(dir) if dir.is_dir() => dir,
        _ => env::temp_dir(),
    };
    // Where many users share the base, so that they do not share names.
    let user = own_user()?;
    let run = digest(&format!("{address}\n{port}\n{run}\n{restart}"));
    let dir = base.join(format!("direct-dcp-{user}-{run:016x}"));
    match fs::DirBuilder::new().mode(0o700).create(&dir) {
        Ok(()) => Ok(dir),
        // By another rank, or by somebody else, which is found out before it is used.
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(dir),
        Err(error) => {
            let what = format!(
                "creating the directory {}, where the ranks meet; name another in {DIR}",
                dir.display()
            );
            Err(io_error(what)(error))
        }
    }
}

/// FNV-1a. It only keeps a name short; who may use the directory is checked otherwise.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn required<T: std::str::FromStr>(variable: &'static str) -> Result<T, GroupError> {
    parsed(variable)?.ok_or_else(|| {
        let reason = "is not set; start the ranks with torchrun (or, in Rust, the Launcher), or \
                      set it as torchrun does";
        wrong(variable, reason.into())
    })
}

fn parsed<T: std::str::FromStr>(variable: &'static str) -> Result<Option<T>, GroupError> {
    let Some(value) = text(variable)? else {
        return Ok(None);
    };
    match value.trim().parse() {
        Ok(value) => Ok(Some(value)),
        Err(_) => Err(wrong(
            variable,
            format!("is {value:?}, which is no number that it can have"),
        )),
    }
}

fn text(variable: &'static str) -> Result<Option<String>, GroupError> {
    match env::var(variable) {
        Ok(value) => Ok(Some(value)),
        Err(env::VarError::NotPresent) => Ok(None),
        Err(env::VarError::NotUnicode(_)) => Err(wrong(variable, "is not valid UTF-8".into())),
    }
}

fn wrong(variable: &'static str, reason: String) -> GroupError {
    GroupError::Environment { variable, reason }
}
