//! No atomics of Rust's own in code that becomes PTX.
//!
//! On nvptx64 the compiler drops the ordering of read-modify-write operations: `fetch_add` becomes
//! a relaxed `atom.global.add`, whatever was asked for. The device code orders memory with asm.

use super::Finding;
use super::source::Rust;

const FOLDER: &str = "crates/direct-dcp-kernels/src/";
const EXCEPT: &str = "crates/direct-dcp-kernels/src/host/";

pub(super) fn check(sources: &[Rust]) -> Vec<Finding> {
    let device = sources
        .iter()
        .filter(|rust| rust.path.starts_with(FOLDER) && !rust.path.starts_with(EXCEPT));
    let mut findings = Vec::new();
    for rust in device {
        for (number, line) in rust.product() {
            if let Some(what) = atomic(&line.code) {
                let message = format!("`{what}` in code that becomes PTX");
                findings.push(Finding::new(&rust.path, number, message));
            }
        }
    }
    findings
}

/// The atomic type or operation that the code names.
fn atomic(code: &str) -> Option<&str> {
    let name = |c: char| c.is_alphanumeric() || c == '_';
    code.split(|c| !name(c)).find(|word| {
        word.starts_with("fetch_")
            || word.starts_with("compare_exchange")
            || word.starts_with("atomic_")
            || word.starts_with("Atomic")
            || *word == "atomic"
            || *word == "swap" && code.contains(".swap(")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn atomics_are_found_in_device_code_only() {
        for bad in [
            "x.fetch_add(1, AcqRel);",
            "x.swap(1, AcqRel);",
            "x.compare_exchange_weak(0, 1, AcqRel, Relaxed);",
            "use core::sync::atomic::Ordering;",
            "let x: AtomicU32;",
            "core::intrinsics::atomic_xadd(x, 1);",
        ] {
            let at = |file| check(&[Rust::sample(&format!("{FOLDER}{file}"), bad)]).len();
            assert_eq!(at("protocol.rs"), 1, "{bad}");
            assert_eq!(at("ptx/thread.rs"), 1, "{bad}");
            assert_eq!(at("host/machine.rs"), 0, "{bad}");
        }
    }

    #[test]
    fn other_code_is_not() {
        let good = "core::mem::swap(a, b); asm!(\"atom.acq_rel.gpu.add\"); // fetch_add is broken";
        assert_eq!(
            check(&[Rust::sample(&format!("{FOLDER}protocol.rs"), good)]),
            []
        );
    }
}
