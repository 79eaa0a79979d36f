//! Sleep until a word in shared memory changes.
//!
//! The words may be shared between processes: a waiter is found by the memory that the word lies
//! in, whatever address each process has mapped it at.
//!
//! ```
//! use direct_dcp_shm::{SharedMemory, futex};
//! use std::sync::atomic::Ordering;
//! use std::time::Duration;
//!
//! # fn main() -> Result<(), direct_dcp_shm::ShmError> {
//! let mapping = SharedMemory::create("signal", 4)?.map()?;
//! let signal = mapping.atomic_u32(0).expect("in bounds and aligned");
//! std::thread::scope(|scope| {
//!     scope.spawn(|| {
//!         signal.store(1, Ordering::Release);
//!         futex::wake_all(signal);
//!     });
//!     // Always a loop: a wait may end early, and what counts is the word.
//!     while signal.load(Ordering::Acquire) != 1 {
//!         futex::wait(signal, 0, Duration::from_secs(1));
//!     }
//! });
//! # Ok(())
//! # }
//! ```

use rustix::io::Errno;
use rustix::thread::futex::{self, Flags, Timespec};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Why a [`wait`] ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// Somebody called [`wake_all`], or the wait ended early for a reason of the kernel's, such as
    /// a signal. The word may or may not have changed.
    Woken,
    /// The word did not hold the expected value, so there was nothing to wait for.
    ValueChanged,
    /// The timeout passed.
    TimedOut,
}

/// Sleeps while `word` holds `expected`, until [`wake_all`] or for `timeout` at most.
///
/// The comparison and the start of the sleep are one step: a wake that comes after the word was
/// changed is never missed. Nothing is ordered by it; load the word again with `Acquire`.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Duration) -> Wake {
    // Longer than the kernel can count is as good as its longest.
    let timeout = Timespec::try_from(timeout).unwrap_or(Timespec {
        tv_sec: i64::MAX,
        tv_nsec: 0,
    });
    match futex::wait(word, Flags::empty(), expected, Some(&timeout)) {
        Err(Errno::AGAIN) => Wake::ValueChanged,
        Err(Errno::TIMEDOUT) => Wake::TimedOut,
        Ok(()) | Err(_) => Wake::Woken,
    }
}

/// Wakes all who [`wait`] on `word`, in every process. Store the new value first.
pub fn wake_all(word: &AtomicU32) {
    // The only failure is a word that is not mapped, which a reference excludes.
    let _ = futex::wake(word, Flags::empty(), i32::MAX.cast_unsigned());
}
