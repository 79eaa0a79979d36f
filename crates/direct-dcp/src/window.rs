//! The order of windows in flight.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use crate::error::{GatherError, invalid};

/// Windows that were submitted and not acquired, the oldest first, each with what there is to
/// lend. One whose ticket was dropped will not be acquired, and is skipped.
#[derive(Debug)]
pub(crate) struct Windows<T> {
    pipeline: Arc<()>,
    queue: VecDeque<Window<T>>,
}

#[derive(Debug)]
struct Window<T> {
    epoch: u64,
    ticket: Weak<()>,
    lends: T,
}

/// A ticket's place in the order. Dropping it gives the window up.
#[derive(Debug)]
pub(crate) struct Turn {
    pipeline: Arc<()>,
    _kept: Arc<()>,
    pub(crate) epoch: u64,
}

impl<T> Windows<T> {
    pub(crate) fn new() -> Self {
        Windows {
            pipeline: Arc::default(),
            queue: VecDeque::new(),
        }
    }

    /// Adds the window of call `epoch`, the newest.
    pub(crate) fn push(&mut self, epoch: u64, lends: T) -> Turn {
        let kept = Arc::default();
        let ticket = Arc::downgrade(&kept);
        self.queue.push_back(Window {
            epoch,
            ticket,
            lends,
        });
        Turn {
            pipeline: self.pipeline.clone(),
            _kept: kept,
            epoch,
        }
    }

    /// The call of the window that is next to be acquired; those before it were given up.
    pub(crate) fn next(&mut self) -> Option<u64> {
        while let Some(window) = self.queue.front() {
            if window.ticket.strong_count() > 0 {
                return Some(window.epoch);
            }
            self.queue.pop_front();
        }
        None
    }

    /// Takes a window out, if it is its turn.
    pub(crate) fn take(&mut self, turn: &Turn) -> Result<T, GatherError> {
        if !Arc::ptr_eq(&self.pipeline, &turn.pipeline) {
            let expected = "one of this pipeline".to_owned();
            return Err(invalid("ticket", expected, "one of another"));
        }
        let next = self.next();
        let mine = self.queue.pop_front_if(|window| window.epoch == turn.epoch);
        mine.map(|window| window.lends)
            .ok_or(GatherError::OutOfTurn {
                epoch: turn.epoch,
                next,
            })
    }
}
