//! Plain device memory and pinned host memory.

use core::ffi::{c_uint, c_void};

use crate::abi::Out;
use crate::call::export;
use crate::capture::refuse_during_capture;
use crate::code::{Code, Outcome, ensure};
use crate::memory::{Buffer, map_private, pointer, unmap};
use crate::state::{require_context, state};

/// Allocates and returns the address.
fn allocate(bytes: usize, pinned: bool) -> Outcome<u64> {
    ensure(bytes > 0, Code::INVALID_VALUE)?;
    let mut state = state();
    let (context, device) = require_context(&state)?;
    refuse_during_capture(&state)?;
    let address = map_private(bytes)?.expose_provenance() as u64;
    state.buffers.insert(
        address,
        Buffer {
            size: bytes,
            context,
            device,
            pinned,
        },
    );
    Ok(address)
}

/// Waits for the context's work, as the driver does, and frees.
fn free(address: u64, pinned: bool) -> Outcome {
    let streams: Vec<_> = {
        let state = state();
        let (context, _) = require_context(&state)?;
        refuse_during_capture(&state)?;
        let buffer = state.buffers.get(&address).ok_or(Code::INVALID_VALUE)?;
        ensure(buffer.pinned == pinned, Code::INVALID_VALUE)?;
        ensure(pinned || buffer.context == context, Code::INVALID_CONTEXT)?;
        let all = state.streams.values().chain(state.default_streams.values());
        all.filter(|s| s.context == buffer.context)
            .map(|s| (s.clone(), s.position()))
            .collect()
    };
    for (stream, position) in streams {
        let _ = stream.wait_for(position); // its failure is for whoever synchronizes it
    }
    let buffer = state()
        .buffers
        .remove(&address)
        .ok_or(Code::INVALID_VALUE)?;
    unmap(pointer(address), buffer.size);
    Ok(())
}

export! {
    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        address.set(allocate(bytes, false)?)
    }
    fn cuMemFree_v2(address: u64) {
        free(address, false)
    }
    fn cuMemHostAlloc(host: Out<*mut c_void>, bytes: usize, flags: c_uint) {
        ensure(flags & !7 == 0, Code::INVALID_VALUE)?;
        host.set(pointer(allocate(bytes, true)?))
    }
    fn cuMemFreeHost(host: *mut c_void) {
        free(host.expose_provenance() as u64, true)
    }
    fn cuMemHostGetDevicePointer_v2(address: Out<u64>, host: *mut c_void, flags: c_uint) {
        ensure(flags == 0, Code::INVALID_VALUE)?;
        let at = host.expose_provenance() as u64;
        let pinned = state().buffers.get(&at).is_some_and(|buffer| buffer.pinned);
        ensure(pinned, Code::INVALID_VALUE)?;
        address.set(at)
    }
}
