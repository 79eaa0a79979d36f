//! The gather kernels as host functions: the protocol's own code over the memory of the fake driver.
//!
//! [`register`] hands them to [`direct_dcp_fake_cuda`]. From then on code that launches the kernels
//! of `direct_dcp_kernels::device` runs on a machine without a GPU, by the same
//! [`protocol::gather`](direct_dcp_kernels::protocol::gather). A thread of a kernel is one of the
//! CPU; a block has two. The blocks of a launch that copies out wait for each other, so the launch
//! waits until all of them are resident.
//!
//! What a GPU would leave undefined ends the launch with an error here: memory that the device may
//! not touch, accesses that are not aligned to the kernel's unit, an ordinary access to a multicast
//! address, a multicast access where some device has bound no memory.
//!
//! The stores of a launch can be made to fail: see [`sabotage`].

mod launch;
mod memory;
mod place;
mod sabotage;
mod staged;
mod thread;

use core::ffi::c_void;
use std::sync::OnceLock;

use direct_dcp_fake_cuda::{Fake, Kernel};
use direct_dcp_kernels::device::{
    GATHER_ENTRIES, MULTICAST_PTX, PLACE_ENTRIES, STAGED_ENTRIES, UNICAST_PTX,
};

pub use sabotage::{Sabotage, sabotage};

/// Registers every kernel of both modules.
///
/// # Panics
/// If a module has a kernel that there is no host function for.
pub fn register(fake: &Fake) {
    FAKE.get_or_init(|| Fake::open_at(fake.path().to_owned()));
    let (unicast, multicast) = (target(UNICAST_PTX), target(MULTICAST_PTX));
    assert_ne!(
        unicast, multicast,
        "the modules are told apart by their targets"
    );
    let gathers = GATHER_ENTRIES
        .into_iter()
        .map(|(width, copy_out, name)| (name, gather_kernel as Find, width, copy_out));
    let places = PLACE_ENTRIES
        .into_iter()
        .map(|(width, converts, name)| (name, place_kernel as Find, width, converts));
    for (name, find, width, kind) in gathers.chain(places) {
        for (text, target, everywhere) in [
            (UNICAST_PTX, unicast, false),
            (MULTICAST_PTX, multicast, true),
        ] {
            if text.contains(&format!(".entry {name}(")) {
                let kernel = find(width, kind, everywhere);
                let kernel = kernel.unwrap_or_else(|| panic!("no host function for {name}"));
                fake.register_kernel(&format!("{name}@{target}"), kernel, registers(name));
            }
        }
    }
    for (name, kernel) in STAGED_ENTRIES.into_iter().zip(STAGED) {
        fake.register_kernel(&format!("{name}@{unicast}"), kernel, registers(name));
    }
}

/// Registers of each thread of a kernel, as an assembler for sm_90 (CUDA 13.0) has made of it.
fn registers(name: &str) -> u32 {
    match name.trim_start_matches("direct_dcp_") {
        "gather_into_16" => 92,
        "gather_into_8" => 72,
        "gather_into_4" | "gather_into_2" => 62,
        "gather_into_1" => 80,
        "dequantize_16" => 124,
        "dequantize_2" | "place_16" | "place_8" | "place_4" | "place_2" | "place_1" => 104,
        _ => 44,
    }
}

/// The library that calls the kernels: the one that they were registered with, which need not be
/// beside the running program.
static FAKE: OnceLock<Fake> = OnceLock::new();

fn fake() -> &'static Fake {
    FAKE.get_or_init(Fake::open)
}

/// What a module is compiled for.
fn target(text: &str) -> &str {
    let mut lines = text
        .lines()
        .filter_map(|line| line.strip_prefix(".target "));
    lines.next().unwrap_or_default().trim()
}

/// The host function for a width, a kind, and whether one store reaches all ranks.
type Find = fn(u32, bool, bool) -> Option<Kernel>;

fn gather_kernel(width: u32, copy_out: bool, everywhere: bool) -> Option<Kernel> {
    Some(match (width, copy_out, everywhere) {
        (1, false, false) => gather::<1, false, false>,
        (1, true, false) => gather::<1, true, false>,
        (2, false, false) => gather::<2, false, false>,
        (2, true, false) => gather::<2, true, false>,
        (4, false, false) => gather::<4, false, false>,
        (4, true, false) => gather::<4, true, false>,
        (8, false, false) => gather::<8, false, false>,
        (8, true, false) => gather::<8, true, false>,
        (16, false, false) => gather::<16, false, false>,
        (16, true, false) => gather::<16, true, false>,
        (16, false, true) => gather::<16, false, true>,
        (16, true, true) => gather::<16, true, true>,
        _ => return None,
    })
}

extern "C" fn gather<const WIDTH: u64, const COPY_OUT: bool, const EVERYWHERE: bool>(
    params: *mut *mut c_void,
    grid: u32,
    threads: u32,
) {
    launch::run(params, grid, WIDTH, EVERYWHERE, |launch| {
        let _resident = COPY_OUT.then(|| launch.reside(threads));
        launch.gather(COPY_OUT);
    });
}

fn place_kernel(width: u32, converts: bool, everywhere: bool) -> Option<Kernel> {
    Some(match (width, converts, everywhere) {
        (1, false, false) => place::<1, false, false>,
        (2, false, false) => place::<2, false, false>,
        (4, false, false) => place::<4, false, false>,
        (8, false, false) => place::<8, false, false>,
        (16, false, false) => place::<16, false, false>,
        (16, false, true) => place::<16, false, true>,
        (2, true, false) => place::<2, true, false>,
        (16, true, false) => place::<16, true, false>,
        (16, true, true) => place::<16, true, true>,
        _ => return None,
    })
}

extern "C" fn place<const WIDTH: u64, const CONVERTS: bool, const EVERYWHERE: bool>(
    params: *mut *mut c_void,
    grid: u32,
    _threads: u32,
) {
    launch::run_place(params, grid, WIDTH, EVERYWHERE, CONVERTS);
}

const STAGED: [Kernel; 3] = [staged_advance, staged_publish, staged_copy];

extern "C" fn staged_advance(params: *mut *mut c_void, grid: u32, _threads: u32) {
    launch::run(params, grid, 16, false, staged::advance);
}

extern "C" fn staged_publish(params: *mut *mut c_void, grid: u32, _threads: u32) {
    launch::run(params, grid, 16, false, staged::publish);
}

extern "C" fn staged_copy(params: *mut *mut c_void, grid: u32, _threads: u32) {
    launch::run(params, grid, 16, false, staged::copy);
}
