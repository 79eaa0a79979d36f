//! Futexes across threads and across mappings.

mod common;

use common::{PATIENCE, within_patience};
use direct_dcp_shm::SharedMemory;
use direct_dcp_shm::futex::{self, Wake};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn another_value_does_not_wait() {
    within_patience(|| {
        let word = AtomicU32::new(5);
        assert_eq!(futex::wait(&word, 4, PATIENCE), Wake::ValueChanged);
        assert_eq!(futex::wait(&word, 4, Duration::MAX), Wake::ValueChanged);
    });
}

#[test]
fn a_timeout_ends_the_wait_and_not_before() {
    within_patience(|| {
        let word = AtomicU32::new(5);
        assert_eq!(futex::wait(&word, 5, Duration::ZERO), Wake::TimedOut);
        let timeout = Duration::from_millis(30);
        let start = Instant::now();
        assert_eq!(futex::wait(&word, 5, timeout), Wake::TimedOut);
        assert!(start.elapsed() >= timeout);
    });
}

#[test]
fn a_wake_through_another_mapping_ends_every_wait() {
    within_patience(|| {
        let memory = SharedMemory::create("futex", 4096).unwrap();
        let offset = 128;
        thread::scope(|scope| {
            let waiters: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        // Each waiter has a mapping of its own, as each process would.
                        let mapping = memory.map().unwrap();
                        let word = mapping.atomic_u32(offset).unwrap();
                        while word.load(Ordering::Acquire) == 0 {
                            // Longer than the watchdog: only the wake can end it.
                            futex::wait(word, 0, Duration::MAX);
                        }
                        word.load(Ordering::Relaxed)
                    })
                })
                .collect();
            // Most likely all of them sleep by now; if not, they find the value changed.
            thread::sleep(Duration::from_millis(50));
            let mapping = memory.map().unwrap();
            let word = mapping.atomic_u32(offset).unwrap();
            word.store(0xC0FF_EE01, Ordering::Release);
            futex::wake_all(word);
            for waiter in waiters {
                assert_eq!(waiter.join().unwrap(), 0xC0FF_EE01);
            }
        });
    });
}

#[test]
fn ping_pong_never_misses_a_wake() {
    within_patience(|| {
        let memory = SharedMemory::create("ping-pong", 64).unwrap();
        let play = |parity: u32| {
            let mapping = memory.map().unwrap();
            let ball = mapping.atomic_u32(0).unwrap();
            for turn in (parity..2_000).step_by(2) {
                loop {
                    let seen = ball.load(Ordering::Acquire);
                    if seen == turn {
                        break;
                    }
                    futex::wait(ball, seen, Duration::MAX);
                }
                ball.store(turn + 1, Ordering::Release);
                futex::wake_all(ball);
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| play(0));
            scope.spawn(|| play(1));
        });
    });
}
