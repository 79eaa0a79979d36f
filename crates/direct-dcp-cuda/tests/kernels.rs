//! Modules, launches, graphs; the kernels are host functions that the fake runs.

#![allow(unsafe_code)] // launches, and what the host functions do

mod common;

use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, Ordering};

use common::Bench;
use direct_dcp_cuda::{
    CaptureMode, CaptureStatus, CudaError, DeviceBuffer, Event, LaunchShape, Module, Param, Stream,
};

const PTX: &str = "
.version 8.1
.target sm_90
.address_size 64
.visible .entry meet(
    .param .u64 .ptr .align 4 mine,
    .param .u64 .ptr .align 4 theirs,
    .param .u32 epoch
)
{ ret; }
.visible .entry count(.param .u64 word, .param .align 8 .b8 pair[16]) { ret; }
.visible .entry unregistered() { ret; }
";

/// The comparison of epochs crosses the sign.
const EPOCH: u32 = 0x7fff_fff0;

fn is_invalid<T: std::fmt::Debug>(result: Result<T, CudaError>) {
    assert!(
        matches!(result, Err(CudaError::InvalidArgument { .. })),
        "{result:?}"
    );
}

/// The argument at an index.
///
/// # Safety
/// There is one, of this type.
unsafe fn argument<T: Copy>(params: *mut *mut c_void, index: usize) -> T {
    // SAFETY: the caller's promise.
    let place = unsafe { params.add(index) };
    // SAFETY: the caller's promise.
    let place = unsafe { *place };
    // SAFETY: the caller's promise.
    unsafe { place.cast::<T>().read_unaligned() }
}

fn word(address: u64) -> &'static AtomicU32 {
    let pointer = core::ptr::with_exposed_provenance_mut::<u32>(address as usize);
    // SAFETY: the tests pass words of device memory that lives until the kernel has finished.
    unsafe { AtomicU32::from_ptr(pointer) }
}

/// Publishes the epoch to the other rank and waits until the other has reached it.
extern "C" fn meet(params: *mut *mut c_void, _grid: u32, _block: u32) {
    // SAFETY: as the PTX declares.
    let mine: u64 = unsafe { argument(params, 0) };
    // SAFETY: as above.
    let theirs: u64 = unsafe { argument(params, 1) };
    // SAFETY: as above.
    let epoch: u32 = unsafe { argument(params, 2) };
    word(theirs).store(epoch, Ordering::Release);
    while (word(mine).load(Ordering::Acquire).wrapping_sub(epoch) as i32) < 0 {
        std::thread::yield_now();
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Pair {
    first: u64,
    second: u64,
}

/// Adds the grid, the block and the second of the pair to a word.
extern "C" fn count(params: *mut *mut c_void, grid: u32, block: u32) {
    // SAFETY: as the PTX declares.
    let place: u64 = unsafe { argument(params, 0) };
    // SAFETY: as above.
    let pair: Pair = unsafe { argument(params, 1) };
    assert_eq!(pair.first, 11);
    word(place).fetch_add(grid * 1000 + block + pair.second as u32, Ordering::AcqRel);
}

fn read(buffer: &DeviceBuffer, stream: &Stream) -> u32 {
    let mut bytes = [1; 4];
    buffer.download(stream, 0, &mut bytes).expect("a download");
    u32::from_ne_bytes(bytes)
}

#[test]
fn kernels_of_two_ranks_wait_for_each_other() {
    let bench = Bench::new();
    bench.fake.register_kernel("meet", meet, 32);
    let contexts = [bench.context(0), bench.context(1)];
    let streams = contexts
        .each_ref()
        .map(|context| Stream::new(context).expect("a stream"));
    let words = contexts
        .each_ref()
        .map(|context| DeviceBuffer::new(context, 4).expect("memory"));
    for (word, stream) in words.iter().zip(&streams) {
        word.upload(stream, 0, &(EPOCH - 1).to_ne_bytes())
            .expect("an upload");
    }
    let functions = contexts.each_ref().map(|context| {
        Module::load_ptx(context, PTX)
            .expect("a module")
            .function("meet")
            .expect("an entry")
    });
    let attributes = functions[0].attributes().expect("attributes");
    assert_eq!(
        (attributes.local_bytes, attributes.max_threads_per_block),
        (0, 1024)
    );
    assert_eq!(
        functions[0].max_active_blocks_per_multiprocessor(1024, 0),
        Ok(2)
    );
    is_invalid(functions[0].max_active_blocks_per_multiprocessor(0, 0));
    for epoch in EPOCH..EPOCH + 50 {
        for rank in 0..2 {
            let (mine, theirs) = (words[rank].address(), words[1 - rank].address());
            let params = [Param::new(&mine), Param::new(&theirs), Param::new(&epoch)];
            let shape = LaunchShape::linear(4, 128);
            // SAFETY: as the PTX declares; the words live until both streams are synchronized.
            unsafe { functions[rank].launch(shape, &streams[rank], &params) }.expect("a launch");
        }
    }
    for (word, stream) in words.iter().zip(&streams) {
        assert_eq!(read(word, stream), EPOCH + 49);
    }
    // A stream of the other device.
    let zero = 0_u64;
    let params = [Param::new(&zero), Param::new(&zero), Param::new(&7_u32)];
    // SAFETY: refused before anything is launched.
    is_invalid(unsafe { functions[0].launch(LaunchShape::linear(1, 1), &streams[1], &params) });
    drop((functions, words, streams, contexts));
    bench.finish();
}

#[test]
fn what_does_not_fit_is_not_launched() {
    let bench = Bench::new();
    bench.fake.register_kernel("count", count, 32);
    let context = bench.context(0);
    let stream = Stream::new(&context).expect("a stream");
    let module = Module::load_ptx(&context, PTX).expect("a module");
    let function = module.function("count").expect("an entry");
    let word = DeviceBuffer::new(&context, 4).expect("memory");
    word.upload(&stream, 0, &5_u32.to_ne_bytes())
        .expect("an upload");
    let (address, pair) = (
        word.address(),
        Pair {
            first: 11,
            second: 9,
        },
    );
    let launch = |shape, params: &[Param<'_>]| {
        // SAFETY: either as the PTX declares, or refused before anything is launched.
        unsafe { function.launch(shape, &stream, params) }
    };
    let good = [Param::new(&address), Param::new(&pair)];
    let shape = LaunchShape::linear(2, 64);
    is_invalid(launch(shape, &good[..1]));
    is_invalid(launch(shape, &[Param::new(&address), Param::new(&address)]));
    is_invalid(launch(shape, &[good[0]; 40]));
    is_invalid(launch(LaunchShape::linear(0, 64), &good));
    is_invalid(launch(
        LaunchShape {
            block: [64, 0, 1],
            ..shape
        },
        &good,
    ));
    let too_many = launch(LaunchShape::linear(1, 2048), &good).expect_err("too many threads");
    assert_eq!(too_many.code(), Some(1));
    assert_eq!(read(&word, &stream), 5);
    launch(shape, &good).expect("a launch");
    assert_eq!(read(&word, &stream), 5 + 2000 + 64 + 9);

    assert_eq!(
        module.function("missing").expect_err("no entry").code(),
        Some(500)
    );
    is_invalid(module.function("nul\0inside"));
    is_invalid(Module::load_ptx(&context, "nul\0inside"));
    let error = Module::load_ptx(&context, ".version 8.1 nonsense").expect_err("no PTX");
    let CudaError::Jit { code: 218, log, .. } = &error else {
        panic!("{error:?}")
    };
    assert!(log.contains(".target"), "the compiler's own words: {log}");
    let unregistered = module.function("unregistered").expect("an entry");
    // SAFETY: it has no arguments, and the fake refuses it.
    let refused = unsafe { unregistered.launch(shape, &stream, &[]) };
    assert_eq!(refused.expect_err("no host function").code(), Some(719));
    drop((function, unregistered, module, word, stream, context));
    bench.finish();
}

#[test]
fn a_graph_replays_what_was_captured() {
    let bench = Bench::new();
    bench.fake.register_kernel("count", count, 32);
    let context = bench.context(0);
    let (stream, side) = (
        Stream::new(&context).expect("a stream"),
        Stream::new(&context).expect("a stream"),
    );
    let (fork, join) = (
        Event::new(&context).expect("an event"),
        Event::new(&context).expect("an event"),
    );
    let function = Module::load_ptx(&context, PTX)
        .expect("a module")
        .function("count")
        .expect("one");
    let word = DeviceBuffer::new(&context, 4).expect("memory");
    let copied = DeviceBuffer::new(&context, 4).expect("memory");
    word.upload(&stream, 0, &3_u32.to_ne_bytes())
        .expect("an upload");
    let (address, pair) = (
        word.address(),
        Pair {
            first: 11,
            second: 1,
        },
    );
    let params = [Param::new(&address), Param::new(&pair)];

    assert_eq!(stream.capture_status(), Ok(CaptureStatus::None));
    let capture = stream
        .begin_capture(CaptureMode::ThreadLocal)
        .expect("a capture");
    assert_eq!(stream.is_capturing(), Ok(true));
    // SAFETY: as the PTX declares; the memory lives until the last replay.
    unsafe { function.launch(LaunchShape::linear(1, 1), &stream, &params) }.expect("a launch");
    fork.record(&stream).expect("a record");
    side.wait(&fork).expect("a wait");
    assert_eq!(side.is_capturing(), Ok(true));
    // SAFETY: both buffers live until the last replay.
    unsafe { side.copy_on_device(copied.address(), address, 4) }.expect("a copy");
    join.record(&side).expect("a record");
    stream.wait(&join).expect("a wait");
    let graph = capture.end().expect("a graph");
    assert_eq!(side.is_capturing(), Ok(false));
    assert_eq!(read(&word, &stream), 3, "capturing executes nothing");

    let executable = graph.instantiate().expect("executable");
    drop(graph);
    for _ in 0..3 {
        // SAFETY: what was captured is still there.
        unsafe { executable.launch(&stream) }.expect("a launch");
    }
    // An eager call in between, as inference engines do.
    // SAFETY: as the PTX declares.
    unsafe { function.launch(LaunchShape::linear(1, 1), &stream, &params) }.expect("a launch");
    assert_eq!(read(&word, &stream), 3 + 4 * 1002);
    assert_eq!(read(&copied, &stream), 3 + 3 * 1002);
    drop((
        executable, function, word, copied, fork, join, stream, side, context,
    ));
    bench.finish();
}

#[test]
fn captures_that_go_wrong() {
    let bench = Bench::new();
    let context = bench.context(0);
    let (stream, other) = (
        Stream::new(&context).expect("a stream"),
        Stream::new(&context).expect("a stream"),
    );
    // Waiting for the stream spoils the capture; ending it says so.
    let capture = stream
        .begin_capture(CaptureMode::Global)
        .expect("a capture");
    assert_eq!(
        stream.synchronize().expect_err("capturing").code(),
        Some(900)
    );
    assert_eq!(stream.capture_status(), Ok(CaptureStatus::Invalidated));
    assert_eq!(capture.end().expect_err("spoilt").code(), Some(901));
    assert_eq!(stream.is_capturing(), Ok(false));
    // So does an allocation, by any thread, in the global mode.
    let capture = stream
        .begin_capture(CaptureMode::Global)
        .expect("a capture");
    assert_eq!(
        DeviceBuffer::new(&context, 64)
            .expect_err("capturing")
            .code(),
        Some(900)
    );
    drop(capture); // thrown away, and the failure is remembered
    assert_eq!(
        bench
            .driver
            .take_release_error()
            .and_then(|error| error.code()),
        Some(901)
    );
    // In the relaxed mode it is fine, and an abandoned capture is ended quietly.
    let capture = stream
        .begin_capture(CaptureMode::Relaxed)
        .expect("a capture");
    drop(DeviceBuffer::new(&context, 64).map_err(|error| assert_eq!(error.code(), Some(900))));
    assert_eq!(
        stream
            .begin_capture(CaptureMode::Relaxed)
            .expect_err("twice")
            .code(),
        Some(401)
    );
    drop(capture);
    assert_eq!(stream.is_capturing(), Ok(false));
    // A point outside the capture cannot be waited for.
    let event = Event::new(&context).expect("an event");
    event.record(&other).expect("a record");
    let capture = stream
        .begin_capture(CaptureMode::Relaxed)
        .expect("a capture");
    assert_eq!(stream.wait(&event).expect_err("outside").code(), Some(905));
    assert!(capture.end().is_err());
    // A fork that is never joined.
    let capture = stream
        .begin_capture(CaptureMode::Relaxed)
        .expect("a capture");
    event.record(&stream).expect("a record");
    other.wait(&event).expect("a wait");
    assert_eq!(capture.end().expect_err("unjoined").code(), Some(904));
    assert_eq!(other.is_capturing(), Ok(false));
    // The legacy default stream.
    let legacy = Stream::legacy_default(&context);
    assert!(legacy.begin_capture(CaptureMode::Relaxed).is_err());
    drop((event, legacy, stream, other, context));
    bench.finish();
}
