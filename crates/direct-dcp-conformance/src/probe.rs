//! A rank's end of a workspace that checks everything it is given.

use std::sync::atomic::{AtomicU64, Ordering};

use direct_dcp::{GatherError, WorkspaceError};
use rand::{Rng, RngExt};

use crate::case::Spec;
use crate::failure::{Failure, ensure};
use crate::reference::{Key, dice, difference, gathered, poison, rows};
use crate::{Gather, Rank, Rows};

/// The inner result is the backend's, the outer one our judgement of it.
pub(crate) type Attempt<T> = Result<Result<T, GatherError>, Failure>;

/// A workspace, and the reference that it is held to.
pub(crate) struct Probe<G> {
    gather: G,
    spec: Spec,
    rank: usize,
    world: usize,
    seed: u64,
    /// Per ubatch, the calls that have delivered.
    calls: Vec<AtomicU64>,
}

impl<G: Gather> Probe<G> {
    /// Collective: builds the workspace. Its data depends on `seed`.
    pub(crate) fn build<R: Rank<Gather = G>>(
        rank: &R,
        spec: Spec,
        seed: u64,
    ) -> Result<Self, WorkspaceError> {
        Ok(Probe {
            gather: rank.build(&spec)?,
            rank: rank.rank(),
            world: rank.world_size(),
            calls: (0..spec.ubatches).map(|_| AtomicU64::new(0)).collect(),
            seed,
            spec,
        })
    }

    pub(crate) fn gather(&self) -> &G {
        &self.gather
    }

    /// Calls that have delivered what they should.
    pub(crate) fn checked(&self) -> u64 {
        self.calls
            .iter()
            .map(|calls| calls.load(Ordering::Relaxed))
            .sum()
    }

    /// The call of `ubatch` that comes next, from 1.
    pub(crate) fn next_call(&self, ubatch: usize) -> u64 {
        let calls = self.calls.get(ubatch);
        calls.map_or(0, |calls| calls.load(Ordering::Relaxed)) + 1
    }

    /// Pretends to have made a call.
    pub(crate) fn skip(&self, ubatch: usize) {
        self.calls[ubatch].fetch_add(1, Ordering::Relaxed);
    }

    /// Gathers `count` rows a rank by copy; anything but success is a failure.
    pub(crate) fn copied(&self, ubatch: usize, count: usize) -> Result<(), Failure> {
        self.try_copied(ubatch, count)?
            .map_err(|error| self.unexpected(ubatch, &error))
    }

    /// Gathers `count` rows a rank and keeps the slot; anything but success is a failure.
    pub(crate) fn lent(&self, ubatch: usize, count: usize) -> Result<Lent<G::Rows>, Failure> {
        self.try_lent(ubatch, count)?
            .map_err(|error| self.unexpected(ubatch, &error))
    }

    /// One call of each form.
    pub(crate) fn both(&self, ubatch: usize, count: usize) -> Result<(), Failure> {
        self.copied(ubatch, count)?;
        self.lent(ubatch, count)?.verify()
    }

    /// Gathers `count` rows a rank by copy, and checks the result, or that an error left alone
    /// what it must.
    pub(crate) fn try_copied(&self, ubatch: usize, count: usize) -> Attempt<()> {
        let bytes = count * self.spec.format.row_bytes();
        self.try_copied_bytes(ubatch, bytes, bytes * self.world)
    }

    /// The same with `bytes` of input and `len` bytes of output, which may not make sense.
    pub(crate) fn try_copied_bytes(&self, ubatch: usize, bytes: usize, len: usize) -> Attempt<()> {
        let key = self.key(ubatch);
        let mut expected = gathered(key, self.world, bytes);
        expected.resize(len, 1);
        let mut rng = dice(&[key.seed, key.call, self.rank as u64, 1 << 32]);

        // Canary, input, canary, output, canary; or the output first. Both parts are aligned to
        // what some access needs, or not at all.
        let align = 1 << rng.random_range(0..=4);
        let input_first = rng.random();
        let mut after = |end: usize| (end + rng.random_range(1..48)).next_multiple_of(align);
        let (local, out, end) = if input_first {
            let local = after(0);
            let out = after(local + bytes);
            (local, out, after(out + len))
        } else {
            let out = after(0);
            let local = after(out + len);
            (local, out, after(local + bytes))
        };
        let (local, out) = (local..local + bytes, out..out + len);
        let mut storage = vec![0; end];
        rng.fill_bytes(&mut storage);
        storage[local.clone()].copy_from_slice(&rows(key, self.rank, bytes));
        storage[out.clone()].copy_from_slice(&poison(&mut rng, &expected));
        let mut wanted = storage.clone();

        let result = self
            .gather
            .gather_into(ubatch, &mut storage, local.clone(), out.clone());
        // The rows are the caller's again: at times it has other use for them at once.
        if rng.random() {
            storage[local.clone()].fill(0);
            wanted[local.clone()].fill(0);
        }
        match &result {
            Ok(()) => {
                wanted[out.clone()].copy_from_slice(&expected);
                self.delivered(ubatch);
            }
            Err(error) if under_way(error) && self.gather.spoils_outputs() => {
                wanted[out.clone()].copy_from_slice(&storage[out.clone()]);
            }
            Err(error) => {
                // A call that was under way may have written this rank's own rows.
                let own = bytes * self.rank..bytes * (self.rank + 1);
                if under_way(error) && storage[out.clone()][own.clone()] == expected[own.clone()] {
                    wanted[out.clone()][own.clone()].copy_from_slice(&expected[own]);
                }
            }
        }
        ensure(storage == wanted, || {
            format!(
                "call {} on ubatch {ubatch} ended with {result:?}; in the output {}; around it {}",
                key.call,
                difference(&storage[out.clone()], &wanted[out.clone()], bytes.max(1)),
                if storage[..out.start] == wanted[..out.start]
                    && storage[out.end..] == wanted[out.end..]
                {
                    "nothing differs"
                } else {
                    "bytes were changed"
                },
            )
        })?;
        Ok(result)
    }

    /// Gathers `count` rows a rank and keeps the slot, after checking it.
    pub(crate) fn try_lent(&self, ubatch: usize, count: usize) -> Attempt<Lent<G::Rows>> {
        let bytes = count * self.spec.format.row_bytes();
        let key = self.key(ubatch);
        let mut local = rows(key, self.rank, bytes);
        let rows = match self.gather.gather(ubatch, &local) {
            Ok(rows) => rows,
            Err(error) => return Ok(Err(error)),
        };
        local.fill(0);
        std::hint::black_box(&local);
        self.delivered(ubatch);
        let lent = Lent {
            rows,
            key,
            expected: gathered(key, self.world, bytes),
            slice: bytes,
        };
        lent.verify()?;
        Ok(Ok(lent))
    }

    fn key(&self, ubatch: usize) -> Key {
        Key {
            seed: self.seed,
            ubatch,
            call: self.next_call(ubatch),
        }
    }

    fn delivered(&self, ubatch: usize) {
        self.calls[ubatch].fetch_add(1, Ordering::Relaxed);
    }

    fn unexpected(&self, ubatch: usize, error: &GatherError) -> Failure {
        let call = self.next_call(ubatch);
        Failure(format!("call {call} on ubatch {ubatch} failed: {error:?}"))
    }
}

/// Whether a call that ended so had begun to do something.
fn under_way(error: &GatherError) -> bool {
    !matches!(
        error,
        GatherError::InvalidArgument { .. }
            | GatherError::SlotInUse { .. }
            | GatherError::Busy { .. }
            | GatherError::Poisoned { .. }
    )
}

/// A result that is held, with what must be in it.
pub(crate) struct Lent<W> {
    rows: W,
    key: Key,
    expected: Vec<u8>,
    slice: usize,
}

impl<W: Rows> Lent<W> {
    /// The call that delivered it.
    pub(crate) fn call(&self) -> u64 {
        self.key.call
    }

    /// Checks that the slot still holds what it must.
    pub(crate) fn verify(&self) -> Result<(), Failure> {
        let Key { ubatch, call, .. } = self.key;
        ensure(self.rows.epoch() == call, || {
            format!(
                "call {call} on ubatch {ubatch} says it is {}",
                self.rows.epoch()
            )
        })?;
        let bytes = self.rows.bytes();
        ensure(*bytes == self.expected, || {
            format!(
                "in the slot of call {call} on ubatch {ubatch}, {}",
                difference(&bytes, &self.expected, self.slice)
            )
        })
    }
}

/// Fails unless the backend refused or gave up, as `expected` says.
pub(crate) fn fails<T>(
    attempt: Attempt<T>,
    expected: &str,
    fits: impl FnOnce(&GatherError) -> bool,
) -> Result<GatherError, Failure> {
    match attempt? {
        Err(error) if fits(&error) => Ok(error),
        Err(error) => Err(Failure(format!("expected {expected}, got {error:?}"))),
        Ok(_) => Err(Failure(format!("expected {expected}, and it delivered"))),
    }
}
