//! The example programs run, and the checks inside them pass.
//!
//! Cargo builds them before it runs the tests of a package; with `--test examples` alone it does
//! not, and `cargo build --examples` has to come first.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Long after which an example hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs an example and returns what it prints.
fn run(name: &str, args: &[PathBuf]) -> String {
    // The test is in `target/<profile>/deps`.
    let mut program: PathBuf = env::current_exe().unwrap();
    program.pop();
    program.pop();
    program.push("examples");
    program.push(name);
    let mut child = Command::new(&program)
        .args(args)
        .env_remove("RANK")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    let started = Instant::now();
    // They print less than a pipe holds.
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("{name} hangs");
        }
        thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{name}: {}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn threads() {
    let printed = run("01-threads", &[]);
    assert!(
        printed.ends_with("all 4 ranks have the rows of all\n"),
        "{printed}"
    );
}

#[test]
fn zero_copy() {
    let printed = run("02-zero-copy", &[]);
    assert_eq!(printed.matches("is still held").count(), 2, "{printed}");
    assert_eq!(printed.matches("call 7 delivered").count(), 2, "{printed}");
}

#[test]
fn processes() {
    let printed = run("03-processes", &[]);
    assert!(printed.contains("rank 2 is process"), "{printed}");
    assert!(printed.ends_with("all 3 processes are done\n"), "{printed}");
}

#[test]
fn rebuild() {
    let printed = run("04-rebuild", &[]);
    assert!(printed.contains("rank 1 leaves"), "{printed}");
    assert_eq!(printed.matches(" goes on as rank").count(), 3, "{printed}");
}

#[test]
fn attention() {
    let printed = run("05-attention", &[]);
    assert_eq!(
        printed.matches("256 rows, 4 queries").count(),
        3,
        "{printed}"
    );
}

#[test]
fn attention_over_the_larger_data() {
    let Some(folder) = env::var_os("DIRECT_DCP_DATA") else {
        println!("skipped: DIRECT_DCP_DATA does not name a directory with minilm_kv.safetensors");
        return;
    };
    let file = PathBuf::from(folder).join("minilm_kv.safetensors");
    let printed = run("05-attention", &[file]);
    assert_eq!(
        printed.matches("4096 rows, 64 queries").count(),
        3,
        "{printed}"
    );
}
