//! Who is at the other end of a socket.
#![allow(unsafe_code)]

use crate::ShmError;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

/// The process at the other end of a channel, as the kernel noted it when the two were connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its process, or 0 if that is in a PID namespace that ours cannot see, as in another
    /// container.
    pub pid: u32,
    /// Its effective user.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
}

impl Peer {
    /// Asks the kernel for the peer of a connected Unix socket.
    ///
    /// This calls `getsockopt` itself because rustix's `socket_peercred` returns a type that has
    /// no value for a process of 0, which the kernel does report.
    pub(crate) fn of(socket: BorrowedFd<'_>) -> Result<Peer, ShmError> {
        let mut cred = MaybeUninit::<libc::ucred>::zeroed();
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: the descriptor is open for as long as it is borrowed. The kernel writes at most
        // `len` bytes to `cred`, which has them, and one `socklen_t` to `len`; neither pointer is
        // kept.
        let done = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                cred.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        if done != 0 {
            return Err(ShmError::Io {
                call: "getsockopt(SO_PEERCRED)",
                source: io::Error::last_os_error(),
            });
        }
        // SAFETY: `ucred` is three integers, all zeroed at first, so whatever part the kernel wrote
        // it is initialized and valid.
        let cred = unsafe { cred.assume_init() };
        Ok(Peer {
            pid: cred.pid.cast_unsigned(),
            uid: cred.uid,
            gid: cred.gid,
        })
    }
}
