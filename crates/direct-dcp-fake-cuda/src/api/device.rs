//! Initialisation, devices, contexts.

use core::ffi::{c_char, c_int, c_uint};

use crate::abi::Out;
use crate::call::{export, journal};
use crate::code::{Code, ensure, name};
use crate::state::{
    Machine, current_context, new_handle, pop_context, push_context, require_context, state,
};

/// The CUDA version that the fake claims.
const VERSION: c_int = 13_000;
const TOTAL_MEMORY: usize = 8 << 30;

export! {
    fn cuInit(flags: c_uint) {
        ensure(flags == 0, Code::INVALID_VALUE)?;
        ensure(Machine::get().devices > 0, Code::NO_DEVICE)?;
        journal().initialised = true;
        Ok(())
    }
    fn cuDriverGetVersion(version: Out<c_int>) {
        version.set(VERSION)
    }
    fn cuDeviceGetCount(count: Out<c_int>) {
        count.set(Machine::get().devices as c_int)
    }
    fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
        device.set(Machine::get().device(ordinal)? as c_int)
    }
    fn cuDeviceGetName(text: Out<c_char>, len: c_int, device: c_int) {
        let device = Machine::get().device(device)?;
        text.set_text(&format!("Fake GPU {device}"), usize::try_from(len).unwrap_or(0))
    }
    fn cuDeviceGetPCIBusId(text: Out<c_char>, len: c_int, device: c_int) {
        let device = Machine::get().device(device)?;
        ensure(len >= 13, Code::INVALID_VALUE)?;
        text.set_text(&format!("0000:{:02X}:00.0", device + 1), usize::try_from(len).unwrap_or(0))
    }
    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) {
        let device = Machine::get().device(device)? as u8;
        let mut bytes = *b"FAKE-GPU-UUID-00";
        bytes[15] += device;
        uuid.set(bytes)
    }
    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_uint, device: c_int) {
        let machine = Machine::get();
        machine.device(device)?;
        let has = |feature| c_int::from(machine.has(feature));
        value.set(match attribute {
            1 => 1024,
            8 => 48 << 10,
            16 => machine.multiprocessors,
            39 => 2048,
            41 => 1,
            75 => 9,
            76 => 0,
            86 => 0,
            91 => 1,
            102 => has("vmm"),
            103 => has("fd"),
            128 => has("fabric"),
            132 => has("multicast"),
            _ => return Err(Code::INVALID_VALUE),
        })
    }
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
        Machine::get().device(device)?;
        bytes.set(TOTAL_MEMORY)
    }
    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) {
        let machine = Machine::get();
        let different = machine.device(device)? != machine.device(peer)?;
        can.set(c_int::from(different && machine.has("p2p")))
    }
    fn cuDeviceGetP2PAttribute(value: Out<c_int>, attribute: c_uint, source: c_int, destination: c_int) {
        let machine = Machine::get();
        ensure(machine.device(source)? != machine.device(destination)?, Code::INVALID_DEVICE)?;
        let peer = c_int::from(machine.has("p2p"));
        value.set(match attribute {
            1 => 0,
            2..=4 => peer,
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    fn cuDevicePrimaryCtxRetain(context: Out<usize>, device: c_int) {
        let device = Machine::get().device(device)?;
        let mut state = state();
        let primary = state.contexts.entry(device).or_default();
        if primary.retained == 0 {
            primary.handle = new_handle();
            primary.peers.clear();
        }
        context.set(primary.handle)?;
        primary.retained += 1;
        Ok(())
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let device = Machine::get().device(device)?;
        let mut state = state();
        let primary = state.contexts.get_mut(&device).ok_or(Code::INVALID_CONTEXT)?;
        ensure(primary.retained > 0, Code::INVALID_CONTEXT)?;
        primary.retained -= 1;
        if primary.retained == 0 {
            let handle = primary.handle;
            state.default_streams.retain(|(context, _), stream| {
                if *context == handle {
                    stream.close();
                }
                *context != handle
            });
        }
        Ok(())
    }
    fn cuCtxPushCurrent_v2(context: usize) {
        state().device_of(context).map_err(|_| Code::INVALID_CONTEXT)?;
        push_context(context);
        Ok(())
    }
    fn cuCtxPopCurrent_v2(context: Out<usize>) {
        context.set(pop_context()?)
    }
    fn cuCtxGetCurrent(context: Out<usize>) {
        context.set(current_context().unwrap_or(0))
    }
    fn cuCtxSynchronize() {
        let streams: Vec<_> = {
            let state = state();
            let (context, _) = require_context(&state)?;
            crate::capture::refuse_during_capture(&state)?;
            let all = state.streams.values().chain(state.default_streams.values());
            all.filter(|s| s.context == context).map(|s| (s.clone(), s.position())).collect()
        };
        streams.into_iter().try_for_each(|(stream, position)| stream.wait_for(position))
    }
    fn cuCtxEnablePeerAccess(peer: usize, flags: c_uint) {
        ensure(flags == 0, Code::INVALID_VALUE)?;
        ensure(Machine::get().has("p2p"), Code(217))?;
        let mut state = state();
        let (_, device) = require_context(&state)?;
        let peer = state.device_of(peer).map_err(|_| Code::INVALID_CONTEXT)?;
        ensure(peer != device, Code::INVALID_DEVICE)?;
        let primary = state.contexts.get_mut(&device).ok_or(Code::INVALID_CONTEXT)?;
        ensure(!primary.peers.contains(&peer), Code::PEER_ACCESS_ALREADY_ENABLED)?;
        primary.peers.push(peer);
        Ok(())
    }
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let state = state();
        require_context(&state)?;
        let used: usize = state.buffers.values().filter(|b| !b.pinned).map(|b| b.size).sum();
        free.set(TOTAL_MEMORY.saturating_sub(used))?;
        total.set(TOTAL_MEMORY)
    }
}

/// `cuGetErrorName`: not logged, never made to fail.
#[allow(unsafe_code, non_snake_case)] // an exported symbol, named as in C
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetErrorName(error: c_int, text: Out<*const c_char>) -> c_int {
    let found = name(error).map_or(core::ptr::null(), |name| name.as_ptr());
    let outcome = text
        .set(found)
        .and(ensure(!found.is_null(), Code::INVALID_VALUE));
    outcome.err().map_or(0, |code| code.0)
}

/// `cuGetErrorString`: not logged, never made to fail.
#[allow(unsafe_code, non_snake_case)] // an exported symbol, named as in C
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetErrorString(error: c_int, text: Out<*const c_char>) -> c_int {
    let known = name(error).is_some();
    let found = if known {
        c"the fake driver says so".as_ptr()
    } else {
        core::ptr::null()
    };
    let outcome = text.set(found).and(ensure(known, Code::INVALID_VALUE));
    outcome.err().map_or(0, |code| code.0)
}
