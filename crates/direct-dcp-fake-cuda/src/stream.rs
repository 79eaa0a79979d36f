//! Streams, each with a thread, and events.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::capture::Capture;
use crate::code::{Code, Outcome};
use crate::residency;
use crate::state::Machine;

/// A piece of work. It may run more than once: graphs replay it.
pub(crate) type Work = Arc<dyn Fn() -> Outcome + Send + Sync>;

/// Whether work is left out once its stream has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Kernels, copies, waits: nothing more runs, as in a broken context.
    Ordinary,
    /// Records of events: whoever waits for one must not wait for ever.
    Record,
}

pub(crate) struct Stream {
    pub(crate) handle: usize,
    pub(crate) context: usize,
    device: u32,
    /// Ordered with the legacy default stream.
    pub(crate) blocking: bool,
    pub(crate) legacy: bool,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Default)]
struct Inner {
    queue: VecDeque<(Work, Kind)>,
    submitted: u64,
    done: u64,
    closed: bool,
    error: Option<Code>,
    capture: Option<Arc<Capture>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream {
    /// Starts a stream's thread. It ends when the stream is closed and its work is done.
    pub(crate) fn start(
        handle: usize,
        (context, device): (usize, u32),
        blocking: bool,
        legacy: bool,
    ) -> Outcome<Arc<Self>> {
        let stream = Arc::new(Self {
            handle,
            context,
            device,
            blocking,
            legacy,
            inner: Mutex::default(),
            changed: Condvar::new(),
        });
        let worker = Arc::clone(&stream);
        std::thread::Builder::new()
            .name(format!("fake-stream-{handle:x}"))
            .spawn(move || worker.work())
            .map_err(|_| Code::OUT_OF_MEMORY)?;
        Ok(stream)
    }

    fn work(&self) {
        let mut late = Machine::get().late_streams;
        loop {
            let mut inner = lock(&self.inner);
            let (work, kind) = loop {
                if let Some(next) = inner.queue.pop_front() {
                    break next;
                }
                if inner.closed {
                    return;
                }
                inner = self
                    .changed
                    .wait(inner)
                    .unwrap_or_else(PoisonError::into_inner);
            };
            let skip = inner.error.is_some() && kind == Kind::Ordinary;
            drop(inner);
            if late && kind == Kind::Ordinary {
                residency::idle(self.device);
                late = false;
            }
            let outcome = if skip { Ok(()) } else { work() };
            let mut inner = lock(&self.inner);
            inner.done += 1;
            if let Err(code) = outcome {
                inner.error.get_or_insert(code);
            }
            self.changed.notify_all();
        }
    }

    /// Queues work, whatever captures there are.
    pub(crate) fn enqueue(&self, work: Work, kind: Kind) {
        let mut inner = lock(&self.inner);
        inner.queue.push_back((work, kind));
        inner.submitted += 1;
        self.changed.notify_all();
    }

    pub(crate) fn close(&self) {
        lock(&self.inner).closed = true;
        self.changed.notify_all();
    }

    /// Work submitted so far.
    pub(crate) fn position(&self) -> u64 {
        lock(&self.inner).submitted
    }

    /// Waits until that much work is done.
    pub(crate) fn wait_for(&self, position: u64) -> Outcome {
        let mut inner = lock(&self.inner);
        while inner.done < position {
            inner = self
                .changed
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
        inner.error.map_or(Ok(()), Err)
    }

    pub(crate) fn query(&self) -> Outcome {
        let inner = lock(&self.inner);
        match inner.error {
            Some(code) => Err(code),
            None if inner.done < inner.submitted => Err(Code::NOT_READY),
            None => Ok(()),
        }
    }

    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        lock(&self.inner).capture.clone()
    }

    pub(crate) fn set_capture(&self, capture: Option<Arc<Capture>>) {
        lock(&self.inner).capture = capture;
    }
}

pub(crate) struct Event {
    pub(crate) context: usize,
    pub(crate) timing: bool,
    inner: Mutex<Recorded>,
    changed: Condvar,
}

#[derive(Default)]
struct Recorded {
    submitted: u64,
    completed: u64,
    at: Option<Instant>,
    /// Recorded last in this capture, on this stream.
    captured: Option<(Arc<Capture>, usize)>,
}

impl Event {
    pub(crate) fn new(context: usize, timing: bool) -> Self {
        Self {
            context,
            timing,
            inner: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Notes a record and returns the work that completes it.
    pub(crate) fn record(self: &Arc<Self>) -> Work {
        let mut inner = lock(&self.inner);
        inner.submitted += 1;
        inner.captured = None;
        let (number, event) = (inner.submitted, Arc::clone(self));
        Arc::new(move || {
            let mut inner = lock(&event.inner);
            inner.completed = inner.completed.max(number);
            inner.at = Some(Instant::now());
            event.changed.notify_all();
            Ok(())
        })
    }

    pub(crate) fn record_captured(&self, capture: Arc<Capture>, stream: usize) {
        lock(&self.inner).captured = Some((capture, stream));
    }

    pub(crate) fn captured(&self) -> Option<(Arc<Capture>, usize)> {
        lock(&self.inner).captured.clone()
    }

    /// The number of the last record; 0 for none.
    pub(crate) fn last(&self) -> u64 {
        lock(&self.inner).submitted
    }

    pub(crate) fn wait_for(&self, number: u64) {
        let mut inner = lock(&self.inner);
        while inner.completed < number {
            inner = self
                .changed
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn query(&self) -> Outcome {
        let inner = lock(&self.inner);
        if inner.captured.is_some() {
            return Err(Code::CAPTURED_EVENT);
        }
        if inner.completed < inner.submitted {
            Err(Code::NOT_READY)
        } else {
            Ok(())
        }
    }

    pub(crate) fn time(&self) -> Outcome<Instant> {
        let inner = lock(&self.inner);
        if inner.submitted == 0 {
            return Err(Code::INVALID_HANDLE);
        }
        if inner.completed < inner.submitted {
            return Err(Code::NOT_READY);
        }
        inner.at.ok_or(Code::NOT_READY)
    }
}
