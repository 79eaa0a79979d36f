//! Multicast objects: a page that all processes of a team share.
//!
//! The page holds which devices were added and which memory is bound where. Memory is named by the
//! process that bound it and a descriptor of it there, which other processes of the same user open
//! through `/proc`. Whoever wants the replicas of an address maps that memory too.

#![allow(unsafe_code)] // the shared page

use core::cell::UnsafeCell;
use core::ffi::c_void;
use core::sync::atomic::{AtomicU32, Ordering};
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::code::{Code, Outcome, ensure};
use crate::memory::{self, Object};

/// Sizes and offsets of binds and mappings are a multiple of this.
pub(crate) const MINIMUM_GRANULARITY: usize = 2 << 20;
/// What a real driver finds best is much more.
pub(crate) const RECOMMENDED_GRANULARITY: usize = 4 << 20;

const MAX_DEVICES: usize = 16;
const MAX_BINDINGS: usize = 64;

/// Memory of one device behind a part of an object, as the page has it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Slot {
    /// Counts binds from 1; 0 is a free slot.
    serial: u64,
    device: u32,
    pid: u32,
    fd: i32,
    offset: usize,
    memory_offset: usize,
    bytes: usize,
}

#[repr(C)]
struct Table {
    added_count: u32,
    added: [u32; MAX_DEVICES],
    next_serial: u64,
    slots: [Slot; MAX_BINDINGS],
}

/// The page: a spin lock and what it protects.
#[repr(C)]
struct Page {
    lock: AtomicU32,
    table: UnsafeCell<Table>,
}

/// This process's view of a multicast object.
pub(crate) struct Shared {
    page: *mut Page,
    devices: u32,
    /// Bound memory that was mapped here to be stored to, by serial.
    views: Mutex<HashMap<u64, (usize, usize)>>,
}

// SAFETY: the page stays mapped until `drop`; its table is only touched under its lock.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// A binding made by this process, which keeps the memory's descriptor open.
pub(crate) struct Binding {
    pub(crate) object: Arc<Object>,
    pub(crate) device: u32,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
    serial: u64,
    _fd: OwnedFd,
}

impl Shared {
    pub(crate) const BYTES: usize = size_of::<Page>().next_multiple_of(4096);

    pub(crate) fn map(fd: RawFd, devices: u32) -> Outcome<Self> {
        ensure(
            (1..=MAX_DEVICES as u32).contains(&devices),
            Code::INVALID_VALUE,
        )?;
        let page = memory::map_shared(fd, 0, Self::BYTES)?.cast();
        Ok(Self {
            page,
            devices,
            views: Mutex::default(),
        })
    }

    /// Runs `body` with the table locked against all processes.
    fn with<R>(&self, body: impl FnOnce(&mut Table) -> Outcome<R>) -> Outcome<R> {
        // SAFETY: mapped until `drop`, and zeros are a valid page.
        let page = unsafe { &*self.page };
        let mut tries = 0_u32;
        while page.lock.swap(1, Ordering::Acquire) != 0 {
            tries += 1;
            // A process that died with the lock must not hang the others.
            ensure(tries < 1_000_000, Code::SYSTEM_NOT_READY)?;
            std::thread::yield_now();
        }
        // SAFETY: the lock is held, so nobody else has a reference.
        let outcome = body(unsafe { &mut *page.table.get() });
        page.lock.store(0, Ordering::Release);
        outcome
    }

    pub(crate) fn add_device(&self, device: u32) -> Outcome {
        self.with(|table| {
            let count = table.added_count as usize;
            let known = table.added[..count].contains(&device);
            ensure(!known && count < self.devices as usize, Code::INVALID_VALUE)?;
            table.added[count] = device;
            table.added_count += 1;
            Ok(())
        })
    }

    /// A real driver would wait here until all devices are added.
    pub(crate) fn require_complete(&self) -> Outcome {
        self.with(|table| ensure(table.added_count == self.devices, Code::ILLEGAL_STATE))
    }

    pub(crate) fn has_device(&self, device: u32) -> Outcome<bool> {
        self.with(|table| Ok(table.added[..table.added_count as usize].contains(&device)))
    }

    /// Binds checked memory.
    pub(crate) fn bind(
        object: &Arc<Object>,
        offset: usize,
        memory: &Object,
        memory_offset: usize,
        bytes: usize,
    ) -> Outcome<Binding> {
        let device = memory.device()?;
        let fd = memory::duplicate(memory.fd.as_raw_fd())?;
        let (raw, pid) = (fd.as_raw_fd(), std::process::id());
        let serial = object.shared()?.with(|table| {
            let end = offset + bytes;
            let mut used = table.slots.iter().filter(|slot| slot.serial != 0);
            let overlaps =
                used.any(|s| s.device == device && s.offset < end && offset < s.offset + s.bytes);
            ensure(!overlaps, Code::INVALID_VALUE)?;
            let free = table.slots.iter_mut().find(|slot| slot.serial == 0);
            let slot = free.ok_or(Code::OUT_OF_MEMORY)?;
            table.next_serial += 1;
            let serial = table.next_serial;
            *slot = Slot {
                serial,
                device,
                pid,
                fd: raw,
                offset,
                memory_offset,
                bytes,
            };
            Ok(serial)
        })?;
        Ok(Binding {
            object: Arc::clone(object),
            device,
            offset,
            bytes,
            serial,
            _fd: fd,
        })
    }

    pub(crate) fn unbind(binding: &Binding) -> Outcome {
        binding.object.shared()?.with(|table| {
            let slot = table
                .slots
                .iter_mut()
                .find(|slot| slot.serial == binding.serial);
            *slot.ok_or(Code::INVALID_VALUE)? = Slot::default();
            Ok(())
        })
    }

    /// Where the replicas of a span lie in this process, by device; one for each device of the
    /// team, or an error.
    pub(crate) fn replicas(&self, offset: usize, bytes: usize) -> Outcome<Vec<*mut c_void>> {
        let mut slots = self.with(|table| {
            let covers = |s: &&Slot| {
                s.serial != 0 && s.offset <= offset && offset + bytes <= s.offset + s.bytes
            };
            Ok(table
                .slots
                .iter()
                .filter(covers)
                .copied()
                .collect::<Vec<_>>())
        })?;
        ensure(slots.len() == self.devices as usize, Code::ILLEGAL_STATE)?;
        slots.sort_by_key(|slot| slot.device);
        let mut views = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        let place = |slot: &Slot| {
            let view = match views.get(&slot.serial) {
                Some((view, _)) => *view,
                None => {
                    let view = view_of(slot)?;
                    views.insert(slot.serial, (view, slot.bytes));
                    view
                }
            };
            Ok(memory::pointer((view + offset - slot.offset) as u64))
        };
        slots.iter().map(place).collect()
    }
}

/// Maps the memory behind a binding, whichever process bound it.
fn view_of(slot: &Slot) -> Outcome<usize> {
    let path = format!("/proc/{}/fd/{}", slot.pid, slot.fd);
    let file = std::fs::File::options().read(true).write(true).open(path);
    let file = file.map_err(|_| Code::OPERATING_SYSTEM)?;
    let view = memory::map_shared(file.as_raw_fd(), slot.memory_offset, slot.bytes)?;
    Ok(view.expose_provenance())
}

impl Drop for Shared {
    fn drop(&mut self) {
        let views = self.views.get_mut().unwrap_or_else(PoisonError::into_inner);
        for (view, bytes) in views.values() {
            memory::unmap(memory::pointer(*view as u64), *bytes);
        }
        memory::unmap(self.page.cast(), Self::BYTES);
    }
}
