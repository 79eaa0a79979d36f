//! What the threads that are ranks did last, for the report of one that does not end.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

static STEPS: LazyLock<Mutex<HashMap<ThreadId, String>>> = LazyLock::new(Mutex::default);

fn steps() -> MutexGuard<'static, HashMap<ThreadId, String>> {
    STEPS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes what the current thread goes on to do.
pub(crate) fn begin(step: impl Into<String>) {
    steps().insert(thread::current().id(), step.into());
}

/// What a thread began last, if it has said so; it is forgotten.
pub(crate) fn take(thread: ThreadId) -> Option<String> {
    steps().remove(&thread)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_step_of_each_thread_is_told_once() {
        let rank = |step: &'static str| {
            thread::spawn(move || {
                begin("earlier");
                begin(step);
                thread::current().id()
            })
        };
        let ids = ["waits", "uploads"].map(|step| rank(step).join().unwrap());
        assert_eq!(take(ids[1]).as_deref(), Some("uploads"));
        assert_eq!(take(ids[0]).as_deref(), Some("waits"));
        assert_eq!(take(ids[0]), None);
    }
}
