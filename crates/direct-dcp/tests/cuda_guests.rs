//! Gathers in memory that an engine owns, by multicast, beside a rank with a kernel of its own.

#![allow(unsafe_code)] // promises about memory that lives here

mod cuda_common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use cuda_common::{Machine, POISON, rows_of, rows_of_all};
use direct_dcp::cuda::{Context, Device, DeviceBuffer, DeviceRows, DeviceRowsMut, Driver, Stream};
use direct_dcp_cuda::gather::{GuestLane, GuestOptions, Kernel, LaunchError, Transport};
use direct_dcp_cuda::{
    AddressRange, Allocation, Granularity, HandleTypes, Mapping, MulticastObject,
};
use direct_dcp_fake_cuda::Fake;
use direct_dcp_kernels::device::Receiver;
use direct_dcp_kernels::{FaultCode, Shape};

const WORLD: usize = 2;
const ROW: usize = 128;
const CAPACITY: usize = 2048;
const SLOT: usize = CAPACITY * ROW;
/// Where an engine puts its signals, in memory of this size.
const SIGNALS: u64 = 1 << 20;
const BYTES: usize = 2 << 20;
const PATIENCE: Duration = Duration::from_secs(20);

/// The memory of all ranks, and one address that reaches it.
struct Engine {
    everywhere: Mapping,
    own: Vec<Arc<Mapping>>,
    contexts: Vec<Context>,
}

impl Engine {
    fn new() -> Self {
        let driver = Driver::load().unwrap();
        let devices = [0, 1].map(|ordinal| Device::new(&driver, ordinal).unwrap());
        let contexts = devices
            .each_ref()
            .map(|device| Context::new(device).unwrap());
        let kind = HandleTypes::POSIX_FD;
        let mut object =
            MulticastObject::create(&contexts[0], 2, BYTES, kind, Granularity::Minimum).unwrap();
        devices
            .iter()
            .for_each(|device| object.add_device(device).unwrap());
        let mut team = object.complete().unwrap();
        let own = contexts.each_ref().map(|context| {
            let memory =
                Allocation::create(context, BYTES, kind, Granularity::Recommended).unwrap();
            team.bind(0, &memory, 0, BYTES).unwrap();
            let range = AddressRange::reserve(context, BYTES, 0).unwrap();
            let mapping = Mapping::new(&range, 0, &memory, BYTES, &[context.device()]).unwrap();
            let stream = Stream::new(context).unwrap();
            mapping.upload(&stream, 0, &vec![POISON; 2 * SLOT]).unwrap();
            let zeros = [0; 4 * 2 * WORLD];
            mapping.upload(&stream, SIGNALS as usize, &zeros).unwrap();
            stream.synchronize().unwrap();
            Arc::new(mapping)
        });
        let bound = team.bound().unwrap();
        let range = AddressRange::reserve(&contexts[0], BYTES, 0).unwrap();
        let both: Vec<&Device> = devices.iter().collect();
        Engine {
            everywhere: bound.map(0, &range, 0, BYTES, &both).unwrap(),
            own: own.to_vec(),
            contexts: contexts.to_vec(),
        }
    }

    fn receiver(base: u64) -> Receiver {
        Receiver {
            rows: base,
            signals: base + SIGNALS,
            shapes: 0,
            notice: 0,
        }
    }

    /// A lane of ours for `rank`, and its epoch.
    fn lane(&self, rank: usize) -> (GuestLane, DeviceBuffer) {
        let context = &self.contexts[rank];
        let epoch = DeviceBuffer::new(context, 8).unwrap();
        let stream = Stream::new(context).unwrap();
        epoch.upload(&stream, 0, &[0; 8]).unwrap();
        stream.synchronize().unwrap();
        let options = GuestOptions {
            world_size: WORLD as u32,
            rank: rank as u32,
            slots: 2,
            slot_bytes: SLOT as u64,
            own: Self::receiver(self.own[rank].address()),
            receivers: vec![Self::receiver(self.everywhere.address())],
            epoch: epoch.address(),
            sharing: 1,
        };
        let kernel = Kernel::load(context, Transport::Multicast).unwrap();
        // SAFETY: the engine's memory and the epoch outlive the lane.
        (unsafe { GuestLane::new(kernel, options) }.unwrap(), epoch)
    }

    /// What a kernel of the engine's does for `rank` in call `epoch`: stores, publishes, waits.
    fn other_kernel(&self, fake: &Fake, rank: usize, epoch: u32, rows: &[u8]) -> Vec<u8> {
        let slot = epoch as usize % 2;
        let place = self.everywhere.address() + (slot * SLOT + rank * rows.len()) as u64;
        for replica in fake.multicast_replicas(place, rows.len()).unwrap() {
            // SAFETY: the replica of this rank's part of a slot, which nobody else touches.
            unsafe { replica.copy_from_nonoverlapping(rows.as_ptr(), rows.len()) };
        }
        let index = |source: usize| 4 * (slot * WORLD + source) as u64;
        let signal = self.everywhere.address() + SIGNALS + index(rank);
        for replica in fake.multicast_replicas(signal, 4).unwrap() {
            word(replica.expose_provenance() as u64).store(epoch, Ordering::Release);
        }
        let own = self.own[rank].address();
        for source in 0..WORLD {
            while word(own + SIGNALS + index(source)).load(Ordering::Acquire) != epoch {
                thread::yield_now();
            }
        }
        let mut gathered = vec![POISON; WORLD * rows.len()];
        let stream = Stream::new(&self.contexts[rank]).unwrap();
        self.own[rank]
            .download(&stream, slot * SLOT, &mut gathered)
            .unwrap();
        gathered
    }
}

/// A signal.
fn word(address: u64) -> &'static AtomicU32 {
    let pointer = std::ptr::with_exposed_provenance_mut(address as usize);
    // SAFETY: a word of the engine's memory, which the fake has in the memory of this process and
    // which lives until the test is over.
    unsafe { AtomicU32::from_ptr(pointer) }
}

/// One call of ours; what it delivered, or why not.
fn call(
    lane: &GuestLane,
    context: &Context,
    rows: &[u8],
    timeout: Duration,
) -> Result<Vec<u8>, LaunchError> {
    let stream = Stream::new(context)?;
    let local = DeviceBuffer::new(context, rows.len())?;
    let out = DeviceBuffer::new(context, WORLD * rows.len())?;
    local.upload(&stream, 0, rows)?;
    out.upload(&stream, 0, &vec![POISON; WORLD * rows.len()])?;
    let shape = Shape {
        rows: (rows.len() / ROW) as u32,
        row_bytes: ROW as u32,
        digest: 0,
    };
    // SAFETY: the buffer lives until the stream has come to its end.
    let from = unsafe { DeviceRows::new(local.address(), rows.len()) };
    // SAFETY: as above; another buffer.
    let to = unsafe { DeviceRowsMut::new(out.address(), out.bytes()) };
    lane.gather_into(&stream, shape, from, to, timeout)?;
    stream.synchronize()?;
    if let Some(report) = lane.report() {
        return Err(LaunchError::Failed(report));
    }
    let mut gathered = vec![0; out.bytes()];
    out.download(&stream, 0, &mut gathered)?;
    Ok(gathered)
}

fn epoch_of(epoch: &DeviceBuffer, context: &Context) -> u64 {
    let mut bytes = [0; 8];
    let stream = Stream::new(context).unwrap();
    epoch.download(&stream, 0, &mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

#[test]
fn ranks_with_kernels_of_their_own_take_part() {
    Machine::new(2).run("ranks_with_kernels_of_their_own_take_part", |fake| {
        let engine = Engine::new();
        let (lane, epoch) = engine.lane(0);
        for (number, count) in (1..).zip([1, 16, 5, 16]) {
            let rows = |rank| rows_of(number.into(), rank, count * ROW);
            let (ours, theirs) = thread::scope(|scope| {
                let other = scope.spawn(|| engine.other_kernel(fake, 1, number, &rows(1)));
                let ours = call(&lane, &engine.contexts[0], &rows(0), PATIENCE).unwrap();
                (ours, other.join().unwrap())
            });
            let expected = rows_of_all(number.into(), 0..WORLD, count * ROW);
            assert!(ours == expected && theirs == expected, "call {number}");
            assert_eq!(epoch_of(&epoch, &engine.contexts[0]), number.into());
        }
    });
}

#[test]
fn ranks_of_ours_share_one_address() {
    Machine::new(2).run("ranks_of_ours_share_one_address", |_| {
        let engine = Engine::new();
        let lanes = [engine.lane(0), engine.lane(1)];
        for (number, count) in (1_u64..).zip([16, 1, 7]) {
            let gathered = thread::scope(|scope| {
                let ranks = [0, 1].map(|rank| {
                    let (lane, context) = (&lanes[rank].0, &engine.contexts[rank]);
                    let rows = rows_of(number, rank, count * ROW);
                    scope.spawn(move || call(lane, context, &rows, PATIENCE).unwrap())
                });
                ranks.map(|rank| rank.join().unwrap())
            });
            let expected = rows_of_all(number, 0..WORLD, count * ROW);
            assert!(gathered.iter().all(|rows| *rows == expected));
        }
    });
}

/// Engines gather two ubatches at once, each in memory of its own.
#[test]
fn calls_of_two_ubatches_fit_a_device() {
    Machine::new(2).with("DIRECT_DCP_FAKE_SMS", 1).run(
        "calls_of_two_ubatches_fit_a_device",
        |_| {
            let engines = [0, 1].map(|_| Engine::new());
            let lanes = engines
                .each_ref()
                .map(|engine| [engine.lane(0), engine.lane(1)]);
            thread::scope(|scope| {
                for (ubatch, engine) in engines.iter().enumerate() {
                    for (rank, context) in engine.contexts.iter().enumerate() {
                        let lane = &lanes[ubatch][rank].0;
                        scope.spawn(move || {
                            // Odd ranks begin with the other one.
                            let wait = if ubatch == rank { 0 } else { 100 };
                            thread::sleep(Duration::from_millis(wait));
                            let rows = rows_of(ubatch as u64, rank, SLOT / WORLD);
                            let got = call(lane, context, &rows, PATIENCE).unwrap();
                            let expected = rows_of_all(ubatch as u64, 0..WORLD, SLOT / WORLD);
                            assert!(got == expected, "other bytes");
                        });
                    }
                }
            });
        },
    );
}

#[test]
fn a_missing_rank_is_named_until_it_is_forgotten() {
    Machine::new(2).run("a_missing_rank_is_named_until_it_is_forgotten", |fake| {
        let engine = Engine::new();
        let (lane, epoch) = engine.lane(0);
        let context = &engine.contexts[0];
        let rows = |rank| rows_of(1, rank, ROW);
        for _ in 0..2 {
            match call(&lane, context, &rows(0), Duration::from_millis(50)) {
                Err(LaunchError::Failed(report)) => {
                    assert_eq!(report.missing, [1]);
                    assert_eq!(
                        (report.fault.code, report.fault.epoch),
                        (FaultCode::Timeout, 1)
                    );
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(epoch_of(&epoch, context), 0);
        }
        lane.forget(&Stream::new(context).unwrap()).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| engine.other_kernel(fake, 1, 1, &rows(1)));
            let gathered = call(&lane, context, &rows(0), PATIENCE).unwrap();
            assert!(gathered == rows_of_all(1, 0..WORLD, ROW));
        });
    });
}

#[test]
fn what_does_not_fit_is_not_launched() {
    Machine::new(2).run("what_does_not_fit_is_not_launched", |_| {
        let engine = Engine::new();
        let (lane, epoch) = engine.lane(0);
        let context = &engine.contexts[0];
        for bytes in [0, SLOT / WORLD + ROW] {
            let refused = call(&lane, context, &vec![1; bytes.max(1)][..bytes], PATIENCE);
            assert!(refused.is_err(), "{bytes}");
        }
        assert_eq!(epoch_of(&epoch, context), 0);
        lane.abort();
        match call(&lane, context, &rows_of(1, 0, ROW), PATIENCE) {
            Err(LaunchError::Failed(report)) => assert_eq!(report.fault.code, FaultCode::Aborted),
            other => panic!("{other:?}"),
        }
    });
}
