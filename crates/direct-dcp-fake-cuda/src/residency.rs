//! What runs on each device, and which blocks its multiprocessors have room for: by registers, as
//! the gather kernels fill them.

use std::collections::HashMap;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::state::Machine;

/// Registers of a multiprocessor.
pub(crate) const REGISTERS: u32 = 1 << 16;

/// Registers of a block: whole warps, and eight by eight in each thread.
pub(crate) fn registers_of(threads: u32, registers: u32) -> u32 {
    threads.next_multiple_of(32) * registers.next_multiple_of(8).max(8)
}

/// A device, one of its multiprocessors, and registers of it.
type Place = (u32, usize, u32);

#[derive(Default)]
struct Residents {
    /// Registers that nobody has, by device and multiprocessor.
    free: HashMap<u32, Vec<u32>>,
    launches: HashMap<u64, Vec<Place>>,
    next: u64,
    /// Kernels that run, by device.
    running: HashMap<u32, usize>,
}

static RESIDENTS: LazyLock<Mutex<Residents>> = LazyLock::new(Mutex::default);
static LEFT: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Residents> {
    RESIDENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn wait(residents: MutexGuard<'static, Residents>) -> MutexGuard<'static, Residents> {
    let waited = LEFT.wait(residents);
    waited.unwrap_or_else(PoisonError::into_inner)
}

/// Runs a kernel on a device.
pub(crate) fn run(device: u32, kernel: impl FnOnce()) {
    *lock().running.entry(device).or_default() += 1;
    kernel();
    if let Some(running) = lock().running.get_mut(&device) {
        *running -= 1;
    }
    LEFT.notify_all();
}

/// Waits until no kernel runs on a device.
pub(crate) fn idle(device: u32) {
    let mut residents = lock();
    while residents
        .running
        .get(&device)
        .is_some_and(|&running| running > 0)
    {
        residents = wait(residents);
    }
}

/// Gives each of so many blocks of `registers` a place, one after another, where there is most room;
/// those that have one keep it while the next has to wait. Returns what [`leave`] takes.
pub(crate) fn reside(device: u32, blocks: u32, registers: u32) -> u64 {
    let mut residents = lock();
    let ticket = residents.next;
    residents.next += 1;
    for _ in 0..blocks {
        while !residents.place(ticket, device, registers) {
            residents = wait(residents);
        }
    }
    ticket
}

impl Residents {
    /// Gives a block of a launch a place, if there is one.
    fn place(&mut self, ticket: u64, device: u32, registers: u32) -> bool {
        let multiprocessors = Machine::get().multiprocessors.max(1) as usize;
        let free = self.free.entry(device);
        let free = free.or_insert_with(|| vec![REGISTERS; multiprocessors]);
        let roomiest = free.iter_mut().enumerate().max_by_key(|(_, room)| **room);
        let Some((at, room)) = roomiest.filter(|(_, room)| **room >= registers) else {
            return false;
        };
        *room -= registers;
        let places = self.launches.entry(ticket).or_default();
        places.push((device, at, registers));
        true
    }
}

/// Takes all blocks of a launch away.
pub(crate) fn leave(ticket: u64) {
    let mut residents = lock();
    for (device, at, registers) in residents.launches.remove(&ticket).unwrap_or_default() {
        if let Some(free) = residents.free.get_mut(&device) {
            free[at] += registers;
        }
    }
    LEFT.notify_all();
}
