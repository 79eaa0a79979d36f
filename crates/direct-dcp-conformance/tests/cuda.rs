//! Ranks on a GPU that is made up: the program that is run on real ones, as it is.

use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use direct_dcp_fake_gpu::variables;

/// Longer than it takes; every case has a watchdog of its own.
const PATIENCE: Duration = Duration::from_secs(400);

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_cuda_conformance"));
    command
        .args(arguments)
        // Enough to come by every way, world and width.
        .env("DIRECT_DCP_GATHERS", "900")
        .env("DIRECT_DCP_KILLS", "6")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// What it says, or ends it.
fn finish(mut command: Command) -> Output {
    let mut child = command.spawn().unwrap();
    let started = Instant::now();
    // It says little, which a pipe holds.
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > PATIENCE {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("no end: {output:?}");
        }
        thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap()
}

#[track_caller]
fn passes(kind: &str) {
    let mut command = command(&[kind]);
    command
        .envs(variables())
        .env("DIRECT_DCP_FAKE_DEVICES", "1");
    let output = finish(command);
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{said}");
    let last = said.lines().last().unwrap_or_default();
    assert!(
        output.status.success() && last.contains(" 0 failed"),
        "{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn streams() {
    passes("streams");
}

#[test]
fn processes() {
    passes("processes");
}

#[test]
fn without_a_driver_it_says_so() {
    let mut command = command(&[]);
    command.env("DIRECT_DCP_LIBCUDA", "/no/such/libcuda.so");
    let output = finish(command);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(said.starts_with("skipped: no NVIDIA driver"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn what_it_does_not_know_is_refused() {
    for arguments in [&["graphics"][..], &["streams", "no_such_scenario"]] {
        let mut command = command(arguments);
        command
            .envs(variables())
            .env("DIRECT_DCP_FAKE_DEVICES", "1");
        let output = finish(command);
        assert!(!output.status.success(), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(arguments[arguments.len() - 1]), "{said}");
    }
}
