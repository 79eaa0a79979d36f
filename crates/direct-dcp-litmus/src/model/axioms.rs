use super::program::{Block, Event, EventId, Kind, Program, ReadsFrom, Scope};
use super::relation::Relation;

/// The axioms of the model, by their names in the PTX ISA (8.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axiom {
    /// 8.10.1: causality order between writes of one location is coherence order.
    Coherence,
    /// 8.10.2: Fence-SC order does not contradict causality order.
    FenceSc,
    /// 8.10.3: no morally strong write comes between the halves of a read-modify-write. (Single-copy
    /// atomicity, its other half, cannot fail where every access has one size.)
    Atomicity,
    /// 8.10.4: no value justifies itself through dependencies and communication.
    NoThinAir,
    /// 8.10.5: morally strong communication does not contradict program order at one address.
    ScPerLocation,
    /// 8.10.6: communication order does not contradict causality order.
    Causality,
}

/// The axioms, and the two points at which the ISA's text leaves room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// Strong operations of different threads on aliases of one location observe each other as
    /// if they named one address.
    ///
    /// The letter of the ISA says no: moral strength needs the same virtual address (8.2.1, 8.7), and
    /// without it a release through one mapping never synchronizes with an acquire through
    /// another. Whoever signals with `multimem.st.release` and waits with `ld.acquire` relies on it.
    pub strong_through_aliases: bool,
    /// A kernel boundary orders aliases as an alias fence does.
    ///
    /// The ISA says yes: API synchronization "participates in proxy-preserved base causality order".
    pub api_orders_aliases: bool,
    /// Axioms to leave out, to see which one forbids an outcome.
    pub without: &'static [Axiom],
}

impl Default for Model {
    /// The letter of the ISA.
    fn default() -> Self {
        Self {
            strong_through_aliases: false,
            api_orders_aliases: true,
            without: &[],
        }
    }
}

impl Model {
    /// Whether some execution of `program` has `outcome` and satisfies the axioms.
    ///
    /// # Panics
    ///
    /// If the outcome names something that is not a read, or a write of another location.
    #[must_use]
    pub fn allows(&self, program: &Program, outcome: &[ReadsFrom]) -> bool {
        let fixed = Static::of(program, self.strong_through_aliases);
        let choices = fixed.sources(program, outcome);
        let mut picked = vec![0; choices.len()];
        loop {
            let mut sources = vec![None; fixed.events.len()];
            for ((read, writes), &i) in choices.iter().zip(&picked) {
                sources[*read] = Some(writes[i]);
            }
            let candidate = Candidate {
                model: self,
                program,
                fixed: &fixed,
                sources,
            };
            if candidate.satisfiable() {
                return true;
            }
            // The next combination of sources, counting like an odometer.
            let Some(digit) =
                (0..picked.len()).find(|&digit| picked[digit] + 1 < choices[digit].1.len())
            else {
                return false;
            };
            picked[..digit].fill(0);
            picked[digit] += 1;
        }
    }

    fn applies(&self, axiom: Axiom) -> bool {
        !self.without.contains(&axiom)
    }
}

/// What the program alone determines, whatever its reads return.
struct Static {
    events: Vec<Event>,
    /// 8.9.1: the order in which each thread executes its operations.
    program_order: Relation,
    /// 8.7: same thread or mutually inclusive strong scopes; memory operations on one address.
    morally_strong: Relation,
    /// Moral strength as release and acquire use it: with aliases, where the model assumes that.
    communicating: Relation,
    /// 8.9.4, item 2: the barriers of a block that meet in one phase. Symmetric.
    barriers: Relation,
}

impl Static {
    fn of(program: &Program, strong_through_aliases: bool) -> Self {
        let mut events = program.events.clone();
        events.extend((0..program.locations).map(|l| Event {
            thread: None,
            kind: Kind::Init(l),
        }));
        let n = events.len();
        let block = |e: usize| events[e].thread.map(|t| program.blocks[t.0]);
        let same_thread =
            |a: usize, b: usize| events[a].thread.is_some() && events[a].thread == events[b].thread;
        let strong_pair = |a: usize, b: usize| {
            let (Some(at), Some(bt)) = (block(a), block(b)) else {
                return false;
            };
            let includes = |e: usize, other: Block, own: Block| {
                events[e]
                    .sem()
                    .and_then(|s| s.scope())
                    .is_some_and(|s| in_scope(s, own, other))
            };
            includes(a, bt, at) && includes(b, at, bt)
        };
        let orderable = |e: usize| events[e].address().is_some() || events[e].is_memory_fence();
        let both_access = |a: usize, b: usize| Some((events[a].address()?, events[b].address()?));
        let morally_strong = Relation::from_fn(n, |a, b| {
            orderable(a)
                && orderable(b)
                && (same_thread(a, b) || strong_pair(a, b))
                && both_access(a, b).is_none_or(|(x, y)| x == y)
        });
        let aliased = Relation::from_fn(n, |a, b| {
            !same_thread(a, b)
                && strong_pair(a, b)
                && both_access(a, b).is_some_and(|(x, y)| x.location == y.location)
        });
        let communicating = if strong_through_aliases {
            morally_strong.clone().union(&aliased)
        } else {
            morally_strong.clone()
        };
        let program_order = Relation::from_fn(n, |a, b| a < b && same_thread(a, b));
        let barriers = Relation::from_fn(n, |a, b| match (events[a].kind, events[b].kind) {
            (Kind::Barrier(x), Kind::Barrier(y)) => {
                x == y && block(a) == block(b) && !same_thread(a, b)
            }
            _ => false,
        });
        Self {
            events,
            program_order,
            morally_strong,
            communicating,
            barriers,
        }
    }

    fn writes_of(&self, location: usize) -> impl Iterator<Item = usize> {
        (0..self.events.len()).filter(move |&e| {
            self.events[e].is_write() && self.events[e].location() == Some(location)
        })
    }

    /// Each read with the writes it may return under `outcome`.
    fn sources(&self, program: &Program, outcome: &[ReadsFrom]) -> Vec<(usize, Vec<usize>)> {
        let mut choices: Vec<(usize, Vec<usize>)> = Vec::new();
        for (read, event) in self.events.iter().enumerate().filter(|(_, e)| e.is_read()) {
            let own = program
                .atoms
                .iter()
                .find(|a| a.read.0 == read)
                .map(|a| a.write.0);
            let location = event.location().expect("a read has a location");
            let all = self
                .writes_of(location)
                .filter(|&w| Some(w) != own)
                .collect();
            choices.push((read, all));
        }
        for &ReadsFrom {
            read: EventId(read),
            write,
        } in outcome
        {
            let entry = choices.iter_mut().find(|(r, _)| *r == read);
            let (_, writes) = entry.expect("an outcome is about reads");
            writes.retain(|&w| match write {
                Some(EventId(write)) => w == write,
                None => matches!(self.events[w].kind, Kind::Init(_)),
            });
            assert!(!writes.is_empty(), "event {read} cannot return that write");
        }
        choices
    }
}

fn in_scope(scope: Scope, own: Block, other: Block) -> bool {
    match scope {
        Scope::Cta => own == other,
        Scope::Gpu => own.gpu == other.gpu,
        Scope::Sys => true,
    }
}

/// One execution but for Fence-SC order and coherence order: every read has its source.
struct Candidate<'a> {
    model: &'a Model,
    program: &'a Program,
    fixed: &'a Static,
    sources: Vec<Option<usize>>,
}

impl Candidate<'_> {
    /// Whether a Fence-SC order and a coherence order exist with which the axioms hold.
    fn satisfiable(&self) -> bool {
        if self.model.applies(Axiom::NoThinAir) && !self.no_thin_air() {
            return false;
        }
        let observation = self.observation_order();
        let synchronizes = self.synchronizes(&observation);
        let events = &self.fixed.events;
        let sc = |e: usize| matches!(events[e].kind, Kind::Fence(super::Sem::Sc(_)));
        let sc_fences: Vec<_> = self
            .fixed
            .morally_strong
            .pairs()
            .filter(|&(a, b)| a < b && sc(a) && sc(b))
            .collect();
        orientations(self.len(), &sc_fences)
            .any(|fence_sc| self.holds_with_fence_order(&observation, &synchronizes, &fence_sc))
    }

    fn holds_with_fence_order(
        &self,
        observation: &Relation,
        synchronizes: &Relation,
        fence_sc: &Relation,
    ) -> bool {
        if !fence_sc.is_acyclic() {
            return false;
        }
        let base = self.base_causality_order(synchronizes, fence_sc);
        if self.model.applies(Axiom::FenceSc)
            && fence_sc
                .pairs()
                .any(|(first, second)| base.contains(second, first))
        {
            return false;
        }
        let preserved = self.proxy_preserved(&base);
        let causality = preserved.clone().union(&observation.then(&preserved));
        let contested: Vec<_> = self
            .fixed
            .morally_strong
            .pairs()
            .filter(|&(a, b)| {
                a < b && self.fixed.events[a].is_write() && self.fixed.events[b].is_write()
            })
            .collect();
        orientations(self.len(), &contested)
            .any(|chosen| self.holds_with_coherence(&causality, &chosen))
    }

    fn holds_with_coherence(&self, causality: &Relation, chosen: &Relation) -> bool {
        let Some(coherence) = self.coherence_order(causality, chosen) else {
            return false;
        };
        let overtaken = self.overtaken(&coherence);
        let applies = |axiom| self.model.applies(axiom);
        (!applies(Axiom::Atomicity) || self.atomic(&coherence))
            && (!applies(Axiom::ScPerLocation) || self.sc_per_location(&coherence, &overtaken))
            && (!applies(Axiom::Causality) || self.causal(causality, &overtaken))
    }

    fn len(&self) -> usize {
        self.fixed.events.len()
    }

    /// From each write to the reads that return it.
    fn reads_from(&self) -> Relation {
        Relation::from_fn(self.len(), |w, r| self.sources[r] == Some(w))
    }

    fn atom_halves(&self) -> Relation {
        let mut halves = Relation::empty(self.len());
        for atom in &self.program.atoms {
            halves.insert(atom.read.0, atom.write.0);
        }
        halves
    }

    /// 8.9.2: from a write to a read that returns it, or returns a value that atomics made of it, each
    /// step morally strong.
    fn observation_order(&self) -> Relation {
        let events = &self.fixed.events;
        let steps = self.reads_from().intersection(&self.fixed.communicating);
        let chains = steps.union(&self.atom_halves()).closure();
        Relation::from_fn(self.len(), |w, r| {
            events[w].is_write() && events[r].is_read() && chains.contains(w, r)
        })
    }

    /// 8.8: the first instruction of each release pattern with the write that others may observe.
    fn release_patterns(&self) -> Vec<(usize, usize)> {
        let events = &self.fixed.events;
        let strong_write =
            |w: usize| matches!(events[w].kind, Kind::Write(_, sem) if sem.scope().is_some());
        let releases = |e: usize| events[e].sem().is_some_and(|s| s.releases());
        let mut patterns = Vec::new();
        for w in (0..self.len()).filter(|&w| strong_write(w)) {
            for first in 0..self.len() {
                let extends = self.fixed.program_order.contains(first, w)
                    && (events[first].is_memory_fence()
                        || events[first].address() == events[w].address());
                if releases(first) && (first == w || extends) {
                    patterns.push((first, w));
                }
            }
        }
        patterns
    }

    /// 8.8: the read of each acquire pattern with the last instruction of the pattern.
    fn acquire_patterns(&self) -> Vec<(usize, usize)> {
        let events = &self.fixed.events;
        let strong_read =
            |r: usize| matches!(events[r].kind, Kind::Read(_, sem) if sem.scope().is_some());
        let acquires = |e: usize| events[e].sem().is_some_and(|s| s.acquires());
        let mut patterns = Vec::new();
        for r in (0..self.len()).filter(|&r| strong_read(r)) {
            for last in 0..self.len() {
                let extends = self.fixed.program_order.contains(r, last)
                    && (events[last].is_memory_fence()
                        || events[last].address() == events[r].address());
                if acquires(last) && (last == r || extends) {
                    patterns.push((r, last));
                }
            }
        }
        patterns
    }

    /// 8.9.4, without the order between `fence.sc`: barriers, API order, and a release pattern whose
    /// write precedes the read of an acquire pattern in observation order.
    fn synchronizes(&self, observation: &Relation) -> Relation {
        let mut synchronizes = self.fixed.barriers.clone();
        for &(EventId(end), EventId(start)) in &self.program.api_order {
            synchronizes.insert(end, start);
        }
        let acquires = self.acquire_patterns();
        for (first, write) in self.release_patterns() {
            for &(read, last) in &acquires {
                if observation.contains(write, read)
                    && self.fixed.communicating.contains(first, last)
                {
                    synchronizes.insert(first, last);
                }
            }
        }
        synchronizes
    }

    /// 8.9.5: what follows from program order and synchronization, transitively.
    fn base_causality_order(&self, synchronizes: &Relation, fence_sc: &Relation) -> Relation {
        self.fixed
            .program_order
            .clone()
            .union(synchronizes)
            .union(fence_sc)
            .closure()
    }

    /// 8.9.5: base causality order between operations on one address, and between aliases where an
    /// alias fence (or a kernel boundary) lies on the way. Initialisation precedes everything.
    fn proxy_preserved(&self, base: &Relation) -> Relation {
        let events = &self.fixed.events;
        let fences: Vec<_> = (0..self.len())
            .filter(|&e| matches!(events[e].kind, Kind::AliasFence))
            .collect();
        let fenced = |x: usize, y: usize| {
            let alias_fence = fences
                .iter()
                .any(|&f| base.contains(x, f) && base.contains(f, y));
            let boundary = self
                .program
                .api_order
                .iter()
                .any(|&(EventId(end), EventId(start))| {
                    base.contains(x, end) && base.contains(start, y)
                });
            alias_fence || (self.model.api_orders_aliases && boundary)
        };
        Relation::from_fn(self.len(), |x, y| {
            let (Some(at), Some(other)) = (events[x].location(), events[y].location()) else {
                return false;
            };
            if at != other {
                return false;
            }
            match (events[x].address(), events[y].address()) {
                (Some(a), Some(b)) => base.contains(x, y) && (a == b || fenced(x, y)),
                (None, Some(_)) => true,
                _ => false,
            }
        })
    }

    /// 8.9.6: initialisation first, morally strong writes as chosen, and by the axiom of coherence
    /// whatever causality orders. `None` if these contradict each other.
    fn coherence_order(&self, causality: &Relation, chosen: &Relation) -> Option<Relation> {
        let events = &self.fixed.events;
        let two_writes = |a: usize, b: usize| {
            events[a].is_write()
                && events[b].is_write()
                && events[a].location() == events[b].location()
        };
        let required = Relation::from_fn(self.len(), |a, b| {
            two_writes(a, b)
                && (matches!(events[a].kind, Kind::Init(_))
                    || (self.model.applies(Axiom::Coherence) && causality.contains(a, b)))
        });
        let order = required.union(chosen).closure();
        order.is_irreflexive().then_some(order)
    }

    /// 8.9.7, item 3: from a read to the writes that come after its source in coherence order.
    fn overtaken(&self, coherence: &Relation) -> Relation {
        Relation::from_fn(self.len(), |r, w| {
            self.sources[r].is_some_and(|source| coherence.contains(source, w))
        })
    }

    fn atomic(&self, coherence: &Relation) -> bool {
        self.program.atoms.iter().all(|atom| {
            let (read, write) = (atom.read.0, atom.write.0);
            let source = self.sources[read].expect("every read has a source");
            (0..self.len()).all(|between| {
                !(self.fixed.morally_strong.contains(between, write)
                    && coherence.contains(source, between)
                    && coherence.contains(between, write))
            })
        })
    }

    fn no_thin_air(&self) -> bool {
        let mut flow = self.reads_from().union(&self.atom_halves());
        for &(EventId(read), EventId(write)) in &self.program.dependencies {
            flow.insert(read, write);
        }
        flow.is_acyclic()
    }

    fn sc_per_location(&self, coherence: &Relation, overtaken: &Relation) -> bool {
        let events = &self.fixed.events;
        let same_address = Relation::from_fn(self.len(), |a, b| {
            self.fixed.program_order.contains(a, b)
                && events[a].address().is_some()
                && events[a].address() == events[b].address()
        });
        self.reads_from()
            .union(coherence)
            .union(overtaken)
            .intersection(&self.fixed.morally_strong)
            .union(&same_address)
            .is_acyclic()
    }

    fn causal(&self, causality: &Relation, overtaken: &Relation) -> bool {
        self.reads_from()
            .union(overtaken)
            .pairs()
            .all(|(a, b)| !causality.contains(b, a))
    }
}

/// Every way to order each pair: all 2ⁿ of them.
fn orientations(events: usize, pairs: &[(usize, usize)]) -> impl Iterator<Item = Relation> {
    assert!(
        pairs.len() < 20,
        "{} unordered pairs are too many to enumerate",
        pairs.len()
    );
    (0_u32..1 << pairs.len()).map(move |bits| {
        let mut order = Relation::empty(events);
        for (i, &(a, b)) in pairs.iter().enumerate() {
            if bits >> i & 1 == 0 {
                order.insert(a, b)
            } else {
                order.insert(b, a)
            }
        }
        order
    })
}
