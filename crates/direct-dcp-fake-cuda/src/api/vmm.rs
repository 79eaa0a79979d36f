//! Virtual memory.

#![allow(unsafe_code)] // the two shapes of a shareable handle

use core::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use crate::abi::{AccessDesc, AllocationProp, In, Out};
use crate::call::export;
use crate::code::{Code, Outcome, ensure};
use crate::memory::{
    FABRIC, Kind, MINIMUM_GRANULARITY, Mapping, Object, POSIX_FD, RECOMMENDED_GRANULARITY,
    duplicate, open, place, pointer, reserve, unmap, vacate,
};
use crate::state::{Machine, State, new_handle, state};

/// Checks the properties and returns the device and the handle types.
fn check(prop: AllocationProp) -> Outcome<(u32, u32)> {
    let machine = Machine::get();
    ensure(machine.has("vmm"), Code::NOT_SUPPORTED)?;
    ensure(
        prop.kind == 1 && prop.location.kind == 1,
        Code::INVALID_VALUE,
    )?;
    ensure(
        prop.win32.is_null() && prop.reserved == [0; 4],
        Code::INVALID_VALUE,
    )?;
    ensure(
        prop.compression == 0 && prop.rdma <= 1 && prop.usage == 0,
        Code::INVALID_VALUE,
    )?;
    check_types(prop.handle_types)?;
    Ok((machine.device(prop.location.id)?, prop.handle_types))
}

pub(super) fn check_types(types: u32) -> Outcome {
    let machine = Machine::get();
    ensure(types & !(POSIX_FD | FABRIC) == 0, Code::INVALID_VALUE)?;
    ensure(
        types & POSIX_FD == 0 || machine.has("fd"),
        Code::NOT_SUPPORTED,
    )?;
    ensure(
        types & FABRIC == 0 || machine.has("fabric"),
        Code::NOT_SUPPORTED,
    )
}

/// Without a channel, fabric handles can be asked for and not made.
pub(super) fn check_channel(types: u32) -> Outcome {
    ensure(
        types & FABRIC == 0 || Machine::get().has("imex"),
        Code::NOT_PERMITTED,
    )
}

pub(super) fn insert(state: &mut State, object: Object) -> u64 {
    let handle = new_handle() as u64;
    state.objects.insert(handle, Arc::new(object));
    handle
}

pub(super) fn object(state: &State, handle: u64) -> Outcome<Arc<Object>> {
    state
        .objects
        .get(&handle)
        .cloned()
        .ok_or(Code::INVALID_HANDLE)
}

/// A fabric handle: where the descriptor is, and what names it beyond doubt.
#[repr(C)]
#[derive(Clone, Copy)]
struct Fabric {
    magic: [u8; 8],
    pid: u32,
    fd: RawFd,
    inode: u64,
    rest: [u8; 40],
}

const MAGIC: [u8; 8] = *b"FAKEFABR";

fn inode(path: &str) -> Outcome<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path)
        .map(|meta| meta.ino())
        .map_err(|_| Code::INVALID_VALUE)
}

fn open_fabric(fabric: Fabric) -> Outcome<OwnedFd> {
    ensure(fabric.magic == MAGIC, Code::INVALID_VALUE)?;
    let path = format!("/proc/{}/fd/{}", fabric.pid, fabric.fd);
    ensure(inode(&path)? == fabric.inode, Code::INVALID_VALUE)?;
    let file = std::fs::File::options().read(true).write(true).open(path);
    file.map(OwnedFd::from).map_err(|_| Code::INVALID_VALUE)
}

export! {
    fn cuMemGetAllocationGranularity(bytes: Out<usize>, prop: In<AllocationProp>, option: c_uint) {
        check(prop.get()?)?;
        bytes.set(match option {
            0 => MINIMUM_GRANULARITY,
            1 => RECOMMENDED_GRANULARITY,
            _ => return Err(Code::INVALID_VALUE),
        })
    }
    fn cuMemCreate(handle: Out<u64>, bytes: usize, prop: In<AllocationProp>, flags: u64) {
        let (device, types) = check(prop.get()?)?;
        check_channel(types)?;
        ensure(flags == 0 && bytes > 0, Code::INVALID_VALUE)?;
        ensure(bytes.is_multiple_of(MINIMUM_GRANULARITY), Code::INVALID_VALUE)?;
        let object = Object::create_memory(device, bytes, types)?;
        handle.set(insert(&mut state(), object))
    }
    fn cuMemRelease(handle: u64) {
        // Mappings and bindings keep the object itself.
        state().objects.remove(&handle).map(drop).ok_or(Code::INVALID_VALUE)
    }
    fn cuMemGetAllocationPropertiesFromHandle(prop: Out<AllocationProp>, handle: u64) {
        let object = object(&state(), handle)?;
        let id = object.device()? as c_int;
        prop.set(AllocationProp {
            kind: 1,
            handle_types: object.types,
            location: crate::abi::Location { kind: 1, id },
            win32: core::ptr::null_mut(),
            compression: 0,
            rdma: 0,
            usage: 0,
            reserved: [0; 4],
        })
    }

    fn cuMemAddressReserve(address: Out<u64>, bytes: usize, alignment: usize, hint: u64, flags: u64) {
        ensure(Machine::get().has("vmm"), Code::NOT_SUPPORTED)?;
        ensure(flags == 0 && hint == 0 && bytes > 0, Code::INVALID_VALUE)?;
        ensure(bytes.is_multiple_of(MINIMUM_GRANULARITY), Code::INVALID_VALUE)?;
        ensure(alignment == 0 || alignment.is_power_of_two(), Code::INVALID_VALUE)?;
        let base = reserve(bytes, alignment.max(RECOMMENDED_GRANULARITY))?;
        state().ranges.insert(base, bytes);
        address.set(base)
    }
    fn cuMemAddressFree(address: u64, bytes: usize) {
        let mut state = state();
        ensure(state.ranges.get(&address) == Some(&bytes), Code::INVALID_VALUE)?;
        let busy = state.mappings.range(address..address + bytes as u64).next().is_some();
        ensure(!busy, Code::INVALID_VALUE)?;
        state.ranges.remove(&address);
        unmap(pointer(address), bytes);
        Ok(())
    }
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        let mut state = state();
        let object = object(&state, handle)?;
        let unit = object.granularity();
        ensure(flags == 0 && bytes > 0 && bytes.is_multiple_of(unit), Code::INVALID_VALUE)?;
        ensure(address.is_multiple_of(unit as u64), Code::INVALID_VALUE)?;
        let end = address.checked_add(bytes as u64).ok_or(Code::INVALID_VALUE)?;
        let (base, size) = state.ranges.range(..=address).next_back().ok_or(Code::INVALID_VALUE)?;
        ensure(end <= base + *size as u64, Code::INVALID_VALUE)?;
        let before = state.mappings.range(..end).next_back();
        ensure(before.is_none_or(|(at, m)| at + m.size as u64 <= address), Code::ALREADY_MAPPED)?;
        match &object.kind {
            Kind::Memory { .. } => {
                // A real driver's documentation: the offset must be zero.
                ensure(offset == 0 && bytes <= object.size, Code::INVALID_VALUE)?;
                place(address, bytes, object.fd.as_raw_fd())?;
            }
            Kind::Multicast(shared) => {
                let inside = offset.checked_add(bytes).is_some_and(|end| end <= object.size);
                ensure(inside && offset.is_multiple_of(unit), Code::INVALID_VALUE)?;
                shared.require_complete()?;
                // The addresses stay untouchable: there is no memory that a plain store could mean.
            }
        }
        let mapping = Mapping { size: bytes, offset, object, readers: Vec::new(), writers: Vec::new() };
        state.mappings.insert(address, mapping);
        Ok(())
    }
    fn cuMemUnmap(address: u64, bytes: usize) {
        let mut state = state();
        let mapping = state.mappings.get(&address).ok_or(Code::NOT_MAPPED)?;
        ensure(mapping.size == bytes, Code::INVALID_VALUE)?;
        vacate(address, bytes)?;
        state.mappings.remove(&address);
        Ok(())
    }
    fn cuMemSetAccess(address: u64, bytes: usize, access: In<AccessDesc>, count: usize) {
        let machine = Machine::get();
        let mut state = state();
        let mapping = state.mappings.get_mut(&address).ok_or(Code::NOT_MAPPED)?;
        ensure(mapping.size == bytes && count > 0, Code::INVALID_VALUE)?;
        let (mut readers, mut writers) = (mapping.readers.clone(), mapping.writers.clone());
        for index in 0..count {
            let AccessDesc { location, flags } = access.at(index)?;
            ensure(location.kind == 1 && matches!(flags, 0 | 1 | 3), Code::INVALID_VALUE)?;
            let device = machine.device(location.id)?;
            match &mapping.object.kind {
                Kind::Memory { device: home } => {
                    ensure(device == *home || machine.has("p2p"), Code::INVALID_DEVICE)?;
                }
                Kind::Multicast(shared) => ensure(shared.has_device(device)?, Code::INVALID_DEVICE)?,
            }
            readers.retain(|other| *other != device);
            writers.retain(|other| *other != device);
            if flags != 0 {
                readers.push(device);
            }
            if flags == 3 {
                writers.push(device);
            }
        }
        if matches!(mapping.object.kind, Kind::Memory { .. }) {
            open(address, bytes, !writers.is_empty())?;
        }
        (mapping.readers, mapping.writers) = (readers, writers);
        Ok(())
    }

    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: u64, kind: c_uint, flags: u64) {
        ensure(flags == 0, Code::INVALID_VALUE)?;
        let object = object(&state(), handle)?;
        ensure(object.types & kind == kind, Code::INVALID_VALUE)?;
        match kind {
            POSIX_FD => {
                let fd = duplicate(object.fd.as_raw_fd())?;
                Out(shareable.cast::<c_int>()).set(fd.into_raw_fd())
            }
            FABRIC => {
                let (pid, fd) = (std::process::id(), object.fd.as_raw_fd());
                let inode = inode(&format!("/proc/self/fd/{fd}"))?;
                let fabric = Fabric { magic: MAGIC, pid, fd, inode, rest: [0x5a; 40] };
                // A caller's 64 bytes need not be aligned.
                // SAFETY: plain data without padding, of the size of the array.
                let bytes: [u8; 64] = unsafe { core::mem::transmute(fabric) };
                Out(shareable.cast::<[u8; 64]>()).set(bytes)
            }
            _ => Err(Code::INVALID_VALUE),
        }
    }
    fn cuMemImportFromShareableHandle(handle: Out<u64>, shareable: *mut c_void, kind: c_uint) {
        // A real driver refuses null for either kind, and so descriptor 0.
        ensure(!shareable.is_null(), Code::INVALID_VALUE)?;
        let fd = match kind {
            POSIX_FD => {
                let raw = RawFd::try_from(shareable.addr()).map_err(|_| Code::INVALID_VALUE)?;
                duplicate(raw)?
            }
            FABRIC => {
                let bytes = In(shareable.cast_const().cast::<[u8; 64]>()).get()?;
                // SAFETY: every pattern of 64 bytes is a `Fabric`.
                open_fabric(unsafe { core::mem::transmute::<[u8; 64], Fabric>(bytes) })?
            }
            _ => return Err(Code::INVALID_VALUE),
        };
        let object = Object::import(fd)?;
        ensure(object.types & kind == kind, Code::INVALID_VALUE)?;
        handle.set(insert(&mut state(), object))
    }
}
