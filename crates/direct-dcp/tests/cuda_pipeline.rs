//! Windows in flight between GPUs: streams that wait as they should, and no longer.
#![allow(unsafe_code)] // promises about rows that live here

mod cuda_common;

use std::collections::VecDeque;
use std::sync::Barrier;
use std::thread::sleep;
use std::time::{Duration, Instant};

use cuda_common::{Machine, POISON, Rank, WAYS, options, rows_of, rows_of_all, threads};
use direct_dcp::cuda::{CaptureMode, DeviceBuffer, DeviceRows, Gathered, Pipeline, Stream, Ticket};
use direct_dcp::{GatherError, Way, WorkspaceOptions};
use direct_dcp_cuda::WaitCondition;
use direct_dcp_fake_cuda::FailMode;

const ROWS: usize = 5;
const WINDOWS: usize = 14;

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// One rank with a pipeline, and room for the rows of all windows, and for copies of them.
struct Ends {
    pipeline: Pipeline,
    rank: usize,
    world: usize,
    bytes: usize,
    stream: Stream,
    local: DeviceBuffer,
    copies: DeviceBuffer,
    /// A word for streams to wait for.
    word: DeviceBuffer,
    group: direct_dcp::Group,
}

impl Ends {
    fn new(group: direct_dcp::Group, device: u32, options: WorkspaceOptions) -> Self {
        let Rank {
            stream,
            gather,
            group,
            ..
        } = Rank::new(group, device, options).unwrap();
        let context = gather.workspace().context().clone();
        let bytes = ROWS * gather.workspace().format().row_bytes();
        let world = group.world_size();
        let buffer = |bytes| DeviceBuffer::new(&context, bytes).unwrap();
        let ends = Ends {
            rank: group.rank(),
            world,
            bytes,
            local: buffer(WINDOWS * bytes),
            copies: buffer(WINDOWS * bytes * world),
            word: buffer(4),
            pipeline: Pipeline::new(gather, 0).unwrap(),
            stream,
            group,
        };
        for window in 0..WINDOWS {
            let rows = rows_of(window as u64, ends.rank, bytes);
            ends.local
                .upload(&ends.stream, window * bytes, &rows)
                .unwrap();
        }
        let poison = vec![POISON; ends.copies.bytes()];
        ends.copies.upload(&ends.stream, 0, &poison).unwrap();
        ends.word.upload(&ends.stream, 0, &[0; 4]).unwrap();
        ends.stream.synchronize().unwrap();
        ends
    }

    fn rows(&self, window: usize) -> DeviceRows {
        let address = self.local.address() + (window * self.bytes) as u64;
        // SAFETY: the buffer lives until all streams are waited for, and is written before that
        // only by what the window waits for.
        unsafe { DeviceRows::new(address, self.bytes) }
    }

    fn submit(&mut self, window: usize) -> Result<Ticket, GatherError> {
        let rows = self.rows(window);
        self.pipeline.submit(&self.stream, rows)
    }

    /// Submits the reading of a window.
    fn read(&self, stream: &Stream, gathered: &Gathered, window: usize) {
        assert_eq!(gathered.bytes() as usize, self.bytes * self.world);
        let to = self.copies.address() + (window * self.bytes * self.world) as u64;
        // SAFETY: both places live until the stream is waited for.
        unsafe { stream.copy_on_device(to, gathered.address().unwrap(), self.bytes * self.world) }
            .unwrap();
    }

    fn acquire_and_read(&mut self, ticket: &Ticket, window: usize) {
        let gathered = self.pipeline.acquire(ticket, &self.stream).unwrap();
        assert_eq!(gathered.epoch(), Some(ticket.epoch()));
        self.read(&self.stream, &gathered, window);
        gathered.release_after(&self.stream).unwrap();
    }

    /// Makes a stream wait for [`open`](Ends::open).
    fn close(&self, stream: &Stream) {
        // SAFETY: the word lives until the stream is waited for.
        unsafe { stream.wait_value_u32(self.word.address(), 7, WaitCondition::Equal) }.unwrap();
    }

    fn open(&self) {
        let other = Stream::new(self.pipeline.gather().workspace().context()).unwrap();
        self.word.upload(&other, 0, &7_u32.to_ne_bytes()).unwrap();
        other.synchronize().unwrap();
    }

    /// Waits for everything, and looks at the copies of `windows`.
    #[track_caller]
    fn check(&self, windows: impl IntoIterator<Item = usize>) {
        self.pipeline.gather().wait(&self.stream).unwrap();
        let size = self.bytes * self.world;
        let mut all = vec![0; self.copies.bytes()];
        self.copies.download(&self.stream, 0, &mut all).unwrap();
        for window in windows {
            let expected = rows_of_all(window as u64, 0..self.world, self.bytes);
            assert!(all[window * size..][..size] == expected, "window {window}");
        }
    }

    /// Afterwards memory may be freed.
    fn meet(&self) {
        self.stream.synchronize().unwrap();
        self.group.barrier().unwrap();
    }
}

fn devices(options: WorkspaceOptions, test: impl Fn(Ends) + Sync) {
    threads(2, |group| {
        let device = group.rank() as u32;
        test(Ends::new(group, device, options.clone()));
    });
}

/// As many windows in flight as the slots permit, on every way, one rank late now and then.
#[test]
fn every_window_arrives() {
    Machine::new(2).run("every_window_arrives", |_| {
        for (slots, way) in [2, 3, 4]
            .into_iter()
            .flat_map(|slots| WAYS.map(|way| (slots, way)))
        {
            devices(options(2).slots(slots).way(way), |mut ends| {
                let mut tickets = VecDeque::new();
                for window in 0..WINDOWS {
                    if tickets.len() == slots - 1 {
                        let ticket = tickets.pop_front().unwrap();
                        ends.acquire_and_read(&ticket, window + 1 - slots);
                    }
                    if window % 5 == 2 + ends.rank {
                        sleep(millis(15));
                    }
                    tickets.push_back(ends.submit(window).unwrap());
                }
                for (ticket, window) in tickets.iter().zip(WINDOWS + 1 - slots..) {
                    ends.acquire_and_read(ticket, window);
                }
                ends.check(0..WINDOWS);
                ends.meet();
            });
        }
    });
}

/// The caller's stream goes on beside a gather, and waits for it once the window is acquired.
#[test]
fn only_acquire_makes_the_stream_wait() {
    Machine::new(2).run("only_acquire_makes_the_stream_wait", |_| {
        let late = Barrier::new(2);
        devices(options(2).slots(3).way(Way::Push), |mut ends| {
            if ends.rank == 1 {
                late.wait();
            }
            let tickets = [0, 1].map(|window| ends.submit(window).unwrap());
            if ends.rank == 0 {
                ends.stream.synchronize().unwrap();
                let start = Instant::now();
                ends.acquire_and_read(&tickets[0], 0);
                ends.acquire_and_read(&tickets[1], 1);
                assert!(start.elapsed() < millis(1000), "the host does not wait");
                sleep(millis(60));
                assert!(!ends.stream.is_idle().unwrap(), "waits for the peer");
                late.wait();
            } else {
                ends.acquire_and_read(&tickets[0], 0);
                ends.acquire_and_read(&tickets[1], 1);
            }
            ends.check([0, 1]);
            ends.meet();
        });
    });
}

/// Rows that are made by the caller's stream are waited for, and what it does later is not.
#[test]
fn a_gather_waits_for_its_rows() {
    Machine::new(2).run("a_gather_waits_for_its_rows", |_| {
        devices(options(2).slots(3).way(Way::Push), |mut ends| {
            // The rows of window 0 become those of window 3 before they are gathered.
            ends.close(&ends.stream);
            let (to, from) = (ends.rows(0).address(), ends.rows(3).address());
            // SAFETY: both are in the buffer, and apart.
            unsafe { ends.stream.copy_on_device(to, from, ends.bytes) }.unwrap();
            let ticket = ends.submit(0).unwrap();
            // Time to take the rows too early.
            sleep(millis(60));
            ends.open();
            // Later work that takes long is not waited for.
            let reader = Stream::new(ends.pipeline.gather().workspace().context()).unwrap();
            ends.word.upload(&ends.stream, 0, &[0; 4]).unwrap();
            ends.close(&ends.stream);
            let gathered = ends.pipeline.acquire(&ticket, &reader).unwrap();
            ends.read(&reader, &gathered, 3);
            reader.synchronize().unwrap();
            gathered.release_after(&reader).unwrap();
            assert!(!ends.stream.is_idle().unwrap());
            ends.open();
            ends.check([3]);
            ends.meet();
        });
    });
}

/// Where what a stream does first waits for the kernels that run, the window of a rank that is late
/// does not wait for those of the others, which wait for it.
#[test]
fn a_first_window_is_not_held_back() {
    Machine::new(1).with("DIRECT_DCP_FAKE_LATE_STREAMS", 1).run(
        "a_first_window_is_not_held_back",
        |_| {
            threads(2, |group| {
                let mut ends = Ends::new(group, 0, options(2));
                ends.group.barrier().unwrap();
                if ends.rank == 1 {
                    sleep(millis(100));
                }
                let ticket = ends.submit(0).unwrap();
                ends.acquire_and_read(&ticket, 0);
                ends.check([0]);
                ends.meet();
            });
        },
    );
}

/// A reader on another stream keeps the window S - 1 later from being gathered, and not the one
/// before that.
#[test]
fn a_reader_delays_the_next_writer() {
    Machine::new(2).run("a_reader_delays_the_next_writer", |_| {
        devices(options(2).slots(3).way(Way::Push), |mut ends| {
            let reader = Stream::new(ends.pipeline.gather().workspace().context()).unwrap();
            let [first, second] = [0, 1].map(|window| ends.submit(window).unwrap());
            let slow = ends.pipeline.acquire(&first, &reader).unwrap();
            if ends.rank == 0 {
                ends.close(&reader);
            }
            ends.read(&reader, &slow, 0);
            ends.acquire_and_read(&second, 1);
            // The second is delivered while the first is read.
            ends.check([1]);
            slow.release_after(&reader).unwrap();
            let third = ends.submit(2).unwrap();
            ends.acquire_and_read(&third, 2);
            sleep(millis(60));
            assert!(!ends.stream.is_idle().unwrap(), "waits for the reader");
            ends.group.barrier().unwrap();
            if ends.rank == 0 {
                ends.open();
            }
            let fourth = ends.submit(3).unwrap();
            ends.acquire_and_read(&fourth, 3);
            reader.synchronize().unwrap();
            ends.check(0..4);
            ends.meet();
        });
    });
}

/// A stream that joins comes after windows that nobody acquires, and does not hold up the host.
#[test]
fn a_stream_that_joins_comes_after_every_window() {
    Machine::new(2).run("a_stream_that_joins_comes_after_every_window", |_| {
        devices(options(2).slots(3).way(Way::Push), |mut ends| {
            let other = Stream::new(ends.pipeline.gather().workspace().context()).unwrap();
            if ends.rank == 0 {
                ends.close(&ends.stream);
            }
            let first = ends.submit(0).unwrap();
            drop(ends.submit(1).unwrap());
            ends.pipeline.join(&other).unwrap();
            sleep(millis(60));
            assert!(!other.is_idle().unwrap(), "waits for the windows");
            ends.group.barrier().unwrap();
            if ends.rank == 0 {
                ends.open();
            }
            other.synchronize().unwrap();
            ends.acquire_and_read(&first, 0);
            ends.check([0]);
            ends.meet();
        });
    });
}

#[test]
fn windows_are_acquired_once_each_in_order() {
    Machine::new(2).run("windows_are_acquired_once_each_in_order", |_| {
        devices(options(2).slots(4).way(Way::Push), |mut ends| {
            let context = ends.pipeline.gather().workspace().context().clone();
            let out_of_turn = |epoch, next| GatherError::OutOfTurn { epoch, next };
            let in_use = |epoch| GatherError::SlotInUse { ubatch: 0, epoch };
            let [first, second, third] = [0, 1, 2].map(|window| ends.submit(window).unwrap());
            assert_eq!(ends.submit(3).unwrap_err(), in_use(1));
            let stream = Stream::new(&context).unwrap();
            let error = ends.pipeline.acquire(&second, &stream).unwrap_err();
            assert_eq!(error, out_of_turn(2, Some(1)));
            let held = ends.pipeline.acquire(&first, &ends.stream).unwrap();
            let error = ends.pipeline.acquire(&first, &stream).unwrap_err();
            assert_eq!(error, out_of_turn(1, Some(2)));
            assert_eq!(ends.submit(3).unwrap_err(), in_use(1));
            ends.read(&ends.stream, &held, 0);
            // On the stream that is submitted from, this is enough.
            drop(held);
            let fourth = ends.submit(3).unwrap();
            // Given up, and skipped.
            drop(second);
            ends.acquire_and_read(&third, 2);
            let fifth = ends.submit(4).unwrap();
            drop(fourth);
            drop(fifth);
            for window in 5..WINDOWS {
                drop(ends.submit(window).unwrap());
            }
            let last = ends.submit(0).unwrap();
            ends.acquire_and_read(&last, 0);
            let error = ends.pipeline.acquire(&last, &stream).unwrap_err();
            assert_eq!(error, out_of_turn(last.epoch(), None));
            ends.check([0, 2]);
            ends.meet();
        });
    });
}

#[test]
fn tickets_belong_to_their_pipeline() {
    Machine::new(2).run("tickets_belong_to_their_pipeline", |_| {
        devices(
            options(2).slots(3).ubatches(2).way(Way::Push),
            |mut ends| {
                let rank = Rank::new(ends.group.clone(), ends.rank as u32, options(2)).unwrap();
                let mut other = Pipeline::new(rank.gather, 0).unwrap();
                let ticket = ends.submit(0).unwrap();
                let error = other.acquire(&ticket, &ends.stream).unwrap_err();
                assert!(
                    matches!(error, GatherError::InvalidArgument { what: "ticket", .. }),
                    "{error}"
                );
                ends.acquire_and_read(&ticket, 0);
                ends.check([0]);
                ends.meet();
            },
        );
    });
}

#[test]
fn bad_input_and_graphs_are_refused() {
    Machine::new(2).run("bad_input_and_graphs_are_refused", |_| {
        devices(options(2).slots(3).way(Way::Push), |mut ends| {
            // SAFETY: never read.
            let none = unsafe { DeviceRows::new(ends.local.address(), 7) };
            let error = ends.pipeline.submit(&ends.stream, none).unwrap_err();
            assert!(
                matches!(error, GatherError::InvalidArgument { .. }),
                "{error}"
            );
            let capture = ends.stream.begin_capture(CaptureMode::ThreadLocal).unwrap();
            let rows = ends.rows(0);
            let error = ends.pipeline.submit(&ends.stream, rows).unwrap_err();
            assert!(matches!(error, GatherError::Unsupported { .. }), "{error}");
            drop(capture);
            let ticket = ends.submit(0).unwrap();
            ends.acquire_and_read(&ticket, 0);
            ends.check([0]);
            ends.meet();
        });
    });
}

/// A rank goes, or aborts, while windows are in flight: the other hears of it at each of them.
#[test]
fn what_fails_in_flight_is_told_at_every_window() {
    Machine::new(2).run("what_fails_in_flight_is_told_at_every_window", |_| {
        for aborts in [false, true] {
            devices(options(2).slots(4).way(Way::Push), |mut ends| {
                let first = ends.submit(0).unwrap();
                ends.acquire_and_read(&first, 0);
                ends.check([0]);
                if ends.rank == 1 {
                    if aborts {
                        sleep(millis(30));
                        ends.group.abort();
                    }
                    return;
                }
                let [second, third] = [1, 2].map(|window| ends.submit(window).unwrap());
                let expected = match aborts {
                    true => GatherError::Aborted { by: 1 },
                    false => GatherError::PeerLost { rank: 1 },
                };
                let start = Instant::now();
                let gathered = ends.pipeline.acquire(&second, &ends.stream);
                if let Ok(gathered) = gathered {
                    gathered.release_after(&ends.stream).unwrap();
                    let error = ends.pipeline.gather().wait(&ends.stream).unwrap_err();
                    assert_eq!(error, expected);
                }
                assert_eq!(
                    ends.pipeline.acquire(&third, &ends.stream).unwrap_err(),
                    expected
                );
                assert_eq!(ends.submit(3).unwrap_err(), expected);
                drop(ends);
                assert!(start.elapsed() < millis(5000), "{:?}", start.elapsed());
            });
        }
    });
}

/// A driver that refuses costs at most the window that was asked for.
#[test]
fn a_driver_that_refuses_is_an_error() {
    Machine::new(2).run("a_driver_that_refuses_is_an_error", |fake| {
        for call in ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"] {
            devices(options(2).slots(3).way(Way::Push), |mut ends| {
                ends.group.barrier().unwrap();
                if ends.rank == 0 {
                    fake.fail(Some(call), 1, 2, FailMode::Refuse);
                    let error = ends.submit(0).unwrap_err();
                    assert!(matches!(error, GatherError::Driver { .. }), "{error}");
                    assert_eq!(fake.failed().as_deref(), Some(call));
                }
                ends.group.barrier().unwrap();
                let ticket = ends.submit(1).unwrap();
                ends.acquire_and_read(&ticket, 1);
                ends.check([1]);
                ends.meet();
            });
        }
        // What tells that a window is done cannot be recorded: the host waits instead.
        devices(options(2).slots(3).way(Way::Push), |mut ends| {
            let early = (ends.rank == 1).then(|| ends.submit(2).unwrap());
            ends.group.barrier().unwrap();
            let ticket = early.unwrap_or_else(|| {
                fake.fail(Some("cuEventRecord"), 3, 2, FailMode::Refuse);
                let ticket = ends.submit(2).unwrap();
                assert_eq!(fake.failed().as_deref(), Some("cuEventRecord"));
                ticket
            });
            ends.group.barrier().unwrap();
            ends.acquire_and_read(&ticket, 2);
            ends.check([2]);
            ends.meet();
        });
    });
}
