/// Where a thread runs: its GPU and its block on that GPU.
///
/// Blocks of different kernels on one GPU are given different indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The GPU.
    pub gpu: u8,
    /// The block, unique on its GPU.
    pub index: u8,
}

/// The set of threads that a strong operation interacts with directly (8.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// `.cta`: the block.
    Cta,
    /// `.gpu`: the device, whatever the kernel.
    Gpu,
    /// `.sys`: every device and the host.
    Sys,
}

/// The `.sem` and `.scope` qualifiers of an operation (8.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sem {
    /// `.weak`: an ordinary load or store.
    Weak,
    /// `.relaxed`
    Relaxed(Scope),
    /// `.acquire`
    Acquire(Scope),
    /// `.release`
    Release(Scope),
    /// `.acq_rel`
    AcqRel(Scope),
    /// `.sc`: fences only.
    Sc(Scope),
}

impl Sem {
    pub(super) fn scope(self) -> Option<Scope> {
        match self {
            Self::Weak => None,
            Self::Relaxed(s)
            | Self::Acquire(s)
            | Self::Release(s)
            | Self::AcqRel(s)
            | Self::Sc(s) => Some(s),
        }
    }

    pub(super) fn acquires(self) -> bool {
        matches!(self, Self::Acquire(_) | Self::AcqRel(_) | Self::Sc(_))
    }

    pub(super) fn releases(self) -> bool {
        matches!(self, Self::Release(_) | Self::AcqRel(_) | Self::Sc(_))
    }
}

/// A virtual address: a memory location seen through one of its mappings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub(super) location: usize,
    mapping: u8,
}

impl Address {
    /// The same location at another virtual address, for example that of a multicast mapping.
    #[must_use]
    pub fn alias(self) -> Self {
        Self {
            mapping: self.mapping + 1,
            ..self
        }
    }
}

/// A thread of a [`Program`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadId(pub(super) usize);

/// An operation of a [`Program`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventId(pub(super) usize);

impl EventId {
    /// "This read returns the value of `write`."
    #[must_use]
    pub fn from(self, write: Self) -> ReadsFrom {
        ReadsFrom {
            read: self,
            write: Some(write),
        }
    }

    /// "This read returns the initial value."
    #[must_use]
    pub fn initial(self) -> ReadsFrom {
        ReadsFrom {
            read: self,
            write: None,
        }
    }
}

/// One line of an outcome; see [`EventId::from`] and [`EventId::initial`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadsFrom {
    pub(super) read: EventId,
    pub(super) write: Option<EventId>,
}

/// The two halves of an atomic read-modify-write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Atom {
    /// The read half.
    pub read: EventId,
    /// The write half.
    pub write: EventId,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// The hypothetical write that initialises a location (8.2.6).
    Init(usize),
    Read(Address, Sem),
    Write(Address, Sem),
    Fence(Sem),
    AliasFence,
    /// One phase of a block's barrier.
    Barrier(u32),
    /// The start or the end of a thread, as the host sees it.
    Boundary,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) thread: Option<ThreadId>,
    pub(super) kind: Kind,
}

impl Event {
    pub(super) fn address(&self) -> Option<Address> {
        match self.kind {
            Kind::Read(address, _) | Kind::Write(address, _) => Some(address),
            _ => None,
        }
    }

    pub(super) fn location(&self) -> Option<usize> {
        match self.kind {
            Kind::Init(location) => Some(location),
            _ => self.address().map(|a| a.location),
        }
    }

    pub(super) fn is_read(&self) -> bool {
        matches!(self.kind, Kind::Read(..))
    }

    /// Initialisation included.
    pub(super) fn is_write(&self) -> bool {
        matches!(self.kind, Kind::Write(..) | Kind::Init(_))
    }

    /// The qualifiers of a load, a store or a memory fence.
    pub(super) fn sem(&self) -> Option<Sem> {
        match self.kind {
            Kind::Read(_, sem) | Kind::Write(_, sem) | Kind::Fence(sem) => Some(sem),
            _ => None,
        }
    }

    pub(super) fn is_memory_fence(&self) -> bool {
        matches!(self.kind, Kind::Fence(_))
    }
}

/// A straight-line program: threads, and for each its operations in program order.
///
/// Branches and spin loops are taken as the outcome says they went: the load that ends a spin is
/// the load written here.
#[derive(Clone, Debug, Default)]
pub struct Program {
    pub(super) events: Vec<Event>,
    pub(super) blocks: Vec<Block>,
    pub(super) locations: usize,
    pub(super) atoms: Vec<Atom>,
    pub(super) dependencies: Vec<(EventId, EventId)>,
    pub(super) api_order: Vec<(EventId, EventId)>,
}

impl Program {
    /// A program with no threads.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A fresh memory location, at its first address.
    pub fn location(&mut self) -> Address {
        self.locations += 1;
        Address {
            location: self.locations - 1,
            mapping: 0,
        }
    }

    /// A new thread of `block`.
    pub fn thread(&mut self, block: Block) -> ThreadId {
        self.blocks.push(block);
        ThreadId(self.blocks.len() - 1)
    }

    fn push(&mut self, thread: ThreadId, kind: Kind) -> EventId {
        self.events.push(Event {
            thread: Some(thread),
            kind,
        });
        EventId(self.events.len() - 1)
    }

    /// `ld`
    ///
    /// # Panics
    ///
    /// If the qualifier is not one that a load takes.
    pub fn load(&mut self, thread: ThreadId, address: Address, sem: Sem) -> EventId {
        assert!(!sem.releases(), "a load does not take {sem:?}");
        self.push(thread, Kind::Read(address, sem))
    }

    /// `st`, or `multimem.st` where the address is an alias.
    ///
    /// # Panics
    ///
    /// If the qualifier is not one that a store takes.
    pub fn store(&mut self, thread: ThreadId, address: Address, sem: Sem) -> EventId {
        assert!(!sem.acquires(), "a store does not take {sem:?}");
        self.push(thread, Kind::Write(address, sem))
    }

    /// `atom`: a read and a write, of which the read acquires and the write releases.
    ///
    /// # Panics
    ///
    /// If the qualifier is not one that an atomic takes.
    pub fn atom(&mut self, thread: ThreadId, address: Address, sem: Sem) -> Atom {
        let (read, write) = match sem {
            Sem::Relaxed(_) => (sem, sem),
            Sem::Acquire(s) => (sem, Sem::Relaxed(s)),
            Sem::Release(s) => (Sem::Relaxed(s), sem),
            Sem::AcqRel(s) => (Sem::Acquire(s), Sem::Release(s)),
            Sem::Weak | Sem::Sc(_) => panic!("an atomic does not take {sem:?}"),
        };
        let atom = Atom {
            read: self.push(thread, Kind::Read(address, read)),
            write: self.push(thread, Kind::Write(address, write)),
        };
        self.atoms.push(atom);
        atom
    }

    /// `fence`
    ///
    /// # Panics
    ///
    /// If the qualifier is not one that a fence takes.
    pub fn fence(&mut self, thread: ThreadId, sem: Sem) -> EventId {
        assert!(
            sem.acquires() || sem.releases(),
            "a fence does not take {sem:?}"
        );
        self.push(thread, Kind::Fence(sem))
    }

    /// `fence.proxy.alias`
    pub fn alias_fence(&mut self, thread: ThreadId) -> EventId {
        self.push(thread, Kind::AliasFence)
    }

    /// `bar.sync` or `bar.red`: the thread takes part in one phase of its block's barrier.
    pub fn barrier(&mut self, thread: ThreadId, phase: u32) -> EventId {
        self.push(thread, Kind::Barrier(phase))
    }

    /// The start or the end of a thread; see [`Program::api_order`].
    pub fn boundary(&mut self, thread: ThreadId) -> EventId {
        self.push(thread, Kind::Boundary)
    }

    /// The CUDA API orders `end` before `start`, as between kernels of one stream (8.9.4).
    pub fn api_order(&mut self, end: EventId, start: EventId) {
        self.api_order.push((end, start));
    }

    /// What `write` stores depends on what `read` returned.
    pub fn depends(&mut self, read: EventId, write: EventId) {
        self.dependencies.push((read, write));
    }
}
