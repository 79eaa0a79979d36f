//! Multicast objects.

use core::ffi::{c_int, c_uint};
use std::sync::Arc;

use super::vmm::{check_channel, check_types, insert, object};
use crate::abi::{In, MulticastProp, Out};
use crate::call::export;
use crate::code::{Code, Outcome, ensure};
use crate::memory::Object;
use crate::multicast::{MINIMUM_GRANULARITY, RECOMMENDED_GRANULARITY, Shared};
use crate::state::{Machine, State, state};

/// Checks the properties and returns the handle types.
fn check(prop: MulticastProp) -> Outcome<u32> {
    let machine = Machine::get();
    ensure(machine.has("multicast"), Code::NOT_SUPPORTED)?;
    ensure(
        (1..=machine.devices).contains(&prop.devices),
        Code::INVALID_VALUE,
    )?;
    ensure(prop.flags == 0 && prop.size > 0, Code::INVALID_VALUE)?;
    let types = u32::try_from(prop.handle_types).map_err(|_| Code::INVALID_VALUE)?;
    check_types(types)?;
    Ok(types)
}

fn bind(
    state: &mut State,
    object: &Arc<Object>,
    offset: usize,
    memory: &Object,
    memory_offset: usize,
    bytes: usize,
) -> Outcome {
    let shared = object.shared()?;
    let aligned = [offset, memory_offset, bytes]
        .iter()
        .all(|n| n.is_multiple_of(MINIMUM_GRANULARITY));
    ensure(aligned && bytes > 0, Code::INVALID_VALUE)?;
    let fits =
        |offset: usize, size: usize| offset.checked_add(bytes).is_some_and(|end| end <= size);
    ensure(
        fits(offset, object.size) && fits(memory_offset, memory.size),
        Code::INVALID_VALUE,
    )?;
    ensure(object.types == 0 || memory.types != 0, Code::INVALID_VALUE)?;
    shared.require_complete()?;
    ensure(shared.has_device(memory.device()?)?, Code::INVALID_DEVICE)?;
    let binding = Shared::bind(object, offset, memory, memory_offset, bytes)?;
    state.bindings.push(binding);
    Ok(())
}

export! {
    fn cuMulticastGetGranularity(bytes: Out<usize>, prop: In<MulticastProp>, option: c_uint) {
        check(prop.get()?)?;
        bytes.set(match option {
            0 => MINIMUM_GRANULARITY,
            1 => RECOMMENDED_GRANULARITY,
            _ => return Err(Code::INVALID_VALUE),
        })
    }
    fn cuMulticastCreate(handle: Out<u64>, prop: In<MulticastProp>) {
        let prop = prop.get()?;
        let types = check(prop)?;
        check_channel(types)?;
        ensure(prop.size.is_multiple_of(MINIMUM_GRANULARITY), Code::INVALID_VALUE)?;
        let object = Object::create_multicast(prop.devices, prop.size, types)?;
        handle.set(insert(&mut state(), object))
    }
    fn cuMulticastAddDevice(handle: u64, device: c_int) {
        let object = object(&state(), handle)?;
        object.shared()?.add_device(Machine::get().device(device)?)
    }
    fn cuMulticastBindMem(handle: u64, offset: usize, memory: u64, memory_offset: usize, bytes: usize, flags: u64) {
        ensure(flags == 0, Code::INVALID_VALUE)?;
        let mut state = state();
        let multicast = object(&state, handle)?;
        let memory = object(&state, memory)?;
        bind(&mut state, &multicast, offset, &memory, memory_offset, bytes)
    }
    fn cuMulticastBindAddr(handle: u64, offset: usize, address: u64, bytes: usize, flags: u64) {
        ensure(flags == 0, Code::INVALID_VALUE)?;
        let mut state = state();
        let multicast = object(&state, handle)?;
        let (base, mapping) = state.mappings.range(..=address).next_back().ok_or(Code::NOT_MAPPED)?;
        let inside = usize::try_from(address - base).map_err(|_| Code::INVALID_VALUE)?;
        ensure(inside + bytes <= mapping.size, Code::INVALID_VALUE)?;
        let memory = Arc::clone(&mapping.object);
        bind(&mut state, &multicast, offset, &memory, inside, bytes)
    }
    fn cuMulticastUnbind(handle: u64, device: c_int, offset: usize, bytes: usize) {
        let mut state = state();
        let multicast = object(&state, handle)?;
        let device = Machine::get().device(device)?;
        let found = state.bindings.iter().position(|b| {
            Arc::ptr_eq(&b.object, &multicast)
                && (b.device, b.offset, b.bytes) == (device, offset, bytes)
        });
        let found = found.ok_or(Code::INVALID_VALUE)?;
        let binding = state.bindings.swap_remove(found);
        Shared::unbind(&binding)
    }
}
