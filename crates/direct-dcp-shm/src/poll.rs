//! Waiting for a descriptor, with a deadline.

use crate::ShmError;
use crate::error::failed;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Waits until `fd` is ready for one of `events`, or has failed or hung up.
pub(crate) fn wait_until(
    fd: BorrowedFd<'_>,
    events: PollFlags,
    deadline: Instant,
) -> Result<(), ShmError> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if !ready(fd, events, left)?.is_empty() {
            return Ok(());
        }
        if left.is_zero() {
            return Err(ShmError::TimedOut);
        }
    }
}

/// What of `events`, failure and hang-up holds for `fd` within `timeout`; possibly nothing.
pub(crate) fn ready(
    fd: BorrowedFd<'_>,
    events: PollFlags,
    timeout: Duration,
) -> Result<PollFlags, ShmError> {
    let timeout = Timespec::try_from(timeout).ok();
    let mut fds = [PollFd::from_borrowed_fd(fd, events)];
    match rustix::event::poll(&mut fds, timeout.as_ref()) {
        Ok(_) => Ok(fds[0].revents()),
        Err(Errno::INTR) => Ok(PollFlags::empty()),
        Err(errno) => Err(failed("poll")(errno)),
    }
}
