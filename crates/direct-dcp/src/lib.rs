//! Direct symmetric-memory KV gather for decode context parallelism.
//!
//! The KV cache of one sequence is sharded over `world_size` ranks. A gather hands every rank the
//! rows of all ranks: each stores its own straight into memory that its peers read, publishes an
//! epoch, and waits for the epochs of the others. No library call, no copy through a socket, no
//! thread in between.
//!
//! ```
//! use direct_dcp::{DType, Group, KvGather, RowFormat, Workspace, WorkspaceOptions};
//!
//! // Two ranks, here as threads of this process; each holds three rows of eight bf16 values.
//! let format = RowFormat::new(DType::BF16, 8);
//! let ranks: Vec<_> = Group::threads(2)?
//!     .into_iter()
//!     .map(|group| {
//!         std::thread::spawn(move || -> Result<Vec<u8>, Box<dyn std::error::Error + Send + Sync>> {
//!             let workspace = Workspace::new(&group, WorkspaceOptions::new(64, format))?;
//!             let gather = KvGather::new(workspace);
//!             let local = vec![group.rank() as u8 + 1; 3 * format.row_bytes()];
//!             // Zero-copy: the rows of all ranks, in rank order, lent until the guard drops.
//!             let rows = gather.gather(0, &local)?;
//!             Ok(rows.to_vec())
//!         })
//!     })
//!     .collect();
//! for rank in ranks {
//!     let rows = rank.join().unwrap().unwrap();
//!     assert_eq!(rows.len(), 2 * 3 * format.row_bytes());
//!     assert!(rows[..48].iter().all(|&byte| byte == 1));
//!     assert!(rows[48..].iter().all(|&byte| byte == 2));
//! }
//! # Ok::<(), direct_dcp::GroupError>(())
//! ```
//!
//! # The parts
//!
//! | type | is |
//! | --- | --- |
//! | [`Group`] | the ranks, and how they find and lose one another |
//! | [`Workspace`] | the memory that they share, sized once |
//! | [`KvGather`] | the operation: [`gather_into`](KvGather::gather_into) copies out, [`gather`](KvGather::gather) lends the slot, [`gather_final`](KvGather::gather_final) puts every row in its final place |
//! | [`Pipeline`] | gathers that go on while earlier results are read |
//! | [`Tuning`] | which ways are fast on a machine, as measured there |
//! | [`plan`] | which rows to gather: who owns which token, chunks that fit, and where each row belongs |
//!
//! # What it does not do
//!
//! It does not cross machines, and it does not reduce: rows arrive as they were sent. Ranks trust
//! one another: a peer that writes shared memory outside the protocol can corrupt results.
#![forbid(unsafe_code)]

pub mod cuda;
mod error;
mod format;
mod gather;
mod group;
mod layout;
mod options;
mod pipeline;
pub mod plan;
pub mod tuning;
mod window;
mod workspace;

pub use error::GatherError;
pub use format::{DType, RowFormat};
pub use gather::{Gathered, KvGather, Status};
pub use group::{AbortHandle, Exchange, Group, GroupError, Launcher};
pub use layout::{FinalLayout, Pages, Planes, Rows};
pub use options::{Way, WorkspaceError, WorkspaceOptions};
pub use pipeline::{Pipeline, Ticket};
pub use tuning::Tuning;
pub use workspace::Workspace;

/// The program in the README, compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
