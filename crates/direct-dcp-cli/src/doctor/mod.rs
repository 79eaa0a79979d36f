//! `direct-dcp doctor`: what this machine can do, found out by trying.

mod cuda;
mod trial;

pub(crate) use trial::Task;

use crate::error::Error;
use crate::gpu::Place;
use crate::machine;
use crate::ranks::Backend;
use crate::report::{self, Format, Table};
use serde::Serialize;
use serde_json::json;
use std::fmt;
use std::fs;
use std::path::Path;

/// Show what this machine can do, and which way a group would take.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Groups of threads and of processes are brought up and gather by every way, on CPUs, and on GPUs where
there are any, except by multicast, which is only asked about. The exit status is 0 if all of them
work. A machine without GPUs is not at fault.

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
    /// Not there, which need not be a fault.
    #[serde(rename = "none")]
    Absent,
    Failed,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Ok => "ok",
            Verdict::Limited => "limited",
            Verdict::Absent => "none",
            Verdict::Failed => "FAILED",
        })
    }
}

/// One line of the result.
#[derive(Debug, Serialize)]
struct Check {
    what: String,
    verdict: Verdict,
    found: String,
    /// What to change, where something should be.
    #[serde(skip_serializing_if = "Option::is_none")]
    change: Option<String>,
}

impl Check {
    fn new(what: impl Into<String>, verdict: Verdict, found: impl Into<String>) -> Self {
        Check {
            what: what.into(),
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
    checks.push(trial::probe(Backend::Threads, Place::Cpu)?);
    checks.push(trial::probe(Backend::Processes, Place::Cpu)?);
    let (found, facts) = cuda::survey();
    checks.extend(found);
    if facts.usable() {
        let place = Place::Cuda { device: None };
        checks.push(trial::probe(Backend::Cuda, place)?);
        checks.push(trial::probe(Backend::CudaProcesses, place)?);
    }
    let works = checks.iter().all(|check| check.verdict != Verdict::Failed);
    match args.format {
        Format::Json => {
            let document = json!({
                "version": env!("CARGO_PKG_VERSION"),
                "works": works,
                "checks": checks,
                "cuda": facts,
            });
            report::line(&format!("{document:#}"))?;
        }
        Format::Table => {
            let table = Table::new(&[14, 7, 0], 3);
            for check in &checks {
                report::line(&table.row(&[
                    check.what.clone(),
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
        "something does not work here; see the lines marked FAILED".into(),
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
