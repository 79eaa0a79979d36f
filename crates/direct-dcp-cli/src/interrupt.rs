//! Signals that ask the program to end. The first lets it tidy up, the second ends it at once.

use crate::error::Error;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// The signal that came, 0 before.
static SIGNAL: OnceLock<Arc<AtomicUsize>> = OnceLock::new();

/// Starts to listen. Without the handlers, signals end the program as they always do.
pub(crate) fn listen() {
    let signal = SIGNAL.get_or_init(Arc::default);
    let again = Arc::new(AtomicBool::new(false));
    for number in [SIGHUP, SIGINT, SIGTERM] {
        // The order matters: a signal first looks whether one came before it.
        let _ = signal_hook::flag::register_conditional_default(number, Arc::clone(&again));
        let _ = signal_hook::flag::register(number, Arc::clone(&again));
        let _ = signal_hook::flag::register_usize(number, Arc::clone(signal), number as usize);
    }
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
