//! Plain copies of the bytes that a gather must deliver: what no gather can beat by much.
//!
//! A gather's slots alternate, and so do the buffers here, or the copies would have it easier in
//! the caches. The copies of one rank are shared by as many threads as the gather's; each has
//! buffers of its own and waits for nobody, which a gather cannot avoid.

use super::clock::{now, wait_until};
use super::measure::Mode;
use direct_dcp::Way;
use std::hint::black_box;
use std::thread;

/// One rank's copies.
pub(super) struct Ceiling {
    parts: Vec<Part>,
    crowded: bool,
}

/// What one thread copies: `times` slices, each from one of the sources to one of the
/// destinations, which take turns from call to call.
struct Part {
    slice: usize,
    times: usize,
    sources: Vec<Vec<u8>>,
    destinations: Vec<Vec<u8>>,
    calls: usize,
}

impl Ceiling {
    /// Copies as one call of a rank delivers them, `slice` bytes from each of `ranks` ranks.
    pub(super) fn new(
        (way, mode): (Way, Mode),
        slice: usize,
        ranks: usize,
        blocks: usize,
        crowded: bool,
    ) -> Ceiling {
        let part = |bytes: usize| {
            // How many slices arrive, from how many different ones, and which buffers alternate.
            let (times, distinct, sources, destinations) = match (way, mode) {
                (Way::SharedSlot, Mode::ZeroCopy) => (1, 1, 1, 2),
                (Way::Push, Mode::ZeroCopy) => (ranks, 1, 1, 2),
                (_, Mode::ZeroCopy) => (ranks, ranks, 2, 2),
                (_, Mode::CopyOut) => (ranks, ranks, 2, 1),
            };
            Part {
                slice: bytes,
                times,
                // Not zeroed, or the system could lend one page of zeros for all of them.
                sources: vec![vec![1; bytes * distinct]; sources],
                destinations: vec![vec![2; bytes * times]; destinations],
                calls: 0,
            }
        };
        let parts =
            (0..blocks).map(|block| part(slice * (block + 1) / blocks - slice * block / blocks));
        Ceiling {
            parts: parts.collect(),
            crowded,
        }
    }

    /// Bytes of the buffers that [`Ceiling::new`] allocates at most; none if too many to count.
    pub(super) fn memory(slice: usize, ranks: usize) -> Option<usize> {
        slice.checked_mul(ranks)?.checked_mul(4)
    }

    /// Copies `calls` times from `start` on. Returns when it started and ended.
    pub(super) fn run(&mut self, calls: usize, start: u64) -> (u64, u64) {
        let crowded = self.crowded;
        let Some((first, others)) = self.parts.split_first_mut() else {
            return (start, start);
        };
        thread::scope(|scope| {
            let others: Vec<_> = others
                .iter_mut()
                .map(|part| scope.spawn(move || part.run(calls, start, crowded)))
                .collect();
            let (mut begin, mut end) = first.run(calls, start, crowded);
            for other in others {
                if let Ok(times) = other.join() {
                    begin = begin.min(times.0);
                    end = end.max(times.1);
                }
            }
            (begin, end)
        })
    }
}

impl Part {
    fn run(&mut self, calls: usize, start: u64, crowded: bool) -> (u64, u64) {
        wait_until(start, crowded);
        let begin = now();
        for _ in 0..calls {
            self.call();
        }
        (begin, now())
    }

    fn call(&mut self) {
        self.calls += 1;
        let from = self.calls % self.sources.len();
        let to = self.calls % self.destinations.len();
        let (source, destination) = (&self.sources[from], &mut self.destinations[to]);
        if source.len() == destination.len() {
            destination.copy_from_slice(black_box(source));
        } else {
            for i in 0..self.times {
                destination[i * self.slice..][..self.slice].copy_from_slice(black_box(source));
            }
        }
        black_box(destination);
    }
}
