//! However a run ends, it says why, and leaves no process and no file behind.

mod common;

use common::{Ended, command, example, finish, listing, run, until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use tempfile::{TempDir, tempdir};

/// A gather that takes longer than any test.
struct LongRun {
    child: Child,
    /// Where it makes its temporary files.
    temporary: TempDir,
    outputs: TempDir,
}

/// The program, started by a shell after some words of its own.
fn after(words: &str) -> Command {
    let program = command();
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &format!("{words}; exec \"$0\" \"$@\"")])
        .arg(program.get_program())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    shell
}

impl LongRun {
    fn start(backend: &str) -> LongRun {
        LongRun::start_by(command(), backend)
    }

    fn start_by(mut command: Command, backend: &str) -> LongRun {
        let (temporary, outputs) = (tempdir().unwrap(), tempdir().unwrap());
        let child = command
            .env("TMPDIR", temporary.path())
            .arg("gather")
            .arg(example())
            .args([
                "--ranks",
                "3",
                "--iterations",
                "1000000",
                "--backend",
                backend,
            ])
            .arg("--output")
            .arg(outputs.path().join("out"))
            .spawn()
            .unwrap();
        LongRun {
            child,
            temporary,
            outputs,
        }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn ranks(&self) -> Vec<u32> {
        children(self.pid())
    }

    /// Its ranks, once they are at work.
    fn ranks_at_work(&self) -> Vec<u32> {
        until("three ranks at work", || {
            let ranks = self.ranks();
            ranks.len() == 3 && ranks.iter().all(|&rank| maps_workspace(rank))
        });
        self.ranks()
    }

    /// How it ended, if nothing is left of it.
    fn end(self) -> Ended {
        let ended = finish(self.child);
        assert!(listing(self.temporary.path()).is_empty());
        assert!(listing(self.outputs.path()).is_empty());
        ended
    }
}

fn signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

/// State and parent of a process.
fn stat(pid: u32) -> Option<(char, u32)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it may hold anything.
    let mut fields = text.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.next()?.parse().ok()?))
}

fn children(parent: u32) -> Vec<u32> {
    listing(Path::new("/proc"))
        .iter()
        .filter_map(|name| name.parse().ok())
        .filter(|&pid| stat(pid).is_some_and(|(state, of)| of == parent && state != 'Z'))
        .collect()
}

/// One of a process's sets of signals, the first in the lowest bit.
fn mask(pid: u32, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix(name));
    u64::from_str_radix(mask.unwrap().trim(), 16).unwrap()
}

fn maps_workspace(pid: u32) -> bool {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"));
    maps.is_ok_and(|maps| maps.contains("direct-dcp workspace"))
}

fn gone(pid: u32) -> bool {
    // Whoever inherits an orphan may not be quick to notice its end.
    stat(pid).is_none_or(|(state, _)| state == 'Z')
}

#[test]
fn a_rank_that_is_killed_is_named() {
    let run = LongRun::start("processes");
    let ranks = run.ranks_at_work();
    signal(ranks[1], Signal::KILL);
    let ended = run.end();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    assert!(ended.stderr.starts_with("error: rank "), "{ended:?}");
    assert!(ended.stderr.contains("was killed by signal 9"), "{ended:?}");
    assert!(ranks.iter().all(|&rank| gone(rank)));
}

#[test]
fn no_rank_outlives_the_program() {
    let mut run = LongRun::start("processes");
    let ranks = run.ranks_at_work();
    signal(run.pid(), Signal::KILL);
    run.child.wait().unwrap();
    until("gone", || ranks.iter().all(|&rank| gone(rank)));
    assert!(listing(run.temporary.path()).is_empty());
}

#[test]
fn signals_end_everything() {
    for (backend, number) in [
        ("processes", Signal::INT),
        ("processes", Signal::TERM),
        ("threads", Signal::INT),
        ("threads", Signal::HUP),
    ] {
        let run = LongRun::start(backend);
        let ranks = if backend == "processes" {
            run.ranks_at_work()
        } else {
            until("at work", || maps_workspace(run.pid()));
            Vec::new()
        };
        signal(run.pid(), number);
        let ended = run.end();
        assert_eq!(ended.status.signal(), Some(number.as_raw()), "{ended:?}");
        assert!(
            ended.stderr.is_empty() && ended.stdout.is_empty(),
            "{ended:?}"
        );
        assert!(ranks.iter().all(|&rank| gone(rank)));
    }
}

#[test]
fn a_signal_that_is_ignored_stays_so() {
    let run = LongRun::start_by(after("trap '' HUP"), "threads");
    until("at work", || maps_workspace(run.pid()));
    let caught = |number: Signal| mask(run.pid(), "SigCgt:") & (1 << (number.as_raw() - 1)) != 0;
    assert!(caught(Signal::TERM) && !caught(Signal::HUP));
    signal(run.pid(), Signal::HUP);
    // The first signal that counts ends it, so that was none.
    signal(run.pid(), Signal::TERM);
    let ended = run.end();
    assert_eq!(
        ended.status.signal(),
        Some(Signal::TERM.as_raw()),
        "{ended:?}"
    );
}

#[test]
fn a_file_that_may_not_grow_is_an_error() {
    let dir = tempdir().unwrap();
    let mut shell = after("ulimit -f 1");
    shell.args(["gather", "--output"]);
    shell.arg(dir.path().join("out")).arg(example());
    let ended = finish(shell.spawn().unwrap());
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let words = ended.stderr.to_lowercase();
    assert!(words.contains("file too large"), "{ended:?}");
    assert!(listing(dir.path()).is_empty());
}

#[test]
fn without_room_for_the_ranks_to_meet() {
    let file = example();
    let mut command = command();
    command
        .env("TMPDIR", "/no/such/directory")
        .arg("gather")
        .arg(file);
    let ended = finish(command.args(["--backend", "processes"]).spawn().unwrap());
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:?}");
    assert!(ended.stderr.contains("no such file"), "{ended:?}");
}

#[test]
fn the_doctor_finds_both_kinds_of_group() {
    let document: Value =
        serde_json::from_str(&run(&["doctor", "--format", "json"]).success()).unwrap();
    assert_eq!(document["works"], true);
    let checks = document["checks"].as_array().unwrap();
    for what in [
        "processors",
        "memory",
        "descriptors",
        "confinement",
        "threads",
        "processes",
    ] {
        assert!(
            checks.iter().any(|check| check["what"] == what),
            "{what}: {document}"
        );
    }
    let text = run(&["doctor"]).success();
    assert!(
        text.contains("a group takes shared-slot unless told otherwise"),
        "{text}"
    );

    // A group that cannot come up is reported, not fatal to the rest of the report.
    let mut command = command();
    let ended = finish(
        command
            .env("TMPDIR", "/no/such")
            .arg("doctor")
            .spawn()
            .unwrap(),
    );
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(ended.stdout.contains("processes       FAILED"), "{ended:?}");
    assert!(ended.stdout.contains("set TMPDIR"), "{ended:?}");
}

#[test]
fn help_shows_examples_and_no_inner_parts() {
    for args in [
        &["--help"][..],
        &["gather", "--help"],
        &["bench", "--help"],
        &["doctor", "--help"],
    ] {
        assert!(run(args).success().contains("Example"), "{args:?}");
    }
    let help = run(&["--help"]).success();
    assert!(!help.contains("rank "), "{help}");
    assert!(run(&["--version"]).success().starts_with("direct-dcp "));
    for shell in ["bash", "zsh", "fish"] {
        assert!(
            run(&["completions", shell])
                .success()
                .contains("interleave")
        );
    }
}
