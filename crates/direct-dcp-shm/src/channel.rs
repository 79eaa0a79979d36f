//! Messages between two ranks, each with at most one descriptor.
//!
//! The socket keeps packets apart, so a message is a row of packets:
//!
//! ```text
//! packet 0   length of the message (u64, little endian), its first bytes    [descriptor]
//! packet 1…  the bytes that follow
//! ```
//!
//! Every packet but the last carries exactly [`CHUNK`] bytes of the message; the receiver accepts
//! nothing else, so that packets which do not belong together never pass for a message.

use crate::ShmError;
use crate::error::failed;
use crate::peer::Peer;
use crate::poll::{ready, wait_until};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType,
    sockopt,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most bytes that one message may have: 64 MiB.
pub const MAX_MESSAGE: usize = 64 << 20;

/// Bytes of a message that one packet carries; small enough for the kernel's default buffers.
const CHUNK: usize = 32 << 10;

/// Bytes of the length before a message.
const HEADER: usize = size_of::<u64>();

/// Descriptors that one packet has room for: one more than are allowed, to tell too many from one.
/// The kernel closes those that find no room, and says so.
const FD_ROOM: usize = 2;

/// One end of a private connection between two ranks: a Unix `SOCK_SEQPACKET` socket.
///
/// Messages arrive whole and in order. Threads may share a channel; those that send take turns, and
/// so do those that receive, and a thread whose turn it is not waits for the other's deadline.
///
/// A message that fails midway, in sending or receiving, closes the channel for both ends: what
/// would come next could not be told from the rest of it. A timeout before its first packet changes
/// nothing.
///
/// ```
/// use direct_dcp_shm::Channel;
/// use std::time::{Duration, Instant};
///
/// # fn main() -> Result<(), direct_dcp_shm::ShmError> {
/// let deadline = Instant::now() + Duration::from_secs(5);
/// let (ours, theirs) = Channel::pair()?;
/// ours.send(b"hello", None, deadline)?;
/// drop(ours);
/// assert!(theirs.is_closed()); // and yet nothing is lost:
/// assert_eq!(theirs.recv(deadline)?.0, b"hello");
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
    sending: Mutex<()>,
    receiving: Mutex<()>,
    /// A message failed midway.
    broken: AtomicBool,
}

impl Channel {
    /// Two connected ends, for two ranks that this process starts.
    ///
    /// # Errors
    /// [`ShmError::Io`] if the process has no descriptor left.
    pub fn pair() -> Result<(Channel, Channel), ShmError> {
        let (a, b) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(failed("socketpair"))?;
        Ok((Channel::over(a), Channel::over(b)))
    }

    /// Adopts one end of a pair that another process made, such as the launcher.
    ///
    /// # Errors
    /// [`ShmError::NotAChannel`] if it is not a connected Unix `SOCK_SEQPACKET` socket.
    pub fn from_fd(fd: OwnedFd) -> Result<Channel, ShmError> {
        let not = |reason| ShmError::NotAChannel { reason };
        let domain = sockopt::socket_domain(&fd).map_err(|errno| match errno {
            Errno::NOTSOCK => not("it is not a socket"),
            errno => failed("getsockopt(SO_DOMAIN)")(errno),
        })?;
        if domain != AddressFamily::UNIX {
            return Err(not("it is not a Unix socket"));
        }
        let kind = sockopt::socket_type(&fd).map_err(failed("getsockopt(SO_TYPE)"))?;
        if kind != SocketType::SEQPACKET {
            return Err(not("it is not of type SOCK_SEQPACKET"));
        }
        rustix::net::getpeername(&fd).map_err(|errno| match errno {
            Errno::NOTCONN => not("it is not connected"),
            errno => failed("getpeername")(errno),
        })?;
        // Credentials are asked for, never received with messages.
        sockopt::set_socket_passcred(&fd, false).map_err(failed("setsockopt(SO_PASSCRED)"))?;
        Ok(Channel::over(fd))
    }

    /// A channel over a socket that is known to be fit for one.
    pub(crate) fn over(socket: OwnedFd) -> Channel {
        Channel {
            socket,
            sending: Mutex::new(()),
            receiving: Mutex::new(()),
            broken: AtomicBool::new(false),
        }
    }

    /// The socket, to be handed to another process, which takes it by [`from_fd`](Self::from_fd).
    pub fn into_fd(self) -> OwnedFd {
        self.socket
    }

    /// The socket.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The process at the other end. For the ends of a [`pair`](Self::pair) it is the process that
    /// made the pair.
    ///
    /// # Errors
    /// [`ShmError::Io`] if the kernel refuses.
    pub fn peer(&self) -> Result<Peer, ShmError> {
        Peer::of(self.as_fd())
    }

    /// Whether the peer has hung up, or the channel has failed. Never waits, and leaves messages
    /// that have arrived where they are: a peer that sent some and exited counts as closed, and
    /// they can still be received.
    pub fn is_closed(&self) -> bool {
        const GONE: PollFlags = PollFlags::HUP.union(PollFlags::RDHUP).union(PollFlags::ERR);
        self.broken.load(Ordering::Relaxed)
            || ready(self.as_fd(), PollFlags::RDHUP, Duration::ZERO)
                .is_ok_and(|events| events.intersects(GONE))
    }

    /// Sends `bytes`, and with them a duplicate of `fd`. Success means that the kernel holds the
    /// message, not that the peer has received it.
    ///
    /// # Errors
    /// [`ShmError::TooLarge`] above [`MAX_MESSAGE`] bytes, [`ShmError::Closed`] if the peer is
    /// gone, [`ShmError::TimedOut`] if it does not receive fast enough.
    pub fn send(
        &self,
        bytes: &[u8],
        fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<(), ShmError> {
        check_length(bytes.len() as u64)?;
        let header = (bytes.len() as u64).to_le_bytes();
        let (first, rest) = bytes.split_at(bytes.len().min(CHUNK));
        let _turn = turn(&self.sending);
        self.check_intact()?;
        self.send_packet(&[&header, first], fd, deadline)?;
        for chunk in rest.chunks(CHUNK) {
            self.send_packet(&[chunk], None, deadline)
                .map_err(|error| self.fail(error))?;
        }
        Ok(())
    }

    /// Receives the next message and the descriptor that came with it, which is close-on-exec. With
    /// a deadline in the past it takes only what is already there.
    ///
    /// # Errors
    /// [`ShmError::Closed`] once the peer is gone and all its messages are received,
    /// [`ShmError::TimedOut`] if none comes, and [`ShmError::Truncated`],
    /// [`ShmError::WrongFdCount`], [`ShmError::TooLarge`] or [`ShmError::Malformed`] if what comes
    /// is no message of this format.
    pub fn recv(&self, deadline: Instant) -> Result<(Vec<u8>, Option<OwnedFd>), ShmError> {
        let mut packet = vec![0; HEADER + CHUNK];
        let _turn = turn(&self.receiving);
        self.check_intact()?;
        let (first, fd) = match self.recv_packet(&mut packet, deadline) {
            Err(ShmError::TimedOut) => return Err(ShmError::TimedOut),
            Err(error) => return Err(self.fail(error)),
            Ok(received) => received,
        };
        let bytes = self
            .recv_rest(first, &mut packet, deadline)
            .map_err(|error| self.fail(error))?;
        Ok((bytes, fd))
    }

    /// The whole message whose packet 0, of `first` bytes, is in `packet`.
    fn recv_rest(
        &self,
        first: usize,
        packet: &mut [u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ShmError> {
        let malformed = |reason| ShmError::Malformed { reason };
        let (header, chunk) = packet[..first]
            .split_first_chunk::<HEADER>()
            .ok_or(malformed("it is shorter than its length field"))?;
        let len = check_length(u64::from_le_bytes(*header))?;
        if chunk.len() != len.min(CHUNK) {
            return Err(malformed("its first packet does not fit its length"));
        }
        let mut bytes = Vec::with_capacity(len);
        bytes.extend_from_slice(chunk);
        while bytes.len() < len {
            let (got, fd) = self.recv_packet(packet, deadline)?;
            if fd.is_some() {
                return Err(ShmError::WrongFdCount { got: 1, allowed: 0 });
            }
            if got != (len - bytes.len()).min(CHUNK) {
                return Err(malformed("one of its packets does not fit its length"));
            }
            bytes.extend_from_slice(&packet[..got]);
        }
        Ok(bytes)
    }

    /// Sends one packet, whole or not at all.
    fn send_packet(
        &self,
        parts: &[&[u8]],
        fd: Option<BorrowedFd<'_>>,
        deadline: Instant,
    ) -> Result<(), ShmError> {
        let parts: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let rights = SendAncillaryMessage::ScmRights(fd.as_slice());
        if fd.is_some() && !control.push(rights) {
            return Err(failed("sendmsg")(Errno::NOBUFS));
        }
        // Per call, because O_NONBLOCK would also hold for every other process with this socket.
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match rustix::net::sendmsg(&self.socket, &parts, &mut control, flags) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => wait_until(self.as_fd(), PollFlags::OUT, deadline)?,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(ShmError::Closed),
                Err(errno) => return Err(failed("sendmsg")(errno)),
            }
        }
    }

    /// Receives one packet: how many bytes of `packet` it fills, and its descriptor.
    fn recv_packet(
        &self,
        packet: &mut [u8],
        deadline: Instant,
    ) -> Result<(usize, Option<OwnedFd>), ShmError> {
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FD_ROOM))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(packet)];
            let received = match rustix::net::recvmsg(&self.socket, &mut parts, &mut control, flags)
            {
                Ok(received) => received,
                // A peer that left with our messages unread makes one call fail; what it sent
                // before, and then the end, come by the next.
                Err(Errno::INTR | Errno::CONNRESET) => continue,
                Err(Errno::AGAIN) => {
                    wait_until(self.as_fd(), PollFlags::IN, deadline)?;
                    continue;
                }
                Err(errno) => return Err(failed("recvmsg")(errno)),
            };
            // Owned from here on, so that every way out but the last closes them.
            let mut fds: Vec<OwnedFd> = control
                .drain()
                .filter_map(|message| match message {
                    RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                    _ => None,
                })
                .flatten()
                .collect();
            if received
                .flags
                .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
            {
                return Err(ShmError::Truncated);
            }
            if fds.len() > 1 {
                return Err(ShmError::WrongFdCount {
                    got: fds.len(),
                    allowed: 1,
                });
            }
            if received.bytes == 0 {
                return Err(ShmError::Closed);
            }
            return Ok((received.bytes, fds.pop()));
        }
    }

    /// Closes the channel for both ends because of `error`, which it returns.
    fn fail(&self, error: ShmError) -> ShmError {
        self.broken.store(true, Ordering::Relaxed);
        // It fails only if the peer is gone, who then needs no telling.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        error
    }

    /// Refuses a channel that has failed: packets of the failed message may still be in it.
    fn check_intact(&self) -> Result<(), ShmError> {
        match self.broken.load(Ordering::Relaxed) {
            true => Err(ShmError::Closed),
            false => Ok(()),
        }
    }
}

/// Refuses a message that is over the limit, before anything is allocated for it.
fn check_length(len: u64) -> Result<usize, ShmError> {
    usize::try_from(len)
        .ok()
        .filter(|&len| len <= MAX_MESSAGE)
        .ok_or(ShmError::TooLarge {
            what: "a message",
            len,
            limit: MAX_MESSAGE as u64,
        })
}

/// Waits for the turn to send or receive. It guards no data, so a panic elsewhere spoils nothing.
fn turn(lock: &Mutex<()>) -> MutexGuard<'_, ()> {
    lock.lock().unwrap_or_else(PoisonError::into_inner)
}
