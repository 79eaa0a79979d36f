//! What the machine has, as far as the program asks.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::thread::available_parallelism;

/// Processors that this process may use.
pub(crate) fn cores() -> usize {
    available_parallelism().map_or(1, usize::from)
}

/// Threads that share one rank's copies unless told otherwise, as the library chooses.
pub(crate) fn default_blocks(ranks: usize) -> usize {
    (cores() / ranks.max(1)).clamp(1, 8)
}

/// Bytes that can be allocated without others suffering, if the system says: what the kernel calls
/// available, or less where a control group limits this process.
pub(crate) fn available_memory() -> Option<u64> {
    let machine = meminfo("MemAvailable:");
    let group = memory_limit().map(|(limit, used)| limit.saturating_sub(used));
    match (machine, group) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

/// Limit and use of the control group at the root of what this process sees, which in a container
/// is its own.
pub(crate) fn memory_limit() -> Option<(u64, u64)> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let v2 = || {
        let used = number("/sys/fs/cgroup/memory.current")?;
        Some((number("/sys/fs/cgroup/memory.max")?, used))
    };
    let v1 = || {
        let used = number("/sys/fs/cgroup/memory/memory.usage_in_bytes")?;
        let limit = number("/sys/fs/cgroup/memory/memory.limit_in_bytes")?;
        // Its way to say that there is none.
        (limit < 1 << 60).then_some((limit, used))
    };
    v2().or_else(v1)
}

/// A line of `/proc/meminfo`, in bytes.
pub(crate) fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Descriptors that this process may open now, and at most.
pub(crate) fn descriptor_limits() -> (u64, u64) {
    let limit = getrlimit(Resource::Nofile);
    (
        limit.current.unwrap_or(u64::MAX),
        limit.maximum.unwrap_or(u64::MAX),
    )
}

/// Lets this process, and those that it starts, open `wanted` descriptors if that is allowed.
pub(crate) fn want_descriptors(wanted: usize) {
    let (now, most) = descriptor_limits();
    let wanted = wanted as u64;
    if now < wanted {
        let limit = Rlimit {
            current: Some(wanted.min(most)),
            maximum: getrlimit(Resource::Nofile).maximum,
        };
        // If it fails, opening the descriptors will, and say so.
        let _ = setrlimit(Resource::Nofile, limit);
    }
}

/// What a process that wants `bytes` of memory should be told, if it should.
pub(crate) fn check_memory(bytes: Option<usize>, what: &str, instead: &str) -> Result<(), String> {
    let available = available_memory();
    match (bytes, available) {
        (Some(bytes), Some(available)) if bytes as u64 > available => Err(format!(
            "{what} needs {} of memory, and {} are available; {instead}",
            crate::report::bytes(bytes as u64),
            crate::report::bytes(available)
        )),
        (None, _) => Err(format!(
            "{what} needs more memory than a workspace can have; {instead}"
        )),
        _ => Ok(()),
    }
}
