//! Whether all ranks have made the same plan.

use super::chunk::ChunkPlan;
use super::digest::RequestDigests;
use crate::group::{Group, GroupError};

/// Why ranks do not gather by one plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgreementError {
    /// A rank has planned a request otherwise, or has more or fewer requests than this rank.
    #[error(
        "rank {rank} plans request {request} in another way than this rank; all ranks must plan the same contexts, in the same order"
    )]
    Differs {
        /// The rank, the first such one.
        rank: usize,
        /// The first such request, counted from 0.
        request: usize,
    },
    /// The group failed.
    #[error(transparent)]
    Group(#[from] GroupError),
}

impl ChunkPlan {
    /// Collective: compares the plans of all ranks, request by request, before any of their chunks
    /// is gathered. Without it, ranks whose plans differ find out in the first gather that does:
    /// [`GatherError::Mismatch`](crate::GatherError::Mismatch) of `plan`, which names no request.
    ///
    /// # Errors
    /// [`AgreementError::Differs`] on every rank whose plan is not that of all others.
    pub fn agree(&self, group: &Group) -> Result<(), AgreementError> {
        let own = self.request_digests();
        let all = group.all_gather(&own.to_bytes())?;
        for (rank, bytes) in all.iter().enumerate() {
            // Bytes of a rank that speaks otherwise than we differ from the first request on.
            let request = match RequestDigests::from_bytes(bytes) {
                Ok(theirs) => own.first_difference(&theirs),
                Err(_) => Some(0),
            };
            if let Some(request) = request {
                return Err(AgreementError::Differs { rank, request });
            }
        }
        Ok(())
    }
}
