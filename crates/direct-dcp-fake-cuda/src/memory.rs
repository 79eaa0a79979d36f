//! Memory: `memfd`s behind handles, address ranges, mappings, and who may touch what.

#![allow(unsafe_code)] // mmap and the rest

use core::ffi::c_void;
use std::ffi::CString;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use crate::code::{Code, Outcome, ensure};
use crate::multicast::Shared;
use crate::state::State;

/// Sizes and addresses of memory are a multiple of this.
pub(crate) const MINIMUM_GRANULARITY: usize = 64 << 10;
/// The granularity that gives large pages.
pub(crate) const RECOMMENDED_GRANULARITY: usize = 2 << 20;
/// Memory is filled with this at first, up to [`POISON_LIMIT`]: nobody may count on zeros.
const POISON: u8 = 0xa5;
const POISON_LIMIT: usize = 64 << 20;

/// `CU_MEM_HANDLE_TYPE_*` that exist here.
pub(crate) const POSIX_FD: u32 = 1;
pub(crate) const FABRIC: u32 = 8;

/// What a generic handle stands for.
pub(crate) struct Object {
    pub(crate) fd: OwnedFd,
    pub(crate) size: usize,
    pub(crate) types: u32,
    pub(crate) kind: Kind,
}

pub(crate) enum Kind {
    Memory { device: u32 },
    Multicast(Shared),
}

impl Object {
    pub(crate) fn create_memory(device: u32, size: usize, types: u32) -> Outcome<Self> {
        let fd = memfd(&format!("fakecuda:mem:{device}:{size}:{types}"), size)?;
        poison(fd.as_raw_fd(), size)?;
        Ok(Self {
            fd,
            size,
            types,
            kind: Kind::Memory { device },
        })
    }

    pub(crate) fn create_multicast(devices: u32, size: usize, types: u32) -> Outcome<Self> {
        let fd = memfd(
            &format!("fakecuda:mc:{devices}:{size}:{types}"),
            Shared::BYTES,
        )?;
        let kind = Kind::Multicast(Shared::map(fd.as_raw_fd(), devices)?);
        Ok(Self {
            fd,
            size,
            types,
            kind,
        })
    }

    /// Recognises a descriptor by the name of its `memfd`.
    pub(crate) fn import(fd: OwnedFd) -> Outcome<Self> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
            .map_err(|_| Code::INVALID_VALUE)?;
        let link = link.to_string_lossy().into_owned();
        let name = link
            .strip_prefix("/memfd:fakecuda:")
            .ok_or(Code::INVALID_VALUE)?;
        let name = name.trim_end_matches(" (deleted)");
        let fields: Vec<&str> = name.split(':').collect();
        let [kind, first, size, types] = fields[..] else {
            return Err(Code::INVALID_VALUE);
        };
        let number = |text: &str| text.parse::<usize>().map_err(|_| Code::INVALID_VALUE);
        let first = u32::try_from(number(first)?).map_err(|_| Code::INVALID_VALUE)?;
        let types = u32::try_from(number(types)?).map_err(|_| Code::INVALID_VALUE)?;
        let size = number(size)?;
        let kind = match kind {
            "mem" => Kind::Memory { device: first },
            "mc" => Kind::Multicast(Shared::map(fd.as_raw_fd(), first)?),
            _ => return Err(Code::INVALID_VALUE),
        };
        Ok(Self {
            fd,
            size,
            types,
            kind,
        })
    }

    pub(crate) fn shared(&self) -> Outcome<&Shared> {
        match &self.kind {
            Kind::Multicast(shared) => Ok(shared),
            Kind::Memory { .. } => Err(Code::INVALID_HANDLE),
        }
    }

    pub(crate) fn device(&self) -> Outcome<u32> {
        match self.kind {
            Kind::Memory { device } => Ok(device),
            Kind::Multicast(_) => Err(Code::INVALID_HANDLE),
        }
    }

    pub(crate) fn granularity(&self) -> usize {
        match self.kind {
            Kind::Memory { .. } => MINIMUM_GRANULARITY,
            Kind::Multicast(_) => crate::multicast::MINIMUM_GRANULARITY,
        }
    }
}

/// An object at an address.
pub(crate) struct Mapping {
    pub(crate) size: usize,
    /// Offset into the object; memory is mapped from its beginning.
    pub(crate) offset: usize,
    pub(crate) object: Arc<Object>,
    /// Devices with access.
    pub(crate) readers: Vec<u32>,
    pub(crate) writers: Vec<u32>,
}

/// Plain device memory or pinned host memory.
pub(crate) struct Buffer {
    pub(crate) size: usize,
    pub(crate) context: usize,
    pub(crate) device: u32,
    pub(crate) pinned: bool,
}

/// The buffer that an address is in, and where it begins.
fn buffer_at(state: &State, address: u64) -> Option<(u64, &Buffer)> {
    let (&base, buffer) = state.buffers.range(..=address).next_back()?;
    (address < base + buffer.size as u64).then_some((base, buffer))
}

/// Whether an address is in pinned host memory.
pub(crate) fn is_pinned(state: &State, address: u64) -> bool {
    buffer_at(state, address).is_some_and(|(_, buffer)| buffer.pinned)
}

/// Whether a device may touch a span, and at which host address it lies.
///
/// `copy` is true for copies by the driver, which reach plain memory of any device.
pub(crate) fn check_access(
    state: &State,
    device: u32,
    address: u64,
    bytes: usize,
    write: bool,
    copy: bool,
) -> Outcome<*mut c_void> {
    let end = address
        .checked_add(bytes as u64)
        .ok_or(Code::INVALID_VALUE)?;
    if let Some((base, buffer)) = buffer_at(state, address) {
        let peers = state
            .contexts
            .get(&device)
            .map(|c| c.peers.as_slice())
            .unwrap_or_default();
        let reachable =
            buffer.pinned || copy || buffer.device == device || peers.contains(&buffer.device);
        ensure(
            end <= base + buffer.size as u64 && reachable,
            Code::INVALID_VALUE,
        )?;
        return Ok(pointer(address));
    }
    let mut at = address;
    while at < end {
        let (base, mapping) = state
            .mappings
            .range(..=at)
            .next_back()
            .ok_or(Code::INVALID_VALUE)?;
        let next = base + mapping.size as u64;
        let allowed = if write {
            &mapping.writers
        } else {
            &mapping.readers
        };
        let is_memory = matches!(mapping.object.kind, Kind::Memory { .. });
        ensure(
            at < next && is_memory && allowed.contains(&device),
            Code::INVALID_VALUE,
        )?;
        at = next;
    }
    Ok(pointer(address))
}

/// A device address as a host pointer: they are the same here.
pub(crate) fn pointer(address: u64) -> *mut c_void {
    core::ptr::with_exposed_provenance_mut(address as usize)
}

fn memfd(name: &str, size: usize) -> Outcome<OwnedFd> {
    let name = CString::new(name).map_err(|_| Code::UNKNOWN)?;
    // SAFETY: the name ends in NUL.
    let raw = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if raw < 0 {
        return Err(Code::OPERATING_SYSTEM);
    }
    // SAFETY: just opened, owned by nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    let length = libc::off_t::try_from(size).map_err(|_| Code::OUT_OF_MEMORY)?;
    // SAFETY: the descriptor is open.
    let set = unsafe { libc::ftruncate(raw, length) };
    ensure(set == 0, Code::OUT_OF_MEMORY)?;
    Ok(fd)
}

fn poison(fd: RawFd, size: usize) -> Outcome {
    if size <= POISON_LIMIT {
        let address = map_shared(fd, 0, size)?;
        // SAFETY: just mapped, writable, of this size.
        unsafe { address.cast::<u8>().write_bytes(POISON, size) };
        unmap(address, size);
    }
    Ok(())
}

/// Duplicates a descriptor, closed on exec.
pub(crate) fn duplicate(fd: RawFd) -> Outcome<OwnedFd> {
    ensure(fd >= 0, Code::INVALID_VALUE)?;
    // SAFETY: only borrowed for the call, which refuses a descriptor that is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    borrowed
        .try_clone_to_owned()
        .map_err(|_| Code::INVALID_VALUE)
}

fn mapped(address: *mut c_void) -> Outcome<*mut c_void> {
    if address == libc::MAP_FAILED {
        Err(Code::OUT_OF_MEMORY)
    } else {
        Ok(address)
    }
}

/// Maps part of a `memfd` for reading and writing, anywhere.
pub(crate) fn map_shared(fd: RawFd, offset: usize, size: usize) -> Outcome<*mut c_void> {
    let offset = libc::off_t::try_from(offset).map_err(|_| Code::INVALID_VALUE)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    mapped(unsafe {
        libc::mmap(
            core::ptr::null_mut(),
            size,
            protection,
            libc::MAP_SHARED,
            fd,
            offset,
        )
    })
}

/// Maps anonymous memory, poisoned.
pub(crate) fn map_private(size: usize) -> Outcome<*mut c_void> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let address =
        mapped(unsafe { libc::mmap(core::ptr::null_mut(), size, protection, flags, -1, 0) })?;
    // SAFETY: just mapped, writable, of this size.
    unsafe {
        address
            .cast::<u8>()
            .write_bytes(POISON, size.min(POISON_LIMIT))
    };
    Ok(address)
}

/// Undoes [`map_shared`], [`map_private`] and [`reserve`].
pub(crate) fn unmap(address: *mut c_void, size: usize) {
    // SAFETY: the callers pass exactly what they mapped, once.
    unsafe { libc::munmap(address, size) };
}

const EMPTY: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Reserves addresses that nobody can touch.
pub(crate) fn reserve(size: usize, alignment: usize) -> Outcome<u64> {
    let padded = size.checked_add(alignment).ok_or(Code::OUT_OF_MEMORY)?;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let raw = mapped(unsafe {
        libc::mmap(core::ptr::null_mut(), padded, libc::PROT_NONE, EMPTY, -1, 0)
    })?;
    let start = raw.expose_provenance();
    let base = start.next_multiple_of(alignment);
    if base > start {
        unmap(raw, base - start);
    }
    unmap(pointer((base + size) as u64), start + padded - base - size);
    Ok(base as u64)
}

/// Puts memory into a reserved span, without access.
pub(crate) fn place(address: u64, size: usize, fd: RawFd) -> Outcome {
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: replaces a part of a reservation of ours that is empty.
    mapped(unsafe { libc::mmap(pointer(address), size, libc::PROT_NONE, flags, fd, 0) }).map(drop)
}

/// Empties a span of a reservation.
pub(crate) fn vacate(address: u64, size: usize) -> Outcome {
    let flags = EMPTY | libc::MAP_FIXED;
    // SAFETY: replaces a part of a reservation of ours.
    mapped(unsafe { libc::mmap(pointer(address), size, libc::PROT_NONE, flags, -1, 0) }).map(drop)
}

/// Lets the process, and so every device, touch a span.
pub(crate) fn open(address: u64, size: usize, write: bool) -> Outcome {
    let protection = libc::PROT_READ | if write { libc::PROT_WRITE } else { 0 };
    // SAFETY: a span of a mapping of ours.
    let set = unsafe { libc::mprotect(pointer(address), size, protection) };
    ensure(set == 0, Code::OPERATING_SYSTEM)
}
