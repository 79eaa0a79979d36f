//! The same things between processes: this test starts itself again as the peer.

mod common;

use common::{later, noise, within_patience};
use direct_dcp_shm::{Channel, SharedMemory, futex, inherit};
use std::env;
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

const LEN: usize = 4096;
const SIGNAL: usize = 4092;
const CHILD: &str = "DIRECT_DCP_SHM_TEST_CHILD";

/// The child's side. Its channel is its standard input.
#[test]
fn child() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let channel = Channel::from_fd(socket).unwrap();
    let (bytes, fd) = channel.recv(later()).unwrap();
    let mapping = SharedMemory::from_fd(fd.unwrap(), LEN)
        .unwrap()
        .map()
        .unwrap();
    for (i, word) in bytes.as_chunks().0.iter().enumerate() {
        let cell = mapping.atomic_u32(4 * i).unwrap();
        cell.store(u32::from_ne_bytes(*word), Ordering::Relaxed);
    }
    let signal = mapping.atomic_u32(SIGNAL).unwrap();
    signal.store(1, Ordering::Release);
    futex::wake_all(signal);
}

#[test]
fn memory_and_futexes_reach_another_process() {
    within_patience(|| {
        let (ours, theirs) = Channel::pair().unwrap();
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["child", "--exact"])
            .env(CHILD, "1")
            .stdin(Stdio::from(theirs.into_fd()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let memory = SharedMemory::create("processes", LEN).unwrap();
        let mapping = memory.map().unwrap();
        let bytes = noise(2_000);
        ours.send(&bytes, Some(memory.fd()), later()).unwrap();

        let signal = mapping.atomic_u32(SIGNAL).unwrap();
        while signal.load(Ordering::Acquire) == 0 {
            futex::wait(signal, 0, Duration::MAX);
        }
        let got: Vec<u8> = (0..bytes.len() / 4)
            .map(|i| mapping.atomic_u32(4 * i).unwrap())
            .flat_map(|cell| cell.load(Ordering::Relaxed).to_ne_bytes())
            .collect();
        assert_eq!(got, bytes);
        assert!(child.wait().unwrap().success());
        // A process that another test forks has a copy of the child's end until it executes its
        // program, so the child's exit need not be the last of it.
        while !ours.is_closed() {
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

#[test]
fn only_what_may_be_inherited_is() {
    let memory = SharedMemory::create("inherited", LEN).unwrap();
    let seen = || {
        let path = format!("/proc/self/fd/{}", memory.fd().as_raw_fd());
        let listed = Command::new("readlink").arg(path).output().unwrap().stdout;
        String::from_utf8(listed)
            .unwrap()
            .contains("memfd:inherited")
    };
    assert!(!seen());
    inherit(memory.fd()).unwrap();
    assert!(seen());
}
