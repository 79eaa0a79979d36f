//! Ctrl-C, and other signals, while a call waits for other ranks.
//!
//! Python handles signals on its main thread, between two calls of native code. A wait that may be
//! long is therefore made on a thread of its own, and the caller looks for signals meanwhile. Where
//! a handler raises, as Ctrl-C's does, the wait is ended or left, and the exception is returned.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use direct_dcp::AbortHandle;
use pyo3::prelude::*;

use crate::errors;

/// How often the caller looks for signals.
const EVERY: Duration = Duration::from_millis(50);

/// Makes a call on a thread of its own. Whoever drops the channel leaves the call to itself, and what
/// it returns is dropped.
pub(crate) fn start<T: Send + 'static>(
    call: impl FnOnce() -> T + Send + 'static,
) -> PyResult<Receiver<T>> {
    let (done, result) = mpsc::channel();
    thread()
        .spawn(move || done.send(call()).is_ok())
        .map_err(errors::thread)?;
    Ok(result)
}

/// Makes a call that nobody can abort: if a handler raises, it is left to end by its own timeout.
pub(crate) fn leaving<T: Send + 'static>(
    py: Python<'_>,
    call: impl FnOnce() -> T + Send + 'static,
) -> PyResult<T> {
    receive(py, &mut start(call)?)?.ok_or_else(errors::ended)
}

/// Makes a call that `abort` ends: if a handler raises, the group is aborted, and the call is over
/// when this returns. Threads other than Python's main one, which get no signals, make it
/// themselves.
pub(crate) fn aborting<T: Send>(
    py: Python<'_>,
    abort: &AbortHandle,
    call: impl FnOnce() -> T + Send,
) -> PyResult<T> {
    if !on_main_thread(py)? {
        return Ok(py.detach(call));
    }
    thread::scope(|scope| {
        let (done, mut result) = mpsc::channel();
        let waiting = thread()
            .spawn_scoped(scope, move || done.send(call()).is_ok())
            .map_err(errors::thread)?;
        let received = receive(py, &mut result);
        if received.is_err() {
            abort.abort();
        }
        // The call is over, or about to be; its result, if nobody wants it any more, may have to
        // wait for others.
        py.detach(move || {
            let _ = waiting.join();
            drop(result);
        });
        received?.ok_or_else(errors::ended)
    })
}

/// What comes through a channel, if anything does, unless a handler raises before.
pub(crate) fn receive<T: Send>(py: Python<'_>, from: &mut Receiver<T>) -> PyResult<Option<T>> {
    loop {
        let from = &mut *from;
        match py.detach(move || from.recv_timeout(EVERY)) {
            Ok(value) => return Ok(Some(value)),
            Err(RecvTimeoutError::Timeout) => py.check_signals()?,
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
        }
    }
}

fn thread() -> Builder {
    Builder::new().name("direct-dcp-wait".into())
}

fn on_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    let main = threading.call_method0("main_thread")?.getattr("ident")?;
    threading.call_method0("get_ident")?.eq(main)
}

/// When calls were made, by ubatch.
///
/// A thread costs more than a quick gather does. Only the first call of a ubatch, and one after a
/// pause, get one: the calls before which a peer may have been lost unnoticed, and which take longer
/// anyway.
pub(crate) struct Pace {
    start: Instant,
    /// Nanoseconds from the start to the end of the last call; 0 before it.
    ends: Vec<AtomicU64>,
}

impl Pace {
    pub(crate) fn new(ubatches: usize) -> Self {
        Pace {
            start: Instant::now(),
            ends: std::iter::repeat_with(|| AtomicU64::new(0))
                .take(ubatches)
                .collect(),
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Whether a call may take its time.
    pub(crate) fn is_slow(&self, ubatch: usize) -> bool {
        self.ends.get(ubatch).is_some_and(|end| {
            let end = end.load(Ordering::Relaxed);
            end == 0 || Duration::from_nanos(self.now().saturating_sub(end)) > EVERY
        })
    }

    /// Notes that a call was made.
    pub(crate) fn made(&self, ubatch: usize) {
        if let Some(end) = self.ends.get(ubatch) {
            end.store(self.now(), Ordering::Relaxed);
        }
    }
}
