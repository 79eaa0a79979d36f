//! What the fake refuses, called as C code would call it.

#![allow(unsafe_code)] // raw driver calls

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicU32, Ordering};

use direct_dcp_fake_cuda::{Fake, library_path};

const UNIT: usize = 2 << 20;

/// `CUmemAllocationProp`, `CUmemAccessDesc` and `CUmulticastObjectProp` as words.
const DEVICE_0: [u32; 8] = [1, 1, 1, 0, 0, 0, 0, 0];
const ACCESS_0: [u32; 3] = [1, 0, 3];
const TEAM_OF_2: [u64; 4] = [2, UNIT as u64, 1, 0];

/// Calls a function with up to six integers or pointers, as the C calling convention passes them.
struct Raw(libloading::Library);

impl Raw {
    fn call(&self, name: &str, arguments: &[u64]) -> c_int {
        type Six = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> c_int;
        // SAFETY: all functions called here take at most six integers or pointers.
        let function = *unsafe { self.0.get::<Six>(name.as_bytes()) }.expect("a function");
        let mut six = [0; 6];
        six[..arguments.len()].copy_from_slice(arguments);
        let [a, b, c, d, e, f] = six;
        // SAFETY: integers fill the registers of integer and pointer arguments alike; the places
        // that pointers name live through the call.
        unsafe { function(a, b, c, d, e, f) }
    }

    /// Calls a function whose first argument is where a handle or an address goes.
    fn create(&self, name: &str, arguments: &[u64]) -> u64 {
        let mut created = 0_u64;
        let mut all = vec![place(&mut created)];
        all.extend_from_slice(arguments);
        assert_eq!(self.call(name, &all), 0, "{name}");
        created
    }
}

fn place<T>(value: &mut T) -> u64 {
    core::ptr::from_mut(value)
        .cast::<c_void>()
        .expose_provenance() as u64
}

fn address<T>(value: &T) -> u64 {
    core::ptr::from_ref(value)
        .cast::<c_void>()
        .expose_provenance() as u64
}

#[test]
fn what_is_out_of_order_is_refused() {
    // SAFETY: our own library.
    let raw = Raw(unsafe { libloading::Library::new(library_path()) }.expect("the fake"));
    let fake = Fake::open();
    let mut out = 0_u64;

    // Before initialisation, and without a context.
    assert_eq!(raw.call("cuDeviceGetCount", &[place(&mut out)]), 3);
    assert_eq!(raw.call("cuInit", &[0]), 0);
    assert_eq!(raw.call("cuStreamCreate", &[place(&mut out), 1]), 201);
    assert_eq!(raw.call("cuMemAlloc_v2", &[place(&mut out), 64]), 201);
    assert_eq!(raw.call("cuCtxPopCurrent_v2", &[place(&mut out)]), 201);
    assert_eq!(raw.call("cuCtxPushCurrent_v2", &[0x1234]), 201);
    assert_eq!(raw.call("cuDevicePrimaryCtxRelease_v2", &[0]), 201);
    let context = raw.create("cuDevicePrimaryCtxRetain", &[0]);
    assert_eq!(raw.call("cuCtxPushCurrent_v2", &[context]), 0);

    // Handles that are gone, or were never there.
    let stream = raw.create("cuStreamCreate", &[1]);
    assert_eq!(raw.call("cuStreamDestroy_v2", &[stream]), 0);
    assert_eq!(raw.call("cuStreamDestroy_v2", &[stream]), 400);
    assert_eq!(raw.call("cuStreamQuery", &[stream]), 400);
    let buffer = raw.create("cuMemAlloc_v2", &[64]);
    assert_eq!(raw.call("cuMemFree_v2", &[buffer + 1]), 1);
    assert_eq!(raw.call("cuMemFreeHost", &[buffer]), 1);
    assert_eq!(raw.call("cuMemFree_v2", &[buffer]), 0);
    assert_eq!(raw.call("cuMemFree_v2", &[buffer]), 1);

    // Virtual memory.
    let mut unknown_type = DEVICE_0;
    unknown_type[1] = 2;
    let create = |prop: &[u32; 8], bytes: usize| {
        raw.call(
            "cuMemCreate",
            &[address(&out), bytes as u64, address(prop), 0],
        )
    };
    assert_eq!(create(&unknown_type, UNIT), 1);
    assert_eq!(create(&DEVICE_0, UNIT + 4096), 1);
    let memory = raw.create("cuMemCreate", &[UNIT as u64, address(&DEVICE_0), 0]);
    let range = raw.create("cuMemAddressReserve", &[2 * UNIT as u64, 0, 0, 0]);
    let (unit, both) = (UNIT as u64, 2 * UNIT as u64);
    assert_eq!(
        raw.call("cuMemSetAccess", &[range, unit, address(&ACCESS_0), 1]),
        211
    );
    assert_eq!(
        raw.call("cuMemMap", &[range, unit, 65536, memory, 0]),
        1,
        "an offset"
    );
    assert_eq!(
        raw.call("cuMemMap", &[range + both, unit, 0, memory, 0]),
        1,
        "not reserved"
    );
    assert_eq!(
        raw.call("cuMemMap", &[range, both, 0, memory, 0]),
        1,
        "more than there is"
    );
    assert_eq!(raw.call("cuMemMap", &[range, unit, 0, memory, 0]), 0);
    assert_eq!(raw.call("cuMemMap", &[range, unit, 0, memory, 0]), 208);
    let host = [7_u8; 8];
    let copy = [range, address(&host), 8, 0];
    assert_eq!(raw.call("cuMemcpyHtoDAsync_v2", &copy), 1, "no access yet");
    assert_eq!(
        raw.call("cuMemSetAccess", &[range, unit, address(&ACCESS_0), 1]),
        0
    );
    assert_eq!(raw.call("cuMemcpyHtoDAsync_v2", &copy), 0);
    assert_eq!(raw.call("cuStreamSynchronize", &[0]), 0);
    assert_eq!(
        raw.call("cuMemAddressFree", &[range, both]),
        1,
        "still mapped"
    );
    assert_eq!(raw.call("cuMemUnmap", &[range + unit, unit]), 211);
    assert_eq!(raw.call("cuMemUnmap", &[range, both]), 1);
    assert_eq!(
        raw.call("cuMemRelease", &[memory]),
        0,
        "a mapping keeps the memory itself"
    );
    assert_eq!(raw.call("cuMemRelease", &[memory]), 1);
    assert_eq!(raw.call("cuMemUnmap", &[range, unit]), 0);
    assert_eq!(raw.call("cuMemUnmap", &[range, unit]), 211);
    assert_eq!(raw.call("cuMemAddressFree", &[range, unit]), 1);
    assert_eq!(raw.call("cuMemAddressFree", &[range, both]), 0);

    // Copies of host memory that is not pinned do not wait for their turn.
    let gate = raw.create("cuMemHostAlloc", &[8, 0]);
    let buffer = raw.create("cuMemAlloc_v2", &[8]);
    let mut there = [0_u8; 8];
    let pageable = [place(&mut there), buffer, 8, 0];
    assert_eq!(
        raw.call("cuMemcpyHtoDAsync_v2", &[buffer, address(&host), 8, 0]),
        0
    );
    assert_eq!(raw.call("cuStreamSynchronize", &[0]), 0);
    assert_eq!(raw.call("cuStreamWaitValue32_v2", &[0, gate, 1, 1]), 0);
    assert_eq!(
        raw.call("cuMemcpyDtoHAsync_v2", &pageable),
        800,
        "a busy stream"
    );
    let pinned = [gate, buffer, 4, 0];
    assert_eq!(raw.call("cuMemcpyDtoHAsync_v2", &pinned), 0, "but pinned");
    // SAFETY: the word is pinned memory of this process, used by nobody else but atomically.
    unsafe { AtomicU32::from_ptr(core::ptr::with_exposed_provenance_mut(gate as usize)) }
        .store(1, Ordering::Release);
    assert_eq!(raw.call("cuStreamSynchronize", &[0]), 0);
    assert_eq!(raw.call("cuMemcpyDtoHAsync_v2", &pageable), 0);
    assert_eq!(raw.call("cuStreamSynchronize", &[0]), 0);
    assert_eq!(there, host);
    assert_eq!(raw.call("cuMemFree_v2", &[buffer]), 0);
    assert_eq!(raw.call("cuMemFreeHost", &[gate]), 0);

    // Multicast.
    let memory = raw.create("cuMemCreate", &[unit, address(&DEVICE_0), 0]);
    let team = raw.create("cuMulticastCreate", &[address(&TEAM_OF_2)]);
    let range = raw.create("cuMemAddressReserve", &[unit, 0, 0, 0]);
    let bind = [team, 0, memory, 0, unit, 0];
    assert_eq!(
        raw.call("cuMulticastAddDevice", &[memory, 0]),
        400,
        "not a multicast object"
    );
    assert_eq!(raw.call("cuMulticastAddDevice", &[team, 0]), 0);
    assert_eq!(
        raw.call("cuMulticastBindMem", &bind),
        401,
        "a device is missing"
    );
    assert_eq!(
        raw.call("cuMemMap", &[range, unit, 0, team, 0]),
        401,
        "a device is missing"
    );
    assert_eq!(raw.call("cuMulticastAddDevice", &[team, 0]), 1);
    assert_eq!(raw.call("cuMulticastAddDevice", &[team, 1]), 0);
    assert_eq!(
        raw.call("cuMulticastUnbind", &[team, 0, 0, unit]),
        1,
        "nothing is bound"
    );
    assert_eq!(raw.call("cuMulticastBindMem", &bind), 0);
    assert_eq!(raw.call("cuMulticastBindMem", &bind), 1, "bound already");
    assert_eq!(raw.call("cuMulticastUnbind", &[team, 0, 0, unit]), 0);

    // What is left is named, and then it is not.
    assert_eq!(fake.report(), "contexts=1 handles=2 ranges=1");
    assert_eq!(fake.outstanding(), 4);
    assert_eq!(raw.call("cuMemRelease", &[team]), 0);
    assert_eq!(raw.call("cuMemRelease", &[memory]), 0);
    assert_eq!(raw.call("cuMemAddressFree", &[range, unit]), 0);
    assert_eq!(raw.call("cuDevicePrimaryCtxRelease_v2", &[0]), 0);
    assert_eq!(
        raw.call(
            "cuStreamCreate",
            &[place(&mut out), c_uint::from(true).into()]
        ),
        709
    );
    assert_eq!(raw.call("cuCtxPopCurrent_v2", &[place(&mut out)]), 0);
    assert_eq!((fake.outstanding(), fake.context_depth()), (0, 0));
}
