//! One rank's end of one ubatch on a GPU.
#![allow(unsafe_code)] // launches and copies

use std::any::Any;
use std::fmt;
use std::mem::offset_of;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use direct_dcp_kernels::Shape;
use direct_dcp_kernels::device::{Arguments, Receiver, State};

use super::end::{End, Reach};
use super::kernel::Entry;
use super::layout::Layout;
use super::route::{CallOptions, Route};
use super::rows::{DeviceRows, DeviceRowsMut};
use super::words::{Report, Words};
use crate::buffer::DeviceBuffer;
use crate::context::Context;
use crate::copy;
use crate::error::CudaError;
use crate::event::Event;
use crate::function::{Function, LaunchShape, Param};
use crate::pinned::PinnedBuffer;
use crate::stream::Stream;

/// How a lane is built.
#[derive(Clone, Debug)]
pub struct LaneOptions {
    /// The layout of every rank's memory.
    pub layout: Layout,
    /// This rank.
    pub rank: u32,
    /// This ubatch.
    pub ubatch: u32,
    /// Ranks that share this rank's device, itself counted.
    pub sharing: u32,
}

/// Why a launch was not made, or an earlier one failed.
#[derive(Debug)]
pub enum LaunchError {
    /// Another thread is in a call on this ubatch.
    Busy,
    /// The result of call `epoch` is held, and this call would let the peers overwrite it.
    SlotInUse {
        /// The call whose result is held.
        epoch: u64,
    },
    /// An argument does not fit.
    Size {
        /// The argument.
        what: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        got: u64,
    },
    /// By this way the call cannot be captured into a graph: only the host knows its slot.
    Capturing,
    /// By this way these rows cannot be placed, for this reason.
    Placing(&'static str),
    /// An earlier call failed; nothing was launched.
    Failed(Report),
    /// The driver refused.
    Cuda(CudaError),
}

impl From<CudaError> for LaunchError {
    fn from(error: CudaError) -> Self {
        LaunchError::Cuda(error)
    }
}

/// One rank's end of one ubatch.
pub struct Lane {
    options: LaneOptions,
    /// What is done when it is built, and rehearsals, go there; a caller's calls do not.
    stream: Arc<Stream>,
    own: Receiver,
    slot_bytes: u64,
    ends: Box<[End]>,
    state: DeviceBuffer,
    /// The last epoch that was read.
    epoch: PinnedBuffer,
    words: Words,
    /// The mappings that the addresses are in.
    _memory: Vec<Arc<dyn Any + Send + Sync>>,
    /// Calls that were captured are ordered, before the lane's others and before its end, by
    /// whoever replays them.
    book: Mutex<Book>,
    holds: Mutex<Holds>,
}

/// What the host knows of the calls it has submitted.
pub(super) struct Book {
    /// Calls submitted, as far as the host knows.
    pub(super) issued: u64,
    /// Whether only the device knows how many calls there were: replays of captured ones advance
    /// the epoch behind the host's back. Who needs the number asks.
    asks: bool,
    /// The end of the last call that was not captured, and its stream.
    last: Event,
    last_stream: Option<u64>,
}

#[derive(Default)]
struct Holds {
    /// Calls whose results are held.
    epochs: Vec<u64>,
    /// Ends of reads on other streams, which the next call has to wait for.
    reads: Vec<Event>,
}

impl Lane {
    /// A lane whose calls go by any of `reaches`, which all lead to the same memory of the ranks.
    /// `own` is this rank's own part of it, and `memory` keeps all of it alive. The header of `own`
    /// is zero, and every rank knows that before the first call. `stream` is for what is done here
    /// and in rehearsals: drivers have few hardware queues, so a rank's lanes had better share it.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for sizes that do not fit each other, else the driver's.
    pub fn new(
        options: LaneOptions,
        stream: &Arc<Stream>,
        reaches: Vec<Reach>,
        own: Receiver,
        memory: Vec<Arc<dyn Any + Send + Sync>>,
    ) -> Result<Self, CudaError> {
        let layout = &options.layout;
        let fit = options.rank < layout.world_size
            && layout.slots >= 2
            && !reaches.is_empty()
            && reaches.iter().all(|reach| reach.fits(layout.world_size));
        if !fit {
            let got = format!("{options:?}");
            return Err(CudaError::invalid("lane", "sizes that fit", got));
        }
        let Some(slot_bytes) = layout.slot_bytes() else {
            return Err(CudaError::invalid(
                "layout",
                "sizes that fit",
                format!("{layout:?}"),
            ));
        };
        let context = stream.context();
        let ends = reaches.into_iter().map(|reach| End::new(reach, stream));
        let ends = ends.collect::<Result<_, _>>()?;
        let state = DeviceBuffer::new(context, size_of::<State>())?;
        state.upload(stream, 0, &[0; size_of::<State>()])?;
        let words = Words::new(context, layout.world_size)?;
        Ok(Lane {
            book: Mutex::new(Book {
                issued: 0,
                asks: false,
                last: Event::new(context)?,
                last_stream: None,
            }),
            holds: Mutex::default(),
            own,
            slot_bytes,
            ends,
            state,
            epoch: PinnedBuffer::new(context, size_of::<u64>())?,
            words,
            _memory: memory,
            stream: stream.clone(),
            options,
        })
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
        call: CallOptions,
    ) -> Result<(), LaunchError> {
        let mut book = self.turn()?;
        let gathered = self.check(&book, shape, local)?;
        if out.bytes() as u64 != gathered {
            return Err(size("output bytes", gathered, out.bytes() as u64));
        }
        self.submit(&mut book, stream, shape, local, Some(&out), call)?;
        Ok(())
    }

    /// Submits a gather into this rank's slot, and lends the slot.
    ///
    /// # Errors
    /// See [`LaunchError`]; nothing was submitted then.
    pub fn gather(
        self: &Arc<Self>,
        stream: &Stream,
        shape: Shape,
        local: DeviceRows,
        call: CallOptions,
    ) -> Result<Held, LaunchError> {
        let mut book = self.turn()?;
        let bytes = self.check(&book, shape, local)?;
        let captured = self.submit(&mut book, stream, shape, local, None, call)?;
        Ok(self.lend(&book, captured, bytes))
    }

    /// Whether no call was submitted yet.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.book.try_lock().is_ok_and(|book| book.issued == 0)
    }

    /// What became of the submitted calls: the report of the first that failed, if one has.
    #[must_use]
    pub fn report(&self) -> Option<Report> {
        self.words.report()
    }

    /// Whether a call has found a fault, which [`report`](Lane::report) tells once the call's other
    /// waits have ended too.
    #[must_use]
    pub fn has_fault(&self) -> bool {
        self.words.has_fault()
    }

    /// Ends every wait of this lane, now and from now on. A fault that was found before stays the
    /// one that is reported.
    pub fn abort(&self) {
        self.words.abort();
    }

    /// Ends every wait of this lane for `rank`, which is lost.
    pub fn lose(&self, rank: u32) {
        self.words.lose(rank);
    }

    /// Calls completed, read from the device after the work of `stream`.
    ///
    /// # Errors
    /// The driver's.
    pub fn epoch(&self, stream: &Stream) -> Result<u64, CudaError> {
        let word = self.state.address() + offset_of!(State, epoch) as u64;
        // SAFETY: a word of the state, which lives as long as the lane.
        unsafe { copy::fetch_u64(stream, &self.epoch, word) }
    }

    /// How it was built.
    #[must_use]
    pub fn options(&self) -> &LaneOptions {
        &self.options
    }

    /// The stream of its own work.
    #[must_use]
    pub fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// The context that it works in.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.stream.context()
    }

    /// Waits until the last call that was submitted, and not captured, has ended, well or not.
    pub fn settle(&self) {
        let book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        // A failure here is the launch's, and told by `report` or by the next call.
        let _ = book.last.synchronize();
    }

    /// What calls of `route` use.
    pub(super) fn end(&self, route: Route) -> Result<&End, LaunchError> {
        let mut ends = self.ends.iter();
        let end = ends.find(|end| end.kernel.transport == route.transport());
        let missing = || {
            let got = format!("{route:?}");
            CudaError::invalid("route", "one that the lane was built for", got)
        };
        Ok(end.ok_or_else(missing)?)
    }

    /// The most blocks of a launch, all of whose blocks `wait`, or only the last one. More of one that
    /// does not wait than are resident would only queue.
    pub(super) fn most_blocks(&self, entry: &Entry, wait: bool, call: &CallOptions) -> u32 {
        if call.route == Route::CopyEngine {
            return 1;
        }
        let (sharing, ubatches) = (self.options.sharing, self.options.layout.ubatches);
        let most = if wait {
            let kernels = self.ends.iter().map(|end| &end.kernel);
            let most = kernels.map(|kernel| kernel.most_waiting_blocks(sharing, ubatches));
            most.min().unwrap_or(1)
        } else {
            entry.resident_blocks / sharing.max(1)
        };
        call.max_blocks.unwrap_or(u32::MAX).min(most).max(1)
    }

    /// Where call `epoch` delivers.
    pub(super) fn slot_address(&self, epoch: u64) -> u64 {
        self.own.rows + epoch % u64::from(self.options.layout.slots) * self.slot_bytes
    }

    pub(super) fn turn(&self) -> Result<MutexGuard<'_, Book>, LaunchError> {
        match self.book.try_lock() {
            Ok(book) => Ok(book),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(LaunchError::Busy),
        }
    }

    /// Everything that must hold before a launch; returns the bytes it delivers.
    fn check(&self, book: &Book, shape: Shape, local: DeviceRows) -> Result<u64, LaunchError> {
        let layout = &self.options.layout;
        if shape.row_bytes != layout.row_bytes {
            return Err(size(
                "row bytes",
                layout.row_bytes.into(),
                shape.row_bytes.into(),
            ));
        }
        let most = layout.capacity_rows / layout.world_size;
        if shape.rows == 0 || shape.rows > most {
            let expected = format!("1 to {most}");
            return Err(LaunchError::Size {
                what: "rows per rank",
                expected,
                got: shape.rows.into(),
            });
        }
        if local.bytes() as u64 != shape.bytes() {
            return Err(size("local bytes", shape.bytes(), local.bytes() as u64));
        }
        self.check_slots(book)?;
        Ok(shape.bytes() * u64::from(layout.world_size))
    }

    /// Whether there may be a next call now.
    pub(super) fn check_slots(&self, book: &Book) -> Result<(), LaunchError> {
        if let Some(report) = self.report() {
            return Err(LaunchError::Failed(report));
        }
        // Slot rule: call n tells the peers that they may store into the slot of call
        // n - (S - 1), so its result, and any older one, must have been released.
        let slots = u64::from(self.options.layout.slots);
        let last_safe = book.issued + 1 - (slots - 1).min(book.issued + 1);
        match lock(&self.holds)
            .epochs
            .iter()
            .find(|&&epoch| epoch <= last_safe)
        {
            Some(&epoch) => Err(LaunchError::SlotInUse { epoch }),
            None => Ok(()),
        }
    }

    /// Submits the call, and tells whether it was captured instead of executed.
    fn submit(
        &self,
        book: &mut Book,
        stream: &Stream,
        shape: Shape,
        local: DeviceRows,
        out: Option<&DeviceRowsMut>,
        call: CallOptions,
    ) -> Result<bool, LaunchError> {
        let end = self.end(call.route)?;
        let copies = call.route == Route::CopyEngine;
        let staged = call.route == Route::Staged;
        let capturing = stream.is_capturing()?;
        // The staged kernels tell nobody which slot they have filled.
        if capturing && (copies || staged && out.is_none()) {
            return Err(LaunchError::Capturing);
        }
        let width = Self::width(shape, local, out);
        if !capturing {
            self.follow_up(book, stream, out.is_none() || copies)?;
        }
        let slot = (book.issued + 1) % u64::from(self.options.layout.slots);
        let arguments = Arguments {
            local: local.address(),
            out: out.filter(|_| !copies).map_or(0, DeviceRowsMut::address),
            shape: shape.in_form(out.is_some()),
            pull: (call.route == Route::Pull).into(),
            stored: copies.into(),
            ..self.arguments(end, call.timeout)
        };
        let launches = self.launches(end, shape, width, out.is_some(), &call)?;
        if copies {
            self.push_by_copies(end, stream, shape, local, slot)?;
        }
        for (function, launch) in launches {
            // SAFETY: the kernels' one parameter is `Arguments`. The memory of the lane lives as
            // long as the lane, which waits for its last call before it goes; the promises of
            // `DeviceRows` and `DeviceRowsMut` cover the caller's. `most_blocks` keeps a waiting
            // grid resident.
            let launched = unsafe { function.launch(launch, stream, &[Param::new(&arguments)]) };
            self.launched(book, stream, capturing, launched)?;
        }
        book.issued += 1;
        if let Some(out) = out.filter(|_| copies) {
            let from = self.slot_address(book.issued);
            // SAFETY: the slot holds the gathered rows once the launch before has ended, and the
            // output is the caller's promise.
            unsafe { stream.copy_on_device(out.address(), from, out.bytes()) }?;
        }
        self.submitted(book, stream, capturing)?;
        Ok(capturing)
    }

    /// The arguments of a call that moves nothing yet.
    pub(super) fn arguments(&self, end: &End, timeout: Duration) -> Arguments {
        Arguments {
            local: 0,
            out: 0,
            near_rows: Receiver::near_rows(&end.receivers),
            receivers: end.table.address(),
            own: self.own,
            state: self.state.address(),
            status: self.words.status(),
            interrupts: self.words.interrupts(),
            shape: Shape {
                rows: 0,
                row_bytes: self.options.layout.row_bytes,
                digest: 0,
            },
            slot_bytes: self.slot_bytes,
            timeout: u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX),
            epoch: self.state.address() + offset_of!(State, epoch) as u64,
            world_size: self.options.layout.world_size,
            rank: self.options.rank,
            slots: self.options.layout.slots,
            receiver_count: end.receivers.len() as u32,
            pull: 0,
            stored: 0,
        }
    }

    /// Passes on how a launch went.
    pub(super) fn launched(
        &self,
        book: &mut Book,
        stream: &Stream,
        capturing: bool,
        launched: Result<(), CudaError>,
    ) -> Result<(), LaunchError> {
        if launched.is_err() && !capturing {
            // It may be under way all the same, and then it counts: only the device knows.
            let _ = stream.synchronize();
            book.asks = true;
        }
        Ok(launched?)
    }

    /// Notes that a call has been submitted, and counted.
    pub(super) fn submitted(
        &self,
        book: &mut Book,
        stream: &Stream,
        capturing: bool,
    ) -> Result<(), LaunchError> {
        if capturing {
            book.asks = true;
            return Ok(());
        }
        if book.last.record(stream).is_err() {
            // The call is under way, and nobody could wait for it later.
            stream.synchronize()?;
        }
        book.last_stream = Some(stream.as_raw());
        Ok(())
    }

    /// Lends the slot of the call that was submitted last.
    pub(super) fn lend(self: &Arc<Self>, book: &Book, captured: bool, bytes: u64) -> Held {
        let epoch = book.issued;
        lock(&self.holds).epochs.push(epoch);
        Held {
            lane: self.clone(),
            epoch,
            address: (!captured).then(|| self.slot_address(epoch)),
            bytes,
        }
    }

    /// The launches of one call.
    fn launches<'a>(
        &self,
        end: &'a End,
        shape: Shape,
        width: u32,
        copy_out: bool,
        call: &CallOptions,
    ) -> Result<Vec<(&'a Function, LaunchShape)>, LaunchError> {
        let aligned = || LaunchError::Size {
            what: "alignment of rows and addresses",
            expected: "16-byte multiples, for this way".into(),
            got: width.into(),
        };
        let kernel = &end.kernel;
        // What is pulled without an output is copied into this rank's own slot.
        let copies_out = match call.route {
            Route::Push | Route::Multicast => copy_out,
            Route::Pull => true,
            Route::CopyEngine => false,
            Route::Staged => {
                let staged = kernel.staged(shape.bytes(), self.options.layout.world_size);
                let staged = staged.filter(|_| width == 16).ok_or_else(aligned)?;
                let launches = if copy_out { 3 } else { 2 };
                return Ok(staged.into_iter().take(launches).collect());
            }
        };
        let entry = kernel.entry(width, copies_out).ok_or_else(aligned)?;
        let most = self.most_blocks(entry, copies_out, call);
        let launch = kernel.shape(shape.bytes(), width, most);
        Ok(vec![(&entry.function, launch)])
    }

    /// Orders a call after the ones before it, whatever streams they and their readers were on.
    /// `names_slot` says whether the host names the slot of this call: to lend it, or to copy into
    /// it.
    pub(super) fn follow_up(
        &self,
        book: &mut Book,
        stream: &Stream,
        names_slot: bool,
    ) -> Result<(), LaunchError> {
        if book.last_stream.is_some_and(|last| last != stream.as_raw()) {
            stream.wait(&book.last)?;
        }
        for read in lock(&self.holds).reads.drain(..) {
            stream.wait(&read)?;
        }
        // Replays move the epoch behind the host's back, now or at any later time, so only the
        // device knows it; to ask is to wait for all that the stream has to do. The kernels count
        // for themselves. The host needs the count where it names the slot, or to see whether this
        // call would have a held one overwritten. Results are lent only by calls that have the
        // book, as we do: if none is held now, none will be before this call is submitted.
        if book.asks && (names_slot || !lock(&self.holds).epochs.is_empty()) {
            book.issued = self.epoch(stream)?;
            self.check_slots(book)?;
        }
        Ok(())
    }

    fn push_by_copies(
        &self,
        end: &End,
        stream: &Stream,
        shape: Shape,
        local: DeviceRows,
        slot: u64,
    ) -> Result<(), LaunchError> {
        let place = slot * self.slot_bytes + u64::from(self.options.rank) * shape.bytes();
        for receiver in self.in_turn(end) {
            // SAFETY: the slot rule, which `check` enforces, keeps every reader out of these
            // bytes until this call publishes; `world_size` slices fit a slot.
            unsafe {
                stream.copy_on_device(receiver.rows + place, local.address(), local.bytes())
            }?;
        }
        Ok(())
    }

    /// The receivers, the next rank's first, so that none is hit by all ranks at once.
    pub(super) fn in_turn<'a>(&self, end: &'a End) -> impl Iterator<Item = &'a Receiver> {
        let (before, after) = end.receivers.split_at(self.options.rank as usize);
        after.iter().skip(1).chain(before).chain(after.first())
    }

    /// Bytes from one slot to the next.
    pub(super) fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// The widest access that divides every address and size of a call.
    fn width(shape: Shape, local: DeviceRows, out: Option<&DeviceRowsMut>) -> u32 {
        let all = local.address() | out.map_or(0, DeviceRowsMut::address) | shape.bytes();
        1 << all.trailing_zeros().min(4)
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane")
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // A launch under way uses the lane's memory.
        self.settle();
    }
}

/// The rows of all ranks, in a slot that no rank stores into until this is released.
///
/// Dropping it releases the slot for work that comes after it on the gather's own stream; readers
/// on another stream release it with [`Held::release_after`].
#[derive(Debug)]
pub struct Held {
    lane: Arc<Lane>,
    epoch: u64,
    pub(super) address: Option<u64>,
    bytes: u64,
}

impl Held {
    /// The device address of `[world_size · rows, row_bytes]`, once the stream has come here.
    /// `None` where the call was captured: each replay has a slot of its own, see
    /// [`address_word`](Held::address_word).
    #[must_use]
    pub fn address(&self) -> Option<u64> {
        self.address
    }

    /// The device address of a u64 that holds the address of the rows, after the call and each
    /// replay of it, for consumers in the same graph.
    #[must_use]
    pub fn address_word(&self) -> u64 {
        self.lane.state.address() + offset_of!(State, rows) as u64
    }

    /// The size of the rows.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The call, counted by the host.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether a call of `lane` lent it.
    pub(super) fn is_of(&self, lane: &Arc<Lane>) -> bool {
        Arc::ptr_eq(&self.lane, lane)
    }

    /// Releases the slot after what `stream` has to do so far: the next call waits for it.
    ///
    /// # Errors
    /// The driver's; the slot is released all the same, and the stream was waited for.
    pub fn release_after(self, stream: &Stream) -> Result<(), CudaError> {
        let recorded = Event::new(self.lane.context()).and_then(|event| {
            event.record(stream)?;
            Ok(event)
        });
        match recorded {
            Ok(event) => {
                lock(&self.lane.holds).reads.push(event);
                Ok(())
            }
            Err(error) => {
                stream.synchronize()?;
                Err(error)
            }
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // One of them: a captured call has the number of an eager one.
        let mut holds = lock(&self.lane.holds);
        let mine = holds.epochs.iter().position(|&epoch| epoch == self.epoch);
        mine.map(|index| holds.epochs.remove(index));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn size(what: &'static str, expected: u64, got: u64) -> LaunchError {
    LaunchError::Size {
        what,
        expected: expected.to_string(),
        got,
    }
}
