//! The instruction sequences of the gather kernels, and the mistakes that must be caught.
//!
//! One gather between a writing rank and a reading rank. A datum is *stale* if a read that the
//! protocol lets happen may return the old content. Every sequence is also checked to be possible
//! at all: the same read may return the new content.

use Scope::{Cta, Gpu, Sys};
use Sem::{AcqRel, Acquire, Relaxed, Release, Sc, Weak};
use direct_dcp_litmus::model::{
    Address, Block, EventId, Model, Program, ReadsFrom, Scope, Sem, ThreadId,
};

/// The letter of the ISA.
const LETTER: Model = Model {
    strong_through_aliases: false,
    api_orders_aliases: true,
    without: &[],
};
/// What every use of multicast signals assumes: a strong store through the multicast mapping
/// is observed by a strong load of the replica.
const MULTICAST: Model = Model {
    strong_through_aliases: true,
    ..LETTER
};

/// Who stores the datum. The writing rank has three blocks: one arrives first, one in between, and
/// the last one publishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Storer {
    /// A thread of the first block.
    FirstBlock,
    /// The leader of the first block.
    FirstLeader,
    /// A thread of the block in between.
    MiddleBlock,
    /// A thread of the last block.
    LastBlock,
    /// The leader of the last block.
    LastLeader,
    /// The thread of the last block that publishes to this reader.
    Publisher,
}

const STORERS: [Storer; 6] = [
    Storer::FirstBlock,
    Storer::FirstLeader,
    Storer::MiddleBlock,
    Storer::LastBlock,
    Storer::LastLeader,
    Storer::Publisher,
];

/// Who reads the datum, on the reading rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader {
    /// The thread of the last block that observed the signal.
    Observer,
    /// Another thread of the last block, after the block's barriers.
    LastBlock,
    /// The leader of another block, which saw the epoch.
    OtherLeader,
    /// A thread of another block, whose leader saw the epoch.
    OtherBlock,
    /// The next kernel of the stream.
    NextKernel,
}

const READERS: [Reader; 5] = [
    Reader::Observer,
    Reader::LastBlock,
    Reader::OtherLeader,
    Reader::OtherBlock,
    Reader::NextKernel,
];

/// Where the publishing thread stores the shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShapeStored {
    /// Before the alias fence, if there is one, and the release.
    BeforeFence,
    /// After the alias fence, before the release.
    BeforeRelease,
    /// After the release.
    AfterRelease,
}

/// Where the observing thread reads the shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShapeRead {
    /// Before the acquire.
    BeforeAcquire,
    /// After the acquire, before the alias fence, if there is one.
    BeforeFence,
    /// After both.
    AfterFence,
}

/// One gather. [`UNICAST`] and [`MULTICAST_GATHER`] are what the kernels do; a test changes a field.
#[derive(Clone, Copy, Debug)]
struct Gather {
    /// Rows and shape are stored through an alias of the addresses they are read at.
    aliased: bool,
    /// So is the signal.
    signal_aliased: bool,
    data: Sem,
    /// A fence by each storing thread before its block's barrier.
    storer_fence: Option<Sem>,
    storer_alias_fence: bool,
    barrier_before_arrive: bool,
    leader_fence_before_arrive: Option<Sem>,
    arrive: Sem,
    leader_fence_after_arrive: Option<Sem>,
    /// The barrier by which the last block's threads learn that it is the last.
    second_barrier: bool,
    /// The last block's leader publishes, and not another of its threads.
    leader_publishes: bool,
    publisher_alias_fence: bool,
    shape: Sem,
    shape_stored: ShapeStored,
    publish: Sem,
    observe: Sem,
    observer_alias_fence: bool,
    shape_read: ShapeRead,
    barrier_after_observe: bool,
    advance: Sem,
    follow: Sem,
    barrier_after_follow: bool,
}

const UNICAST: Gather = Gather {
    aliased: false,
    signal_aliased: false,
    data: Weak,
    storer_fence: None,
    storer_alias_fence: false,
    barrier_before_arrive: true,
    leader_fence_before_arrive: None,
    arrive: AcqRel(Gpu),
    leader_fence_after_arrive: None,
    second_barrier: true,
    leader_publishes: false,
    publisher_alias_fence: false,
    shape: Weak,
    shape_stored: ShapeStored::BeforeFence,
    publish: Release(Sys),
    observe: Acquire(Sys),
    observer_alias_fence: false,
    shape_read: ShapeRead::AfterFence,
    barrier_after_observe: true,
    advance: Release(Gpu),
    follow: Acquire(Gpu),
    barrier_after_follow: true,
};

const MULTICAST_GATHER: Gather = Gather {
    aliased: true,
    signal_aliased: true,
    data: Relaxed(Sys),
    publisher_alias_fence: true,
    observer_alias_fence: true,
    shape: Relaxed(Sys),
    ..UNICAST
};

const WRITER: u8 = 0;
const READER: u8 = 1;

/// The program of a gather, and the reads that say how it went.
struct Built {
    program: Program,
    /// The order of arrival, the signal seen, and the epoch seen.
    course: Vec<ReadsFrom>,
    datum: (EventId, EventId),
    shape: (EventId, EventId),
}

/// A barrier phase, numbered so that no two in the program are the same.
#[derive(Clone, Copy)]
enum Phase {
    Stored,
    Arrived,
    Settled,
    Advanced,
    Followed,
}

struct Builder {
    program: Program,
    gather: Gather,
}

impl Builder {
    fn thread(&mut self, gpu: u8, index: u8) -> ThreadId {
        self.program.thread(Block { gpu, index })
    }

    fn threads<const N: usize>(&mut self, gpu: u8, index: u8) -> [ThreadId; N] {
        std::array::from_fn(|_| self.thread(gpu, index))
    }

    fn barrier(&mut self, threads: &[ThreadId], phase: Phase) {
        for &thread in threads {
            self.program.barrier(thread, phase as u32);
        }
    }

    fn fence(&mut self, thread: ThreadId, sem: Option<Sem>) {
        if let Some(sem) = sem {
            self.program.fence(thread, sem);
        }
    }

    fn alias_fence(&mut self, thread: ThreadId, wanted: bool) {
        if wanted {
            self.program.alias_fence(thread);
        }
    }

    /// The address at which the writing rank reaches what the reading rank sees at `address`.
    fn remote(&self, address: Address) -> Address {
        if self.gather.aliased {
            address.alias()
        } else {
            address
        }
    }

    /// The stores of a block, then the meeting before its leader arrives. The leader comes first.
    fn store(
        &mut self,
        block: &[ThreadId],
        storer: Option<ThreadId>,
        datum: Address,
    ) -> Option<EventId> {
        let Gather {
            data,
            storer_fence,
            storer_alias_fence,
            barrier_before_arrive,
            ..
        } = self.gather;
        let store = storer.map(|thread| {
            let store = self.program.store(thread, self.remote(datum), data);
            self.fence(thread, storer_fence);
            self.alias_fence(thread, storer_alias_fence);
            store
        });
        if barrier_before_arrive {
            self.barrier(block, Phase::Stored);
        }
        store
    }
}

impl Gather {
    fn build(self, storer: Storer, reader: Reader) -> Built {
        let mut b = Builder {
            program: Program::new(),
            gather: self,
        };
        let (datum, shape) = (b.program.location(), b.program.location());
        let (signal, epoch, completion) = (
            b.program.location(),
            b.program.location(),
            b.program.location(),
        );
        let mut course = Vec::new();

        // The writing rank: the blocks store and arrive, one after the other.
        let first: [_; 2] = b.threads(WRITER, 0);
        let middle: [_; 2] = b.threads(WRITER, 1);
        let last: [_; 3] = b.threads(WRITER, 2);
        let publisher = if self.leader_publishes {
            last[0]
        } else {
            last[2]
        };
        let stores_it = match storer {
            Storer::FirstBlock => first[1],
            Storer::FirstLeader => first[0],
            Storer::MiddleBlock => middle[1],
            Storer::LastBlock => last[1],
            Storer::LastLeader => last[0],
            Storer::Publisher => publisher,
        };
        let mut stored = None;
        let mut arrived = None;
        for block in [&first[..], &middle[..], &last[..]] {
            let storer = block.contains(&stores_it).then_some(stores_it);
            stored = stored.or(b.store(block, storer, datum));
            b.fence(block[0], self.leader_fence_before_arrive);
            let atom = b.program.atom(block[0], completion, self.arrive);
            course.push(match arrived {
                None => atom.read.initial(),
                Some(before) => atom.read.from(before),
            });
            arrived = Some(atom.write);
        }

        // The last block publishes.
        b.fence(last[0], self.leader_fence_after_arrive);
        if self.second_barrier {
            b.barrier(&last, Phase::Arrived);
        }
        let store_shape = |b: &mut Builder, at| {
            let address = b.remote(shape);
            (self.shape_stored == at).then(|| b.program.store(publisher, address, self.shape))
        };
        let early = store_shape(&mut b, ShapeStored::BeforeFence);
        b.alias_fence(publisher, self.publisher_alias_fence);
        let middle = store_shape(&mut b, ShapeStored::BeforeRelease);
        let remote_signal = if self.signal_aliased {
            signal.alias()
        } else {
            signal
        };
        let publish = b.program.store(publisher, remote_signal, self.publish);
        let late = store_shape(&mut b, ShapeStored::AfterRelease);
        let shape_store = early
            .or(middle)
            .or(late)
            .expect("the shape is stored somewhere");

        // The reading rank: one thread of its last block observes the signal, reads the shape, and
        // the leader records the epoch.
        let [leader, observer, neighbour] = b.threads(READER, 0);
        let read_shape = |b: &mut Builder, at| {
            (self.shape_read == at).then(|| b.program.load(observer, shape, Weak))
        };
        let early = read_shape(&mut b, ShapeRead::BeforeAcquire);
        let observe = b.program.load(observer, signal, self.observe);
        course.push(observe.from(publish));
        let middle = read_shape(&mut b, ShapeRead::BeforeFence);
        b.alias_fence(observer, self.observer_alias_fence);
        let late = read_shape(&mut b, ShapeRead::AfterFence);
        let shape_load = early
            .or(middle)
            .or(late)
            .expect("the shape is read somewhere");
        let mut read = None;
        if reader == Reader::Observer {
            read = Some(b.program.load(observer, datum, Weak));
        }
        if self.barrier_after_observe {
            b.barrier(&[leader, observer, neighbour], Phase::Settled);
        }
        let advance = b.program.store(leader, epoch, self.advance);
        b.barrier(&[leader, observer, neighbour], Phase::Advanced);
        if reader == Reader::LastBlock {
            read = Some(b.program.load(neighbour, datum, Weak));
        }

        // Another block of the reading rank sees the epoch.
        let [other_leader, other] = b.threads(READER, 1);
        if matches!(reader, Reader::OtherLeader | Reader::OtherBlock) {
            let follow = b.program.load(other_leader, epoch, self.follow);
            course.push(follow.from(advance));
            if self.barrier_after_follow {
                b.barrier(&[other_leader, other], Phase::Followed);
            }
            let thread = if reader == Reader::OtherLeader {
                other_leader
            } else {
                other
            };
            read = Some(b.program.load(thread, datum, Weak));
        }

        // The next kernel of the stream starts when all threads of this one have ended.
        if reader == Reader::NextKernel {
            let next = b.thread(READER, 2);
            let start = b.program.boundary(next);
            for thread in [leader, observer, neighbour] {
                let end = b.program.boundary(thread);
                b.program.api_order(end, start);
            }
            read = Some(b.program.load(next, datum, Weak));
        }

        Built {
            program: b.program,
            course,
            datum: (
                stored.expect("somebody stores"),
                read.expect("somebody reads"),
            ),
            shape: (shape_store, shape_load),
        }
    }

    /// Whether the old datum may be read. Asserts that the new one may.
    fn stale(self, model: Model, storer: Storer, reader: Reader) -> bool {
        let built = self.build(storer, reader);
        built.may_be_old(model, built.datum)
    }

    /// Whether the old shape may be read. Asserts that the new one may.
    fn shape_stale(self, model: Model) -> bool {
        let built = self.build(Storer::Publisher, Reader::Observer);
        built.may_be_old(model, built.shape)
    }

    /// Asserts that no reader may read an old datum of any storer, nor an old shape.
    fn safe_everywhere(self, model: Model) {
        for storer in STORERS {
            for reader in READERS {
                assert!(
                    !self.stale(model, storer, reader),
                    "{storer:?} {reader:?} {self:?}"
                );
            }
        }
        assert!(!self.shape_stale(model), "shape {self:?}");
    }

    /// Asserts that exactly these readers may read an old datum of this storer.
    fn stale_for(self, model: Model, storer: Storer, readers: &[Reader]) {
        for reader in READERS {
            let stale = self.stale(model, storer, reader);
            assert_eq!(
                stale,
                readers.contains(&reader),
                "{storer:?} {reader:?} {self:?}"
            );
        }
    }
}

impl Built {
    fn may_be_old(&self, model: Model, (store, read): (EventId, EventId)) -> bool {
        let with = |line| [&self.course[..], &[line]].concat();
        assert!(
            model.allows(&self.program, &with(read.from(store))),
            "cannot happen at all"
        );
        model.allows(&self.program, &with(read.initial()))
    }
}

#[test]
fn unicast_is_safe_by_the_letter() {
    // The letter covers a writer and a reader that use one virtual address.
    UNICAST.safe_everywhere(LETTER);
    for data in [Relaxed(Sys), Relaxed(Gpu)] {
        Gather { data, ..UNICAST }.safe_everywhere(LETTER);
    }
    for shape in [Weak, Relaxed(Sys)] {
        Gather { shape, ..UNICAST }.safe_everywhere(LETTER);
    }
    Gather {
        leader_publishes: true,
        ..UNICAST
    }
    .safe_everywhere(LETTER);
}

#[test]
fn multicast_is_safe_if_strong_operations_reach_through_aliases() {
    MULTICAST_GATHER.safe_everywhere(MULTICAST);
    Gather {
        data: Weak,
        shape: Weak,
        ..MULTICAST_GATHER
    }
    .safe_everywhere(MULTICAST);
    Gather {
        leader_publishes: true,
        ..MULTICAST_GATHER
    }
    .safe_everywhere(MULTICAST);
}

#[test]
fn multicast_relies_on_more_than_the_letter() {
    // The signal itself goes through the alias, so that by the letter its release and its acquire
    // do not synchronize, whatever the fences.
    for storer in STORERS {
        MULTICAST_GATHER.stale_for(LETTER, storer, &READERS);
    }
    assert!(MULTICAST_GATHER.shape_stale(LETTER));
}

#[test]
fn multicast_rows_with_unicast_signals_are_safe_by_the_letter() {
    let gather = Gather {
        signal_aliased: false,
        ..MULTICAST_GATHER
    };
    gather.safe_everywhere(LETTER);
    Gather {
        observer_alias_fence: false,
        ..gather
    }
    .safe_everywhere(LETTER);
    Gather {
        publisher_alias_fence: false,
        ..gather
    }
    .safe_everywhere(LETTER);
    let unfenced = Gather {
        publisher_alias_fence: false,
        observer_alias_fence: false,
        ..gather
    };
    assert!(unfenced.stale(LETTER, Storer::FirstBlock, Reader::LastBlock));
}

#[test]
fn a_second_mapping_of_a_peers_memory_is_an_alias_too() {
    // Stored by ordinary instructions, but at another virtual address than it is read at.
    let mapped_twice = Gather {
        aliased: true,
        signal_aliased: true,
        ..UNICAST
    };
    for reader in READERS {
        assert!(
            mapped_twice.stale(LETTER, Storer::FirstBlock, reader),
            "{reader:?}"
        );
        let fenced = reader == Reader::NextKernel;
        assert_eq!(
            mapped_twice.stale(MULTICAST, Storer::FirstBlock, reader),
            !fenced,
            "{reader:?}"
        );
    }
}

#[test]
fn a_wrong_arrival_is_stale() {
    let wrong = [
        Gather {
            arrive: Relaxed(Gpu),
            ..UNICAST
        },
        Gather {
            arrive: Release(Gpu),
            ..UNICAST
        },
        Gather {
            arrive: Acquire(Gpu),
            ..UNICAST
        },
        Gather {
            arrive: AcqRel(Cta),
            ..UNICAST
        },
    ];
    for gather in wrong {
        for storer in [Storer::FirstBlock, Storer::FirstLeader, Storer::MiddleBlock] {
            gather.stale_for(LETTER, storer, &READERS);
        }
        // The last block's own rows do not depend on the count.
        for storer in [Storer::LastBlock, Storer::LastLeader, Storer::Publisher] {
            gather.stale_for(LETTER, storer, &[]);
        }
    }
}

#[test]
fn a_missing_barrier_before_the_arrival_is_stale() {
    let gather = Gather {
        barrier_before_arrive: false,
        ..UNICAST
    };
    for storer in [Storer::FirstBlock, Storer::MiddleBlock] {
        gather.stale_for(LETTER, storer, &READERS);
    }
    // Leaders store and arrive themselves, and the last block still meets once more.
    for storer in [
        Storer::FirstLeader,
        Storer::LastBlock,
        Storer::LastLeader,
        Storer::Publisher,
    ] {
        gather.stale_for(LETTER, storer, &[]);
    }
}

#[test]
fn a_missing_second_barrier_is_stale() {
    let gather = Gather {
        second_barrier: false,
        ..UNICAST
    };
    for storer in [Storer::FirstBlock, Storer::FirstLeader, Storer::MiddleBlock] {
        gather.stale_for(LETTER, storer, &READERS);
    }
    for storer in [Storer::LastBlock, Storer::LastLeader, Storer::Publisher] {
        gather.stale_for(LETTER, storer, &[]);
    }
    // A leader that publishes itself needs no second barrier.
    Gather {
        leader_publishes: true,
        ..gather
    }
    .safe_everywhere(LETTER);
}

#[test]
fn a_wrong_publish_or_observe_is_stale() {
    let wrong = [
        Gather {
            publish: Relaxed(Sys),
            ..UNICAST
        },
        Gather {
            publish: Weak,
            ..UNICAST
        },
        Gather {
            publish: Release(Gpu),
            ..UNICAST
        },
        Gather {
            observe: Relaxed(Sys),
            ..UNICAST
        },
        Gather {
            observe: Weak,
            ..UNICAST
        },
        Gather {
            observe: Acquire(Gpu),
            ..UNICAST
        },
    ];
    for gather in wrong {
        for storer in STORERS {
            gather.stale_for(LETTER, storer, &READERS);
        }
        assert!(gather.shape_stale(LETTER), "{gather:?}");
    }
    for gather in [
        Gather {
            publish: Relaxed(Sys),
            ..MULTICAST_GATHER
        },
        Gather {
            observe: Relaxed(Sys),
            ..MULTICAST_GATHER
        },
    ] {
        for storer in STORERS {
            gather.stale_for(MULTICAST, storer, &READERS);
        }
    }
}

#[test]
fn a_wrong_epoch_is_stale_for_the_blocks_that_follow_it() {
    let followers = [Reader::OtherLeader, Reader::OtherBlock];
    let wrong = [
        Gather {
            advance: Relaxed(Gpu),
            ..UNICAST
        },
        Gather {
            advance: Weak,
            ..UNICAST
        },
        Gather {
            advance: Release(Cta),
            ..UNICAST
        },
        Gather {
            follow: Relaxed(Gpu),
            ..UNICAST
        },
        Gather {
            follow: Weak,
            ..UNICAST
        },
        Gather {
            follow: Acquire(Cta),
            ..UNICAST
        },
        // The observing thread is not the one that stores the epoch.
        Gather {
            barrier_after_observe: false,
            ..UNICAST
        },
    ];
    for gather in wrong {
        gather.stale_for(LETTER, Storer::FirstBlock, &followers);
    }
    let gather = Gather {
        barrier_after_follow: false,
        ..UNICAST
    };
    gather.stale_for(LETTER, Storer::FirstBlock, &[Reader::OtherBlock]);
}

#[test]
fn the_shape_is_stored_before_the_release_and_read_after_the_acquire() {
    for shape in [Weak, Relaxed(Sys)] {
        let stored = |shape_stored| Gather {
            shape,
            shape_stored,
            ..UNICAST
        };
        assert!(!stored(ShapeStored::BeforeRelease).shape_stale(LETTER));
        assert!(stored(ShapeStored::AfterRelease).shape_stale(LETTER));
        let early = Gather {
            shape,
            shape_read: ShapeRead::BeforeAcquire,
            ..UNICAST
        };
        assert!(early.shape_stale(LETTER));
    }
}

#[test]
fn a_multicast_shape_needs_an_alias_fence_between_its_store_and_its_read() {
    use ShapeRead::{AfterFence, BeforeFence};
    // (stored, publisher fences, observer fences, read, stale)
    for (shape_stored, publisher_alias_fence, observer_alias_fence, shape_read, stale) in [
        (ShapeStored::BeforeFence, true, false, BeforeFence, false),
        (ShapeStored::BeforeRelease, true, false, BeforeFence, true),
        (ShapeStored::BeforeRelease, true, true, BeforeFence, true),
        (ShapeStored::BeforeRelease, true, true, AfterFence, false),
        (ShapeStored::BeforeRelease, false, true, AfterFence, false),
        (ShapeStored::BeforeFence, false, false, AfterFence, true),
        (ShapeStored::AfterRelease, true, true, AfterFence, true),
    ] {
        let gather = Gather {
            shape_stored,
            publisher_alias_fence,
            observer_alias_fence,
            shape_read,
            ..MULTICAST_GATHER
        };
        assert_eq!(gather.shape_stale(MULTICAST), stale, "{gather:?}");
    }
}

#[test]
fn multicast_needs_an_alias_fence_on_one_side_and_one_is_enough() {
    let fences = |storer_alias_fence, publisher_alias_fence, observer_alias_fence| Gather {
        storer_alias_fence,
        publisher_alias_fence,
        observer_alias_fence,
        ..MULTICAST_GATHER
    };
    // None: only a kernel boundary still orders the aliases.
    let in_kernel = [
        Reader::Observer,
        Reader::LastBlock,
        Reader::OtherLeader,
        Reader::OtherBlock,
    ];
    for storer in STORERS {
        fences(false, false, false).stale_for(MULTICAST, storer, &in_kernel);
        for (storing, publishing, observing) in [
            (true, false, false),
            (false, true, false),
            (false, false, true),
        ] {
            fences(storing, publishing, observing).stale_for(MULTICAST, storer, &[]);
        }
    }
    // Were a kernel boundary not to count, the next kernel would need the fence too.
    let bare = Model {
        api_orders_aliases: false,
        ..MULTICAST
    };
    fences(false, false, false).stale_for(bare, Storer::FirstBlock, &READERS);
    fences(false, true, false).stale_for(bare, Storer::FirstBlock, &[]);
    fences(false, false, true).stale_for(bare, Storer::FirstBlock, &[]);
}

#[test]
fn the_observers_alias_fence_helps_only_those_who_meet_it() {
    // Readers that follow the leader without the leader having met the observer.
    let gather = Gather {
        publisher_alias_fence: false,
        observer_alias_fence: true,
        barrier_after_observe: false,
        ..MULTICAST_GATHER
    };
    let followers = [Reader::OtherLeader, Reader::OtherBlock];
    gather.stale_for(MULTICAST, Storer::FirstBlock, &followers);
}

#[test]
fn arrival_patterns_seen_elsewhere() {
    let base = Gather {
        arrive: Relaxed(Gpu),
        data: Relaxed(Sys),
        ..UNICAST
    };
    let (sc, acq_rel) = (Some(Sc(Sys)), Some(AcqRel(Sys)));
    let patterns = [
        (
            "each thread fence.sc, relaxed count",
            Gather {
                storer_fence: sc,
                ..base
            },
            true,
        ),
        (
            "each thread fence.acq_rel, relaxed count",
            Gather {
                storer_fence: acq_rel,
                ..base
            },
            true,
        ),
        (
            "each thread fence.sc, relaxed count, fence.acq_rel",
            Gather {
                storer_fence: sc,
                leader_fence_after_arrive: acq_rel,
                ..base
            },
            true,
        ),
        (
            "each thread fence.sc, relaxed count, fence.sc",
            Gather {
                storer_fence: sc,
                leader_fence_after_arrive: sc,
                ..base
            },
            false,
        ),
        (
            "each thread fence.acq_rel, relaxed count, fence.sc",
            Gather {
                storer_fence: acq_rel,
                leader_fence_after_arrive: sc,
                ..base
            },
            true,
        ),
        (
            "leader fence.acq_rel on both sides of a relaxed count",
            Gather {
                leader_fence_before_arrive: acq_rel,
                leader_fence_after_arrive: acq_rel,
                ..base
            },
            false,
        ),
        (
            "leader fence.acq_rel before a relaxed count only",
            Gather {
                leader_fence_before_arrive: acq_rel,
                ..base
            },
            true,
        ),
        (
            "each thread and leader fence.sc before a relaxed count only",
            Gather {
                storer_fence: sc,
                leader_fence_before_arrive: sc,
                ..base
            },
            true,
        ),
        (
            "acq_rel count",
            Gather {
                arrive: AcqRel(Gpu),
                ..base
            },
            false,
        ),
        (
            "each thread fence.sc, acq_rel count",
            Gather {
                storer_fence: sc,
                arrive: AcqRel(Gpu),
                ..base
            },
            false,
        ),
        (
            "release count, fence.acq_rel",
            Gather {
                arrive: Release(Gpu),
                leader_fence_after_arrive: acq_rel,
                ..base
            },
            false,
        ),
        (
            "acq_rel count, relaxed signal",
            Gather {
                arrive: AcqRel(Gpu),
                publish: Relaxed(Sys),
                ..base
            },
            true,
        ),
    ];
    for (name, gather, stale) in patterns {
        for leader_publishes in [true, false] {
            let gather = Gather {
                leader_publishes,
                ..gather
            };
            for reader in [Reader::Observer, Reader::OtherBlock, Reader::NextKernel] {
                let seen = gather.stale(LETTER, Storer::FirstBlock, reader);
                assert_eq!(
                    seen, stale,
                    "{name}: {reader:?}, leader publishes: {leader_publishes}"
                );
            }
        }
    }
}

/// The next use of a slot: a reader of call e in one kernel, the publish of a later call in the next
/// kernel of its rank, the peer's observation of it, and the peer's store to the same slot in its own
/// next kernel. Can the reader see that store?
fn future_rows(aliased: bool, gather: Gather, model: Model) -> bool {
    let mut p = Program::new();
    let (datum, signal) = (p.location(), p.location());
    let remote = |a: Address| if aliased { a.alias() } else { a };

    let reader = p.thread(Block {
        gpu: READER,
        index: 0,
    });
    let read = p.load(reader, datum, Weak);
    let read_end = p.boundary(reader);
    let publisher = p.thread(Block {
        gpu: READER,
        index: 1,
    });
    let publisher_start = p.boundary(publisher);
    p.api_order(read_end, publisher_start);
    if gather.publisher_alias_fence {
        p.alias_fence(publisher);
    }
    let publish = p.store(publisher, remote(signal), gather.publish);

    let observer = p.thread(Block {
        gpu: WRITER,
        index: 0,
    });
    let observe = p.load(observer, signal, gather.observe);
    if gather.observer_alias_fence {
        p.alias_fence(observer);
    }
    let observe_end = p.boundary(observer);
    let writer = p.thread(Block {
        gpu: WRITER,
        index: 1,
    });
    let writer_start = p.boundary(writer);
    p.api_order(observe_end, writer_start);
    let store = p.store(writer, remote(datum), gather.data);

    let seen = observe.from(publish);
    assert!(
        model.allows(&p, &[seen, read.initial()]),
        "cannot happen at all"
    );
    model.allows(&p, &[seen, read.from(store)])
}

#[test]
fn a_reader_never_sees_the_next_use_of_its_slot() {
    assert!(!future_rows(false, UNICAST, LETTER));
    assert!(future_rows(
        false,
        Gather {
            publish: Relaxed(Sys),
            ..UNICAST
        },
        LETTER
    ));
    assert!(future_rows(
        false,
        Gather {
            observe: Relaxed(Sys),
            ..UNICAST
        },
        LETTER
    ));

    // Through the alias: a kernel boundary or a fence.
    let fences = |publisher_alias_fence, observer_alias_fence| Gather {
        publisher_alias_fence,
        observer_alias_fence,
        ..MULTICAST_GATHER
    };
    let bare = Model {
        api_orders_aliases: false,
        ..MULTICAST
    };
    for (gather, model, future) in [
        (fences(false, false), MULTICAST, false),
        (fences(true, true), MULTICAST, false),
        (fences(false, false), bare, true),
        (fences(true, false), bare, false),
        (fences(false, true), bare, false),
        (fences(true, true), LETTER, true),
    ] {
        assert_eq!(
            future_rows(true, gather, model),
            future,
            "{gather:?} {model:?}"
        );
    }
}

/// Two blocks of one rank read the epoch as they start; the last one stores the next epoch.
/// Can the other block start with that one, and so perform the wrong call?
fn entry_sees_this_calls_epoch(gather: Gather, entry: Sem) -> bool {
    let mut p = Program::new();
    let (epoch, completion) = (p.location(), p.location());
    let block = |index| Block { gpu: READER, index };
    let [thread, leader] = [p.thread(block(0)), p.thread(block(0))];
    let read = p.load(thread, epoch, entry);
    if gather.barrier_before_arrive {
        p.barrier(thread, 0);
        p.barrier(leader, 0);
    }
    let first = p.atom(leader, completion, gather.arrive);
    let last = p.thread(block(1));
    let second = p.atom(last, completion, gather.arrive);
    let advance = p.store(last, epoch, gather.advance);
    let course = [first.read.initial(), second.read.from(first.write)];
    let with = |line| [&course[..], &[line]].concat();
    assert!(
        LETTER.allows(&p, &with(read.initial())),
        "cannot happen at all"
    );
    LETTER.allows(&p, &with(read.from(advance)))
}

#[test]
fn no_block_starts_with_the_epoch_of_its_own_call() {
    for entry in [Weak, Relaxed(Gpu), Acquire(Gpu)] {
        assert!(!entry_sees_this_calls_epoch(UNICAST, entry), "{entry:?}");
        let unmet = Gather {
            barrier_before_arrive: false,
            ..UNICAST
        };
        assert!(entry_sees_this_calls_epoch(unmet, entry), "{entry:?}");
    }
    let uncounted = Gather {
        arrive: Relaxed(Gpu),
        ..UNICAST
    };
    assert!(entry_sees_this_calls_epoch(uncounted, Weak));
}

#[test]
fn the_next_launch_counts_from_the_reset() {
    let mut p = Program::new();
    let completion = p.location();
    let last = p.thread(Block {
        gpu: WRITER,
        index: 0,
    });
    let full = p.atom(last, completion, AcqRel(Gpu));
    let reset = p.store(last, completion, Weak);
    let end = p.boundary(last);
    let next = p.thread(Block {
        gpu: WRITER,
        index: 1,
    });
    let start = p.boundary(next);
    p.api_order(end, start);
    let count = p.atom(next, completion, AcqRel(Gpu));
    assert!(LETTER.allows(&p, &[count.read.from(reset)]));
    assert!(!LETTER.allows(&p, &[count.read.from(full.write)]));
    assert!(!LETTER.allows(&p, &[count.read.initial()]));
}
