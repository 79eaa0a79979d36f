//! Tells waiting kernels what only the host can see: an abort, the death of a rank, and that they
//! have waited long enough for the others after one of their waits has failed.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use direct_dcp_cuda::gather::Lane;

use crate::group::Control;

/// Time between two looks.
const INTERVAL: Duration = Duration::from_millis(10);

/// A thread that looks until this is dropped.
#[derive(Debug)]
pub(super) struct Watcher {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl Watcher {
    /// Watches the `world_size` ranks on behalf of this rank's lanes.
    pub(super) fn start(
        control: Arc<Control>,
        lanes: Vec<Arc<Lane>>,
        world_size: u32,
    ) -> std::io::Result<Self> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new()
            .name("direct-dcp watcher".into())
            .spawn(move || {
                let (flag, changed) = &*stopped;
                let mut lost = vec![false; world_size as usize];
                let mut failing = vec![false; lanes.len()];
                let mut flag = flag.lock().unwrap_or_else(PoisonError::into_inner);
                while !*flag {
                    look(&control, &lanes, &mut lost);
                    give_up(&lanes, &mut failing);
                    let wait = changed.wait_timeout(flag, INTERVAL);
                    flag = wait.unwrap_or_else(PoisonError::into_inner).0;
                }
            })?;
        Ok(Watcher {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let (flag, changed) = &*self.stop;
        *flag.lock().unwrap_or_else(PoisonError::into_inner) = true;
        changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It does not panic, and there would be nobody to tell.
            let _ = thread.join();
        }
    }
}

fn look(control: &Control, lanes: &[Arc<Lane>], lost: &mut [bool]) {
    if control.aborted_by().is_some() {
        lanes.iter().for_each(|lane| lane.abort());
    }
    for (rank, known) in (0..).zip(lost) {
        if !*known && control.lost(rank as usize) {
            *known = true;
            lanes.iter().for_each(|lane| lane.lose(rank));
        }
    }
}

/// Ends the other waits of calls that were seen to fail at the look before. Whoever they wait for
/// may not come at all: a rank that shares the device cannot submit its call while a driver that
/// was asked to free memory waits, with a lock held, for the device to be done with this one.
fn give_up(lanes: &[Arc<Lane>], failing: &mut [bool]) {
    for (lane, seen) in lanes.iter().zip(failing) {
        if std::mem::replace(seen, lane.has_fault()) {
            lane.abort();
        }
    }
}
