//! Anonymous memory that ranks share by its descriptor.

use crate::error::failed;
use crate::{Mapping, ShmError};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The seals that fix the size for good: a mapped page can never disappear.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Pages are allocated this many bytes at a time, so that a signal undoes little.
const COMMIT_STEP: u64 = 16 << 20;

/// Memory of a fixed size, known by a descriptor that can be sent to another process.
///
/// It is a `memfd`, sealed so that nobody can resize it, with every page allocated. It starts as
/// zeros and lives as long as any descriptor or mapping of it does.
///
/// ```
/// use direct_dcp_shm::SharedMemory;
///
/// # fn main() -> Result<(), direct_dcp_shm::ShmError> {
/// let memory = SharedMemory::create("example", 1 << 16)?;
/// let again = SharedMemory::from_fd(memory.try_clone_fd()?, 1 << 16)?;
/// assert_eq!(again.map()?.len(), 65_536);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    len: usize,
}

impl SharedMemory {
    /// Creates zeroed memory of `len` bytes, which `/proc` shows under `name`.
    ///
    /// # Errors
    /// [`ShmError::Empty`] if `len` is 0, [`ShmError::TooLarge`] or [`ShmError::OutOfMemory`] if the
    /// machine cannot hold it, [`ShmError::Io`] if the kernel refuses a step. A limit of a memory
    /// control group is not seen beforehand: the kernel enforces it by ending a process.
    pub fn create(name: &str, len: usize) -> Result<SharedMemory, ShmError> {
        let size = checked_size(len)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags).map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&fd, size).map_err(failed("ftruncate"))?;
        commit(fd.as_fd(), size, 0)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        Ok(SharedMemory { fd, len })
    }

    /// Adopts memory that another rank created with [`create`](Self::create) and the same `len`.
    ///
    /// Nothing is mapped before the descriptor is known to be a memfd, sealed, of exactly that
    /// size.
    ///
    /// # Errors
    /// [`ShmError::NotMemfd`], [`ShmError::NotSealed`] or [`ShmError::WrongSize`] if it is something
    /// else; those of [`create`](Self::create) if it has pages still to be allocated.
    pub fn from_fd(fd: OwnedFd, len: usize) -> Result<SharedMemory, ShmError> {
        let expected = checked_size(len)?;
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|errno| match errno {
            Errno::INVAL => ShmError::NotMemfd,
            errno => failed("fcntl(F_GET_SEALS)")(errno),
        })?;
        let missing = SEALS.difference(seals);
        if !missing.is_empty() {
            return Err(ShmError::NotSealed {
                missing: names(missing),
            });
        }
        // Only now, with the seals seen, is the size read one that stays.
        let stat = rustix::fs::fstat(&fd).map_err(failed("fstat"))?;
        let got = stat.st_size.cast_unsigned();
        if got != expected {
            return Err(ShmError::WrongSize { expected, got });
        }
        // `st_blocks` counts units of 512 bytes, whatever the page size.
        let committed = stat.st_blocks.cast_unsigned().saturating_mul(512);
        commit(fd.as_fd(), got, committed)?;
        Ok(SharedMemory { fd, len })
    }

    /// The descriptor, to be sent to another rank.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A second descriptor of the same memory, close-on-exec like the first.
    ///
    /// # Errors
    /// [`ShmError::Io`] if the process has no descriptor left.
    pub fn try_clone_fd(&self) -> Result<OwnedFd, ShmError> {
        self.fd.try_clone().map_err(|source| ShmError::Io {
            call: "fcntl(F_DUPFD_CLOEXEC)",
            source,
        })
    }

    /// Size in bytes; never 0.
    #[expect(
        clippy::len_without_is_empty,
        reason = "empty shared memory cannot exist"
    )]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Maps the memory for reading and writing. Each call makes a mapping of its own, at its own
    /// address; what is written through one is read through all.
    ///
    /// # Errors
    /// [`ShmError::Io`] if the address space is full, or if the descriptor was opened or sealed
    /// read-only by the rank that sent it.
    pub fn map(&self) -> Result<Mapping, ShmError> {
        Mapping::of(self)
    }
}

/// The size as the kernel counts it, if a mapping can have it: a Rust object spans at most
/// `isize::MAX` bytes.
fn checked_size(len: usize) -> Result<u64, ShmError> {
    match len {
        0 => Err(ShmError::Empty),
        _ if len > isize::MAX.cast_unsigned() => Err(ShmError::TooLarge {
            what: "shared memory",
            len: len as u64,
            limit: isize::MAX as u64,
        }),
        _ => Ok(len as u64),
    }
}

/// Allocates the pages of `fd`, of which about `committed` bytes already have theirs.
///
/// A page that is first allocated when it is touched raises `SIGBUS` if it cannot be; here the
/// same is an error. What is plainly more than the machine has is refused first, because the
/// kernel would end processes to make room.
fn commit(fd: BorrowedFd<'_>, size: u64, committed: u64) -> Result<(), ShmError> {
    let requested = size.saturating_sub(committed);
    if requested == 0 {
        return Ok(());
    }
    if let Some(available) = available_memory().filter(|&available| available < requested) {
        return Err(ShmError::OutOfMemory {
            requested,
            available,
        });
    }
    let mut start = 0;
    while start < size {
        let step = COMMIT_STEP.min(size - start);
        match rustix::fs::fallocate(fd, FallocateFlags::empty(), start, step) {
            Ok(()) => start += step,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(failed("fallocate")(errno)),
        }
    }
    Ok(())
}

/// Bytes that memory and swap can still provide, or `None` where `/proc` does not tell.
fn available_memory() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
        kib.checked_mul(1024)
    };
    field("MemAvailable:")?.checked_add(field("SwapFree:")?)
}

/// The names of `seals`, as their manual page has them.
fn names(seals: SealFlags) -> String {
    [
        (SealFlags::SHRINK, "F_SEAL_SHRINK"),
        (SealFlags::GROW, "F_SEAL_GROW"),
        (SealFlags::SEAL, "F_SEAL_SEAL"),
    ]
    .into_iter()
    .filter(|(seal, _)| seals.contains(*seal))
    .map(|(_, name)| name)
    .collect::<Vec<_>>()
    .join(", ")
}
