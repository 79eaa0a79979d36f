//! What can go wrong while a group comes up, talks, or is rebuilt.

use direct_dcp_shm::ShmError;
use std::io;
use std::time::Duration;

/// Why a [`Group`](super::Group) could not be built, or why one of its operations failed.
///
/// Each message names the ranks concerned and says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The caller passed something that cannot be right on any machine.
    #[error("{what}: expected {expected}, got {got}")]
    InvalidArgument {
        /// The argument.
        what: &'static str,
        /// What it may be.
        expected: String,
        /// What it was.
        got: String,
    },

    /// Some ranks did not come in time.
    #[error(
        "no word from {} in {waited:.1?}; see whether they run, are stuck, or skipped this call, \
         then call rebuild, or raise the timeout if they are only slow",
        Ranks(missing)
    )]
    Timeout {
        /// The ranks that were waited for in vain.
        missing: Vec<usize>,
        /// How long.
        waited: Duration,
    },

    /// A rank has exited, was killed, or dropped its group.
    #[error("rank {rank} has left the group; call rebuild to go on with the others")]
    PeerLost {
        /// The rank that left, as numbered in this generation.
        rank: usize,
    },

    /// Another rank has given this generation up.
    #[error("rank {rank} has begun to rebuild the group; call rebuild to be part of the new one")]
    Rebuilding {
        /// The rank whose call of rebuild was seen first.
        rank: usize,
    },

    /// Two ranks disagree about something that must be equal on both.
    #[error(
        "rank {source} has another {field}: {theirs} there, {ours} here; \
         start every rank from the same program, version and settings",
        source = r#source
    )]
    Mismatch {
        /// The rank that differs.
        r#source: usize,
        /// What differs.
        field: &'static str,
        /// Its value here.
        ours: String,
        /// Its value there.
        theirs: String,
    },

    /// Something connected during bring-up that is no rank of this group.
    #[error(
        "process {process} connected while the group was coming up, but {reason}; \
         end it, or let this group meet elsewhere"
    )]
    Stranger {
        /// The process, or 0 if this one cannot see it.
        process: u32,
        /// Why it is not one of us.
        reason: String,
    },

    /// Some rank called abort.
    #[error("rank {by} aborted the group; call rebuild, or exit")]
    Aborted {
        /// The rank that was first to abort.
        by: usize,
    },

    /// The others agreed on a group without this rank.
    #[error(
        "the other ranks rebuilt the group without this one, because it called rebuild too late \
         or looked dead; exit, and join a group that is built anew"
    )]
    Excluded,

    /// A rebuild found nobody to go on with.
    #[error(
        "only {survivors} rank is left, and a group needs two; build a new group, or go on without"
    )]
    TooFew {
        /// How many are left, this rank included.
        survivors: usize,
    },

    /// This handle's generation has ended by a call of rebuild on it.
    #[error("generation {generation} has ended; use the group that rebuild returned")]
    Superseded {
        /// The generation that has ended.
        generation: u64,
    },

    /// Another rank failed in a step that all must pass, and every rank gave the step up.
    #[error("rank {rank} failed to {what}, so no rank did; its own error says why")]
    PeerFailed {
        /// The rank that failed.
        rank: usize,
        /// What it could not do.
        what: String,
    },

    /// This machine or this way of starting cannot do what was asked.
    #[error("{capability} is not supported: {reason}; {instead}")]
    Unsupported {
        /// What was asked for.
        capability: &'static str,
        /// Why it cannot be.
        reason: String,
        /// What to do instead.
        instead: &'static str,
    },

    /// An environment variable is missing or wrong.
    #[error("environment variable {variable} {reason}")]
    Environment {
        /// The variable.
        variable: &'static str,
        /// What is wrong, and how to put it right.
        reason: String,
    },

    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: String,
        /// The system's answer.
        source: io::Error,
    },

    /// Shared memory, a channel or the rendezvous directory failed.
    #[error("{what}: {source}")]
    Shm {
        /// What was being done.
        what: String,
        /// The cause.
        source: ShmError,
    },
}

/// Names what was being done when the operating system refused, for `map_err`.
pub(super) fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> GroupError {
    let what = what.into();
    move |source| GroupError::Io { what, source }
}

/// Names what was being done when shared memory or a channel failed, for `map_err`.
pub(super) fn shm_error(what: impl Into<String>) -> impl FnOnce(ShmError) -> GroupError {
    let what = what.into();
    move |source| GroupError::Shm { what, source }
}

/// Ranks in a sentence: `rank 3`, `ranks 3, 5 and 7`, and no more than a line of them.
struct Ranks<'a>(&'a [usize]);

/// How many ranks a message lists by number.
const LISTED: usize = 16;

impl std::fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown: Vec<String> = self.0.iter().take(LISTED).map(usize::to_string).collect();
        let more = self.0.len() - shown.len();
        match (shown.split_last(), more) {
            (None, _) => write!(f, "the other ranks"),
            (Some((only, [])), 0) => write!(f, "rank {only}"),
            (Some((last, others)), 0) => write!(f, "ranks {} and {last}", others.join(", ")),
            (Some(_), _) => write!(f, "ranks {} and {more} more", shown.join(", ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_read_like_a_sentence() {
        let text = |ranks: &[usize]| Ranks(ranks).to_string();
        assert_eq!(text(&[3]), "rank 3");
        assert_eq!(text(&[3, 5]), "ranks 3 and 5");
        assert_eq!(text(&[3, 5, 7]), "ranks 3, 5 and 7");
        assert_eq!(
            text(&(0..20).collect::<Vec<_>>()),
            "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 4 more"
        );
    }

    #[test]
    fn a_mismatch_names_both_sides() {
        let error = GroupError::Mismatch {
            r#source: 2,
            field: "world size",
            ours: "4".into(),
            theirs: "8".into(),
        };
        let text = error.to_string();
        assert!(text.starts_with("rank 2 has another world size: 8 there, 4 here"));
    }
}
