//! Stream capture, and graphs as a list of work in the order of submission.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

use crate::code::{Code, Outcome};
use crate::state::State;
use crate::stream::{Kind, Stream, Work};

/// `CU_STREAM_CAPTURE_MODE_*`.
pub(crate) const GLOBAL: u32 = 0;
pub(crate) const THREAD_LOCAL: u32 = 1;
pub(crate) const RELAXED: u32 = 2;

/// A capture under way.
pub(crate) struct Capture {
    pub(crate) origin: usize,
    pub(crate) mode: u32,
    pub(crate) thread: ThreadId,
    invalid: AtomicBool,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    work: Vec<Work>,
    /// Streams that joined, and whether the origin has waited for what they did since.
    forks: HashMap<usize, bool>,
}

/// Captured work.
pub(crate) struct Graph {
    pub(crate) context: usize,
    pub(crate) work: Vec<Work>,
}

impl Capture {
    pub(crate) fn new(origin: usize, mode: u32) -> Self {
        let thread = std::thread::current().id();
        Self {
            origin,
            mode,
            thread,
            invalid: AtomicBool::new(false),
            inner: Mutex::default(),
        }
    }

    fn with<R>(&self, body: impl FnOnce(&mut Inner) -> R) -> R {
        body(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn add(&self, stream: usize, work: Work) {
        self.with(|inner| {
            inner.work.push(work);
            if stream != self.origin {
                inner.forks.insert(stream, false);
            }
        });
    }

    /// A stream waits for a point of this capture on `from`.
    pub(crate) fn join(&self, stream: usize, from: usize) {
        self.with(|inner| {
            if stream != self.origin {
                inner.forks.insert(stream, false);
            }
            if from != self.origin {
                inner.forks.insert(from, true);
            }
        });
    }

    pub(crate) fn invalidate(&self) {
        self.invalid.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_invalid(&self) -> bool {
        self.invalid.load(Ordering::Relaxed)
    }

    /// Streams that joined.
    pub(crate) fn forks(&self) -> Vec<usize> {
        self.with(|inner| inner.forks.keys().copied().collect())
    }

    pub(crate) fn finish(&self, context: usize) -> Outcome<Graph> {
        if self.is_invalid() {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        self.with(|inner| {
            if inner.forks.values().any(|joined| !joined) {
                return Err(Code::STREAM_CAPTURE_UNJOINED);
            }
            Ok(Graph {
                context,
                work: core::mem::take(&mut inner.work),
            })
        })
    }
}

/// Refuses a call that may block a capture, and spoils that capture, as the driver does.
pub(crate) fn refuse_during_capture(state: &State) -> Outcome {
    let here = std::thread::current().id();
    let affected: Vec<_> = state
        .captures
        .iter()
        .filter(|c| c.mode == GLOBAL || (c.mode == THREAD_LOCAL && c.thread == here))
        .collect();
    for capture in &affected {
        capture.invalidate();
    }
    if affected.is_empty() {
        Ok(())
    } else {
        Err(Code::STREAM_CAPTURE_UNSUPPORTED)
    }
}

/// Refuses a call that waits for, or asks about, a stream that is being captured.
pub(crate) fn refuse_captured(stream: &Stream) -> Outcome {
    match stream.capture() {
        None => Ok(()),
        Some(capture) => {
            capture.invalidate();
            Err(Code::STREAM_CAPTURE_UNSUPPORTED)
        }
    }
}

/// Queues work, or adds it to the capture that the stream is part of.
pub(crate) fn submit(state: &State, stream: &Arc<Stream>, work: Work, kind: Kind) -> Outcome {
    if let Some(capture) = stream.capture() {
        if capture.is_invalid() {
            return Err(Code::STREAM_CAPTURE_INVALIDATED);
        }
        capture.add(stream.handle, work);
        return Ok(());
    }
    // The legacy default stream and blocking streams of its context wait for each other.
    let others = state.streams.values().chain(state.default_streams.values());
    let waits: Vec<_> = others
        .filter(|other| other.context == stream.context && other.handle != stream.handle)
        .filter(|other| (stream.legacy && other.blocking) || (stream.blocking && other.legacy))
        .map(|other| (Arc::clone(other), other.position()))
        .collect();
    for (other, position) in waits {
        stream.enqueue(Arc::new(move || other.wait_for(position)), Kind::Ordinary);
    }
    stream.enqueue(work, kind);
    Ok(())
}
