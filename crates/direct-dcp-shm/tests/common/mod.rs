//! What the tests share. No test asserts that something is fast; each has a watchdog instead.
#![allow(dead_code, reason = "each test binary uses a part of it")]

use rand::Rng;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::panic::resume_unwind;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Long enough for a loaded machine, short enough to notice a hang.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Runs `test`, and fails if it has not ended after [`PATIENCE`].
pub(crate) fn within_patience(test: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel::<()>();
    let test = thread::spawn(move || {
        let _done = done; // dropped at the end, also by a panic
        test();
    });
    if ended.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!("the test still runs after {PATIENCE:?}");
    }
    if let Err(panic) = test.join() {
        resume_unwind(panic);
    }
}

/// A deadline that a working test never reaches.
pub(crate) fn later() -> Instant {
    Instant::now() + PATIENCE
}

/// A deadline that a test means to reach.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_millis(50)
}

/// Random bytes, none of them 0, so that no untouched memory looks right.
pub(crate) fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rand::rng().fill_bytes(&mut bytes);
    for byte in &mut bytes {
        *byte = (*byte).max(1);
    }
    bytes
}

/// A directory that only we can enter, removed in the end.
pub(crate) fn private_dir() -> TempDir {
    tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o700))
        .tempdir()
        .unwrap()
}

/// How many descriptors of this process are the shared memory called `name`. Tests run side by
/// side, so each counts its own.
pub(crate) fn open_fds(name: &str) -> usize {
    let target = format!("/memfd:{name} (deleted)");
    fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| fs::read_link(entry.unwrap().path()).ok())
        .filter(|link| link.as_os_str() == target.as_str())
        .count()
}

/// How many mappings of this process are the shared memory called `name`.
pub(crate) fn open_maps(name: &str) -> usize {
    let target = format!("/memfd:{name} (deleted)");
    fs::read_to_string("/proc/self/maps")
        .unwrap()
        .lines()
        .filter(|line| line.ends_with(&target))
        .count()
}
