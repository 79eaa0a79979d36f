//! Every driver call of a whole life fails once, in turn.

#![allow(unsafe_code)] // launches and copies are part of that life

mod common;

use core::ffi::c_void;
use std::os::fd::AsFd;
use std::sync::Arc;

use common::{Bench, random_bytes};
use direct_dcp_cuda::{
    AddressRange, Allocation, CaptureMode, Context, CudaError, Device, DeviceBuffer, Driver, Event,
    Granularity, HandleTypes, LaunchShape, Mapping, Module, MulticastObject, Param, PinnedBuffer,
    Result, Stream,
};
use direct_dcp_fake_cuda::FailMode;

const UNIT: usize = 2 << 20;
/// `CUDA_ERROR_EXTERNAL_DEVICE`, which the fake never answers of itself.
const PLANNED: i32 = 911;

const PTX: &str = ".version 8.1\n.target sm_90\n.address_size 64\n\
    .visible .entry nothing(.param .u64 a) { ret; }\n";

extern "C" fn nothing(_: *mut *mut c_void, _: u32, _: u32) {}

/// Everything that a group on two devices does from set-up to tear-down.
fn whole_life(driver: &Arc<Driver>) -> Result<()> {
    let contexts: Vec<Context> = Device::all(driver)?
        .iter()
        .map(Context::new)
        .collect::<Result<_>>()?;
    let streams: Vec<Stream> = contexts.iter().map(Stream::new).collect::<Result<_>>()?;
    let (context, stream) = (&contexts[0], &streams[0]);
    let (device, data) = (context.device(), random_bytes(512));
    device.name()?;
    device.compute_capability()?;
    context.enable_peer_access(&contexts[1])?;

    let pinned = PinnedBuffer::new(context, 64)?;
    let buffer = DeviceBuffer::new(context, 512)?;
    buffer.upload(stream, 0, &data)?;
    let mut back = vec![0; 512];
    buffer.download(stream, 0, &mut back)?;
    assert!(
        back == data,
        "a download that reports success has the bytes"
    );
    let event = Event::with_timing(context)?;
    event.record(stream)?;
    streams[1].wait(&event)?;
    event.synchronize()?;
    event.is_done()?;
    stream.is_idle()?;

    let kind = HandleTypes::POSIX_FD;
    let memory: Vec<Arc<Allocation>> = contexts
        .iter()
        .map(|context| Allocation::create(context, UNIT, kind, Granularity::Recommended))
        .collect::<Result<_>>()?;
    let fd = memory[1].export_fd()?;
    let imported = Allocation::import_fd(context, fd.as_fd(), UNIT)?;
    imported.device_ordinal()?;
    let range = AddressRange::reserve(context, 2 * UNIT, 0)?;
    let both = [contexts[0].device(), contexts[1].device()];
    let near = Mapping::new(&range, 0, &memory[0], UNIT, &both)?;
    let far = Mapping::new(&range, UNIT, &imported, UNIT, &[device])?;
    near.upload(stream, 9, &data)?;
    // SAFETY: both mappings live until the stream is synchronized by the download.
    unsafe { stream.copy_on_device(far.address(), near.address(), 1024) }?;
    far.download(stream, 9, &mut back)?;
    assert!(back == data);

    let mut object = MulticastObject::create(context, 2, UNIT, kind, Granularity::Minimum)?;
    let fd = object.export_fd()?;
    let mut other = MulticastObject::import_fd(&contexts[1], fd.as_fd(), 2, UNIT)?;
    object.add_device(both[0])?;
    other.add_device(both[1])?;
    let (mut object, mut other) = (object.complete()?, other.complete()?);
    object.bind(0, &memory[0], 0, UNIT)?;
    other.bind(0, &memory[1], 0, UNIT)?;
    let (object, other) = (object.bound()?, other.bound()?);
    let alias = AddressRange::reserve(context, UNIT, 0)?;
    let multicast = object.map(0, &alias, 0, UNIT, &[device])?;

    let function = Module::load_ptx(context, PTX)?.function("nothing")?;
    function.attributes()?;
    function.max_active_blocks_per_multiprocessor(256, 0)?;
    let address = near.address();
    let capture = stream.begin_capture(CaptureMode::Relaxed)?;
    // SAFETY: the kernel does nothing.
    unsafe { function.launch(LaunchShape::linear(1, 1), stream, &[Param::new(&address)]) }?;
    let executable = capture.end()?.instantiate()?;
    // SAFETY: as above.
    unsafe { executable.launch(stream) }?;
    // SAFETY: the word lives until the context is synchronized.
    unsafe { stream.write_value_u32(pinned.device_address(), 77) }?;
    context.synchronize()?;
    assert_eq!(pinned.load_u32(0), Ok(77));
    drop((multicast, other));
    Ok(())
}

fn every_call_fails_once(mode: FailMode) {
    let bench = Bench::new();
    bench.fake.register_kernel("nothing", nothing, 32);
    bench.fake.clear_log();
    whole_life(&bench.driver).expect("a life without failures");
    let calls = bench.fake.log().len() as u64;
    assert!(calls > 150, "{calls}");
    assert_eq!(bench.fake.outstanding(), 0, "{}", bench.fake.report());
    let mut leaked = 0;
    for k in 1..=calls {
        let (before, depth) = (bench.fake.outstanding(), bench.fake.context_depth());
        bench.fake.fail(None, k, PLANNED, mode);
        let outcome = whole_life(&bench.driver);
        let released = bench.driver.take_release_error();
        let failed = bench
            .fake
            .failed()
            .unwrap_or_else(|| panic!("call {k} was never made"));
        bench.fake.fail(None, 0, PLANNED, mode);
        // The failure is told by the call itself, or, where `Drop` made it, by the driver.
        let is_planned = |error: &CudaError| matches!(error, CudaError::Driver { call, code: PLANNED, .. } if *call == failed);
        let told = outcome.as_ref().err().is_some_and(is_planned)
            || released.as_ref().is_some_and(is_planned);
        assert!(told, "call {k}, {failed}: {outcome:?}, {released:?}");
        // A pop that was refused leaves the context current, and nothing else does.
        let refused_pop = mode == FailMode::Refuse && failed == "cuCtxPopCurrent_v2";
        assert_eq!(
            bench.fake.context_depth(),
            depth + usize::from(refused_pop),
            "{failed}"
        );
        let after = bench.fake.outstanding();
        if after != before {
            // Only a release that the driver refused may leave something.
            let is_release = failed.contains("Free")
                || failed.contains("Release")
                || failed.contains("Destroy")
                || failed.contains("Unmap")
                || failed.contains("Unbind")
                || failed.contains("Unload");
            let report = bench.fake.report();
            assert!(
                mode == FailMode::Refuse && is_release,
                "call {k}, {failed}: {report}"
            );
            leaked += 1;
        }
    }
    if mode == FailMode::AfterRelease {
        assert_eq!(leaked, 0);
        bench.finish();
    }
}

/// One test, since the second half leaves behind what the driver refused to take back.
#[test]
fn nothing_is_lost_except_what_the_driver_refuses_to_take_back() {
    every_call_fails_once(FailMode::AfterRelease);
    every_call_fails_once(FailMode::Refuse);
}
