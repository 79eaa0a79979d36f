//! A rank on a GPU: the suite's bytes go to device memory and back for every call.
#![allow(unsafe_code)] // promises about device memory that lives here

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use direct_dcp::cuda::{
    CudaError, DeviceBuffer, DeviceRows, DeviceRowsMut, Gathered, KvGather, Stream, Workspace,
};
use direct_dcp::{GatherError, Group, GroupError, Status, Way, WorkspaceError, WorkspaceOptions};
use direct_dcp_cuda::{PinnedBuffer, WaitCondition};

use crate::case::Spec;
use crate::failure::Failure;
use crate::{Gather, Rank, Rows, step};

/// Room around the parts of a storage.
const MARGINS: usize = 4096;

/// What device memory holds at first.
const POISON: u8 = 0xa5;

/// Opens what a held slot is read behind.
const OPEN: u32 = 7;

/// A rank on the GPU.
#[derive(Debug)]
pub struct CudaRank {
    pub(super) group: Group,
    pub(super) device: u32,
}

impl CudaRank {
    /// Collective: builds a workspace by options that a [`Spec`] cannot say.
    pub(super) fn with(
        &self,
        options: WorkspaceOptions,
        timeout: Duration,
    ) -> Result<CudaGather, WorkspaceError> {
        step::begin("builds a workspace");
        let workspace = Workspace::new(&self.group, self.device, options)?;
        let gather = KvGather::new(workspace)
            .timeout(timeout)
            .first_timeout(timeout);
        let gather = CudaGather::new(gather).map_err(|error| WorkspaceError::Refused {
            rank: self.group.rank(),
            reason: error.to_string(),
        })?;
        // A driver may allocate only once the device is idle, which no call may keep it from.
        step::begin("has allocated, and waits for all others");
        self.group.barrier()?;
        Ok(gather)
    }
}

impl Rank for CudaRank {
    type Gather = CudaGather;

    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn previous_ranks(&self) -> &[usize] {
        self.group.previous_ranks()
    }

    /// One block is what the library makes of it by itself; more are a limit.
    fn build(&self, spec: &Spec) -> Result<CudaGather, WorkspaceError> {
        let options = WorkspaceOptions::new(spec.capacity, spec.format)
            .slots(spec.slots)
            .ubatches(spec.ubatches)
            .way(spec.way);
        let options = match spec.blocks {
            1 => options,
            blocks => options.blocks(blocks),
        };
        self.with(options, spec.timeout)
    }

    fn exchange(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        self.group.all_gather(bytes)
    }

    fn aborter(&self) -> Box<dyn Fn() + Send> {
        let handle = self.group.abort_handle();
        Box::new(move || handle.abort())
    }

    fn rebuild(&self, deadline: Duration) -> Result<Self, GroupError> {
        Ok(CudaRank {
            group: self.group.rebuild(deadline)?,
            device: self.device,
        })
    }
}

/// What a rank gathers with, and device memory for what it gathers.
#[derive(Debug)]
pub struct CudaGather {
    // Let go first: that ends the peers' waits, for which freeing memory may wait.
    gather: KvGather,
    desks: Vec<Mutex<Desk>>,
    /// For reading what was lent, from any thread: one at a time, and nothing else is on it.
    reader: Arc<Mutex<Stream>>,
}

/// One ubatch's stream, and a copy of its caller's storage. All work on the storage is on the
/// stream, and over when a call returns.
#[derive(Debug)]
struct Desk {
    stream: Stream,
    storage: DeviceBuffer,
}

impl CudaGather {
    fn new(gather: KvGather) -> Result<Self, CudaError> {
        let workspace = gather.workspace();
        let context = workspace.context();
        let world = workspace.group().world_size();
        let all = workspace.capacity_rows() * workspace.format().row_bytes();
        // Also for what is too much, and refused.
        let bytes = all * (world + 1) + MARGINS;
        let desks = (0..workspace.ubatches()).map(|_| {
            Ok(Mutex::new(Desk {
                stream: Stream::new(context)?,
                storage: DeviceBuffer::new(context, bytes)?,
            }))
        });
        let desks = desks.collect::<Result<Vec<_>, CudaError>>()?;
        let reader = Stream::new(context)?;
        for desk in &desks {
            let desk = lock(desk);
            poison(&desk.storage, &[&desk.stream, &reader])?;
        }
        let reader = Arc::new(Mutex::new(reader));
        Ok(CudaGather {
            gather,
            desks,
            reader,
        })
    }

    pub(super) fn inner(&self) -> &KvGather {
        &self.gather
    }

    /// The desk of a ubatch; of one that there is not, which the library refuses, another one's.
    fn desk(&self, ubatch: usize) -> MutexGuard<'_, Desk> {
        lock(self.desks.get(ubatch).unwrap_or(&self.desks[0]))
    }

    /// Submits calls one after another, each from one part of `storage` to another, waits for them
    /// all, and brings the storage back. No two parts overlap.
    pub(super) fn gather_all(
        &self,
        calls: &[(usize, Range<usize>, Range<usize>)],
        storage: &mut [u8],
    ) -> Result<(), GatherError> {
        let Some(&(first, ..)) = calls.first() else {
            return Ok(());
        };
        let desk = self.desk(first);
        let way = self.gather.workspace().way();
        let begin = |what| step::begin(format!("{what} {calls:?} ({way})"));
        begin("uploads for");
        upload(&desk, storage)?;
        begin("submits");
        let mut result = Ok(());
        for (ubatch, local, out) in calls {
            let base = desk.storage.address();
            // SAFETY: a part of the storage, which is this desk's until the wait below, and is
            // written again only after it.
            let from = unsafe { DeviceRows::new(base + local.start as u64, local.len()) };
            // SAFETY: as above; the parts do not overlap.
            let to = unsafe { DeviceRowsMut::new(base + out.start as u64, out.len()) };
            result = result.and_then(|()| self.gather.gather_into(*ubatch, &desk.stream, from, to));
        }
        // Also where one was refused: those before it are under way.
        begin("waits for");
        let ended = self.gather.wait(&desk.stream);
        begin("downloads after");
        let back = desk.storage.download(&desk.stream, 0, storage);
        begin("has done");
        result.and(ended).and(back.map_err(driver))
    }

    /// Submits a call whose slot a reader on a stream of its own is slow to read, releases the slot
    /// after the reader, and then submits the calls that would have the slot overwritten. Gives what
    /// the reader found, and whether a later call ran before it was done.
    pub(super) fn read_slowly(
        &self,
        local: &[u8],
        meet: impl Fn() -> Result<(), GroupError>,
    ) -> Result<(Vec<u8>, bool), Failure> {
        let context = self.gather.workspace().context();
        let bytes = local.len() * self.gather.workspace().group().world_size();
        let desk = self.desk(0);
        let reader = Stream::new(context).map_err(driver)?;
        let gate = PinnedBuffer::new(context, 4).map_err(driver)?;
        let kept = DeviceBuffer::new(context, bytes).map_err(driver)?;
        poison(&kept, &[&reader]).map_err(driver)?;
        // Nobody allocates any more, for which a driver might wait.
        meet()?;
        upload(&desk, local)?;
        // SAFETY: this desk's storage, as in `gather_all`.
        let from = unsafe { DeviceRows::new(desk.storage.address(), local.len()) };
        let gathered = self.gather.gather(0, &desk.stream, from)?;
        self.gather.wait(&desk.stream)?;
        let address = gathered.address().unwrap_or_default();
        let later = || -> Result<bool, GatherError> {
            // SAFETY: the word is pinned memory, which outlives the reader's work: see below.
            unsafe { reader.wait_value_u32(gate.device_address(), OPEN, WaitCondition::Equal) }
                .map_err(driver)?;
            // SAFETY: the slot is lent until it is released after this, and `kept` as above.
            unsafe { reader.copy_on_device(kept.address(), address, bytes) }.map_err(driver)?;
            gathered.release_after(&reader)?;
            // As many calls later as there are slots, the peers store into this one.
            drop(self.gather.gather(0, &desk.stream, from)?);
            thread::sleep(Duration::from_millis(60));
            let early = desk.stream.is_idle().map_err(driver)?;
            gate.store_u32(0, OPEN).map_err(driver)?;
            for _ in 1..self.gather.workspace().slots() {
                drop(self.gather.gather(0, &desk.stream, from)?);
            }
            Ok(early)
        };
        let early = later();
        // However that ended, the reader does before what it works on goes.
        let opened = gate.store_u32(0, OPEN);
        let read = reader.synchronize();
        let early = early?;
        opened.and(read).map_err(driver)?;
        self.gather.wait(&desk.stream)?;
        let mut found = vec![0; bytes];
        kept.download(&reader, 0, &mut found).map_err(driver)?;
        meet()?;
        Ok((found, early))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Fills a buffer with what no test writes there: by an upload, a kernel and a download on each
/// stream, so that these have done all of that before any rank waits for this one. See "A stream's first
/// work" in docs/performance.md.
fn poison(buffer: &DeviceBuffer, streams: &[&Stream]) -> Result<(), CudaError> {
    let mut bytes = vec![POISON; buffer.bytes()];
    for stream in streams {
        buffer.upload(stream, 0, &bytes)?;
        buffer.fill(stream, POISON)?;
        buffer.download(stream, 0, &mut bytes)?;
    }
    Ok(())
}

fn upload(desk: &Desk, bytes: &[u8]) -> Result<(), GatherError> {
    desk.storage.upload(&desk.stream, 0, bytes).map_err(driver)
}

fn driver(error: CudaError) -> GatherError {
    GatherError::Driver {
        call: "the suite's own work",
        code: error.code(),
        message: error.to_string(),
    }
}

impl Gather for CudaGather {
    type Rows = CudaRows;

    fn gather_into(
        &self,
        ubatch: usize,
        storage: &mut [u8],
        local: Range<usize>,
        out: Range<usize>,
    ) -> Result<(), GatherError> {
        self.gather_all(&[(ubatch, local, out)], storage)
    }

    fn gather(&self, ubatch: usize, local: &[u8]) -> Result<CudaRows, GatherError> {
        let desk = self.desk(ubatch);
        upload(&desk, local)?;
        // SAFETY: this desk's storage, as in `gather_all`.
        let from = unsafe { DeviceRows::new(desk.storage.address(), local.len()) };
        let gathered = self.gather.gather(ubatch, &desk.stream, from)?;
        self.gather.wait(&desk.stream)?;
        Ok(CudaRows {
            gathered,
            reader: self.reader.clone(),
        })
    }

    fn status(&self) -> Status {
        let desk = self.desk(0);
        self.gather.status(&desk.stream).expect("epochs to read")
    }

    fn spoils_outputs(&self) -> bool {
        // The last copy is in the stream before anybody knows that the call failed.
        self.gather.workspace().way() == Way::CopyEngine
    }
}

/// A slot that is lent, where the rows have arrived.
#[derive(Debug)]
pub struct CudaRows {
    gathered: Gathered,
    reader: Arc<Mutex<Stream>>,
}

impl Rows for CudaRows {
    fn epoch(&self) -> u64 {
        self.gathered.epoch().unwrap_or_default()
    }

    fn bytes(&self) -> Cow<'_, [u8]> {
        let mut bytes = vec![0; self.gathered.bytes() as usize];
        let address = self.gathered.address().expect("an address of its own");
        let reader = lock(&self.reader);
        // SAFETY: the slot is lent, and the vector outlives the copy, which is waited for below; it
        // is not touched if it cannot be.
        let copied = unsafe { reader.copy_to_host(bytes.as_mut_ptr(), address, bytes.len()) };
        let waited = reader.synchronize();
        copied.and(waited).expect("a copy of the slot");
        Cow::Owned(bytes)
    }
}
