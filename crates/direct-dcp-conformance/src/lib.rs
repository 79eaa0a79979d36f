//! One suite of cases that every backend of direct-dcp passes.
//!
//! A *scenario* is what one rank does and checks: a function over [`Rank`], known by its name. A
//! [`Backend`] runs it on every rank of a group, as threads, as processes, or on devices, and
//! brings the outcomes together. A new backend is tested by one line:
//!
//! ```ignore
//! direct_dcp_conformance::conformance!(MyBackend::new());
//! ```
//!
//! # How a scenario judges
//!
//! Ranks derive every rank's rows from the seed, so each knows alone what it must receive: the
//! plain concatenation. Rows are random and hold no zero byte. Outputs are poisoned, byte by
//! byte, with something else than what is expected there, and lie between canaries in one storage
//! with the input.
//!
//! A scenario that hangs fails, by its name: every wait has a deadline, and a watchdog stands
//! behind it. Run times are never asserted, save where a bound is the promise.
//!
//! # Turning it up
//!
//! | variable | is |
//! | --- | --- |
//! | `DIRECT_DCP_GATHERS` | gathers of each random scenario, per backend; 51,200 unless set, a tenth in debug builds |
//! | `DIRECT_DCP_KILLS` | ranks that are killed; 100 unless set |
//! | `DIRECT_DCP_SEED` | the seed of everything, to repeat a failure; random unless set |

pub mod backends;
mod case;
mod failure;
mod probe;
mod reference;
pub mod scenarios;
mod step;
mod suite;
pub mod usage;

pub use case::{Case, Spec};
pub use failure::{Failure, Outcome};
pub use suite::{attempt, check, nothing_is_left_out};

use std::borrow::Cow;
use std::ops::Range;
use std::time::Duration;

use direct_dcp::{GatherError, GroupError, Status, Way, WorkspaceError};

use scenarios::Scenario;

/// A way to run ranks.
pub trait Backend {
    /// What it is called in reports.
    fn name(&self) -> &'static str;

    /// The ways that it has to move bytes.
    fn ways(&self) -> &[Way] {
        &Way::CPU
    }

    /// The scenarios that make sense on it.
    fn scenarios(&self) -> Vec<Scenario> {
        scenarios::all().to_vec()
    }

    /// Runs the case's scenario on as many ranks as it says, and returns what each has to say, in
    /// rank order. It returns even if ranks hang.
    fn run(&self, case: &Case) -> Vec<Outcome>;

    /// What it answers to somebody who asks for a group of one.
    fn alone(&self) -> Option<GroupError>;
}

/// One rank of a group.
pub trait Rank: Sized + Send {
    /// What it gathers with.
    type Gather: Gather;

    /// Its number.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// The rank that each rank had before the last rebuild.
    fn previous_ranks(&self) -> &[usize];

    /// Collective: builds a workspace, and what gathers in it.
    ///
    /// # Errors
    /// Those of [`Workspace::new`](direct_dcp::Workspace::new).
    fn build(&self, spec: &Spec) -> Result<Self::Gather, WorkspaceError>;

    /// Collective, and beside the gathers: what every rank passed, in rank order.
    ///
    /// # Errors
    /// Those of [`Group::all_gather`](direct_dcp::Group::all_gather).
    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, GroupError>;

    /// Collective, and beside the gathers: returns once every rank is here.
    ///
    /// # Errors
    /// Those of [`exchange`](Rank::exchange).
    fn meet(&self) -> Result<(), GroupError> {
        self.exchange(&[]).map(|_| ())
    }

    /// Something that aborts the group, from any thread.
    fn aborter(&self) -> Box<dyn Fn() + Send>;

    /// A group of the ranks that call this, in the same threads or processes.
    ///
    /// # Errors
    /// Those of [`Group::rebuild`](direct_dcp::Group::rebuild).
    fn rebuild(&self, deadline: Duration) -> Result<Self, GroupError>;

    /// Makes this rank late for its next call. A device may sleep in its stream instead.
    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// What one rank gathers with. Threads may share it.
pub trait Gather: Send + Sync {
    /// A result that is lent, not copied.
    type Rows: Rows;

    /// Gathers from one part of `storage` into another; they do not overlap. A device backend
    /// has a copy of the whole storage in device memory, and brings it back whatever the result.
    ///
    /// # Errors
    /// Those of [`KvGather::gather_into`](direct_dcp::KvGather::gather_into).
    fn gather_into(
        &self,
        ubatch: usize,
        storage: &mut [u8],
        local: Range<usize>,
        out: Range<usize>,
    ) -> Result<(), GatherError>;

    /// Gathers, and lends the slot.
    ///
    /// # Errors
    /// Those of [`KvGather::gather`](direct_dcp::KvGather::gather).
    fn gather(&self, ubatch: usize, local: &[u8]) -> Result<Self::Rows, GatherError>;

    /// Where this rank stands.
    fn status(&self) -> Status;

    /// Whether a call that fails may leave anything at all in the output.
    fn spoils_outputs(&self) -> bool {
        false
    }
}

/// Rows of all ranks, lent until this is dropped, by any thread.
pub trait Rows: Send {
    /// The call that delivered them.
    fn epoch(&self) -> u64;

    /// What is in the slot now; a device backend fetches it anew each time.
    fn bytes(&self) -> Cow<'_, [u8]>;
}
