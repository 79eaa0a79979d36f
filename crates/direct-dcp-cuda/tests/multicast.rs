//! Multicast objects on the fake driver: one process, two processes, wrong orders.

#![allow(unsafe_code)] // a kernel's host function writes through the replicas

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use common::{Bench, child, expect_passed, fake, random_bytes};
use direct_dcp_cuda::{
    AddressRange, Allocation, BoundMulticast, Context, CudaError, Granularity, HandleTypes,
    Mapping, MulticastObject, Stream,
};

const UNIT: usize = 2 << 20;
const KIND: HandleTypes = HandleTypes::POSIX_FD;
/// Not what fresh memory holds.
const FLAG: [u8; 4] = [9, 8, 7, 6];

fn is_invalid<T: std::fmt::Debug>(result: Result<T, CudaError>) {
    assert!(
        matches!(result, Err(CudaError::InvalidArgument { .. })),
        "{result:?}"
    );
}

fn memory(context: &Context, bytes: usize) -> Arc<Allocation> {
    Allocation::create(context, bytes, KIND, Granularity::Recommended).expect("memory")
}

fn mapped(context: &Context, memory: &Arc<Allocation>) -> Mapping {
    let range = AddressRange::reserve(context, memory.bytes(), 0).expect("addresses");
    Mapping::new(&range, 0, memory, memory.bytes(), &[context.device()]).expect("a map")
}

fn multicast_map(context: &Context, bound: &Arc<BoundMulticast>) -> Mapping {
    let range = AddressRange::reserve(context, bound.bytes(), 0).expect("addresses");
    bound
        .map(0, &range, 0, bound.bytes(), &[context.device()])
        .expect("a map")
}

/// Stores to every replica, as `multimem.st` would.
fn multicast_store(mapping: &Mapping, offset: usize, data: &[u8]) {
    let address = mapping.address() + offset as u64;
    let replicas = fake()
        .multicast_replicas(address, data.len())
        .expect("replicas");
    assert_eq!(replicas.len(), 2);
    for replica in replicas {
        // SAFETY: the fake mapped at least `data.len()` bytes there.
        unsafe { replica.copy_from_nonoverlapping(data.as_ptr(), data.len()) };
    }
}

fn check(mapping: &Mapping, stream: &Stream, offset: usize, expected: &[u8]) {
    let mut back = vec![0; expected.len()];
    mapping
        .download(stream, offset, &mut back)
        .expect("a download");
    assert!(back == expected);
}

#[test]
fn a_store_reaches_every_replica() {
    let bench = Bench::new();
    let (zero, one) = (bench.context(0), bench.context(1));
    let streams = [&zero, &one].map(|context| Stream::new(context).expect("a stream"));
    let replicas = [memory(&zero, 2 * UNIT), memory(&one, 2 * UNIT)];
    let views = [mapped(&zero, &replicas[0]), mapped(&one, &replicas[1])].map(Arc::new);

    let mut object =
        MulticastObject::create(&zero, 2, UNIT + 1, KIND, Granularity::Minimum).expect("an object");
    assert_eq!(object.bytes(), 2 * UNIT);
    object.add_device(zero.device()).expect("a device");
    object.add_device(one.device()).expect("a device");
    let mut team = object.complete().expect("complete");
    team.bind(0, &replicas[0], UNIT, UNIT).expect("a bind");
    team.bind(UNIT, &replicas[0], 0, UNIT).expect("a bind");
    team.bind_mapping(0, &views[1], 0, 2 * UNIT)
        .expect("a bind by address");
    let bound = team.bound().expect("bound");
    assert_eq!(bound.bindings(), 3);
    let mapping = multicast_map(&zero, &bound);
    assert!(mapping.is_multicast() && mapping.allocation().is_none());

    let data = random_bytes(5000);
    multicast_store(&mapping, 100, &data);
    check(&views[0], &streams[0], UNIT + 100, &data); // bound crosswise
    check(&views[1], &streams[1], 100, &data);
    // Across two binds of one device there is no single replica.
    assert_eq!(
        bench.fake.multicast_replicas(mapping.address(), 2 * UNIT),
        Err(401)
    );
    // Ordinary copies are refused, here and in the driver.
    is_invalid(mapping.upload(&streams[0], 0, &data));
    is_invalid(mapping.download(&streams[0], 0, &mut [0; 4]));
    assert!(!bench.fake.may_access(0, mapping.address(), 4, true));

    bench.fake.clear_log();
    drop((bound, replicas, views));
    multicast_store(&mapping, 7, &data); // the mapping keeps the bindings, they keep the memory
    drop(mapping);
    let log = bench.fake.log();
    let place = |wanted: &str| {
        let mut places = log
            .iter()
            .enumerate()
            .filter(|(_, (name, _))| name == wanted);
        let first = places.next().map(|(at, _)| at).expect("the call");
        (first, places.next_back().map_or(first, |(at, _)| at))
    };
    assert!(log.iter().all(|(_, code)| *code == 0), "{log:?}");
    let unmap = log
        .iter()
        .position(|(name, _)| name == "cuMemUnmap")
        .expect("an unmap");
    assert!(
        unmap < place("cuMulticastUnbind").0,
        "unmap, then unbind: {log:?}"
    );
    assert!(
        place("cuMulticastUnbind").1 < place("cuMemRelease").1,
        "then release: {log:?}"
    );
    drop((streams, zero, one));
    bench.finish();
}

#[test]
fn wrong_orders_and_arguments_are_refused() {
    let bench = Bench::new();
    let (zero, one) = (bench.context(0), bench.context(1));
    let create =
        |devices, bytes| MulticastObject::create(&zero, devices, bytes, KIND, Granularity::Minimum);
    is_invalid(create(1, UNIT));
    is_invalid(create(2, 0).map_err(|error| match error {
        // The driver refuses a granularity for nothing before we do.
        CudaError::Driver { code: 1, .. } => CudaError::InvalidArgument {
            what: "bytes",
            expected: String::new(),
            got: String::new(),
        },
        other => other,
    }));
    assert_eq!(
        create(3, UNIT).expect_err("more than there are").code(),
        Some(1)
    );

    // No device of ours: there is nothing to bind.
    let object = create(2, UNIT).expect("an object");
    assert!(matches!(
        object.complete(),
        Err(CudaError::WrongOrder { .. })
    ));

    // One of two devices: a real driver waits, the fake says that the state is illegal.
    let near = memory(&zero, UNIT);
    let mut object = create(2, UNIT).expect("an object");
    object.add_device(zero.device()).expect("a device");
    is_invalid(object.add_device(zero.device()));
    let mut team = object.complete().expect("claimed complete");
    assert_eq!(
        team.bind(0, &near, 0, UNIT).expect_err("incomplete").code(),
        Some(401)
    );
    drop(team);

    let far = memory(&one, UNIT);
    let mut object = create(2, UNIT).expect("an object");
    object.add_device(zero.device()).expect("a device");
    object.add_device(one.device()).expect("a device");
    let mut team = object.complete().expect("complete");
    is_invalid(team.bind(1, &near, 0, UNIT));
    is_invalid(team.bind(0, &near, 4096, UNIT));
    is_invalid(team.bind(0, &near, 0, UNIT / 2));
    is_invalid(team.bind(0, &near, 0, 0));
    is_invalid(team.bind(UNIT, &near, 0, UNIT));
    is_invalid(team.bind(0, &near, UNIT, UNIT));
    let private = Allocation::create(&zero, UNIT, HandleTypes::NONE, Granularity::Recommended)
        .expect("memory");
    is_invalid(team.bind(0, &private, 0, UNIT));
    let fd = far.export_fd().expect("a descriptor");
    let imported = Allocation::import_fd(&one, fd.as_fd(), UNIT).expect("an import");
    is_invalid(team.bind(0, &imported, 0, UNIT));
    team.bind(0, &near, 0, UNIT).expect("a bind");
    is_invalid(team.bind(0, &near, 0, UNIT));
    assert!(
        matches!(team.bound(), Err(CudaError::WrongOrder { .. })),
        "device 1 has no memory"
    );
    drop((near, far, private, imported, fd));

    // A device that was not added cannot be given the mapping.
    let mut object = create(2, UNIT).expect("an object");
    object.add_device(zero.device()).expect("a device");
    let fd = object.export_fd().expect("a descriptor");
    let mut again = MulticastObject::import_fd(&one, fd.as_fd(), 2, UNIT).expect("an import");
    again.add_device(one.device()).expect("a device");
    assert_eq!(
        again
            .add_device(zero.device())
            .expect_err("added by the other")
            .code(),
        Some(1)
    );
    let mut team = object.complete().expect("complete");
    team.bind(0, &memory(&zero, UNIT), 0, UNIT).expect("a bind");
    let bound = team.bound().expect("bound");
    let range = AddressRange::reserve(&zero, UNIT, 0).expect("addresses");
    is_invalid(bound.map(0, &range, 0, UNIT / 2, &[zero.device()]));
    is_invalid(bound.map(UNIT, &range, 0, UNIT, &[zero.device()]));
    is_invalid(bound.map(0, &range, 0, UNIT, &[]));
    let mapping = bound
        .map(0, &range, 0, UNIT, &[zero.device()])
        .expect("a map");
    // Not every device has bound memory, so there are not all replicas.
    assert_eq!(
        bench.fake.multicast_replicas(mapping.address(), 4),
        Err(401)
    );
    drop((again, bound, range, mapping, fd, zero, one));
    bench.finish();
}

#[test]
fn a_machine_without_multicast_says_so() {
    let variable = "DIRECT_DCP_FAKE_WITHOUT";
    if std::env::var_os(variable).is_some() {
        let bench = Bench::new();
        let context = bench.context(0);
        let refused = MulticastObject::create(&context, 2, UNIT, KIND, Granularity::Minimum);
        assert!(refused.expect_err("no multicast").is_unsupported());
        drop(context);
        bench.finish();
        return;
    }
    expect_passed(child(
        "a_machine_without_multicast_says_so",
        variable,
        "multicast",
    ));
}

/// The whole order across two processes, with the barriers as lines over pipes.
#[test]
fn two_processes_are_one_team() {
    let variable = "DIRECT_DCP_TEST_TEAM";
    if let Ok(place) = std::env::var(variable) {
        return second_rank(&place);
    }
    let bench = Bench::new();
    let context = bench.context(0);
    let stream = Stream::new(&context).expect("a stream");
    let mut object =
        MulticastObject::create(&context, 2, UNIT, KIND, Granularity::Minimum).expect("an object");
    let fd = object.export_fd().expect("a descriptor");
    let place = format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
    let mut child = child("two_processes_are_one_team", variable, &place);
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut pipe = child.stdin.take().expect("a pipe");
    let mut barrier = |name: &str| {
        pipe.write_all(format!("{name}\n").as_bytes())
            .expect("a pipe");
        let reached = lines
            .by_ref()
            .lines()
            .map_while(Result::ok)
            .any(|line| line == name);
        assert!(reached, "the other rank has not reached: {name}");
    };
    object.add_device(context.device()).expect("a device");
    barrier("added");
    let memory = memory(&context, UNIT);
    let view = mapped(&context, &memory);
    let mut team = object.complete().expect("complete");
    team.bind(0, &memory, 0, UNIT).expect("a bind");
    let bound = team.bound().expect("bound");
    barrier("bound");
    let mapping = multicast_map(&context, &bound);
    let data = random_bytes(4096);
    multicast_store(&mapping, 0, &data);
    multicast_store(&mapping, 8192, &FLAG);
    barrier("stored");
    let mut both = vec![0; 8192];
    view.download(&stream, 0, &mut both).expect("a download");
    assert!(both[..4096] == data, "ours");
    assert!(
        both[4096..]
            .iter()
            .zip(&data)
            .all(|(theirs, ours)| *theirs == !*ours),
        "theirs"
    );
    barrier("read");
    drop((mapping, bound, view, memory, stream, context));
    assert!(child.wait().expect("a child").success());
    bench.finish();
}

fn second_rank(place: &str) {
    let bench = Bench::new();
    let context = bench.context(1);
    let stream = Stream::new(&context).expect("a stream");
    let barrier = |name: &str| {
        println!("\n{name}");
        let mut answer = String::new();
        std::io::stdin().read_line(&mut answer).expect("a pipe");
        assert_eq!(answer.trim(), name);
    };
    let file = File::options()
        .read(true)
        .write(true)
        .open(place)
        .expect("the descriptor");
    let mut object =
        MulticastObject::import_fd(&context, file.as_fd(), 2, UNIT).expect("an import");
    object.add_device(context.device()).expect("a device");
    barrier("added");
    let memory = memory(&context, UNIT);
    let view = mapped(&context, &memory);
    let mut team = object.complete().expect("complete");
    team.bind(0, &memory, 0, UNIT).expect("a bind");
    let bound = team.bound().expect("bound");
    barrier("bound");
    let mapping = multicast_map(&context, &bound);
    // Wait for the other's rows, as the protocol would by a signal, and answer with their inverse.
    wait_for_flag(&view, &stream);
    let mut data = vec![0; 4096];
    view.download(&stream, 0, &mut data).expect("a download");
    data.iter_mut().for_each(|byte| *byte = !*byte);
    multicast_store(&mapping, 4096, &data);
    barrier("stored");
    barrier("read");
    drop((mapping, bound, view, memory, stream, context, file));
    bench.finish();
}

/// Waits until the other rank has raised its flag behind the rows.
fn wait_for_flag(view: &Mapping, stream: &Stream) {
    let mut flag = [0; 4];
    while flag != FLAG {
        view.download(stream, 8192, &mut flag).expect("a download");
        std::thread::yield_now();
    }
}
