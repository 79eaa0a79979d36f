//! The same calls on a real driver. Runs where `DIRECT_DCP_TEST_GPU=1` says that there is a GPU, and
//! passes without doing anything elsewhere.
//!
//! Multicast objects are left out on purpose: they need an NVSwitch system, and no test here may
//! count on having one to itself.

#![allow(unsafe_code)] // launches and asynchronous copies

mod common;

use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::Arc;

use common::{Watchdog, random_bytes};
use direct_dcp_cuda::{
    AddressRange, Allocation, CaptureMode, Context, CudaError, Device, DeviceBuffer, Driver, Event,
    Granularity, HandleTypes, LaunchShape, Mapping, Module, Param, PinnedBuffer, Stream,
    SymbolGroup, WaitCondition,
};

const MIB: usize = 1 << 20;
const MEMORY: &str = "DIRECT_DCP_TEST_MEMORY";

/// `add`: adds `amount` to the word at `place`, once for each thread.
const PTX: &str = ".version 8.1\n.target sm_80\n.address_size 64\n\
    .visible .entry add(.param .u64 place, .param .u32 amount)\n\
    {\n .reg .b64 %rd<3>;\n .reg .b32 %r<3>;\n\
    ld.param.u64 %rd1, [place];\n cvta.to.global.u64 %rd2, %rd1;\n\
    ld.param.u32 %r1, [amount];\n atom.global.add.u32 %r2, [%rd2], %r1;\n ret;\n}\n";

/// The real driver; `None` where nobody says that there is one.
fn gpu() -> Option<(Arc<Driver>, Context, Watchdog)> {
    if std::env::var("DIRECT_DCP_TEST_GPU").as_deref() != Ok("1") {
        return None;
    }
    let watchdog = Watchdog::new(60);
    let driver = Driver::load().expect("a driver");
    let device = Device::new(&driver, 0).expect("a device");
    let context = Context::new(&device).expect("a context");
    Some((driver, context, watchdog))
}

fn read(buffer: &DeviceBuffer, stream: &Stream) -> u32 {
    let mut bytes = [1; 4];
    buffer.download(stream, 0, &mut bytes).expect("a download");
    u32::from_ne_bytes(bytes)
}

#[test]
fn the_driver_and_the_device_tell_about_themselves() {
    let Some((driver, context, _watchdog)) = gpu() else {
        return;
    };
    let device = context.device();
    println!("driver {} from {}", driver.version(), driver.library());
    for report in driver.symbols() {
        println!("{report:?}");
    }
    println!(
        "{} {} {:?} {} bytes",
        device.name().expect("a name"),
        device.pci_bus_id().expect("an address"),
        device.compute_capability().expect("a capability"),
        device.total_memory().expect("bytes"),
    );
    assert_ne!(device.uuid().expect("a UUID"), [0; 16]);
    assert!(driver.has(SymbolGroup::Core) && driver.has(SymbolGroup::Vmm));
    assert_eq!(driver.refused_releases(), 0);
}

#[test]
fn streams_events_and_words() {
    let Some((driver, context, _watchdog)) = gpu() else {
        return;
    };
    let stream = Stream::new(&context).expect("a stream");
    let (start, end) = (
        Event::with_timing(&context).expect("an event"),
        Event::with_timing(&context).expect("one"),
    );
    let gate = PinnedBuffer::new(&context, 64).expect("pinned memory");
    let buffer = DeviceBuffer::new(&context, MIB).expect("memory");
    let data = random_bytes(MIB);
    buffer.upload(&stream, 0, &data).expect("an upload");
    start.record(&stream).expect("a record");
    // SAFETY: the word lives until the stream is synchronized.
    unsafe { stream.wait_value_u32(gate.device_address(), 7, WaitCondition::Equal) }
        .expect("a wait");
    end.record(&stream).expect("a record");
    assert!(!end.is_done().expect("an answer") && !stream.is_idle().expect("an answer"));
    gate.store_u32(0, 7).expect("a word");
    end.synchronize().expect("done");
    assert!(end.elapsed_ms_since(&start).expect("a time") > 0.0);
    // SAFETY: as above.
    unsafe { stream.write_value_u32(gate.device_address() + 8, 9) }.expect("a write");
    let mut back = vec![0; MIB];
    buffer.download(&stream, 0, &mut back).expect("a download");
    assert!(back == data);
    assert_eq!(gate.load_u32(8), Ok(9));
    for raw in [stream.as_raw(), 0, 1, 2] {
        // SAFETY: `stream` outlives the borrow; the others are default streams.
        let borrowed = unsafe { Stream::borrow(&context, raw) }.expect("a stream");
        buffer
            .upload(&borrowed, 3, &data[..100])
            .expect("an upload");
    }
    drop((stream, start, end, gate, buffer, context));
    assert_eq!(driver.take_release_error(), None);
}

#[test]
fn a_kernel_eagerly_and_in_a_graph() {
    let Some((driver, context, _watchdog)) = gpu() else {
        return;
    };
    let stream = Stream::new(&context).expect("a stream");
    let function = Module::load_ptx(&context, PTX)
        .expect("a module")
        .function("add")
        .expect("one");
    println!("{:?}", function.attributes().expect("attributes"));
    assert!(
        function
            .max_active_blocks_per_multiprocessor(256, 0)
            .expect("blocks")
            > 0
    );
    let word = DeviceBuffer::new(&context, 4).expect("memory");
    word.upload(&stream, 0, &5_u32.to_ne_bytes())
        .expect("an upload");
    let (address, amount) = (word.address(), 3_u32);
    let params = [Param::new(&address), Param::new(&amount)];
    let shape = LaunchShape::linear(2, 64);
    // SAFETY: as the PTX declares; the word lives until the stream is synchronized.
    unsafe { function.launch(shape, &stream, &params) }.expect("a launch");
    assert_eq!(read(&word, &stream), 5 + 128 * 3);
    let capture = stream
        .begin_capture(CaptureMode::ThreadLocal)
        .expect("a capture");
    // SAFETY: as above.
    unsafe { function.launch(shape, &stream, &params) }.expect("a launch");
    assert_eq!(stream.is_capturing(), Ok(true));
    let executable = capture
        .end()
        .expect("a graph")
        .instantiate()
        .expect("executable");
    for _ in 0..3 {
        // SAFETY: what was captured is still there.
        unsafe { executable.launch(&stream) }.expect("a launch");
    }
    assert_eq!(read(&word, &stream), 5 + 4 * 128 * 3);
    if driver.has(SymbolGroup::Functions) {
        // SAFETY: refused before anything is launched.
        let refused = unsafe { function.launch(shape, &stream, &params[..1]) };
        assert!(
            matches!(refused, Err(CudaError::InvalidArgument { .. })),
            "{refused:?}"
        );
    }
    let error = Module::load_ptx(&context, &PTX.replace("atom", "nonsense")).expect_err("no PTX");
    println!("{error}");
    assert!(
        matches!(&error, CudaError::Jit { log, .. } if log.contains("nonsense")),
        "{error:?}"
    );
    drop((executable, function, word, stream, context));
    assert_eq!(driver.take_release_error(), None);
}

#[test]
fn memory_is_shared_with_another_process() {
    if let Ok(bytes) = std::env::var(MEMORY) {
        return memory_of_the_parent(&bytes);
    }
    let Some((driver, context, _watchdog)) = gpu() else {
        return;
    };
    let stream = Stream::new(&context).expect("a stream");
    let create = |kind| Allocation::create(&context, MIB, kind, Granularity::Recommended);
    match create(HandleTypes::FABRIC) {
        Ok(memory) => println!("fabric: {:?}", memory.export_fabric().is_ok()),
        Err(error) => {
            println!("fabric: {error}");
            assert!(error.is_unsupported());
        }
    }
    let memory = create(HandleTypes::POSIX_FD).expect("memory");
    println!("{} bytes after rounding", memory.bytes());
    assert_eq!(memory.device_ordinal(), Ok(0));
    let range = AddressRange::reserve(&context, 2 * memory.bytes(), 0).expect("addresses");
    let devices = [context.device()];
    let bytes = memory.bytes();
    let mapping = Mapping::new(&range, 0, &memory, bytes, &devices).expect("a map");
    let fd = memory.export_fd().expect("a descriptor");
    let again = Allocation::import_fd(&context, fd.as_fd(), bytes).expect("an import");
    let alias = Mapping::new(&range, bytes, &again, bytes, &devices).expect("a map");
    let data = random_bytes(MIB);
    mapping.upload(&stream, 0, &data).expect("an upload");
    let mut back = vec![0; MIB];
    alias.download(&stream, 0, &mut back).expect("a download");
    assert!(back == data, "one memory at two addresses");

    // The child's standard input is the descriptor itself, as a socket would have passed it.
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args([
            "memory_is_shared_with_another_process",
            "--exact",
            "--nocapture",
        ])
        .env(MEMORY, bytes.to_string())
        .stdin(Stdio::from(fd))
        .output()
        .expect("a child");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let sum: u64 = data.iter().map(|byte| u64::from(*byte)).sum();
    assert!(
        output.status.success() && text.contains(&format!("sum {sum}")),
        "{output:?}"
    );
    mapping.download(&stream, 0, &mut back).expect("a download");
    assert!(
        back.iter().zip(&data).all(|(new, old)| *new == !*old),
        "what the child wrote"
    );
    drop((mapping, alias, range, memory, again, stream, context));
    assert_eq!(driver.take_release_error(), None);
}

/// The other process: reports the sum of the bytes, and inverts them.
fn memory_of_the_parent(bytes: &str) {
    let (_driver, context, _watchdog) = gpu().expect("a GPU");
    let stream = Stream::new(&context).expect("a stream");
    let bytes: usize = bytes.parse().expect("bytes");
    let memory =
        Allocation::import_fd(&context, std::io::stdin().as_fd(), bytes).expect("an import");
    let range = AddressRange::reserve(&context, bytes, 0).expect("addresses");
    let mapping = Mapping::new(&range, 0, &memory, bytes, &[context.device()]).expect("a map");
    let mut data = vec![0; MIB];
    mapping.download(&stream, 0, &mut data).expect("a download");
    println!(
        "\nsum {}",
        data.iter().map(|byte| u64::from(*byte)).sum::<u64>()
    );
    data.iter_mut().for_each(|byte| *byte = !*byte);
    mapping.upload(&stream, 0, &data).expect("an upload");
}
