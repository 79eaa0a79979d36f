//! One rank's end of a gather in memory that somebody else allocated, laid out and shared.
#![allow(unsafe_code)] // launches

use std::time::Duration;

use direct_dcp_kernels::Shape;
use direct_dcp_kernels::device::{Arguments, Receiver, State};

use super::kernel::{Kernel, Transport};
use super::lane::{LaunchError, size};
use super::rows::{DeviceRows, DeviceRowsMut};
use super::words::{Report, Words};
use crate::buffer::DeviceBuffer;
use crate::error::{CudaError, Result};
use crate::function::Param;
use crate::stream::Stream;

/// Bytes of each access: what the multicast kernel has.
const WIDTH: u64 = 16;

/// Calls of one rank that may be under way at once: engines overlap two ubatches, each with memory
/// of its own.
const UBATCHES: u32 = 2;

/// Where an engine keeps what its ranks share, for one ubatch.
///
/// Its ranks publish signals and nothing else: receivers have neither shapes nor notices. So one
/// that gathers another number of rows is not found out, and one that gave up only by the deadline.
#[derive(Clone, Debug)]
pub struct GuestOptions {
    /// Ranks of the group.
    pub world_size: u32,
    /// This rank.
    pub rank: u32,
    /// Slots.
    pub slots: u32,
    /// Bytes from one slot to the next.
    pub slot_bytes: u64,
    /// This rank's own memory.
    pub own: Receiver,
    /// Where rows and signals go: one that reaches all ranks, or each rank's in rank order.
    pub receivers: Vec<Receiver>,
    /// The device address of a u64, the calls completed.
    pub epoch: u64,
    /// Ranks that share this rank's device, itself counted.
    pub sharing: u32,
}

/// One rank's end of one ubatch in an engine's memory.
///
/// Nothing here orders calls: they come one after the other, as on a stream.
#[derive(Debug)]
pub struct GuestLane {
    options: GuestOptions,
    kernel: Kernel,
    table: DeviceBuffer,
    state: DeviceBuffer,
    words: Words,
}

impl GuestLane {
    /// A lane whose calls are to be launched by `kernel`.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for sizes that do not fit each other, else the driver's.
    ///
    /// # Safety
    /// The addresses are those of memory of these sizes: `[slots][slot_bytes]` rows and
    /// `[slots][world_size]` u32 signals at each, multicast where the kernel's transport is; and
    /// they stay so until the last call, and replay of it, has ended.
    pub unsafe fn new(kernel: Kernel, options: GuestOptions) -> Result<Self> {
        let expected = match kernel.transport {
            Transport::Unicast => options.world_size as usize,
            Transport::Multicast => 1,
        };
        let fits = options.receivers.len() == expected
            && options.rank < options.world_size
            && options.slots >= 2
            && options.slot_bytes.is_multiple_of(WIDTH);
        if !fits {
            let got = format!("{options:?}");
            return Err(CudaError::invalid("lane", "sizes that fit", got));
        }
        let context = kernel.context().clone();
        let stream = Stream::new(&context)?;
        let table = DeviceBuffer::new(&context, options.receivers.len() * size_of::<Receiver>())?;
        let entries: Vec<u8> = Receiver::table(&options.receivers)
            .flat_map(u64::to_ne_bytes)
            .collect();
        table.upload(&stream, 0, &entries)?;
        let lane = GuestLane {
            state: DeviceBuffer::new(&context, size_of::<State>())?,
            words: Words::new(&context, options.world_size)?,
            table,
            kernel,
            options,
        };
        lane.forget(&stream)?;
        Ok(lane)
    }

    /// Submits a gather into `out`, `[world_size · rows, row_bytes]`, rank by rank.
    ///
    /// # Errors
    /// See [`LaunchError`]; nothing was submitted then.
    pub fn gather_into(
        &self,
        stream: &Stream,
        shape: Shape,
        local: DeviceRows,
        out: DeviceRowsMut,
        timeout: Duration,
    ) -> std::result::Result<(), LaunchError> {
        if let Some(report) = self.report() {
            return Err(LaunchError::Failed(report));
        }
        let options = &self.options;
        let all = shape.bytes().saturating_mul(options.world_size.into());
        if shape.rows == 0 || local.bytes() as u64 != shape.bytes() {
            return Err(size("local bytes", shape.bytes(), local.bytes() as u64));
        }
        if out.bytes() as u64 != all {
            return Err(size("output bytes", all, out.bytes() as u64));
        }
        if all > options.slot_bytes {
            return Err(size("gathered bytes, at most", options.slot_bytes, all));
        }
        let unaligned = (local.address() | out.address() | shape.bytes()) % WIDTH;
        let entry = self.kernel.entry(WIDTH as u32, true);
        let Some(entry) = entry.filter(|_| unaligned == 0) else {
            return Err(size("bytes beyond a multiple of 16", 0, unaligned));
        };
        let arguments = Arguments {
            local: local.address(),
            out: out.address(),
            near_rows: Receiver::near_rows(&options.receivers),
            receivers: self.table.address(),
            own: options.own,
            state: self.state.address(),
            status: self.words.status(),
            interrupts: self.words.interrupts(),
            shape: shape.in_form(true),
            slot_bytes: options.slot_bytes,
            timeout: u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX),
            epoch: options.epoch,
            world_size: options.world_size,
            rank: options.rank,
            slots: options.slots,
            receiver_count: options.receivers.len() as u32,
            pull: 0,
            stored: 0,
        };
        let most = self.kernel.most_waiting_blocks(options.sharing, UBATCHES);
        let launch = self.kernel.shape(shape.bytes(), WIDTH as u32, most);
        // SAFETY: the kernel's one parameter is `Arguments`. The table, the state and the words
        // live until `drop` has waited; the promises of `new`, `DeviceRows` and `DeviceRowsMut`
        // cover the rest.
        unsafe {
            entry
                .function
                .launch(launch, stream, &[Param::new(&arguments)])
        }?;
        Ok(())
    }

    /// The report of the first call that failed, if one has.
    #[must_use]
    pub fn report(&self) -> Option<Report> {
        self.words.report()
    }

    /// Ends every wait, now and until [`forget`](GuestLane::forget).
    pub fn abort(&self) {
        self.words.abort();
    }

    /// Forgets a failure or an abort, once the engine has made its memory as new on all ranks.
    ///
    /// # Errors
    /// The driver's.
    pub fn forget(&self, stream: &Stream) -> Result<()> {
        stream.synchronize()?;
        self.state.upload(stream, 0, &[0; size_of::<State>()])?;
        stream.synchronize()?;
        self.words.clear()
    }
}

impl Drop for GuestLane {
    fn drop(&mut self) {
        // A launch under way uses the lane's memory. What it says is told by `report`.
        let _ = self.kernel.context().synchronize();
    }
}
