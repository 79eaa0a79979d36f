//! A launch: its arguments, checked, and its blocks.

#![allow(unsafe_code)] // arguments and tables, by address

use core::ffi::c_void;
use core::num::NonZeroU32;
use core::sync::atomic::{AtomicI32, Ordering};
use std::time::Instant;

use direct_dcp_fake_cuda::Resident;
use direct_dcp_kernels::device::{Arguments, PlaceArguments, Receiver, State, Status};
use direct_dcp_kernels::{Call, Shape, protocol};

use crate::thread::{Team, Thread};
use crate::{fake, memory};

/// `CUDA_ERROR_INVALID_VALUE`, `_ILLEGAL_ADDRESS` and `_MISALIGNED_ADDRESS`.
const INVALID_VALUE: i32 = 1;
const ILLEGAL_ADDRESS: i32 = 700;
const MISALIGNED_ADDRESS: i32 = 716;

/// A launch under way, shared by its threads.
pub(crate) struct Launch {
    pub(crate) arguments: Arguments,
    /// Where rows go that have a place each.
    pub(crate) placing: Option<Placing>,
    /// The table that [`Arguments::receivers`] points to.
    pub(crate) receivers: Vec<Receiver>,
    pub(crate) world_size: NonZeroU32,
    pub(crate) slots: NonZeroU32,
    pub(crate) blocks: NonZeroU32,
    /// Bytes of each access.
    pub(crate) unit: u64,
    /// Whether one store reaches all ranks.
    pub(crate) everywhere: bool,
    pub(crate) started: Instant,
    device: u32,
    failure: AtomicI32,
}

/// Rows that have a place each.
#[derive(Clone, Copy)]
pub(crate) struct Placing {
    pub(crate) arguments: PlaceArguments,
    /// Whether e4m3 elements become bf16 ones.
    pub(crate) converts: bool,
}

/// Runs a kernel: `body`, unless the arguments are of no use.
pub(crate) fn run(
    params: *mut *mut c_void,
    grid: u32,
    unit: u64,
    everywhere: bool,
    body: impl FnOnce(&Launch),
) {
    // SAFETY: the driver passes one pointer for each parameter that the PTX declares: there is one.
    let first = unsafe { params.read() };
    // SAFETY: the parameter is an `Arguments`, by the PTX; the launch checked its size.
    let arguments: Arguments = unsafe { memory::read(first.expose_provenance() as u64) };
    execute(Launch::new(arguments, None, grid, unit, everywhere), body);
}

/// Runs a kernel that stores each row in its place.
pub(crate) fn run_place(
    params: *mut *mut c_void,
    grid: u32,
    unit: u64,
    everywhere: bool,
    converts: bool,
) {
    // SAFETY: as in `run`.
    let first = unsafe { params.read() };
    // SAFETY: the parameter is a `PlaceArguments`, by the PTX; the launch checked its size.
    let arguments: PlaceArguments = unsafe { memory::read(first.expose_provenance() as u64) };
    let placing = Some(Placing {
        arguments,
        converts,
    });
    let launch = Launch::new(arguments.gather, placing, grid, unit, everywhere);
    execute(launch, |launch| launch.gather(false));
}

fn execute(launch: Result<Launch, i32>, body: impl FnOnce(&Launch)) {
    let failure = match launch {
        Ok(launch) => {
            body(&launch);
            launch.failure.into_inner()
        }
        Err(code) => code,
    };
    if failure != 0 {
        fake().fail_launch(failure);
    }
}

impl Launch {
    fn new(
        arguments: Arguments,
        placing: Option<Placing>,
        grid: u32,
        unit: u64,
        everywhere: bool,
    ) -> Result<Self, i32> {
        let device = fake().launch_device().ok_or(INVALID_VALUE)?;
        let mut launch = Launch {
            world_size: NonZeroU32::new(arguments.world_size).ok_or(INVALID_VALUE)?,
            slots: NonZeroU32::new(arguments.slots).ok_or(INVALID_VALUE)?,
            blocks: NonZeroU32::new(grid).ok_or(INVALID_VALUE)?,
            receivers: Vec::new(),
            arguments,
            placing,
            unit,
            everywhere,
            started: *EPOCH,
            device,
            failure: AtomicI32::new(0),
        };
        launch.check()?;
        Ok(launch)
    }

    /// Checks, before anything is touched, that the device may touch all that a gather can.
    fn check(&mut self) -> Result<(), i32> {
        let a = self.arguments;
        let expected = if self.everywhere { 1 } else { a.world_size };
        if a.receiver_count != expected || a.rank >= a.world_size {
            return Err(INVALID_VALUE);
        }
        let slice = a.shape.bytes();
        let all = slice * u64::from(a.world_size);
        match self.placing {
            None => {
                if all > a.slot_bytes {
                    return Err(INVALID_VALUE);
                }
                let aligned = [a.local, a.out, slice, a.slot_bytes, a.own.rows];
                if aligned.iter().any(|n| !n.is_multiple_of(self.unit)) {
                    return Err(MISALIGNED_ADDRESS);
                }
                self.require(a.local, slice, false)?;
            }
            Some(placing) => self.check_placing(&placing)?,
        }
        let entries = u64::from(a.receiver_count);
        self.require(a.receivers, entries * size_of::<Receiver>() as u64, false)?;
        let field = |field: u64, index: u64| {
            let address = a.receivers + 8 * (field * entries + index);
            // SAFETY: an entry of the table, whose span was checked; the host wrote it long ago.
            unsafe { memory::read::<u64>(address) }
        };
        self.receivers = (0..entries)
            .map(|index| Receiver {
                rows: field(0, index),
                signals: field(1, index),
                shapes: field(2, index),
                notice: field(3, index),
            })
            .collect();
        if a.near_rows != Receiver::near_rows(&self.receivers) {
            return Err(INVALID_VALUE);
        }

        if a.out != 0 {
            self.require(a.out, all, true)?;
        }
        self.require(a.state, size_of::<State>() as u64, true)?;
        self.require(a.epoch, 8, true)?;
        let words = u64::from(a.world_size) * 4;
        self.require(a.status, size_of::<Status>() as u64 + words, true)?;
        self.require(a.interrupts, 4 + words, false)?;
        self.require_receiver(&a.own)?;
        for receiver in &self.receivers {
            if receiver.rows.is_multiple_of(self.unit) {
                self.require_receiver(receiver)?;
            } else {
                return Err(MISALIGNED_ADDRESS);
            }
        }
        Ok(())
    }

    /// Checks sizes and tables; rows are looked at one by one.
    fn check_placing(&self, placing: &Placing) -> Result<(), i32> {
        let a = &placing.arguments;
        let widths: u64 = a.planes.iter().copied().map(u64::from).sum();
        let row_bytes = u64::from(a.gather.shape.row_bytes);
        let capacity = u64::from(a.capacity_rows);
        let fits =
            capacity * row_bytes <= a.gather.slot_bytes && a.gather.shape.rows <= a.capacity_rows;
        if widths != row_bytes || !fits || a.gather.out != 0 || a.gather.stored != 0 {
            return Err(INVALID_VALUE);
        }
        let read = if placing.converts {
            self.unit / 2
        } else {
            self.unit
        };
        let from = [a.gather.local, a.page_stride, a.row_stride];
        let to = a.planes.iter().copied().map(u64::from);
        let to = to.chain([a.gather.slot_bytes, a.gather.own.rows]);
        let misaligned = from.iter().any(|n| !n.is_multiple_of(read));
        if misaligned || to.into_iter().any(|n| !n.is_multiple_of(self.unit)) {
            return Err(MISALIGNED_ADDRESS);
        }
        let table = u64::from(a.local_rows) * 4;
        self.require(a.places, table.max(4), false)?;
        if a.cache_slots != 0 {
            self.require(a.cache_slots, table, false)?;
        }
        Ok(())
    }

    fn require_receiver(&self, receiver: &Receiver) -> Result<(), i32> {
        let entries = u64::from(self.slots.get()) * u64::from(self.world_size.get());
        let spans = [
            (
                receiver.rows,
                u64::from(self.slots.get()) * self.arguments.slot_bytes,
            ),
            (receiver.signals, entries * 4),
            (receiver.shapes, entries * size_of::<Shape>() as u64),
            (receiver.notice, 4),
        ];
        let own = *receiver == self.arguments.own;
        for (address, bytes) in spans.into_iter().filter(|(address, _)| *address != 0) {
            if self.everywhere && !own {
                self.replicas(address, bytes).map_err(|_| ILLEGAL_ADDRESS)?;
            } else {
                self.require(address, bytes, true)?;
            }
        }
        Ok(())
    }

    /// Whether the device may read a span; the launch has failed where not.
    pub(crate) fn may_read(&self, address: u64, bytes: u64) -> bool {
        let allowed = self.require(address, bytes, false);
        if let Err(code) = allowed {
            self.fail(code);
        }
        allowed.is_ok()
    }

    /// Says no where the device may not read or write a span by ordinary accesses.
    fn require(&self, address: u64, bytes: u64, write: bool) -> Result<(), i32> {
        match fake().may_access(self.device, address, bytes as usize, write) {
            true => Ok(()),
            false => Err(ILLEGAL_ADDRESS),
        }
    }

    /// Where a store to a multicast address goes; nowhere, and the launch has failed, where some
    /// device has bound no memory.
    pub(crate) fn replicas_or_fail(&self, address: u64, bytes: u64) -> Vec<u64> {
        self.replicas(address, bytes).unwrap_or_else(|code| {
            self.fail(code);
            Vec::new()
        })
    }

    fn replicas(&self, address: u64, bytes: u64) -> Result<Vec<u64>, i32> {
        let found = fake().multicast_replicas(address, bytes as usize)?;
        let addresses = found.into_iter().map(|pointer| pointer.expose_provenance());
        Ok(addresses.map(|address| address as u64).collect())
    }

    fn fail(&self, code: i32) {
        // The first one counts.
        let _ = self
            .failure
            .compare_exchange(0, code, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// The call that the launch is of.
    pub(crate) fn call(&self, copy_out: bool) -> Call {
        Call {
            world_size: self.world_size,
            rank: self.arguments.rank,
            slots: self.slots,
            shape: self.arguments.shape,
            copy_out,
            timeout: self.arguments.timeout,
        }
    }

    /// Waits until all blocks are resident, of so many threads as a GPU would run.
    pub(crate) fn reside(&self, threads: u32) -> Resident<'static> {
        fake().reside(self.blocks.get(), threads)
    }

    /// A gather, with two threads in each block: what one of them finds must reach the other, and
    /// their waits are apart.
    pub(crate) fn gather(&self, copy_out: bool) {
        const THREADS: NonZeroU32 = NonZeroU32::new(2).unwrap();
        let call = self.call(copy_out);
        // Copies of the host's are not copied out.
        if copy_out && self.arguments.stored != 0 {
            return self.fail(INVALID_VALUE);
        }
        self.each_thread(THREADS, copy_out, |thread| protocol::gather(thread, &call));
    }

    /// Runs `body` in so many threads of every block at once.
    pub(crate) fn each_thread(
        &self,
        threads: NonZeroU32,
        copy_out: bool,
        body: impl Fn(&Thread<'_>) + Sync,
    ) {
        let teams: Vec<Team> = (0..self.blocks.get()).map(|_| Team::new(threads)).collect();
        let run = |block: u32, thread| {
            body(&Thread {
                launch: self,
                block,
                thread,
                team: &teams[block as usize],
                copy_out,
            });
        };
        std::thread::scope(|scope| {
            let run = &run;
            for block in 0..self.blocks.get() {
                for thread in 0..threads.get() {
                    if (block, thread) != (0, 0) {
                        std::thread::Builder::new()
                            .stack_size(128 << 10)
                            .spawn_scoped(scope, move || run(block, thread))
                            .expect("a CPU thread for each of the launch");
                    }
                }
            }
            run(0, 0);
        });
    }
}

/// The beginning of the devices' clock.
static EPOCH: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
