//! What the rest of the crate relies on and users do not see: shared memory and control.

use super::{Control, Failure, Group, Launcher};
use direct_dcp_shm::SharedMemory;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// Runs `body` for every rank of a group of threads, then of one that talks as processes do.
fn for_both(world: usize, body: impl Fn(Group) + Sync) {
    thread::scope(|scope| {
        for group in Group::threads(world).unwrap() {
            scope.spawn(|| body(group));
        }
    });
    let mut launcher = Launcher::new(world).unwrap();
    thread::scope(|scope| {
        for rank in 0..world {
            let sockets = launcher.take(rank).unwrap();
            let body = &body;
            scope.spawn(move || body(Group::from_sockets(rank, sockets).unwrap()));
        }
    });
}

fn soon(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60));
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn memory_is_the_same_everywhere() {
    for_both(4, |group| {
        let rank = group.rank();
        for round in 0..3 {
            let size = 4096 * (rank + 1) + 4 * round;
            // Rank 2 has nothing to share.
            let own = (rank != 2).then(|| SharedMemory::create("shared", size).unwrap());
            let all = group.share(own).unwrap();
            assert_eq!(all.len(), 4);
            assert!(all[2].is_none());
            let shared = all.iter().enumerate();
            for (source, mapping) in shared.filter_map(|(at, all)| Some((at, all.as_ref()?))) {
                assert_eq!(mapping.len(), 4096 * (source + 1) + 4 * round);
                let word = mapping.atomic_u32(4 * rank).unwrap();
                word.store(100 * source as u32 + rank as u32, Ordering::Relaxed);
            }
            group.barrier().unwrap();
            if let Some(own) = &all[rank] {
                for peer in 0..4 {
                    let word = own.atomic_u32(4 * peer).unwrap();
                    assert_eq!(word.load(Ordering::Relaxed), (100 * rank + peer) as u32);
                }
            }
            group.barrier().unwrap();
        }
    });
}

#[test]
fn threads_share_one_mapping() {
    let groups = Group::threads(2).unwrap();
    assert!(groups[0].one_process());
    let starts: Vec<usize> = thread::scope(|scope| {
        let share = |group: Group| {
            let own = SharedMemory::create("one", 64).unwrap();
            let all = group.share(Some(own)).unwrap();
            all[0].as_ref().unwrap().as_ptr().addr()
        };
        let threads = groups
            .into_iter()
            .map(|group| scope.spawn(move || share(group)));
        let threads: Vec<_> = threads.collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(starts[0], starts[1]);
}

#[test]
fn control_tells_who_is_gone() {
    for_both(3, |group| {
        let control = Arc::clone(group.control());
        let gone = |control: &Control| [0, 1, 2].map(|rank| control.lost(rank));
        assert_eq!(gone(&control), [false; 3]);
        group.barrier().unwrap();
        match group.rank() {
            0 => {
                soon(|| control.lost(1));
                assert_eq!(gone(&control), [false, true, false]);
                // Its group is dropped, but not what holds its place.
                assert!(!control.lost(2));
                let failure = Failure {
                    blamed: None,
                    ubatch: 2,
                    epoch: 9,
                };
                control.mark_failed(failure);
                soon(|| control.lost(2));
                assert_eq!(control.failed_in(2, 9), Some(0));
            }
            1 => {}
            _ => {
                drop(group);
                soon(|| control.failed_in(2, 9) == Some(0));
                assert!(control.lost(0));
            }
        }
    });
}

#[test]
fn control_of_a_superseded_generation_waits_for_nobody() {
    for_both(2, |group| {
        let old = Arc::clone(group.control());
        let next = group.rebuild(Duration::from_secs(60)).unwrap();
        assert!(old.lost(0) && old.lost(1));
        assert!(!next.control().lost(0) && !next.control().lost(1));
        next.barrier().unwrap();
        old.abort();
        assert_eq!(next.control().aborted_by(), None);
        next.barrier().unwrap();
    });
}
