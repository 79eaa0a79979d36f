//! What the tests of groups have in common.
#![allow(dead_code, reason = "each test program uses its part")]

use direct_dcp::{Exchange, Group, GroupError, Launcher};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// Longer than anything here takes, and shorter than a person waits.
const PATIENCE: Duration = Duration::from_secs(120);

/// Ends the test with a failure if it hangs.
pub(crate) fn watched<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, wait) = mpsc::channel();
    let runner = thread::spawn(move || {
        let result = test();
        let _ = done.send(());
        result
    });
    match wait.recv_timeout(PATIENCE) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("no end after {PATIENCE:?}"),
        _ => runner
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}

/// Runs `body` for each item in a thread of its own; the results in order.
pub(crate) fn each<I: Send, T: Send>(items: Vec<I>, body: impl Fn(I) -> T + Sync) -> Vec<T> {
    let body = &body;
    thread::scope(|scope| {
        let start = |item| {
            thread::Builder::new()
                .stack_size(256 << 10)
                .spawn_scoped(scope, move || body(item))
                .unwrap()
        };
        let threads: Vec<_> = items.into_iter().map(start).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// Random bytes that every rank can compute: those of `rank` in `round`.
pub(crate) fn payload(seed: u64, round: u64, rank: usize, most: usize) -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64(seed ^ (round << 20) ^ rank as u64);
    let mut bytes = vec![0; rng.next_u64() as usize % (most + 1)];
    rng.fill_bytes(&mut bytes);
    bytes
}

/// A private directory to meet in.
pub(crate) fn meeting_place() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o700)).unwrap();
    dir
}

/// A way to bring a group up, with all its ranks in this process.
pub(crate) type Way = fn(usize) -> Vec<Group>;

/// Every way, by name.
pub(crate) const WAYS: [(&str, Way); 4] = [
    ("threads", threads),
    ("sockets", sockets),
    ("directory", directory),
    ("exchange", exchange),
];

pub(crate) fn threads(world: usize) -> Vec<Group> {
    Group::threads(world).unwrap()
}

pub(crate) fn sockets(world: usize) -> Vec<Group> {
    let mut launcher = Launcher::new(world).unwrap();
    let ranks = (0..world).map(|rank| (rank, launcher.take(rank).unwrap()));
    each(ranks.collect(), |(rank, sockets)| {
        Group::from_sockets(rank, sockets).unwrap()
    })
}

pub(crate) fn directory(world: usize) -> Vec<Group> {
    let dir = meeting_place();
    let groups = each((0..world).collect(), |rank| {
        Group::directory(dir.path(), rank, world, Duration::from_secs(30)).unwrap()
    });
    assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    groups
}

pub(crate) fn exchange(world: usize) -> Vec<Group> {
    each(Store::ranks(world), |mut store| {
        Group::with_exchange(&mut store).unwrap()
    })
}

/// The plainest exchange there is: a table and a barrier.
pub(crate) struct Store {
    pub(crate) rank: usize,
    pub(crate) shared: Arc<(Mutex<Vec<Vec<u8>>>, Barrier)>,
}

impl Store {
    pub(crate) fn ranks(world: usize) -> Vec<Store> {
        let table = Mutex::new(vec![Vec::new(); world]);
        let shared = Arc::new((table, Barrier::new(world)));
        (0..world)
            .map(|rank| Store {
                rank,
                shared: Arc::clone(&shared),
            })
            .collect()
    }
}

impl Exchange for Store {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.shared.0.lock().unwrap().len()
    }

    fn all_gather(&mut self, bytes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        self.shared.0.lock().unwrap()[self.rank] = bytes.to_vec();
        self.shared.1.wait();
        Ok(self.shared.0.lock().unwrap().clone())
    }
}

/// The rank that an error says is lost, by whichever of the two ways.
pub(crate) fn lost_rank(error: &GroupError) -> Option<usize> {
    match error {
        GroupError::PeerLost { rank } | GroupError::Rebuilding { rank } => Some(*rank),
        _ => None,
    }
}
