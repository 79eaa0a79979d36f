//! The fabric of ranks that are threads of one process: a table under a lock.
//!
//! A collective is a *round*, known by its number: each rank counts its own collectives, and the
//! rounds of equal number belong together. A rank puts its offer on the round's table and sleeps
//! until the table is full. A rank that gives up leaves its offer behind, so the others still
//! complete the round, and its own next collective is the next round.

use super::control::Words;
use super::error::{GroupError, shm_error};
use super::fabric::{Fabric, Generation, Operation, Passed, deadline};
use direct_dcp_shm::{Mapping, SharedMemory};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The seats of a fresh group of `world` threads, in rank order.
pub(super) fn seats(world: usize) -> Result<Vec<Generation>, GroupError> {
    let hub = Hub::create(world, 1)?;
    Ok((0..world)
        .map(|rank| hub.seat(rank, (0..world).collect()))
        .collect())
}

/// What the ranks of one generation share.
#[derive(Debug)]
struct Hub {
    world: usize,
    number: u64,
    words: Arc<Words>,
    table: Mutex<Table>,
    /// Notified when a round is full or spoiled, a rank leaves, the words change, or a rebuild
    /// starts or ends.
    changed: Condvar,
}

#[derive(Debug)]
struct Table {
    /// Rounds that some rank has begun and some rank has not ended.
    rounds: BTreeMap<u64, Round>,
    departed: Vec<bool>,
    /// Ranks that have called rebuild.
    joined: Vec<bool>,
    /// What the rebuild came to; set once, by the rank that finds it complete.
    outcome: Option<Outcome>,
}

#[derive(Debug)]
struct Round {
    operation: Operation,
    /// The rank that came first, and so chose the operation.
    opener: usize,
    offers: Vec<Option<Offer>>,
    arrived: usize,
    /// Ranks that have made an offer and ended the round, by whatever result.
    ended: usize,
    /// The first rank that came with another operation, and which.
    clash: Option<(usize, Operation)>,
    /// All offers, once all have come.
    full: Option<Arc<[Offer]>>,
}

/// What one rank brings to a round.
#[derive(Debug, Default)]
struct Offer {
    bytes: Vec<u8>,
    memory: Option<Arc<Mapping>>,
    object: Option<Arc<dyn Any + Send + Sync>>,
}

#[derive(Debug)]
struct Outcome {
    /// Those who go on, by their old ranks, ascending.
    members: Vec<usize>,
    /// Their hub, or the member who could not create it.
    next: Result<Arc<Hub>, usize>,
}

impl Hub {
    fn create(world: usize, number: u64) -> Result<Arc<Hub>, GroupError> {
        Ok(Arc::new(Hub {
            world,
            number,
            words: Words::create(world)?,
            table: Mutex::new(Table {
                rounds: BTreeMap::new(),
                departed: vec![false; world],
                joined: vec![false; world],
                outcome: None,
            }),
            changed: Condvar::new(),
        }))
    }

    fn seat(self: &Arc<Hub>, rank: usize, previous: Vec<usize>) -> Generation {
        Generation {
            fabric: Arc::new(Seat {
                hub: Arc::clone(self),
                rank,
                turn: Mutex::new(0),
                superseded: AtomicBool::new(false),
            }),
            words: Arc::clone(&self.words),
            rank,
            number: self.number,
            previous,
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// Sleeps until something changed, or the deadline.
    fn sleep<'a>(&self, table: MutexGuard<'a, Table>, until: Instant) -> MutexGuard<'a, Table> {
        let left = until.saturating_duration_since(Instant::now());
        self.changed
            .wait_timeout(table, left)
            .unwrap_or_else(PoisonError::into_inner)
            .0
    }
}

/// One rank's place at the hub.
#[derive(Debug)]
struct Seat {
    hub: Arc<Hub>,
    rank: usize,
    /// How many collectives this rank has begun. Held while one runs: they take turns.
    turn: Mutex<u64>,
    /// This rank has called rebuild.
    superseded: AtomicBool,
}

impl Seat {
    /// Brings `offer` to this rank's next round, and waits for everybody's.
    fn round(
        &self,
        operation: Operation,
        offer: Offer,
        timeout: Duration,
    ) -> Result<Arc<[Offer]>, GroupError> {
        let until = deadline(timeout);
        let mut turn = lock(&self.turn);
        let mut table = self.hub.table();
        self.refuse(&table)?;
        *turn += 1;
        let number = *turn;
        let world = self.hub.world;
        let round = table.rounds.entry(number).or_insert_with(|| Round {
            operation,
            opener: self.rank,
            offers: std::iter::repeat_with(|| None).take(world).collect(),
            arrived: 0,
            ended: 0,
            clash: None,
            full: None,
        });
        if let Some(place) = round.offers.get_mut(self.rank) {
            *place = Some(offer);
            round.arrived += 1;
        }
        if round.operation != operation {
            round.clash.get_or_insert((self.rank, operation));
        }
        if round.clash.is_some() {
            self.hub.changed.notify_all();
        } else if round.arrived == world {
            round.full = Some(round.offers.drain(..).flatten().collect());
            self.hub.changed.notify_all();
        }
        let result = loop {
            match self.look(&table, number, operation) {
                Ok(Some(offers)) => break Ok(offers),
                Err(error) => break Err(error),
                Ok(None) if Instant::now() >= until => {
                    break Err(GroupError::Timeout {
                        missing: missing(&table, number),
                        waited: timeout,
                    });
                }
                Ok(None) => table = self.hub.sleep(table, until),
            }
        };
        if let Some(round) = table.rounds.get_mut(&number) {
            round.ended += 1;
            if round.ended == world {
                table.rounds.remove(&number);
            }
        }
        result
    }

    /// What has become of a round that this rank waits in; `None` while there is still hope.
    fn look(
        &self,
        table: &Table,
        number: u64,
        operation: Operation,
    ) -> Result<Option<Arc<[Offer]>>, GroupError> {
        let Some(round) = table.rounds.get(&number) else {
            return Ok(None);
        };
        if let Some(offers) = &round.full {
            return Ok(Some(Arc::clone(offers)));
        }
        if let Some((rank, other)) = round.clash {
            // Whoever came with the opener's operation blames the one who did not.
            let (source, theirs) = match operation == round.operation {
                true => (rank, other),
                false => (round.opener, round.operation),
            };
            return Err(clash(source, operation, theirs));
        }
        self.refuse(table)?;
        let gone = |&rank: &usize| {
            table.departed.get(rank) == Some(&true)
                && round.offers.get(rank).is_some_and(Option::is_none)
        };
        match (0..self.hub.world).find(gone) {
            Some(rank) => Err(GroupError::PeerLost { rank }),
            None => Ok(None),
        }
    }

    /// Why no round can begin or go on, if so.
    fn refuse(&self, table: &Table) -> Result<(), GroupError> {
        if self.superseded.load(Ordering::Relaxed) {
            return Err(self.over());
        }
        if let Some(by) = self.hub.words.aborted() {
            return Err(GroupError::Aborted { by });
        }
        if table.outcome.is_some() {
            return Err(GroupError::Excluded);
        }
        let first = |ranks: &[bool]| ranks.iter().position(|&yes| yes);
        match (first(&table.joined), first(&table.departed)) {
            (None, _) => Ok(()),
            // Why the others rebuild tells more than that they do.
            (Some(_), Some(rank)) => Err(GroupError::PeerLost { rank }),
            (Some(rank), None) => Err(GroupError::Rebuilding { rank }),
        }
    }

    fn over(&self) -> GroupError {
        GroupError::Superseded {
            generation: self.hub.number,
        }
    }

    /// Settles who goes on: everybody who has joined.
    fn settle(&self, table: &mut Table) -> Result<(), GroupError> {
        let members: Vec<usize> = (0..self.hub.world)
            .filter(|&rank| table.joined.get(rank) == Some(&true))
            .collect();
        let hub = match members.len() {
            0 | 1 => Ok(None),
            world => Hub::create(world, self.hub.number.saturating_add(1)).map(Some),
        };
        let (next, result) = match hub {
            Ok(Some(hub)) => (Ok(hub), Ok(())),
            Ok(None) => (Err(self.rank), Ok(())),
            Err(error) => (Err(self.rank), Err(error)),
        };
        table.outcome = Some(Outcome { members, next });
        self.hub.changed.notify_all();
        result
    }

    /// This rank's place in what the rebuild came to.
    fn successor(&self, outcome: &Outcome) -> Result<Generation, GroupError> {
        let survivors = outcome.members.len();
        let rank = outcome
            .members
            .binary_search(&self.rank)
            .map_err(|_| GroupError::Excluded)?;
        match &outcome.next {
            _ if survivors < 2 => Err(GroupError::TooFew { survivors }),
            Ok(hub) => Ok(hub.seat(rank, outcome.members.clone())),
            Err(rank) => Err(GroupError::PeerFailed {
                rank: *rank,
                what: "create the control words of the new generation".into(),
            }),
        }
    }
}

impl Fabric for Seat {
    fn gather(
        &self,
        operation: Operation,
        bytes: &[u8],
        timeout: Duration,
        take: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), GroupError> {
        let offer = Offer {
            bytes: bytes.to_vec(),
            ..Offer::default()
        };
        let offers = self.round(operation, offer, timeout)?;
        for (rank, offer) in offers.iter().enumerate() {
            take(rank, &offer.bytes);
        }
        Ok(())
    }

    fn share(
        &self,
        own: Option<SharedMemory>,
        timeout: Duration,
    ) -> Result<Vec<Option<Arc<Mapping>>>, GroupError> {
        // A rank that fails still comes, so that nobody waits for it.
        let (memory, failure) = match own.map(|memory| memory.map()).transpose() {
            Ok(mapping) => (mapping.map(Arc::new), None),
            Err(error) => (None, Some(error)),
        };
        let offer = Offer {
            // Empty says that all went well.
            bytes: vec![0; usize::from(failure.is_some())],
            memory,
            object: None,
        };
        let offers = self.round(Operation::Share, offer, timeout)?;
        if let Some(error) = failure {
            return Err(shm_error("mapping this rank's memory")(error));
        }
        if let Some(rank) = offers.iter().position(|offer| !offer.bytes.is_empty()) {
            return Err(GroupError::PeerFailed {
                rank,
                what: "map its memory".into(),
            });
        }
        Ok(offers.iter().map(|offer| offer.memory.clone()).collect())
    }

    fn pass(&self, own: Passed, timeout: Duration) -> Result<Vec<Passed>, GroupError> {
        let offer = Offer {
            object: own.object,
            ..Offer::default()
        };
        let offers = self.round(Operation::Pass, offer, timeout)?;
        let passed = |offer: &Offer| Passed {
            object: offer.object.clone(),
            fd: None,
        };
        Ok(offers.iter().map(passed).collect())
    }

    fn closed(&self, _rank: usize) -> bool {
        // A thread cannot vanish: its handles are dropped, which the words tell.
        false
    }

    fn wake(&self) {
        // Under the lock, so that nobody is between looking and sleeping.
        let _table = self.hub.table();
        self.hub.changed.notify_all();
    }

    fn leave(&self) {
        let mut table = self.hub.table();
        if let Some(departed) = table.departed.get_mut(self.rank) {
            *departed = true;
        }
        self.hub.changed.notify_all();
    }

    fn rebuild(&self, timeout: Duration) -> Result<Generation, GroupError> {
        if self.superseded.swap(true, Ordering::Relaxed) {
            return Err(self.over());
        }
        let until = deadline(timeout);
        let mut table = self.hub.table();
        if !table.joined.contains(&true) {
            // Ends the rounds of those who do not know yet.
            self.hub.changed.notify_all();
        }
        if table.outcome.is_none()
            && let Some(joined) = table.joined.get_mut(self.rank)
        {
            *joined = true;
        }
        loop {
            if let Some(outcome) = &table.outcome {
                return self.successor(outcome);
            }
            let awaited = table
                .joined
                .iter()
                .zip(&table.departed)
                .any(|(&joined, &departed)| !joined && !departed);
            if !awaited || Instant::now() >= until {
                self.settle(&mut table)?;
            } else {
                table = self.hub.sleep(table, until);
            }
        }
    }

    fn one_process(&self) -> bool {
        true
    }
}

/// Who has not come to a round.
fn missing(table: &Table, number: u64) -> Vec<usize> {
    let offers = table.rounds.get(&number).map(|round| &round.offers);
    let offers = offers.into_iter().flatten().enumerate();
    offers
        .filter(|(_, offer)| offer.is_none())
        .map(|(rank, _)| rank)
        .collect()
}

/// Two ranks called different collectives.
pub(super) fn clash(source: usize, ours: Operation, theirs: Operation) -> GroupError {
    GroupError::Mismatch {
        source,
        field: "collective under way",
        ours: ours.name().into(),
        theirs: theirs.name().into(),
    }
}

/// A lock that a panic elsewhere does not take away: what it guards is valid after every step.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
