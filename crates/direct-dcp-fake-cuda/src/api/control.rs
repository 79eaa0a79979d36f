//! What no driver has: functions by which tests steer and question the fake.

#![allow(unsafe_code, non_snake_case)] // exported symbols, named in C style

use core::ffi::{c_char, c_int, c_void};

use crate::abi::{In, Out};
use crate::call::{Plan, journal};
use crate::code::{Code, Outcome, ensure};
use crate::memory::check_access;
use crate::module::{self, Host};
use crate::residency;
use crate::state::{context_depth, state};

/// Turns an outcome with a count into the count, or into the negative code.
fn count(outcome: Outcome<usize>) -> c_int {
    match outcome {
        Ok(count) => c_int::try_from(count).unwrap_or(c_int::MAX),
        Err(code) => -code.0,
    }
}

/// Copies text into a buffer and returns the length that it would need, NUL included.
fn copy_text(text: &str, buffer: &Out<c_char>, capacity: usize) -> usize {
    if capacity > 0 {
        let _ = buffer.set_text(text, capacity);
    }
    text.len() + 1
}

/// How many things have not been given back.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaOutstanding() -> u64 {
    state()
        .outstanding()
        .iter()
        .map(|(_, count)| *count as u64)
        .sum()
}

/// Names what has not been given back: `streams=1 events=2`. Returns the bytes needed.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaReport(buffer: Out<c_char>, capacity: usize) -> usize {
    let outstanding = state().outstanding();
    let live = outstanding.iter().filter(|(_, count)| *count > 0);
    let text = live
        .map(|(kind, count)| format!("{kind}={count}"))
        .collect::<Vec<_>>()
        .join(" ");
    copy_text(&text, &buffer, capacity)
}

/// Makes the `k`-th call from now (of one function, or of any where `symbol` is null) fail with
/// `code`. A call that gives something back does so and then fails, or, with `refuse`, does not.
/// `k` = 0 plans nothing.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaFail(symbol: In<c_char>, k: u64, code: c_int, refuse: c_int) {
    let symbol = symbol.text().ok();
    let plan = Plan {
        symbol,
        remaining: k,
        code: Code(code),
        refuse_releases: refuse != 0,
    };
    let mut journal = journal();
    journal.plan = (k > 0).then_some(plan);
    journal.failed = None;
}

/// Names the function that the plan made fail; empty if none yet. Returns the bytes needed.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaFailed(buffer: Out<c_char>, capacity: usize) -> usize {
    copy_text(journal().failed.unwrap_or_default(), &buffer, capacity)
}

/// How many driver calls there have been.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaCalls() -> u64 {
    journal().calls
}

/// The calls since the log was cleared, one `name code` a line. Returns the bytes needed.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaLog(buffer: Out<c_char>, capacity: usize) -> usize {
    let text: String = journal()
        .log
        .iter()
        .map(|(name, code)| format!("{name} {code}\n"))
        .collect();
    copy_text(&text, &buffer, capacity)
}

/// Forgets the calls so far.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaClearLog() {
    journal().log.clear();
}

/// How many contexts the calling thread has pushed and not popped.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaContextDepth() -> usize {
    context_depth()
}

/// Registers the host function that runs in place of a kernel, on the thread of the stream. The
/// name is the entry point's; `name@target`, as in `gather@sm_90`, means only modules for a target.
/// Each of its threads has so many registers.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaRegisterKernel(
    name: In<c_char>,
    host: Option<Host>,
    registers: u32,
) -> c_int {
    match (name.text(), host) {
        (Ok(name), Some(host)) => {
            module::register(name, host, registers);
            0
        }
        _ => Code::INVALID_VALUE.0,
    }
}

/// Waits until so many blocks of the launch that runs on the calling thread are resident, and returns
/// what [`fakeCudaLeave`] takes.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaReside(blocks: u32, threads: u32) -> u64 {
    let Some(launch) = module::launched() else {
        return u64::MAX;
    };
    let registers = residency::registers_of(threads, launch.registers);
    residency::reside(launch.device, blocks, registers)
}

/// The launch has ended, and its blocks are gone.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaLeave(ticket: u64) {
    residency::leave(ticket);
}

/// The device of the launch that runs on the calling thread, or -1.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaLaunchDevice() -> c_int {
    module::launched().map_or(-1, |launch| launch.device as c_int)
}

/// Makes the launch that runs on the calling thread end with a code, and its stream with it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaFailLaunch(code: c_int) {
    module::fail_launch(Code(code));
}

/// Where the replicas behind a multicast span lie in this process, one for each device of the team,
/// by device. Returns their number, or a negative code: the span is not mapped, is not multicast
/// (`-NOT_MAPPED`), or not bound on every device (`-ILLEGAL_STATE`).
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaMulticastReplicas(
    address: u64,
    bytes: usize,
    replicas: *mut *mut c_void,
    capacity: usize,
) -> c_int {
    count(multicast_replicas(address, bytes, replicas, capacity))
}

fn multicast_replicas(
    address: u64,
    bytes: usize,
    replicas: *mut *mut c_void,
    capacity: usize,
) -> Outcome<usize> {
    let (object, offset) = {
        let state = state();
        let (base, mapping) = state
            .mappings
            .range(..=address)
            .next_back()
            .ok_or(Code::NOT_MAPPED)?;
        let inside = (address - base) as usize;
        let fits = inside
            .checked_add(bytes)
            .is_some_and(|end| end <= mapping.size);
        ensure(fits && !mapping.writers.is_empty(), Code::NOT_MAPPED)?;
        (mapping.object.clone(), mapping.offset + inside)
    };
    let shared = object.shared().map_err(|_| Code::NOT_MAPPED)?;
    let found = shared.replicas(offset, bytes)?;
    ensure(found.len() <= capacity, Code::INVALID_VALUE)?;
    for (index, replica) in found.iter().enumerate() {
        // SAFETY: the caller's array has room for `capacity` pointers.
        let place = unsafe { replicas.add(index) };
        Out(place).set(*replica)?;
    }
    Ok(found.len())
}

/// Whether a kernel on `device` may read, or write, a span: 0, or a code.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fakeCudaCheckAccess(
    device: u32,
    address: u64,
    bytes: usize,
    write: c_int,
) -> c_int {
    let checked = check_access(&state(), device, address, bytes, write != 0, false);
    checked.err().map_or(0, |code| code.0)
}
