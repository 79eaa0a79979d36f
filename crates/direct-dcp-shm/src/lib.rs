//! Sealed shared memory, descriptor passing and futexes, for ranks that are threads or processes
//! of one Linux machine.
//!
//! Two ranks agree on a block of memory and signal through it:
//!
//! ```
//! use direct_dcp_shm::{Channel, SharedMemory, ShmError, futex};
//! use std::sync::atomic::Ordering;
//! use std::time::{Duration, Instant};
//!
//! # fn main() -> Result<(), ShmError> {
//! let deadline = Instant::now() + Duration::from_secs(5);
//! let (ours, theirs) = Channel::pair()?;
//!
//! // One rank creates the memory and sends its descriptor.
//! let memory = SharedMemory::create("slot-0", 4096)?;
//! ours.send(b"slot-0", Some(memory.fd()), deadline)?;
//!
//! // The other, in this process or another, checks what came before it maps it.
//! let (name, fd) = theirs.recv(deadline)?;
//! assert_eq!(name, b"slot-0");
//! let peer = SharedMemory::from_fd(fd.expect("a descriptor came along"), 4096)?.map()?;
//!
//! // Both now see the same words, and can sleep until one changes.
//! let mine = memory.map()?;
//! let signal = mine.atomic_u32(0).expect("in bounds and aligned");
//! signal.store(7, Ordering::Release);
//! futex::wake_all(signal);
//! assert_eq!(peer.atomic_u32(0).expect("in bounds and aligned").load(Ordering::Acquire), 7);
//! # Ok(())
//! # }
//! ```
//!
//! | to | use |
//! |---|---|
//! | create, verify and map memory that several ranks share | [`SharedMemory`], [`Mapping`] |
//! | sleep until a word in it changes | [`futex`] |
//! | exchange byte strings and descriptors between two ranks | [`Channel`] |
//! | find each other through a private directory | [`rendezvous`] |
//! | hand a descriptor to a child process | [`inherit`] |
//! | find out that this process was forked from a rank's | [`forks`] |
//!
//! # What can be relied on
//!
//! - **Safe from outside.** Safe code reaches shared memory only through atomics. Everything else
//!   goes through the raw pointer of [`Mapping::as_ptr`], whose use is the caller's `unsafe`.
//! - **No bus error.** Memory is sealed against shrinking and its pages are allocated before it is
//!   mapped, so running out of memory is an error when it is created, not a signal when it is used.
//! - **Descriptors do not leak.** Every descriptor made or received is close-on-exec, and those of
//!   a refused message are closed.
//! - **Every wait ends.** Whatever waits for another rank takes a deadline or a timeout.

#[cfg(not(target_os = "linux"))]
compile_error!("direct-dcp-shm needs Linux: memfd seals, SCM_RIGHTS and futexes");

mod channel;
mod error;
mod fork;
pub mod futex;
mod mapping;
mod memory;
mod peer;
mod poll;
mod process;
pub mod rendezvous;

pub use channel::{Channel, MAX_MESSAGE};
pub use error::ShmError;
pub use fork::forks;
pub use mapping::Mapping;
pub use memory::SharedMemory;
pub use peer::Peer;
pub use process::inherit;
