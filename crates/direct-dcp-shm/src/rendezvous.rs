//! Ranks that find each other through a private directory.
//!
//! Each rank that others connect to listens on `rank-<N>.sock` in the directory. The directory must
//! belong to our user and have mode 0700, and both sides check that the other runs as our user.
//!
//! ```
//! use direct_dcp_shm::rendezvous::{self, Listener};
//! use std::fs::Permissions;
//! use std::os::unix::fs::PermissionsExt;
//! use std::time::{Duration, Instant};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let dir = tempfile::tempdir()?;
//! std::fs::set_permissions(dir.path(), Permissions::from_mode(0o700))?;
//! let deadline = Instant::now() + Duration::from_secs(5);
//! let listener = Listener::bind(dir.path(), 0)?;
//!
//! let theirs = rendezvous::connect(dir.path(), 0, deadline)?; // usually in another process
//! let ours = listener.accept(deadline)?;
//! theirs.send(b"rank 1 is here", None, deadline)?;
//! assert_eq!(ours.recv(deadline)?.0, b"rank 1 is here");
//! # Ok(())
//! # }
//! ```

use crate::error::failed;
use crate::poll::wait_until;
use crate::{Channel, ShmError};
use rustix::event::PollFlags;
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Connections that may wait to be accepted; the kernel lowers it to its own limit.
const BACKLOG: i32 = 1024;

/// Pause between two attempts at something that another process has yet to do.
const PAUSE: Duration = Duration::from_millis(2);

/// How long replacing a stale socket waits for other ranks that do the same.
const REPLACE_PATIENCE: Duration = Duration::from_secs(10);

/// A rank that others can [`connect`] to. Its socket file is removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    place: Place,
    /// Device and inode of our socket file.
    file: (u64, u64),
}

impl Listener {
    /// Listens as `rank` in `dir`. A socket file that a killed run has left is replaced; that of a
    /// living one is not.
    ///
    /// # Errors
    /// [`ShmError::NotADirectory`], [`ShmError::ForeignDirectory`] or [`ShmError::OpenDirectory`]
    /// if `dir` is not private to us, [`ShmError::RankTaken`] if somebody listens as `rank`,
    /// [`ShmError::NotASocket`] if another file has the socket's name.
    pub fn bind(dir: &Path, rank: u32) -> Result<Listener, ShmError> {
        let place = Place::open(dir, rank)?;
        let socket = socket(SocketType::SEQPACKET)?;
        match place.bind(&socket) {
            Err(Errno::ADDRINUSE) => place.replace_stale(&socket)?,
            bound => bound.map_err(failed("bind"))?,
        }
        let stat = place.stat().map_err(failed("stat"))?;
        let listener = Listener {
            socket,
            place,
            file: (stat.st_dev, stat.st_ino),
        };
        rustix::net::listen(&listener.socket, BACKLOG).map_err(failed("listen"))?;
        Ok(listener)
    }

    /// Waits for a rank to connect. Which one it is, it has to say itself.
    ///
    /// # Errors
    /// [`ShmError::TimedOut`] if none comes, [`ShmError::ForeignPeer`] if it is another user's.
    pub fn accept(&self, deadline: Instant) -> Result<Channel, ShmError> {
        loop {
            match rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC) {
                Ok(socket) => return own_user_only(Channel::over(socket)),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => wait_until(self.socket.as_fd(), PollFlags::IN, deadline)?,
                Err(errno) => return Err(failed("accept")(errno)),
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Somebody may have cleared the directory and let another run start in it.
        let ours = |stat: Stat| (stat.st_dev, stat.st_ino) == self.file;
        if self.place.stat().is_ok_and(ours) {
            // Nothing to be done if it fails: the next run replaces the file.
            let _ = self.place.unlink();
        }
    }
}

/// Connects to the rank that listens as `rank` in `dir`, or will do so before the deadline. The
/// directory must exist already.
///
/// # Errors
/// Those of [`Listener::bind`] for the directory, [`ShmError::TimedOut`] if nobody listens in time,
/// [`ShmError::ForeignPeer`] if it is another user's process that does.
pub fn connect(dir: &Path, rank: u32, deadline: Instant) -> Result<Channel, ShmError> {
    let place = Place::open(dir, rank)?;
    loop {
        let socket = socket(SocketType::SEQPACKET)?;
        match place.connect(&socket) {
            Ok(()) => return own_user_only(Channel::over(socket)),
            Err(Errno::INTR) => continue,
            // No file yet; a stale one, or one not yet listened on; more callers than fit.
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN) => {}
            Err(errno) => return Err(failed("connect")(errno)),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ShmError::TimedOut);
        }
        thread::sleep(PAUSE.min(left));
    }
}

/// Where a rank listens: a name in a directory that is held open, so that both stay the same even
/// if the path comes to mean another directory.
#[derive(Debug)]
struct Place {
    dir: OwnedFd,
    path: PathBuf,
    rank: u32,
}

impl Place {
    /// Opens the directory and checks that it is private to us.
    fn open(dir: &Path, rank: u32) -> Result<Place, ShmError> {
        let path = dir.to_path_buf();
        // Without a trailing slash, which would follow a symbolic link.
        let name = dir.components().as_path();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = match rustix::fs::open(name, flags, Mode::empty()) {
            Ok(dir) => dir,
            Err(Errno::NOTDIR | Errno::LOOP) => return Err(ShmError::NotADirectory { path }),
            Err(errno) => return Err(failed("open")(errno)),
        };
        let stat = rustix::fs::fstat(&dir).map_err(failed("fstat"))?;
        let us = own_user();
        if stat.st_uid != us {
            return Err(ShmError::ForeignDirectory {
                path,
                owner: stat.st_uid,
                us,
            });
        }
        let mode = stat.st_mode & 0o777;
        if mode != 0o700 {
            return Err(ShmError::OpenDirectory { path, mode });
        }
        Ok(Place { dir, path, rank })
    }

    fn name(&self) -> String {
        format!("rank-{}.sock", self.rank)
    }

    /// The socket's address. It goes through the open directory, whose own path may be longer than
    /// the 107 bytes that an address can hold.
    fn address(&self) -> Result<SocketAddrUnix, Errno> {
        let dir = self.dir.as_raw_fd();
        SocketAddrUnix::new(format!("/proc/self/fd/{dir}/{}", self.name()))
    }

    fn bind(&self, socket: &OwnedFd) -> Result<(), Errno> {
        rustix::net::bind(socket, &self.address()?)
    }

    fn connect(&self, socket: &OwnedFd) -> Result<(), Errno> {
        rustix::net::connect(socket, &self.address()?)
    }

    fn stat(&self) -> Result<Stat, Errno> {
        rustix::fs::statat(&self.dir, self.name(), AtFlags::SYMLINK_NOFOLLOW)
    }

    fn unlink(&self) -> Result<(), Errno> {
        rustix::fs::unlinkat(&self.dir, self.name(), AtFlags::empty())
    }

    /// Binds `socket` in place of a file that no living process listens on.
    ///
    /// Whoever removes a stale file holds the directory's lock from looking to binding. So what was
    /// found stale is still that same file when it is removed: a fresh one can take its place only
    /// after somebody, under the lock, removed it.
    fn replace_stale(&self, socket: &OwnedFd) -> Result<(), ShmError> {
        let _lock = self.lock()?;
        match self.stat() {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Socket => {
                return Err(ShmError::NotASocket {
                    path: self.path.join(self.name()),
                });
            }
            Ok(_) if self.is_alive()? => return Err(self.taken()),
            Ok(_) => self.unlink().map_err(failed("unlink"))?,
            // Its owner has left meanwhile.
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(failed("stat")(errno)),
        }
        self.bind(socket).map_err(|errno| match errno {
            Errno::ADDRINUSE => self.taken(),
            errno => failed("bind")(errno),
        })
    }

    /// Whether a living process has the socket.
    ///
    /// The kernel looks for the owner before it compares types, so a socket of the wrong type can
    /// ask without ever reaching it: refused means that there is none.
    fn is_alive(&self) -> Result<bool, ShmError> {
        let probe = socket(SocketType::DGRAM)?;
        Ok(self.connect(&probe) != Err(Errno::CONNREFUSED))
    }

    /// Takes the directory's lock, until the result is dropped.
    fn lock(&self) -> Result<OwnedFd, ShmError> {
        // Opened anew, because the lock belongs to the opening and ends with it.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir =
            rustix::fs::openat(&self.dir, ".", flags, Mode::empty()).map_err(failed("openat"))?;
        let deadline = Instant::now() + REPLACE_PATIENCE;
        loop {
            match rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(dir),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(PAUSE),
                Err(errno) => return Err(failed("flock")(errno)),
            }
        }
    }

    fn taken(&self) -> ShmError {
        ShmError::RankTaken {
            path: self.path.clone(),
            rank: self.rank,
        }
    }
}

/// A Unix socket, close-on-exec, that makes no call wait.
fn socket(kind: SocketType) -> Result<OwnedFd, ShmError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).map_err(failed("socket"))
}

/// Refuses a peer that runs as another user.
fn own_user_only(channel: Channel) -> Result<Channel, ShmError> {
    let ours = own_user();
    let theirs = channel.peer()?.uid;
    match theirs == ours {
        true => Ok(channel),
        false => Err(ShmError::ForeignPeer { ours, theirs }),
    }
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}
