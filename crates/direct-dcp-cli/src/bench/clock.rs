//! One time for all ranks, which are on one machine, and loops that start together.

use direct_dcp::{Group, GroupError};
use rustix::time::{ClockId, clock_gettime};
use std::thread;
use std::time::Duration;

/// From the agreement on a start until then, for the slowest rank to hear of it.
const NOTICE: u64 = 300_000;
/// Of that, for each thread that a rank starts meanwhile.
const THREAD_NOTICE: u64 = 60_000;
/// What sleeping may take longer than asked.
const SLACK: u64 = 100_000;

/// Nanoseconds on a clock that all processes of the machine read alike.
pub(super) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    // Neither is ever negative.
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Collective: a time that all ranks agree on, shortly ahead.
pub(super) fn agree_on_start(group: &Group, threads: usize) -> Result<u64, GroupError> {
    let times = group.all_gather(&now().to_le_bytes())?;
    let latest = times.iter().filter_map(|time| word(time)).max();
    Ok(latest.unwrap_or_else(now) + NOTICE + THREAD_NOTICE * (threads as u64 - 1))
}

/// Returns at `start`, without keeping a processor from others until shortly before.
pub(super) fn wait_until(start: u64, crowded: bool) {
    if let Some(ahead) = start.checked_sub(now() + SLACK) {
        thread::sleep(Duration::from_nanos(ahead));
    }
    while now() < start {
        if crowded {
            thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

/// A number as ranks exchange it.
pub(super) fn word(bytes: &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}
