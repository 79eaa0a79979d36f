//! What a rank has to say at the end of a scenario.

use std::fmt;

use direct_dcp::{GatherError, GroupError, WorkspaceError};

/// How many gathers were checked, or what was wrong.
pub type Outcome = Result<u64, Failure>;

/// Something that a backend should not have done, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure(pub String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<String> for Failure {
    fn from(text: String) -> Self {
        Failure(text)
    }
}

impl From<GatherError> for Failure {
    fn from(error: GatherError) -> Self {
        Failure(format!("a gather failed: {error:?}"))
    }
}

impl From<WorkspaceError> for Failure {
    fn from(error: WorkspaceError) -> Self {
        Failure(format!("no workspace: {error:?}"))
    }
}

impl From<GroupError> for Failure {
    fn from(error: GroupError) -> Self {
        Failure(format!("the group failed: {error:?}"))
    }
}

/// Fails with `what` unless it `holds`.
pub(crate) fn ensure(holds: bool, what: impl FnOnce() -> String) -> Result<(), Failure> {
    if holds { Ok(()) } else { Err(Failure(what())) }
}
