//! What this process holds, to see what it loses.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

/// A count of what can leak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Open descriptors.
    pub descriptors: usize,
    /// Lines of the memory map.
    pub mappings: usize,
    /// Of these, the ones that ranks share.
    pub shared_mappings: usize,
    /// Threads.
    pub threads: usize,
    /// Resident shared memory, KiB.
    pub shared_kib: usize,
    /// Resident private memory, KiB.
    pub private_kib: usize,
}

/// Mappings by which an allocator and its thread stacks may differ over a thousand rounds.
const MAPPINGS: usize = 40;

/// KiB by which an allocator may differ over a thousand rounds.
const PRIVATE_KIB: usize = 4096;

impl Usage {
    /// What this process holds now.
    #[must_use]
    pub fn now() -> Usage {
        let count = |path| fs::read_dir(path).map_or(0, Iterator::count);
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let kib = |name| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let word = line.and_then(|line| line.split_whitespace().next());
            word.and_then(|word| word.parse().ok()).unwrap_or(0)
        };
        Usage {
            // One of them is this look itself, now as then.
            descriptors: count("/proc/self/fd"),
            mappings: maps.lines().count(),
            shared_mappings: maps
                .lines()
                .filter(|line| line.contains("direct-dcp"))
                .count(),
            threads: count("/proc/self/task"),
            shared_kib: kib("RssShmem:"),
            private_kib: kib("RssAnon:"),
        }
    }

    /// Whether nothing has grown since `before` that an allocator does not explain.
    #[must_use]
    pub fn is_as(&self, before: &Usage) -> bool {
        self.descriptors == before.descriptors
            && self.shared_mappings == before.shared_mappings
            && self.threads == before.threads
            && self.shared_kib == before.shared_kib
            && self.mappings <= before.mappings + MAPPINGS
            && self.private_kib <= before.private_kib + PRIVATE_KIB
    }

    /// What is held when what was going on has ended: the same twice, or the last of many looks.
    #[must_use]
    pub fn steady() -> Usage {
        let mut last = Usage::now();
        for _ in 0..100 {
            thread::sleep(Duration::from_millis(30));
            let now = Usage::now();
            if now == last {
                break;
            }
            last = now;
        }
        last
    }

    /// What is held once it is as `before`, or, if it does not become so, in the end. Threads of
    /// a pool end a little after the pool.
    #[must_use]
    pub fn settled(before: &Usage) -> Usage {
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            let now = Usage::now();
            if now.is_as(before) || Instant::now() > until {
                return now;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}
