//! `direct-dcp doctor`: what this machine can do, found out by trying.

use crate::error::Error;
use crate::machine;
use crate::ranks::{self, Backend, Emit, Message, RankError, WayChoice};
use crate::report::{self, Format, Table};
use direct_dcp::{DType, Group, KvGather, RowFormat, Workspace, WorkspaceOptions};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fmt;
use std::fs;
use std::path::Path;

/// Show what this machine can do, and which way a group would take.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Groups of threads and of processes are brought up and gather by every way. The exit status is 0 if
both kinds work.

Example:
  direct-dcp doctor --format json")]
pub(crate) struct Args {
    /// How to print the result
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// It works, but not as well or as far as it could.
    Limited,
    Failed,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Ok => "ok",
            Verdict::Limited => "limited",
            Verdict::Failed => "FAILED",
        })
    }
}

/// One line of the result.
#[derive(Debug, Serialize)]
struct Check {
    what: &'static str,
    verdict: Verdict,
    found: String,
    /// What to change, where something should be.
    #[serde(skip_serializing_if = "Option::is_none")]
    change: Option<String>,
}

impl Check {
    fn new(what: &'static str, verdict: Verdict, found: impl Into<String>) -> Self {
        Check {
            what,
            verdict,
            found: found.into(),
            change: None,
        }
    }

    fn change(mut self, change: &str) -> Self {
        self.change = Some(change.into());
        self
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let mut checks = vec![cores(), memory(), descriptors(), confinement()];
    let threads = probe(Backend::Threads, "threads")?;
    let processes = probe(Backend::Processes, "processes")?;
    let works = [&threads, &processes]
        .iter()
        .all(|check| check.verdict == Verdict::Ok);
    checks.extend([threads, processes]);
    match args.format {
        Format::Json => {
            let document = json!({
                "version": env!("CARGO_PKG_VERSION"),
                "works": works,
                "checks": checks,
            });
            report::line(&format!("{document:#}"))?;
        }
        Format::Table => {
            let table = Table::new(&[12, 7, 0], 3);
            for check in &checks {
                report::line(&table.row(&[
                    check.what.to_string(),
                    check.verdict.to_string(),
                    check.found.clone(),
                ]))?;
                if let Some(change) = &check.change {
                    report::line(&table.row(&["", "", &format!("-> {change}")]))?;
                }
            }
        }
    }
    if works {
        return Ok(());
    }
    Err(Error::Failed(
        "some kind of group does not work here; see the lines marked FAILED".into(),
    ))
}

fn cores() -> Check {
    let usable = machine::cores();
    let found = format!("{usable} usable; ranks beyond that take turns");
    if usable < 2 {
        return Check::new("processors", Verdict::Limited, found).change(
            "give this process at least two: every gather costs a change of process otherwise",
        );
    }
    Check::new("processors", Verdict::Ok, found)
}

fn memory() -> Check {
    let Some(available) = machine::available_memory() else {
        let found = "/proc/meminfo does not say how much is available";
        return Check::new("memory", Verdict::Limited, found)
            .change("mount /proc, or see to it that workspaces fit");
    };
    let mut found = format!("{} available", report::bytes(available));
    if let Some((limit, _)) = machine::memory_limit() {
        found += &format!(", control group limit {}", report::bytes(limit));
    }
    found += "; workspaces are memfds, which count here and not against /dev/shm";
    if available < 256 << 20 {
        return Check::new("memory", Verdict::Limited, found)
            .change("free some, or raise the container's limit (docker run --memory)");
    }
    Check::new("memory", Verdict::Ok, found)
}

fn descriptors() -> Check {
    let (now, most) = machine::descriptor_limits();
    let show = |limit: u64| match limit {
        u64::MAX => "unlimited".to_string(),
        limit => limit.to_string(),
    };
    // A process has a channel to every other rank, and a workspace of each for a while.
    let ranks = |limit: u64| (limit.saturating_sub(64) / 2).min(1024);
    let found = format!(
        "{} open files per process, {} at most: enough for {} ranks as processes",
        show(now),
        show(most),
        ranks(now)
    );
    if ranks(now) < 16 {
        return Check::new("descriptors", Verdict::Limited, found).change("raise ulimit -n");
    }
    Check::new("descriptors", Verdict::Ok, found)
}

/// What may explain a failure further down.
fn confinement() -> Check {
    let mut found = Vec::new();
    let container = ["/.dockerenv", "/run/.containerenv"];
    if let Some(mark) = container.iter().find(|path| Path::new(path).exists()) {
        found.push(format!("in a container ({mark})"));
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let seccomp = status
        .lines()
        .find_map(|line| line.strip_prefix("Seccomp:"));
    if seccomp.is_some_and(|mode| mode.trim() != "0") {
        found.push("system calls are filtered (seccomp)".into());
    }
    if found.is_empty() {
        found.push("no container and no filter of system calls seen".into());
    }
    Check::new("confinement", Verdict::Ok, found.join(", "))
}

/// Brings up a group of two and gathers by every way.
fn probe(backend: Backend, what: &'static str) -> Result<Check, Error> {
    let mut found: Option<Found> = None;
    let result = ranks::run(backend, 2, &ranks::Task::Probe(Task {}), &mut |message| {
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
    };
    match (result, found) {
        (Ok(()), Some(found)) => Ok(Check::new(
            what,
            Verdict::Ok,
            format!(
                "2 ranks gathered by {}; a group takes {} unless told otherwise (tried {uses})",
                found.works.join(", "),
                found.takes
            ),
        )),
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
pub(crate) struct Task {}

/// What the ranks found.
#[derive(Debug, Serialize, Deserialize)]
struct Found {
    works: Vec<String>,
    takes: String,
}

impl Task {
    /// One rank's part.
    pub(crate) fn run(&self, group: &Group, emit: &mut Emit<'_>) -> Result<(), RankError> {
        let format = RowFormat::new(DType::Bytes, 1152);
        let (rank, ranks) = (group.rank(), group.world_size());
        let byte = |rank: usize| rank as u8 + 1;
        let local = vec![byte(rank); 4 * format.row_bytes()];
        let mut works = Vec::new();
        let mut takes = String::new();
        for way in [
            WayChoice::Auto,
            WayChoice::SharedSlot,
            WayChoice::Push,
            WayChoice::Pull,
        ] {
            let options = WorkspaceOptions::new(4 * ranks, format);
            let options = match way.forced() {
                Some(way) => options.way(way),
                None => options,
            };
            let gather = KvGather::new(Workspace::new(group, options)?);
            let way_taken = gather.workspace().way().to_string();
            let rows = gather.gather(0, &local)?;
            let expected = (0..ranks).flat_map(|rank| vec![byte(rank); local.len()]);
            if !rows.iter().copied().eq(expected) {
                return Err(format!("{way_taken} delivered wrong bytes").into());
            }
            match way {
                WayChoice::Auto => takes = way_taken,
                _ => works.push(way_taken),
            }
        }
        // Everybody has succeeded when this returns.
        group.barrier()?;
        if rank == 0 {
            let found = Found { works, takes };
            let text = serde_json::to_string(&found).map_err(|error| error.to_string())?;
            emit(Message::Text(text))?;
        }
        Ok(())
    }
}
