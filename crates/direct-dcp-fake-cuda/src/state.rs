//! Everything that is alive, by handle, and the contexts that threads have current.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::capture::{Capture, Graph};
use crate::code::{Code, Outcome};
use crate::memory::{Buffer, Mapping, Object};
use crate::module::{Entry, Module};
use crate::multicast::Binding;
use crate::stream::{Event, Stream};

/// Handles are numbers that are given out once, so that a stale one is always noticed.
pub(crate) fn new_handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// A primary context.
#[derive(Default)]
pub(crate) struct Primary {
    pub(crate) handle: usize,
    pub(crate) retained: usize,
    /// Devices whose plain memory it may touch.
    pub(crate) peers: Vec<u32>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) contexts: BTreeMap<u32, Primary>,
    pub(crate) streams: HashMap<usize, Arc<Stream>>,
    /// Legacy and per-thread default streams, by context and thread (0 for legacy).
    pub(crate) default_streams: HashMap<(usize, u64), Arc<Stream>>,
    pub(crate) events: HashMap<usize, Arc<Event>>,
    /// Memory and multicast objects.
    pub(crate) objects: HashMap<u64, Arc<Object>>,
    pub(crate) ranges: BTreeMap<u64, usize>,
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    pub(crate) buffers: BTreeMap<u64, Buffer>,
    pub(crate) bindings: Vec<Binding>,
    pub(crate) modules: HashMap<usize, Module>,
    pub(crate) functions: HashMap<usize, Arc<Entry>>,
    pub(crate) graphs: HashMap<usize, Arc<Graph>>,
    pub(crate) executables: HashMap<usize, Arc<Graph>>,
    pub(crate) captures: Vec<Arc<Capture>>,
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(Mutex::default);

pub(crate) fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// What has not been given back, by kind.
    pub(crate) fn outstanding(&self) -> [(&'static str, usize); 13] {
        let pinned = self.buffers.values().filter(|buffer| buffer.pinned).count();
        [
            (
                "contexts",
                self.contexts.values().map(|context| context.retained).sum(),
            ),
            ("streams", self.streams.len()),
            ("events", self.events.len()),
            ("handles", self.objects.len()),
            ("ranges", self.ranges.len()),
            ("mappings", self.mappings.len()),
            ("bindings", self.bindings.len()),
            ("buffers", self.buffers.len() - pinned),
            ("pinned", pinned),
            ("modules", self.modules.len()),
            ("graphs", self.graphs.len()),
            ("executables", self.executables.len()),
            ("captures", self.captures.len()),
        ]
    }

    pub(crate) fn device_of(&self, context: usize) -> Outcome<u32> {
        let found = self
            .contexts
            .iter()
            .find(|(_, c)| c.handle == context && c.retained > 0);
        found
            .map(|(device, _)| *device)
            .ok_or(Code::CONTEXT_IS_DESTROYED)
    }
}

thread_local! {
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn push_context(context: usize) {
    STACK.with_borrow_mut(|stack| stack.push(context));
}

pub(crate) fn pop_context() -> Outcome<usize> {
    STACK.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)
}

pub(crate) fn context_depth() -> usize {
    STACK.with_borrow(Vec::len)
}

/// The current context's handle, if any.
pub(crate) fn current_context() -> Option<usize> {
    STACK.with_borrow(|stack| stack.last().copied())
}

/// The current context and its device; an error where there is none or it is gone.
pub(crate) fn require_context(state: &State) -> Outcome<(usize, u32)> {
    let context = current_context().ok_or(Code::INVALID_CONTEXT)?;
    Ok((context, state.device_of(context)?))
}

/// What the environment says about the machine.
pub(crate) struct Machine {
    pub(crate) devices: u32,
    pub(crate) multiprocessors: i32,
    /// Whether what a stream does first waits for the kernels that run on its device.
    pub(crate) late_streams: bool,
    without: String,
}

impl Machine {
    pub(crate) fn get() -> &'static Self {
        static MACHINE: LazyLock<Machine> = LazyLock::new(|| Machine {
            devices: number("DIRECT_DCP_FAKE_DEVICES", 2),
            multiprocessors: number("DIRECT_DCP_FAKE_SMS", 132),
            late_streams: number("DIRECT_DCP_FAKE_LATE_STREAMS", 0) != 0,
            without: std::env::var("DIRECT_DCP_FAKE_WITHOUT").unwrap_or_default(),
        });
        &MACHINE
    }

    /// Whether the machine has a feature; all that are not listed as absent.
    pub(crate) fn has(&self, feature: &str) -> bool {
        !self
            .without
            .split(',')
            .any(|absent| absent.trim() == feature)
    }

    pub(crate) fn device(&self, id: i32) -> Outcome<u32> {
        let id = u32::try_from(id).map_err(|_| Code::INVALID_DEVICE)?;
        if id < self.devices {
            Ok(id)
        } else {
            Err(Code::INVALID_DEVICE)
        }
    }
}

fn number<T: std::str::FromStr>(variable: &str, default: T) -> T {
    std::env::var(variable)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}
