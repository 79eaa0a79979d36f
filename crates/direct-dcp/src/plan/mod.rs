//! What to gather: who owns which token, in which chunks a context is gathered, and where each row
//! belongs in the result.
//!
//! Every rank computes the same from the same input, and nothing here communicates, but for
//! [`ChunkPlan::agree`], which asks whether all did.
//!
//! | type | is |
//! | --- | --- |
//! | [`Sharding`] | which rank holds which token |
//! | [`ChunkPlanner`] | cuts the contexts of requests into chunks that fit a workspace |
//! | [`ChunkPlan`], [`Chunk`], [`Part`] | what it makes of them |
//! | [`RowMap`] | where one rank's rows of a chunk go, request by request |
//! | [`RequestDigests`] | what ranks exchange to find the request that they plan differently |
//!
//! ```
//! use direct_dcp::plan::{ChunkPlanner, Sharding};
//!
//! // Two ranks, one token in turn; pages of 4 tokens, and room for 8 rows over both ranks.
//! let planner = ChunkPlanner::new(Sharding::new(2, 1)?, 4, 8)?;
//! let plan = planner.plan(&[5, 6])?;
//!
//! // The first chunk has no room for a page of the second request.
//! let [first, second] = plan.chunks() else { panic!("11 tokens, 8 rows") };
//! assert_eq!((first.local_rows(), first.total_rows()), (3, 5));
//! assert_eq!((second.local_rows(), second.total_rows()), (3, 6));
//! // Rank 1 has two rows of request 0, and one of padding.
//! assert_eq!(first.row_map(1)?.dst_rows(), [3, 4, -1]);
//! # Ok::<(), direct_dcp::plan::PlanError>(())
//! ```

mod agreement;
mod chunk;
mod digest;
mod error;
mod planner;
mod row_map;
mod sharding;

pub use agreement::AgreementError;
pub use chunk::{Chunk, ChunkPlan, Part};
pub use digest::RequestDigests;
pub use error::PlanError;
pub use planner::{ChunkPlanner, Chunks};
pub use row_map::{RowMap, Run};
pub use sharding::{Sharding, TokenRun};
