//! How long may a slot be read? Explored over every interleaving of a few ranks.
//!
//! Each rank keeps, for each of S slots, the rows of every source and a signal of every source. Call
//! e uses slot e mod S: store the rows at every peer, or only at home, where the peers fetch them;
//! publish the signal at every peer, wait for the signal of every source, read. Steps are atomic and immediately visible: what is explored here is
//! the order of the calls, not that of memory.

use std::collections::HashSet;

/// What is stored in a slot, so that a read can tell whose rows it got; 0 is the initial content.
pub type Payload = u8;

/// One step of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Store this rank's rows of `call` at rank `to`.
    Store {
        /// The call.
        call: u64,
        /// The rank that receives the rows.
        to: usize,
        /// The rows.
        rows: Payload,
    },
    /// Store this rank's rows of `call` at home, for the others to fetch.
    Stage {
        /// The call.
        call: u64,
        /// The rows.
        rows: Payload,
    },
    /// Publish this rank's signal of `call` at rank `to`.
    Publish {
        /// The call.
        call: u64,
        /// The rank that receives the signal.
        to: usize,
    },
    /// Block until the signal of rank `from` shows `call`.
    Wait {
        /// The call.
        call: u64,
        /// The source.
        from: usize,
    },
    /// Read the rows of rank `from` out of the slot of `call`, and expect `rows`.
    Read {
        /// The call.
        call: u64,
        /// The source.
        from: usize,
        /// What the reader must find.
        rows: Payload,
    },
    /// Read the rows of rank `from` in that rank's own slot of `call`, and expect `rows`.
    Fetch {
        /// The call.
        call: u64,
        /// The source.
        from: usize,
        /// What the reader must find.
        rows: Payload,
        /// Whether they are put into the slot of the reader.
        keep: bool,
    },
    /// Set every signal of this rank to 0, as a rank that starts again would.
    ZeroSignals,
}

/// Where the reads of a call stand among the steps of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadAt {
    /// Straight after the wait, before the next call: copy-out.
    AfterWait,
    /// Before the first store of the call that is this many calls later: zero-copy.
    BeforeIssue(u64),
    /// Before the publish of the call that is this many calls later.
    BeforePublish(u64),
}

/// How a waiter compares the signal with the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compare {
    /// Equal.
    Equal,
    /// Equal or ahead, by less than half the range.
    AtLeast,
}

/// What the slot of a call is computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotFrom {
    /// The 64-bit call number.
    Call,
    /// The call number as the signal carries it, wrapped.
    Signal,
}

/// How the rows of a call travel, and when they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Pushed, and copied out.
    PushOut,
    /// Pushed, and read in the reader's slot just before the issue of the call that would let it be
    /// overwritten.
    PushLent,
    /// Staged, and copied out of the sources' slots.
    PullOut,
    /// Staged, and copied from the sources' slots to the reader's, where they are read as late as
    /// those that were pushed.
    PullLent,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Kind; 4] = [Kind::PushOut, Kind::PushLent, Kind::PullOut, Kind::PullLent];
}

/// The steps of calls of these kinds, from call 1 on, for `ranks` ranks with `slots` slots; the rows
/// of each are its number.
#[must_use]
pub fn mixed(kinds: &[Kind], ranks: usize, slots: u64) -> Vec<Step> {
    let mut steps = Vec::new();
    for (call, now) in (1_u64..).zip(1..) {
        // What was lent S - 1 calls ago is read for the last time.
        let due = call
            .checked_sub(slots)
            .and_then(|index| kinds.get(usize::try_from(index).ok()?));
        if let Some(Kind::PushLent | Kind::PullLent) = due {
            let lent = call + 1 - slots;
            let rows = Payload::try_from(lent).expect("few calls");
            steps.extend(reads(lent, rows, ranks));
        }
        let Some(kind) = kinds.get(usize::from(now) - 1) else {
            break;
        };
        match kind {
            Kind::PushOut | Kind::PushLent => steps.extend(issue(call, now, ranks)),
            Kind::PullOut | Kind::PullLent => steps.push(Step::Stage { call, rows: now }),
        }
        steps.extend(publish_and_wait(call, ranks));
        match kind {
            Kind::PushOut => steps.extend(reads(call, now, ranks)),
            Kind::PushLent => {}
            Kind::PullOut => steps.extend(fetches(call, now, ranks, false)),
            Kind::PullLent => steps.extend(fetches(call, now, ranks, true)),
        }
    }
    steps
}

/// The steps that read the rows of a call in the slots of their sources.
pub fn fetches(call: u64, rows: Payload, ranks: usize, keep: bool) -> impl Iterator<Item = Step> {
    (0..ranks).map(move |from| Step::Fetch {
        call,
        from,
        rows,
        keep,
    })
}

/// The steps of one call with copy-out, for a group of `ranks`.
#[must_use]
pub fn call(call: u64, rows: Payload, ranks: usize) -> Vec<Step> {
    let mut steps = issue(call, rows, ranks);
    steps.extend(publish_and_wait(call, ranks));
    steps.extend(reads(call, rows, ranks));
    steps
}

/// The steps of `calls` calls after call number `before`; the rows of each are its position, from 1.
#[must_use]
pub fn calls(before: u64, calls: u8, ranks: usize, at: ReadAt) -> Vec<Step> {
    let mut steps = Vec::new();
    // The reads that fall due `lag` calls after their own.
    let due = |now: u8, lag: u64| {
        let position = u64::from(now).checked_sub(lag).filter(|&p| p >= 1);
        position.map_or_else(Vec::new, |p| {
            reads(before + p, u8::try_from(p).expect("at most `calls`"), ranks)
        })
    };
    for now in 1..=calls {
        let number = before + u64::from(now);
        if let ReadAt::BeforeIssue(lag) = at {
            steps.extend(due(now, lag));
        }
        steps.extend(issue(number, now, ranks));
        if let ReadAt::BeforePublish(lag) = at {
            steps.extend(due(now, lag));
        }
        steps.extend(publish_and_wait(number, ranks));
        if at == ReadAt::AfterWait {
            steps.extend(reads(number, now, ranks));
        }
    }
    steps
}

/// The steps that store the rows of a call at every rank.
#[must_use]
pub fn issue(call: u64, rows: Payload, ranks: usize) -> Vec<Step> {
    (0..ranks)
        .map(|to| Step::Store { call, to, rows })
        .collect()
}

/// The steps that publish a call and wait for it.
pub fn publish_and_wait(call: u64, ranks: usize) -> impl Iterator<Item = Step> {
    let publish = (0..ranks).map(move |to| Step::Publish { call, to });
    publish.chain((0..ranks).map(move |from| Step::Wait { call, from }))
}

fn reads(call: u64, rows: Payload, ranks: usize) -> Vec<Step> {
    (0..ranks)
        .map(|from| Step::Read { call, from, rows })
        .collect()
}

/// A stream of one rank. A rank may have several; they interleave freely.
#[derive(Clone, Debug)]
pub struct Stream {
    /// The rank that runs it.
    pub rank: usize,
    /// What it does, in order.
    pub steps: Vec<Step>,
}

/// A group of ranks and what each of them runs.
#[derive(Clone, Debug)]
pub struct System {
    /// The number of ranks.
    pub ranks: usize,
    /// The number of slots, S.
    pub slots: u64,
    /// The number of values that a signal takes before it wraps.
    pub signal_values: u64,
    /// How a waiter compares.
    pub compare: Compare,
    /// What the slot is computed from.
    pub slot_from: SlotFrom,
    /// By how many places the slices in a slot move from one use of it to the next: those of calls of
    /// another size lie elsewhere, over those of other sources.
    pub shift: u64,
    /// The number of calls that the group finished before; the signals hold what those left.
    pub finished: u64,
    /// What the ranks run.
    pub streams: Vec<Stream>,
}

/// What exploring a [`System`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// No interleaving reads wrong rows or hangs.
    Safe {
        /// How many states there are.
        states: usize,
    },
    /// Some interleaving reads wrong rows, and nothing tells.
    Corrupt {
        /// The reader.
        rank: usize,
        /// The call that it reads.
        call: u64,
        /// The source of the rows.
        from: usize,
        /// What it found.
        found: Payload,
        /// What it should have found.
        expected: Payload,
    },
    /// No interleaving reads wrong rows, but some never ends.
    Hangs {
        /// The number of states that cannot be left.
        stuck: usize,
        /// The number of states in which all streams have ended.
        ended: usize,
    },
}

impl Finding {
    /// Whether this is [`Finding::Safe`].
    #[must_use]
    pub fn is_safe(&self) -> bool {
        matches!(self, Self::Safe { .. })
    }

    /// Whether this is [`Finding::Corrupt`].
    #[must_use]
    pub fn is_corrupt(&self) -> bool {
        matches!(self, Self::Corrupt { .. })
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    /// The next step of each stream.
    next: Vec<u8>,
    rows: Vec<Payload>,
    signals: Vec<u32>,
}

impl System {
    /// A group in which every rank runs the same steps in one stream, with u32 signals compared
    /// for equality and the slot taken from the call number: the protocol as it is.
    #[must_use]
    pub fn uniform(ranks: usize, slots: u64, steps: &[Step]) -> Self {
        Self {
            ranks,
            slots,
            signal_values: 1 << 32,
            compare: Compare::Equal,
            slot_from: SlotFrom::Call,
            shift: 0,
            finished: 0,
            streams: (0..ranks)
                .map(|rank| Stream {
                    rank,
                    steps: steps.to_vec(),
                })
                .collect(),
        }
    }

    /// Visits every reachable state, and stops at the first wrong read.
    #[must_use]
    pub fn explore(&self) -> Finding {
        let start = self.start();
        let mut seen = HashSet::from([start.clone()]);
        let mut open = vec![start];
        let (mut stuck, mut ended) = (0, 0);
        while let Some(state) = open.pop() {
            let mut moved = false;
            for stream in 0..self.streams.len() {
                match self.advance(&state, stream) {
                    Advance::Blocked => {}
                    Advance::Wrong(finding) => return finding,
                    Advance::To(next) => {
                        moved = true;
                        if seen.insert(next.clone()) {
                            open.push(next);
                        }
                    }
                }
            }
            if !moved {
                let all_ended = state
                    .next
                    .iter()
                    .zip(&self.streams)
                    .all(|(&next, stream)| usize::from(next) == stream.steps.len());
                if all_ended { ended += 1 } else { stuck += 1 }
            }
        }
        if stuck > 0 {
            Finding::Hangs { stuck, ended }
        } else {
            Finding::Safe { states: seen.len() }
        }
    }

    fn start(&self) -> State {
        let cells = self.ranks * self.ranks * usize::try_from(self.slots).expect("few slots");
        let mut signals = vec![0; cells];
        for call in self.finished.saturating_sub(self.slots) + 1..=self.finished {
            for rank in 0..self.ranks {
                for from in 0..self.ranks {
                    signals[self.cell(rank, call, from)] = self.signal(call);
                }
            }
        }
        State {
            next: vec![0; self.streams.len()],
            rows: vec![0; cells],
            signals,
        }
    }

    fn signal(&self, call: u64) -> u32 {
        u32::try_from(call % self.signal_values).expect("a signal is a u32")
    }

    fn cell(&self, rank: usize, call: u64, from: usize) -> usize {
        let number = match self.slot_from {
            SlotFrom::Call => call,
            SlotFrom::Signal => u64::from(self.signal(call)),
        };
        let slots = usize::try_from(self.slots).expect("few slots");
        let slot = usize::try_from(number % self.slots).expect("few slots");
        (rank * slots + slot) * self.ranks + from
    }

    /// Where the rows of `from` lie at `rank`.
    fn place(&self, rank: usize, call: u64, from: usize) -> usize {
        let uses = call / self.slots;
        let moved = (from as u64 + self.shift * uses) % self.ranks as u64;
        self.cell(rank, call, usize::try_from(moved).expect("few ranks"))
    }

    fn shows(&self, seen: u32, call: u64) -> bool {
        match self.compare {
            Compare::Equal => seen == self.signal(call),
            Compare::AtLeast => {
                let range = self.signal_values;
                let ahead = (u64::from(seen) + range - u64::from(self.signal(call))) % range;
                ahead < range / 2
            }
        }
    }

    fn advance(&self, state: &State, stream: usize) -> Advance {
        let Stream { rank, ref steps } = self.streams[stream];
        let Some(&step) = steps.get(usize::from(state.next[stream])) else {
            return Advance::Blocked;
        };
        let mut next = state.clone();
        match step {
            Step::Store { call, to, rows } => next.rows[self.place(to, call, rank)] = rows,
            Step::Stage { call, rows } => next.rows[self.place(rank, call, rank)] = rows,
            Step::Publish { call, to } => {
                next.signals[self.cell(to, call, rank)] = self.signal(call);
            }
            Step::Wait { call, from } => {
                if !self.shows(state.signals[self.cell(rank, call, from)], call) {
                    return Advance::Blocked;
                }
            }
            Step::Read {
                call,
                from,
                rows: expected,
            }
            | Step::Fetch {
                call,
                from,
                rows: expected,
                ..
            } => {
                let at = if matches!(step, Step::Fetch { .. }) {
                    from
                } else {
                    rank
                };
                let found = state.rows[self.place(at, call, from)];
                if let Step::Fetch { keep: true, .. } = step {
                    next.rows[self.place(rank, call, from)] = found;
                }
                if found != expected {
                    return Advance::Wrong(Finding::Corrupt {
                        rank,
                        call,
                        from,
                        found,
                        expected,
                    });
                }
            }
            Step::ZeroSignals => {
                let own = next.signals.len() / self.ranks;
                next.signals[rank * own..(rank + 1) * own].fill(0);
            }
        }
        next.next[stream] += 1;
        Advance::To(next)
    }
}

enum Advance {
    /// Ended, or waiting.
    Blocked,
    Wrong(Finding),
    To(State),
}
