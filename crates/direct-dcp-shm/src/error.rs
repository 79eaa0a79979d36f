//! What can go wrong, and what to do about it.

use rustix::io::Errno;
use std::io;
use std::path::PathBuf;

/// Why an operation of this crate failed.
///
/// Each message says what was found and, where there is something to do, what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShmError {
    /// A system call failed.
    #[error("{call} failed: {source}")]
    Io {
        /// The system call, by its manual page's name.
        call: &'static str,
        /// The error it returned.
        source: io::Error,
    },

    /// Shared memory of no bytes was asked for.
    #[error("shared memory must hold at least one byte")]
    Empty,

    /// The machine has too little memory left.
    #[error(
        "shared memory needs {requested} bytes and the machine has {available} left; \
         use smaller or fewer slots, or free memory"
    )]
    OutOfMemory {
        /// Bytes asked for.
        requested: u64,
        /// Bytes that memory and swap could still provide.
        available: u64,
    },

    /// The descriptor cannot be sealed, so it is not anonymous shared memory.
    #[error(
        "the descriptor is not a memfd; send the one that SharedMemory::create made, not a file"
    )]
    NotMemfd,

    /// The memory could still be resized by its creator.
    #[error(
        "the shared memory lacks the seals {missing}; without them its creator could shrink it \
         while it is mapped"
    )]
    NotSealed {
        /// The seals that are absent, separated by commas.
        missing: String,
    },

    /// The memory has another size than was agreed.
    #[error("the shared memory holds {got} bytes, not the {expected} agreed on; the ranks differ")]
    WrongSize {
        /// Bytes agreed on.
        expected: u64,
        /// Bytes it holds.
        got: u64,
    },

    /// The descriptor is not one end of a channel.
    #[error("the descriptor is not a channel: {reason}; use a Unix SOCK_SEQPACKET socket pair")]
    NotAChannel {
        /// What it is, or lacks.
        reason: &'static str,
    },

    /// More bytes than the operation can take.
    #[error("{what} of {len} bytes is over the limit of {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Its bytes.
        len: u64,
        /// The most bytes it may have.
        limit: u64,
    },

    /// The kernel cut a message or its descriptors short.
    #[error("a message arrived truncated; its sender does not speak this crate's channel format")]
    Truncated,

    /// A message carried descriptors where it may not, or too many.
    #[error("a packet carried {got} descriptors; at most {allowed} may come with it")]
    WrongFdCount {
        /// Descriptors that came; all were closed.
        got: usize,
        /// Descriptors that could have come.
        allowed: usize,
    },

    /// A message breaks the channel format.
    #[error("a message is malformed: {reason}")]
    Malformed {
        /// How it breaks the format.
        reason: &'static str,
    },

    /// The peer has hung up, or an earlier error has closed the channel.
    #[error("the peer has closed the channel, or an earlier error on it did")]
    Closed,

    /// The deadline passed.
    #[error("the deadline passed; a peer is late, stuck or was never started")]
    TimedOut,

    /// The rendezvous directory is no directory.
    #[error("{} is not a directory, or is a symbolic link to one; name the directory itself", path.display())]
    NotADirectory {
        /// The path that was given.
        path: PathBuf,
    },

    /// The rendezvous directory belongs to somebody else.
    #[error("{} belongs to user {owner}, not to us, {us}; create one of our own", path.display())]
    ForeignDirectory {
        /// The directory.
        path: PathBuf,
        /// The user who owns it.
        owner: u32,
        /// Our effective user.
        us: u32,
    },

    /// The rendezvous directory is open to others.
    #[error("{} has mode {mode:04o}; make it private with chmod 0700", path.display())]
    OpenDirectory {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },

    /// A living listener holds the rank's place.
    #[error("rank {rank} is already listening in {}; give every rank its own number", path.display())]
    RankTaken {
        /// The directory.
        path: PathBuf,
        /// The rank that is taken.
        rank: u32,
    },

    /// Something that is no socket stands where the rank's socket belongs.
    #[error("{} is in the way and is not a socket; remove it", path.display())]
    NotASocket {
        /// What is in the way.
        path: PathBuf,
    },

    /// The peer runs as another user.
    #[error("the peer runs as user {theirs}, not as our user {ours}; start all ranks as one user")]
    ForeignPeer {
        /// Our effective user.
        ours: u32,
        /// The peer's effective user.
        theirs: u32,
    },
}

/// Names the call that an error came from, for `map_err`.
pub(crate) fn failed(call: &'static str) -> impl FnOnce(Errno) -> ShmError {
    move |errno| ShmError::Io {
        call,
        source: errno.into(),
    }
}
