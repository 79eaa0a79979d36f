//! Devices, contexts, streams, events, plain and pinned memory.

#![allow(unsafe_code)] // the unsafe half of the interface is what is tested

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Bench, random_bytes};
use direct_dcp_cuda::{
    Context, CudaError, Device, DeviceAttribute, DeviceBuffer, Event, PinnedBuffer, Stream,
    WaitCondition,
};

fn is_invalid<T: std::fmt::Debug>(result: Result<T, CudaError>) {
    assert!(
        matches!(result, Err(CudaError::InvalidArgument { .. })),
        "{result:?}"
    );
}

#[test]
fn devices_tell_about_themselves() {
    let bench = Bench::new();
    let devices = Device::all(&bench.driver).expect("devices");
    assert_eq!(devices.len(), 2);
    assert_eq!(devices[1].name().expect("a name"), "Fake GPU 1");
    assert_eq!(devices[1].pci_bus_id().expect("an address"), "0000:02:00.0");
    assert_ne!(
        devices[0].uuid().expect("a UUID"),
        devices[1].uuid().expect("a UUID")
    );
    assert_eq!(
        devices[0].compute_capability().expect("a capability"),
        (9, 0)
    );
    assert!(
        devices[0]
            .supports(DeviceAttribute::MulticastSupported)
            .expect("an answer")
    );
    assert!(
        !devices[0]
            .supports(DeviceAttribute::HostNativeAtomicSupported)
            .expect("an answer")
    );
    assert!(devices[0].total_memory().expect("bytes") > 1 << 30);
    assert!(devices[0].can_access_peer(&devices[1]).expect("an answer"));
    assert!(devices[0].can_access_peer(&devices[0]).expect("an answer"));
    assert!(
        devices[0]
            .peer_link(&devices[1])
            .expect("a link")
            .native_atomics
    );
    is_invalid(devices[0].peer_link(&devices[0]));
    is_invalid(Device::new(&bench.driver, 2));
    is_invalid(Device::new(&bench.driver, u32::MAX));
    bench.finish();
}

#[test]
fn the_caller_s_current_context_stays() {
    let bench = Bench::new();
    let (zero, one) = (bench.context(0), bench.context(1));
    let entered = one.enter().expect("current");
    assert_eq!(bench.fake.context_depth(), 1);
    let stream = Stream::new(&zero).expect("a stream");
    let buffer = DeviceBuffer::new(&zero, 64).expect("memory");
    buffer
        .upload(&stream, 0, &random_bytes(64))
        .expect("an upload");
    drop((stream, buffer));
    assert_eq!(bench.fake.context_depth(), 1);
    // A nested entry into the current context pushes nothing.
    one.with_current(|| {
        assert_eq!(bench.fake.context_depth(), 1);
        Ok(())
    })
    .expect("current");
    entered.leave().expect("restored");
    assert_eq!(bench.fake.context_depth(), 0);
    assert!(zero.memory_info().expect("bytes").0 > 0);
    zero.synchronize().expect("idle");
    zero.enable_peer_access(&one).expect("a peer");
    zero.enable_peer_access(&one).expect("twice is fine");
    is_invalid(zero.enable_peer_access(&zero));
    drop((zero, one));
    bench.finish();
}

#[test]
fn bytes_come_back() {
    let bench = Bench::new();
    let context = bench.context(0);
    let stream = Stream::new(&context).expect("a stream");
    let data = random_bytes(10_007);
    let (first, second) = (
        DeviceBuffer::new(&context, data.len()).expect("memory"),
        DeviceBuffer::new(&context, data.len()).expect("memory"),
    );
    first.upload(&stream, 0, &data).expect("an upload");
    // SAFETY: both buffers live until the stream is synchronized by the download.
    unsafe { stream.copy_on_device(second.address(), first.address(), data.len()) }
        .expect("a copy");
    // SAFETY: as above.
    unsafe { stream.fill_u8(second.address() + 16, 0x3c, 5) }.expect("a fill");
    // SAFETY: as above.
    unsafe { stream.fill_u32(second.address() + 32, 0xdead_beef, 2) }.expect("a fill");
    let mut back = vec![0; data.len()];
    second.download(&stream, 0, &mut back).expect("a download");
    let mut expected = data;
    expected[16..21].fill(0x3c);
    expected[32..40].copy_from_slice(&[0xdead_beef_u32.to_ne_bytes(); 2].concat());
    assert_eq!(back, expected);
    // Three pieces of 5 bytes, 7 bytes apart, to places 11 bytes apart.
    let (to, from) = (second.address() + 100, first.address() + 3);
    // SAFETY: as above.
    unsafe { stream.copy_rows_on_device((to, 11), (from, 7), 5, 3) }.expect("a copy");
    let mut first_back = expected.clone();
    first
        .download(&stream, 0, &mut first_back)
        .expect("a download");
    second.download(&stream, 0, &mut back).expect("a download");
    for row in 0..3 {
        expected[100 + 11 * row..][..5].copy_from_slice(&first_back[3 + 7 * row..][..5]);
    }
    assert_eq!(back, expected);
    is_invalid(second.download(&stream, 10_000, &mut [0; 8]));
    is_invalid(second.upload(&stream, usize::MAX, &[1; 8]));
    is_invalid(DeviceBuffer::new(&context, 0));
    drop((stream, first, second, context));
    bench.finish();
}

#[test]
fn events_order_streams_of_two_devices() {
    let bench = Bench::new();
    let (zero, one) = (bench.context(0), bench.context(1));
    let (first, second) = (
        Stream::new(&zero).expect("a stream"),
        Stream::new(&one).expect("a stream"),
    );
    let gate = PinnedBuffer::new(&zero, 64).expect("pinned memory");
    let (start, reached) = (
        Event::with_timing(&zero).expect("an event"),
        Event::with_timing(&zero).expect("an event"),
    );
    let done = Event::new(&one).expect("an event");
    start.record(&first).expect("a record");
    // SAFETY: the word lives until both streams are synchronized.
    unsafe { first.wait_value_u32(gate.device_address(), 7, WaitCondition::Equal) }
        .expect("a wait");
    reached.record(&first).expect("a record");
    second.wait(&reached).expect("a wait");
    done.record(&second).expect("a record");
    std::thread::sleep(Duration::from_millis(20));
    assert!(!done.is_done().expect("an answer"));
    assert!(!second.is_idle().expect("an answer"));
    gate.store_u32(0, 7).expect("a word");
    done.synchronize().expect("done");
    assert!(done.is_done().expect("an answer") && reached.is_done().expect("an answer"));
    assert!(reached.elapsed_ms_since(&start).expect("a time") >= 10.0);
    is_invalid(done.elapsed_ms_since(&start));
    is_invalid(done.record(&first));
    drop((start, reached, done, gate, first, second, zero, one));
    bench.finish();
}

#[test]
fn stream_memory_operations_count_around() {
    let bench = Bench::new();
    let context = bench.context(0);
    let (writer, waiter) = (
        Stream::new(&context).expect("a stream"),
        Stream::new(&context).expect("a stream"),
    );
    let word = DeviceBuffer::new(&context, 4).expect("memory");
    word.upload(&writer, 0, &u32::MAX.to_ne_bytes())
        .expect("an upload");
    // SAFETY: the word lives until both streams are synchronized.
    unsafe { waiter.wait_value_u32(word.address(), 2, WaitCondition::AtLeast) }.expect("a wait");
    // SAFETY: as above.
    unsafe { writer.write_value_u32(word.address(), 3) }.expect("a write");
    waiter.synchronize().expect("over");
    // SAFETY: refused before the driver is called.
    is_invalid(unsafe { writer.write_value_u32(word.address() + 1, 3) });
    drop((word, writer, waiter, context));
    bench.finish();
}

#[test]
fn pinned_words() {
    let bench = Bench::new();
    let context = bench.context(0);
    let pinned = PinnedBuffer::new(&context, 100).expect("pinned memory");
    let mut bytes = vec![1; 100];
    pinned.read(0, &mut bytes).expect("a read");
    assert_eq!(bytes, vec![0; 100], "it starts as zeros");
    pinned.store_u64(8, 0x0102_0304_0506_0708).expect("a word");
    assert_eq!(pinned.load_u64(8), Ok(0x0102_0304_0506_0708));
    assert_eq!(pinned.load_u32(8), Ok(0x0506_0708));
    is_invalid(pinned.load_u32(98));
    is_invalid(pinned.load_u32(2));
    is_invalid(pinned.load_u64(12));
    is_invalid(pinned.store_u32(usize::MAX - 1, 1));
    is_invalid(pinned.read(99, &mut [0; 2]));
    is_invalid(PinnedBuffer::new(&context, 0));
    drop((pinned, context));
    bench.finish();
}

#[test]
fn a_caller_s_stream_is_only_borrowed() {
    let bench = Bench::new();
    let (zero, one) = (bench.context(0), bench.context(1));
    let owner = Stream::new(&zero).expect("a stream");
    let data = random_bytes(256);
    let buffer = DeviceBuffer::new(&zero, 256).expect("memory");
    for raw in [owner.as_raw(), 0, 1, 2] {
        // SAFETY: `owner` outlives the borrow; the others are default streams.
        let borrowed = unsafe { Stream::borrow(&zero, raw) }.expect("a stream");
        buffer.upload(&borrowed, 0, &data).expect("an upload");
        let mut back = vec![0; 256];
        buffer
            .download(&borrowed, 0, &mut back)
            .expect("a download");
        assert_eq!(back, data);
    }
    for stream in [
        Stream::legacy_default(&zero),
        Stream::per_thread_default(&zero),
    ] {
        stream.synchronize().expect("idle");
    }
    // SAFETY: the stream is live; it belongs to another context, which is refused.
    is_invalid(unsafe { Stream::borrow(&one, owner.as_raw()) });
    assert!(owner.is_idle().expect("still there"));
    drop((owner, buffer, zero, one));
    bench.finish();
}

#[test]
fn objects_are_used_from_several_threads() {
    fn check<T: Send + Sync>() {}
    check::<Context>();
    check::<Stream>();
    check::<Event>();
    check::<DeviceBuffer>();
    check::<PinnedBuffer>();
    check::<direct_dcp_cuda::Mapping>();
    check::<direct_dcp_cuda::Function>();
    check::<direct_dcp_cuda::ExecutableGraph>();

    let bench = Bench::new();
    let context = bench.context(0);
    let failed = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (context, failed) = (context.clone(), Arc::clone(&failed));
            scope.spawn(move || {
                let stream = Stream::new(&context).expect("a stream");
                let buffer = DeviceBuffer::new(&context, 4096).expect("memory");
                for _ in 0..20 {
                    let data = random_bytes(4096);
                    buffer.upload(&stream, 0, &data).expect("an upload");
                    let mut back = vec![0; 4096];
                    buffer.download(&stream, 0, &mut back).expect("a download");
                    failed.fetch_or(back != data, Ordering::Relaxed);
                }
            });
        }
    });
    assert!(!failed.load(Ordering::Relaxed));
    drop(context);
    bench.finish();
}
