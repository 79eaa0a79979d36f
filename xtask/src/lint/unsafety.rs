//! Unsafe code only where the architecture has room for it.

use super::Finding;
use super::source::{Rust, has_word};

/// Folders, and files, that may hold unsafe code: memory of the system and of the driver, the fakes
/// that stand for the driver and its kernels, the device memory of tests, the two leaves of the
/// kernels that touch memory, where Python's addresses become memory, and where torch is asked for
/// them.
const ROOMS: [&str; 10] = [
    "crates/direct-dcp-conformance/src/backends/cuda/rank.rs",
    "crates/direct-dcp-cuda/",
    "crates/direct-dcp-fake-cuda/",
    "crates/direct-dcp-fake-gpu/",
    "crates/direct-dcp-fake-kernels/",
    "crates/direct-dcp-shm/",
    "crates/direct-dcp-kernels/src/host/",
    "crates/direct-dcp-kernels/src/ptx/",
    "python/src/memory.rs",
    "python/src/tensor.rs",
];

pub(super) fn check(sources: &[Rust]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for rust in sources {
        if ROOMS.iter().any(|room| rust.path.starts_with(room)) {
            continue;
        }
        for (number, line) in rust.product() {
            if has_word(&line.code, "unsafe") || line.code.contains("allow(unsafe_code") {
                let message = "unsafe code outside of its rooms";
                findings.push(Finding::new(&rust.path, number, message));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_code_is_found_outside_of_its_rooms() {
        for bad in ["unsafe { f() }", "#![allow(unsafe_code)]"] {
            let at = |path: &str| check(&[Rust::sample(path, bad)]).len();
            assert_eq!(at("crates/direct-dcp/src/gather.rs"), 1);
            assert_eq!(at("crates/direct-dcp-kernels/src/protocol.rs"), 1);
            assert_eq!(at("crates/direct-dcp-kernels/src/host/lane.rs"), 0);
            assert_eq!(at("crates/direct-dcp-kernels/tests/loom.rs"), 0);
        }
    }

    #[test]
    fn talk_of_it_is_not() {
        let good = "//! No unsafe code here.\n#![deny(unsafe_code)]\nlet x = \"unsafe\";";
        assert_eq!(
            check(&[Rust::sample("crates/direct-dcp/src/lib.rs", good)]),
            []
        );
    }
}
