//! Handing descriptors to child processes.

use crate::ShmError;
use crate::error::failed;
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};
use std::os::fd::BorrowedFd;

/// Lets child processes inherit `fd` across `exec`, under the same number.
///
/// Every descriptor of this crate is close-on-exec until this is called. From then on *every* child
/// started by any thread of this process inherits it, so close it here as soon as the right child
/// runs: a copy in a stranger keeps a [`Channel`](crate::Channel) from looking closed.
///
/// # Errors
/// [`ShmError::Io`] if the kernel refuses.
pub fn inherit(fd: BorrowedFd<'_>) -> Result<(), ShmError> {
    let flags = fcntl_getfd(fd).map_err(failed("fcntl(F_GETFD)"))?;
    fcntl_setfd(fd, flags.difference(FdFlags::CLOEXEC)).map_err(failed("fcntl(F_SETFD)"))
}
