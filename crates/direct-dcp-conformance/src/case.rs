//! What a scenario is run with.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use direct_dcp::{RowFormat, Way, WorkspaceOptions};

use crate::failure::Failure;

/// One run of one scenario. As text it is one word, which a process can be started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// The scenario's name.
    pub scenario: String,
    /// Ranks of the group.
    pub world: usize,
    /// How rows travel.
    pub way: Way,
    /// Threads that share a rank's copies.
    pub blocks: usize,
    /// Fixes all that is random, alike on all ranks.
    pub seed: u64,
    /// How much to do, where a scenario can do more or less.
    pub amount: u64,
}

impl Case {
    /// Longer than it takes, and shorter than a person waits.
    #[must_use]
    pub fn patience(&self) -> Duration {
        Duration::from_secs(90) + Duration::from_millis(10) * self.amount as u32
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case {
            scenario,
            world,
            way,
            blocks,
            seed,
            amount,
        } = self;
        write!(f, "{scenario}/{world}/{way}/{blocks}/{seed}/{amount}")
    }
}

impl FromStr for Case {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let wrong = || Failure(format!("{text:?} is no case"));
        let parts: Vec<&str> = text.split('/').collect();
        let &[scenario, world, way, blocks, seed, amount] = parts.as_slice() else {
            return Err(wrong());
        };
        Ok(Case {
            scenario: scenario.into(),
            world: world.parse().map_err(|_| wrong())?,
            way: Way::CPU
                .into_iter()
                .chain(Way::CUDA)
                .find(|known| known.to_string() == way)
                .ok_or_else(wrong)?,
            blocks: blocks.parse().map_err(|_| wrong())?,
            seed: seed.parse().map_err(|_| wrong())?,
            amount: amount.parse().map_err(|_| wrong())?,
        })
    }
}

/// The workspace that a rank asks for, and how long its calls wait.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Rows that a gather may deliver.
    pub capacity: usize,
    /// What they are made of.
    pub format: RowFormat,
    /// Slots per ubatch.
    pub slots: usize,
    /// Ubatches.
    pub ubatches: usize,
    /// How rows travel.
    pub way: Way,
    /// Threads that share a rank's copies.
    pub blocks: usize,
    /// The deadline of a call, the first one's too.
    pub timeout: Duration,
}

impl Spec {
    /// A workspace for the case, of two slots and one ubatch, whose calls wait for longer than
    /// any rank that still comes is late.
    #[must_use]
    pub fn new(case: &Case, capacity: usize, format: RowFormat) -> Self {
        Spec {
            capacity,
            format,
            slots: 2,
            ubatches: 1,
            way: case.way,
            blocks: case.blocks,
            timeout: Duration::from_secs(30),
        }
    }

    /// The library's own form of it.
    #[must_use]
    pub fn options(&self) -> WorkspaceOptions {
        WorkspaceOptions::new(self.capacity, self.format)
            .slots(self.slots)
            .ubatches(self.ubatches)
            .way(self.way)
            .blocks(self.blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_survives_being_text() {
        let case = Case {
            scenario: "rank_major".into(),
            world: 4,
            way: Way::Pull,
            blocks: 3,
            seed: u64::MAX,
            amount: 17,
        };
        assert_eq!(case.to_string().parse(), Ok(case));
        assert!("rank_major/4/pull".parse::<Case>().is_err());
    }
}
