//! What each call of a workspace goes by.

use std::fmt;

use direct_dcp_cuda::gather::{Delivery, Route};

use crate::options::{Way, WorkspaceOptions};
use crate::tuning::{Entry, Setting};

/// The ways of calls by their kind and size: the same on all ranks, since it comes from what they
/// agreed on, and a call has the same kind and size on all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    /// How rows travel unless something else is said: the workspace's way.
    way: Way,
    /// From the smallest size up; the last is for any.
    copy_out: Vec<Step>,
    zero_copy: Vec<Step>,
}

/// What calls up to a size go by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Step {
    up_to: Option<usize>,
    pub(super) way: Way,
    pub(super) blocks: Option<usize>,
    /// The way of calls that are captured.
    pub(super) captured: Way,
}

impl Step {
    fn any(way: Way) -> Self {
        Step {
            up_to: None,
            way,
            blocks: None,
            captured: way,
        }
    }

    fn of(entry: &Entry) -> Self {
        Step {
            up_to: entry.up_to,
            way: entry.way,
            blocks: entry.blocks,
            captured: match entry.way {
                // Only the host knows the slot of such a call.
                Way::CopyEngine => Way::Push,
                way => way,
            },
        }
    }
}

impl Choice {
    /// One way for all calls.
    pub(super) fn only(way: Way) -> Self {
        Choice {
            way,
            copy_out: vec![Step::any(way)],
            zero_copy: vec![Step::any(way)],
        }
    }

    /// Calls by push, and those that copy out by pull: there a push moves each row over the slot of
    /// every rank, where pull stages it once.
    pub(super) fn push_and_pull() -> Self {
        Choice {
            copy_out: vec![Step::any(Way::Pull)],
            ..Self::only(Way::Push)
        }
    }

    /// What a group tries, in this order, until one works.
    pub(super) fn candidates(
        options: &WorkspaceOptions,
        setting: &Setting,
        multicast: bool,
    ) -> Vec<Choice> {
        if let Some(way) = options.way {
            return vec![Choice::only(way)];
        }
        let mut candidates = vec![Choice::push_and_pull(), Choice::only(Way::Push)];
        if multicast {
            candidates.insert(0, Choice::only(Way::Multicast));
        }
        let tuned = candidates[0].tuned(options, setting, multicast);
        if tuned != candidates[0] {
            candidates.insert(0, tuned);
        }
        candidates
    }

    /// This, and before it what the table says, but for ways that are not to be had.
    fn tuned(&self, options: &WorkspaceOptions, setting: &Setting, multicast: bool) -> Self {
        let mut tuned = self.clone();
        let Some(table) = &options.tuning else {
            return tuned;
        };
        for delivery in [Delivery::CopyOut, Delivery::ZeroCopy] {
            let entries = table.entries_for(setting, delivery);
            let entries = entries.filter(|entry| multicast || entry.way != Way::Multicast);
            let mut steps: Vec<Step> = entries.map(Step::of).collect();
            if steps.last().is_none_or(|last| last.up_to.is_some()) {
                steps.extend(self.steps(delivery));
            }
            *match delivery {
                Delivery::CopyOut => &mut tuned.copy_out,
                Delivery::ZeroCopy => &mut tuned.zero_copy,
            } = steps;
        }
        tuned
    }

    fn steps(&self, delivery: Delivery) -> &[Step] {
        match delivery {
            Delivery::CopyOut => &self.copy_out,
            Delivery::ZeroCopy => &self.zero_copy,
        }
    }

    /// The workspace's way.
    pub(super) fn way(&self) -> Way {
        self.way
    }

    /// What a call with slices of `bytes` bytes goes by.
    pub(super) fn of(&self, delivery: Delivery, bytes: usize) -> Step {
        let mut steps = self.steps(delivery).iter().copied();
        steps
            .find(|step| step.up_to.is_none_or(|most| bytes <= most))
            .unwrap_or(Step::any(self.way))
    }

    /// All that a call may go by, each once.
    pub(super) fn uses(&self) -> Vec<(Delivery, Way)> {
        let mut uses = Vec::new();
        for delivery in [Delivery::CopyOut, Delivery::ZeroCopy] {
            for step in self.steps(delivery) {
                uses.extend([(delivery, step.way), (delivery, step.captured)]);
            }
        }
        // Of rows that are placed.
        uses.push((Delivery::ZeroCopy, self.way));
        let mut once = Vec::new();
        for one in uses {
            if !once.contains(&one) {
                once.push(one);
            }
        }
        once
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.way)?;
        for delivery in [Delivery::ZeroCopy, Delivery::CopyOut] {
            let steps = self.steps(delivery);
            if steps == [Step::any(self.way)] {
                continue;
            }
            write!(f, ", {delivery} by ")?;
            for (index, step) in steps.iter().enumerate() {
                let comma = if index == 0 { "" } else { ", " };
                match step.up_to {
                    Some(most) => write!(f, "{comma}{} up to {most} bytes", step.way)?,
                    None => write!(f, "{comma}{}", step.way)?,
                }
            }
        }
        Ok(())
    }
}

/// What the lanes call a way between GPUs.
pub(super) fn route(way: Way) -> Route {
    match way {
        Way::Multicast => Route::Multicast,
        Way::Pull => Route::Pull,
        Way::CopyEngine => Route::CopyEngine,
        Way::Staged => Route::Staged,
        // Shared slots are refused when a workspace is built.
        Way::Push | Way::SharedSlot => Route::Push,
    }
}
