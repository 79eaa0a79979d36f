//! Virtual memory: in one process, between processes, in the wrong order.

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use common::{Bench, child, expect_passed, random_bytes};
use direct_dcp_cuda::{
    AddressRange, Allocation, CudaError, FabricHandle, Granularity, HandleTypes, Mapping, Stream,
};

const MIB: usize = 1 << 20;

fn is_invalid<T: std::fmt::Debug>(result: Result<T, CudaError>) {
    assert!(
        matches!(result, Err(CudaError::InvalidArgument { .. })),
        "{result:?}"
    );
}

#[test]
fn sizes_are_rounded_to_the_granularity() {
    let bench = Bench::new();
    let context = bench.context(0);
    for (granularity, unit) in [
        (Granularity::Minimum, 64 << 10),
        (Granularity::Recommended, 2 * MIB),
    ] {
        let kind = HandleTypes::POSIX_FD;
        assert_eq!(
            Allocation::granularity(&context, kind, granularity),
            Ok(unit)
        );
        for bytes in [1, unit - 1, unit] {
            let memory = Allocation::create(&context, bytes, kind, granularity).expect("memory");
            assert_eq!(memory.bytes(), unit);
            assert_eq!(memory.device_ordinal(), Ok(0));
        }
        is_invalid(Allocation::create(&context, 0, kind, granularity));
        is_invalid(Allocation::create(&context, usize::MAX, kind, granularity));
    }
    drop(context);
    bench.finish();
}

#[test]
fn one_memory_at_two_addresses_on_two_devices() {
    let bench = Bench::new();
    let (zero, one) = (bench.context(0), bench.context(1));
    let (near, far) = (
        Stream::new(&zero).expect("a stream"),
        Stream::new(&one).expect("a stream"),
    );
    let kind = HandleTypes::POSIX_FD.and(HandleTypes::FABRIC);
    let memory = Allocation::create(&zero, MIB, kind, Granularity::Minimum).expect("memory");
    let range = AddressRange::reserve(&zero, 4 * MIB, 0).expect("addresses");
    let first =
        Mapping::new(&range, 0, &memory, MIB, &[zero.device(), one.device()]).expect("a map");

    // The same memory again: by descriptor, for the other device alone, behind the first.
    let fd = memory.export_fd().expect("a descriptor");
    let again = Allocation::import_fd(&one, fd.as_fd(), memory.bytes()).expect("an import");
    drop(fd);
    assert!(again.is_imported());
    assert_eq!(
        again.device_ordinal(),
        Ok(0),
        "where the memory lies, not who imported it"
    );
    let second = Mapping::new(&range, MIB, &again, MIB, &[one.device()]).expect("a map");
    assert_eq!(second.address(), range.address() + MIB as u64);

    let data = random_bytes(MIB);
    first.upload(&near, 0, &data).expect("an upload");
    let mut back = vec![0; MIB];
    second.download(&far, 0, &mut back).expect("a download");
    assert!(back == data);
    // The second mapping gave device 0 nothing.
    let refused = second.download(&near, 0, &mut back).expect_err("no access");
    assert_eq!(refused.code(), Some(1));
    assert!(bench.fake.may_access(1, second.address(), MIB, true));
    assert!(!bench.fake.may_access(0, second.address(), 1, false));
    // A span over both mappings is fine for the device that has both, and ends where they end.
    assert!(bench.fake.may_access(1, first.address(), 2 * MIB, true));
    assert!(!bench.fake.may_access(1, first.address(), 2 * MIB + 1, true));

    // Whatever is dropped first, the order below is right, and nothing is freed too early.
    bench.fake.clear_log();
    drop((range, memory, again));
    first.upload(&near, 5, &data[..100]).expect("still mapped");
    drop((first, second, near, far));
    let log: Vec<_> = bench
        .fake
        .log()
        .into_iter()
        .filter(|(_, code)| *code == 0)
        .collect();
    let teardown: Vec<_> = log
        .iter()
        .map(|(name, _)| name.as_str())
        .filter(|name| name.starts_with("cuMem") && !name.starts_with("cuMemcpy"))
        .collect();
    let expected = [
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemUnmap",
        "cuMemRelease",
        "cuMemAddressFree",
    ];
    assert_eq!(teardown, expected);
    drop((zero, one));
    bench.finish();
}

#[test]
fn fabric_handles_name_memory_too() {
    let bench = Bench::new();
    let context = bench.context(0);
    let stream = Stream::new(&context).expect("a stream");
    let memory = Allocation::create(&context, MIB, HandleTypes::FABRIC, Granularity::Minimum)
        .expect("memory");
    let fabric = memory.export_fabric().expect("a handle");
    assert_eq!(
        format!("{fabric:?}"),
        "FabricHandle(..)",
        "the bytes are a secret"
    );
    is_invalid(memory.export_fd());
    let again = Allocation::import_fabric(&context, &fabric, memory.bytes()).expect("an import");
    let range = AddressRange::reserve(&context, 2 * MIB, 0).expect("addresses");
    let devices = [context.device()];
    let first = Mapping::new(&range, 0, &memory, MIB, &devices).expect("a map");
    let second = Mapping::new(&range, MIB, &again, MIB, &devices).expect("a map");
    let data = random_bytes(1000);
    first.upload(&stream, 77, &data).expect("an upload");
    let mut back = vec![0; 1000];
    second.download(&stream, 77, &mut back).expect("a download");
    assert_eq!(back, data);
    let forged = FabricHandle(random_bytes(64).try_into().expect("64 bytes"));
    let refused = Allocation::import_fabric(&context, &forged, MIB).expect_err("not a handle");
    assert_eq!(refused.code(), Some(1));
    drop((first, second, range, memory, again, stream, context));
    bench.finish();
}

#[test]
fn what_is_wrong_is_refused_and_leaves_nothing() {
    let bench = Bench::new();
    let context = bench.context(0);
    let devices = [context.device()];
    let private =
        Allocation::create(&context, MIB, HandleTypes::NONE, Granularity::Minimum).expect("memory");
    is_invalid(private.export_fd());
    is_invalid(private.export_fabric());
    is_invalid(AddressRange::reserve(&context, 0, 0));
    is_invalid(AddressRange::reserve(&context, MIB, 3));
    let range = AddressRange::reserve(&context, 2 * MIB, 8 * MIB).expect("addresses");
    assert_eq!(range.address() % (8 * MIB as u64), 0);

    is_invalid(Mapping::new(&range, 0, &private, 2 * MIB, &devices)); // more than there is
    is_invalid(Mapping::new(&range, 2 * MIB, &private, MIB, &devices)); // behind the range
    is_invalid(Mapping::new(&range, usize::MAX, &private, MIB, &devices));
    is_invalid(Mapping::new(&range, 0, &private, 0, &devices));
    is_invalid(Mapping::new(&range, 0, &private, MIB, &[]));
    let misaligned = Mapping::new(&range, 4096, &private, MIB, &devices).expect_err("misaligned");
    assert_eq!(misaligned.code(), Some(1));

    let mapping = Mapping::new(&range, 0, &private, MIB, &devices).expect("a map");
    is_invalid(Mapping::new(&range, MIB / 2, &private, MIB, &devices)); // overlaps
    let stream = Stream::new(&context).expect("a stream");
    is_invalid(mapping.upload(&stream, MIB - 1, &[1; 2]));
    is_invalid(mapping.download(&stream, 0, &mut vec![0; MIB + 1]));
    drop(mapping);
    // The span is free again.
    drop(Mapping::new(&range, MIB / 2, &private, MIB, &devices).expect("a map"));

    // A descriptor that is not the driver's.
    let file = File::open("/dev/null").expect("a file");
    let refused = Allocation::import_fd(&context, file.as_fd(), MIB).expect_err("no memory");
    assert_eq!(refused.code(), Some(1));
    // An import that claims more than there is cannot be mapped.
    let shared = Allocation::create(&context, MIB, HandleTypes::POSIX_FD, Granularity::Minimum)
        .expect("memory");
    let fd = shared.export_fd().expect("a descriptor");
    let claimed = Allocation::import_fd(&context, fd.as_fd(), 2 * MIB).expect("an import");
    let refused = Mapping::new(&range, 0, &claimed, 2 * MIB, &devices).expect_err("too much");
    assert_eq!(refused.code(), Some(1));
    drop((private, shared, claimed, range, stream, context));
    bench.finish();
}

#[test]
fn memory_is_shared_with_another_process() {
    let variable = "DIRECT_DCP_TEST_MEMORY";
    if let Ok(place) = std::env::var(variable) {
        return memory_of_the_parent(&place);
    }
    let bench = Bench::new();
    let context = bench.context(0);
    let stream = Stream::new(&context).expect("a stream");
    let kind = HandleTypes::POSIX_FD;
    let memory = Allocation::create(&context, MIB, kind, Granularity::Minimum).expect("memory");
    let range = AddressRange::reserve(&context, MIB, 0).expect("addresses");
    let mapping = Mapping::new(&range, 0, &memory, MIB, &[context.device()]).expect("a map");
    let data = random_bytes(MIB);
    mapping.upload(&stream, 0, &data).expect("an upload");

    let fd = memory.export_fd().expect("a descriptor");
    let place = format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
    let mut child = child("memory_is_shared_with_another_process", variable, &place);
    let mut reply = BufReader::new(child.stdout.take().expect("a pipe"));
    let line = reply
        .by_ref()
        .lines()
        .map_while(Result::ok)
        .find(|line| line.starts_with("sum "));
    let sum: u64 = data.iter().map(|byte| u64::from(*byte)).sum();
    assert_eq!(
        line,
        Some(format!("sum {sum}")),
        "the child saw what was written here"
    );
    // Answer, so that the child ends after it was read.
    child
        .stdin
        .take()
        .expect("a pipe")
        .write_all(b"go\n")
        .expect("a pipe");
    let rest: Vec<_> = reply.lines().map_while(Result::ok).collect();
    assert!(child.wait().expect("a child").success(), "{rest:?}");
    let mut back = vec![0; MIB];
    mapping.download(&stream, 0, &mut back).expect("a download");
    assert!(
        back.iter().zip(&data).all(|(new, old)| *new == !*old),
        "what the child wrote"
    );
    drop((mapping, range, memory, stream, context));
    bench.finish();
}

/// The other process: reports the sum of the bytes, then inverts them.
fn memory_of_the_parent(place: &str) {
    let bench = Bench::new();
    let context = bench.context(1);
    let stream = Stream::new(&context).expect("a stream");
    let file = File::options()
        .read(true)
        .write(true)
        .open(place)
        .expect("the descriptor");
    let memory = Allocation::import_fd(&context, file.as_fd(), MIB).expect("an import");
    drop(file);
    let range = AddressRange::reserve(&context, MIB, 0).expect("addresses");
    let mapping = Mapping::new(&range, 0, &memory, MIB, &[context.device()]).expect("a map");
    let mut data = vec![0; MIB];
    mapping.download(&stream, 0, &mut data).expect("a download");
    println!(
        "\nsum {}",
        data.iter().map(|byte| u64::from(*byte)).sum::<u64>()
    );
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).expect("a pipe");
    data.iter_mut().for_each(|byte| *byte = !*byte);
    mapping.upload(&stream, 0, &data).expect("an upload");
    drop((mapping, range, memory, stream, context));
    bench.finish();
}

#[test]
fn a_machine_that_cannot_share_says_so() {
    let variable = "DIRECT_DCP_FAKE_WITHOUT";
    if std::env::var_os(variable).is_some() {
        let bench = Bench::new();
        let context = bench.context(0);
        let create = |kind| Allocation::create(&context, MIB, kind, Granularity::Minimum);
        let no_channel = create(HandleTypes::FABRIC).expect_err("no IMEX channel");
        assert!(no_channel.is_unsupported(), "{no_channel}");
        assert_eq!(no_channel.code(), Some(800));
        let memory = create(HandleTypes::POSIX_FD).expect("memory");
        assert!(!memory.is_imported());
        // Without peer access, only the memory's own device can map it.
        let one = bench.context(1);
        let range = AddressRange::reserve(&context, MIB, 0).expect("addresses");
        let refused = Mapping::new(&range, 0, &memory, MIB, &[context.device(), one.device()]);
        assert_eq!(refused.expect_err("no peer access").code(), Some(101));
        assert_eq!(
            Arc::strong_count(&memory),
            1,
            "the failed mapping keeps nothing"
        );
        drop((memory, range, context, one));
        bench.finish();
        return;
    }
    expect_passed(child(
        "a_machine_that_cannot_share_says_so",
        variable,
        "imex,p2p",
    ));
}
