//! Finding out that this process was forked from another.
#![allow(unsafe_code)] // a handler for forks

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// How many forks lie between the process that asked this first and this one. Whoever remembers the
/// answer and gets another one later is in a forked process. It costs two loads.
///
/// Forks by the C library are counted, and not those that go on by `exec`, nor raw system calls.
pub fn forks() -> u32 {
    static FIRST: Once = Once::new();
    FIRST.call_once(|| {
        // SAFETY: the handler is a function of this library, which the C library forgets if it is
        // unloaded, and only adds to an atomic, which a forked process may.
        // Without memory for it forks are not counted, and nothing else is different.
        unsafe { libc::pthread_atfork(None, None, Some(count)) };
    });
    FORKS.load(Ordering::Relaxed)
}
