//! Signals that ask the program to end. The first lets it tidy up, the second ends it at once.

use crate::error::Error;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// The signal that came, 0 before.
static SIGNAL: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// Starts to listen. Without the handlers, signals end the program as they always do; those that
/// whoever started it has had ignored, as nohup does, stay so.
pub(crate) fn listen() {
    let ignored = ignored();
    let signal = SIGNAL.get_or_init(Arc::default);
    let again = Arc::new(AtomicBool::new(false));
    for number in [SIGHUP, SIGINT, SIGTERM] {
        if ignored & (1 << (number - 1)) != 0 {
            continue;
        }
        // The order matters: a signal first looks whether one came before it.
        let _ = signal_hook::flag::register_conditional_default(number, Arc::clone(&again));
        let _ = signal_hook::flag::register(number, Arc::clone(&again));
        let _ = signal_hook::flag::register_usize(number, Arc::clone(signal), number as usize);
    }
}

/// The signals that are ignored, the first in the lowest bit; none if the system does not say.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or(0)
}

/// Has writes beyond a limit on the size of files fail, where a signal would end the program.
pub(crate) fn outlive_full_files() {
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

/// An error if a signal came.
pub(crate) fn check() -> Result<(), Error> {
    let signal = SIGNAL
        .get()
        .map_or(0, |signal| signal.load(Ordering::Relaxed));
    match signal {
        0 => Ok(()),
        // It was an `i32` before.
        number => Err(Error::Interrupted(number as i32)),
    }
}
