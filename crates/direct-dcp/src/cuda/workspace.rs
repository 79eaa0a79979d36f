//! The memory that ranks on GPUs share.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use direct_dcp_cuda::gather::{
    CallOptions, Delivery, Kernel, Lane, LaneOptions, LaunchError, Layout, Reach, Rehearsal,
    Report, Transport,
};
use direct_dcp_cuda::{Context, CudaError, Device, DeviceAttribute, DeviceBuffer, Driver, Stream};
use direct_dcp_kernels::device::Receiver;

use super::choice::{Choice, route};
use super::memory::{self, Fact, SymmetricMemory};
use super::multicast::{self, Everywhere};
use super::watcher::Watcher;
use crate::error::{from_fault, shape};
use crate::format::RowFormat;
use crate::group::Group;
use crate::options::{Way, WorkspaceError, WorkspaceOptions, agree, everybody, refused};
use crate::tuning::Setting;

/// What the output of the self-test holds before it.
const POISON: u8 = 0xa5;

/// How long a gather of the self-test waits.
const SELF_TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// Symmetric device memory of a group: `[ubatches, slots, capacity_rows, row_bytes]` and its
/// signals on every rank's device.
///
/// Building one is collective, as for [`crate::Workspace`]: each rank in a thread or process of
/// its own. Several ranks may share a device.
///
/// Ranks in processes that use multicast let it go together: by a [`Group::barrier`] after the last
/// call of all, say. What is stored through the common address once one of them has taken its memory
/// away is undefined.
pub struct Workspace {
    // In the order in which they are let go: the watcher holds lanes, too, and a rank that shares
    // a device with others leaves before it frees memory, for which a driver waits until the
    // device is idle, and so for calls that wait for this rank.
    _watcher: Watcher,
    group: Group,
    lanes: Vec<Arc<Lane>>,
    options: WorkspaceOptions,
    choice: Choice,
    setting: Setting,
    /// For set-up.
    stream: Arc<Stream>,
    /// For the first work of streams.
    scratch: DeviceBuffer,
    sharing: u32,
}

impl Workspace {
    /// Allocates and shares memory on device `ordinal`, and finds the best ways that work: each has
    /// to gather random rows right on all ranks before it is taken, with a copy out and without, as
    /// calls will use it.
    ///
    /// # Errors
    /// [`WorkspaceError::InvalidArgument`] for options that no group could use;
    /// [`WorkspaceError::Mismatch`] where ranks ask for different options;
    /// [`WorkspaceError::Unsupported`] where the way that was asked for does not work;
    /// [`WorkspaceError::Refused`] where some rank has no driver, no such device or no memory, on
    /// every rank; [`WorkspaceError::Group`] where a peer is late or lost.
    pub fn new(
        group: &Group,
        ordinal: u32,
        options: WorkspaceOptions,
    ) -> Result<Self, WorkspaceError> {
        let opened = options.layout(group.world_size()).and_then(|layout| {
            let bytes = layout.bytes().and_then(|bytes| usize::try_from(bytes).ok());
            let bytes = bytes.ok_or_else(|| options.too_large())?;
            let stream = open(ordinal).map_err(|error| refused(group, error))?;
            Ok((layout, bytes, stream))
        });
        let (layout, bytes, stream) = agree(group, &options, opened)?;
        let context = stream.context();
        let fact = fact(context).map_err(|error| refused(group, error));
        let facts = Fact::exchange(group, &everybody(group, fact)?)?;
        let sharing = facts
            .iter()
            .filter(|fact| fact.uuid == facts[group.rank()].uuid)
            .count();
        let memory = SymmetricMemory::new(group, context, bytes, &facts)?;

        let setting = memory::setting(group.one_process(), &facts);
        let builder = Builder {
            group,
            options: &options,
            layout,
            stream: &stream,
            memory: &memory,
            sharing: sharing as u32,
        };
        let (choice, lanes) = builder.choose(&facts, &setting)?;
        if group.rank() == 0 {
            log::info!(
                "direct-dcp: {} {} gather by {choice}, {} rows of {} bytes, {} slots, {} ubatches",
                group.world_size(),
                if group.one_process() {
                    "threads"
                } else {
                    "processes"
                },
                layout.capacity_rows,
                layout.row_bytes,
                layout.slots,
                layout.ubatches,
            );
        }
        let scratch = DeviceBuffer::new(context, 1).map_err(|error| refused(group, error));
        let scratch = everybody(group, scratch)?;
        let watcher = Watcher::start(group.control().clone(), lanes.clone(), layout.world_size);
        let watcher = everybody(group, watcher.map_err(|error| refused(group, error)))?;
        Ok(Workspace {
            _watcher: watcher,
            lanes,
            group: group.clone(),
            options,
            choice,
            setting,
            stream,
            scratch,
            sharing: sharing as u32,
        })
    }

    /// The way that the group has taken: how rows travel in a final layout, and in each call for
    /// which [`way_of`](Workspace::way_of) names no other. [`Way::Push`] or [`Way::Multicast`],
    /// unless another was forced.
    #[must_use]
    pub fn way(&self) -> Way {
        self.choice.way()
    }

    /// How the rows of a call travel that gathers `rows` rows of each rank: the same on all ranks.
    /// [`Way::CopyEngine`] is that of calls that are not captured, unless it was forced; those that
    /// are go by [`Way::Push`].
    #[must_use]
    pub fn way_of(&self, delivery: Delivery, rows: usize) -> Way {
        let bytes = rows.saturating_mul(self.options.format.row_bytes());
        self.choice.of(delivery, bytes).way
    }

    /// Which entries of a [tuning table](crate::tuning) are for it.
    #[must_use]
    pub fn setting(&self) -> &Setting {
        &self.setting
    }

    /// The rows that it was built for.
    #[must_use]
    pub fn format(&self) -> RowFormat {
        self.options.format
    }

    /// Rows that a gather may deliver, over all ranks.
    #[must_use]
    pub fn capacity_rows(&self) -> usize {
        self.options.capacity_rows
    }

    /// Slots per ubatch.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.options.slots
    }

    /// Independent sequences of calls.
    #[must_use]
    pub fn ubatches(&self) -> usize {
        self.options.ubatches
    }

    /// The group it belongs to.
    #[must_use]
    pub fn group(&self) -> &Group {
        &self.group
    }

    /// The context of this rank's device.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.stream.context()
    }

    /// Ranks on this rank's device, itself counted.
    #[must_use]
    pub fn sharing(&self) -> u32 {
        self.sharing
    }

    /// The way of a call with slices of `bytes` bytes, and the most blocks of its launch.
    pub(super) fn choice(
        &self,
        delivery: Delivery,
        bytes: u64,
        captured: bool,
    ) -> (Way, Option<u32>) {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let step = self.choice.of(delivery, bytes);
        let way = if captured { step.captured } else { step.way };
        let blocks = step.blocks.and_then(|blocks| blocks.try_into().ok());
        (way, self.max_blocks().or(blocks))
    }

    /// The most blocks of a launch, if the caller has said.
    pub(super) fn max_blocks(&self) -> Option<u32> {
        self.options
            .blocks
            .and_then(|blocks| blocks.try_into().ok())
    }

    /// The stream of set-up, on which nothing waits for peers.
    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// A new stream that has done its first work. A driver may hold that back until other kernels of
    /// the device have ended, those of ranks that wait for this one too.
    pub(super) fn new_stream(&self) -> Result<Stream, CudaError> {
        let stream = Stream::new(self.context())?;
        self.scratch.fill(&stream, 0)?;
        Ok(stream)
    }

    pub(super) fn lane(&self, ubatch: usize) -> Option<&Arc<Lane>> {
        self.lanes.get(ubatch)
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // While the watcher still sees a peer die, or a call would wait for it until its deadline.
        self.lanes.iter().for_each(|lane| lane.settle());
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workspace")
            .field("options", &self.options)
            .field("choice", &self.choice)
            .field("sharing", &self.sharing)
            .finish_non_exhaustive()
    }
}

/// A stream of the device's context.
fn open(ordinal: u32) -> Result<Arc<Stream>, CudaError> {
    let driver = Driver::load()?;
    let context = Context::new(&Device::new(&driver, ordinal)?)?;
    Stream::new(&context).map(Arc::new)
}

fn fact(context: &Context) -> Result<Fact, CudaError> {
    let device = context.device();
    let multicast = multicast::forbidden_by().is_none()
        && device.supports(DeviceAttribute::MulticastSupported)?;
    Ok(Fact {
        uuid: device.uuid()?,
        multicast,
        name: device.name()?,
    })
}

/// What the choice of a way works with.
struct Builder<'a> {
    group: &'a Group,
    options: &'a WorkspaceOptions,
    layout: Layout,
    /// For set-up and rehearsals, on all ubatches.
    stream: &'a Arc<Stream>,
    memory: &'a SymmetricMemory,
    sharing: u32,
}

impl Builder<'_> {
    /// Collective: the first candidate whose self-test passes on all ranks, and its lanes.
    fn choose(
        &self,
        facts: &[Fact],
        setting: &Setting,
    ) -> Result<(Choice, Vec<Arc<Lane>>), WorkspaceError> {
        let obstacle = multicast::obstacle(facts, self.layout.row_bytes);
        let multicast = obstacle.is_none();
        match (self.options.way, obstacle) {
            (Some(Way::SharedSlot), _) => {
                return Err(unsupported(Way::SharedSlot, "the ranks are on GPUs".into()));
            }
            (Some(Way::Multicast), Some(obstacle)) => {
                return Err(unsupported(Way::Multicast, obstacle));
            }
            _ => {}
        }
        let mut failure = None;
        for choice in Choice::candidates(self.options, setting, multicast) {
            match self.try_choice(&choice) {
                Ok(lanes) => return Ok((choice, lanes)),
                // Every rank got the same verdict, so every rank goes on to the next candidate.
                Err(WorkspaceError::Refused { rank, reason }) => {
                    if self.group.rank() == 0 {
                        log::warn!("direct-dcp: {choice} does not work on rank {rank}: {reason}");
                    }
                    failure = Some((choice.way(), format!("rank {rank}: {reason}")));
                }
                Err(error) => return Err(error),
            }
        }
        // There is at least one candidate, so there is a failure to tell.
        let (way, reason) = failure.unwrap_or((Way::Push, "there is no way".into()));
        Err(unsupported(way, reason))
    }

    fn try_choice(&self, choice: &Choice) -> Result<Vec<Arc<Lane>>, WorkspaceError> {
        let uses = choice.uses();
        let multicast = match uses.iter().any(|(_, way)| *way == Way::Multicast) {
            true => Some(multicast::map(
                self.group,
                self.stream.context(),
                self.memory,
            )?),
            false => None,
        };
        self.clear_headers()?;
        let mut transports = Vec::new();
        if uses.iter().any(|(_, way)| *way != Way::Multicast) {
            transports.push(Transport::Unicast);
        }
        if multicast.is_some() {
            transports.push(Transport::Multicast);
        }
        let kernels = transports
            .into_iter()
            .map(|transport| Ok((transport, Kernel::load(self.stream.context(), transport)?)))
            .collect::<Result<Vec<_>, CudaError>>();
        let kernels = everybody(
            self.group,
            kernels.map_err(|error| refused(self.group, error)),
        )?;
        let lanes = || everybody(self.group, self.lanes(&kernels, multicast.as_ref()));
        let tested = lanes()?;
        for (delivery, way) in uses {
            self.self_test(&tested, delivery, way)?;
        }
        // The self-test's lanes waited for it when they were dropped; the next begin at epoch 0.
        drop(tested);
        self.clear_headers()?;
        lanes()
    }

    /// Collective: makes all signals zero, before anybody stores or observes one.
    fn clear_headers(&self) -> Result<(), WorkspaceError> {
        // Nobody works with the old ones any more.
        self.group.barrier()?;
        let cleared = (|| {
            let header = vec![0; self.layout.header_bytes().unwrap_or_default() as usize];
            let stride = self.layout.ubatch_bytes().unwrap_or_default() as usize;
            for ubatch in 0..self.layout.ubatches as usize {
                self.memory
                    .own()
                    .upload(self.stream, ubatch * stride, &header)?;
            }
            Ok(())
        })();
        everybody(
            self.group,
            cleared.map_err(|error: CudaError| refused(self.group, error)),
        )
    }

    fn lanes(
        &self,
        kernels: &[(Transport, Kernel)],
        multicast: Option<&Everywhere>,
    ) -> Result<Vec<Arc<Lane>>, WorkspaceError> {
        let cuda = |error| refused(self.group, error);
        let mut memory = self.memory.keep();
        memory.extend(multicast.into_iter().flat_map(Everywhere::keep));
        (0..self.layout.ubatches)
            .map(|ubatch| {
                let place = |base| {
                    self.layout
                        .receiver(base, ubatch)
                        .ok_or_else(|| self.options.too_large())
                };
                let reach = |(transport, kernel): &(Transport, Kernel)| {
                    let receivers: Result<Vec<Receiver>, _> = match transport {
                        Transport::Multicast => {
                            let bases = multicast.into_iter().map(Everywhere::address);
                            bases.map(place).collect()
                        }
                        Transport::Unicast => self.memory.addresses().map(place).collect(),
                    };
                    Ok::<_, WorkspaceError>(Reach {
                        kernel: kernel.clone(),
                        receivers: receivers?,
                    })
                };
                let options = LaneOptions {
                    layout: self.layout,
                    rank: self.group.rank() as u32,
                    ubatch,
                    sharing: self.sharing,
                };
                let reaches = kernels.iter().map(reach).collect::<Result<_, _>>()?;
                let own = place(self.memory.own().address())?;
                Lane::new(options, self.stream, reaches, own, memory.clone())
                    .map(Arc::new)
                    .map_err(cuda)
            })
            .collect()
    }

    /// Collective: gathers rows that differ by rank and run, and compares every byte.
    fn self_test(
        &self,
        lanes: &[Arc<Lane>],
        delivery: Delivery,
        way: Way,
    ) -> Result<(), WorkspaceError> {
        let most = self.options.capacity_rows / self.group.world_size();
        let rows = most.min(3);
        let local = noise(self.group.rank(), rows * self.options.format.row_bytes());
        let expected = self.group.all_gather(&local)?.concat();
        let Some(lane) = lanes.first() else {
            return Ok(());
        };
        let trial = shape(self.options.format, local.len(), most)
            .map_err(|error| refused(self.group, error))
            .and_then(|shape| {
                let trial = Rehearsal::new(lane, shape).and_then(|mut trial| {
                    trial.set_rows(&local)?;
                    trial.fill_out(POISON)?;
                    trial.wait()?;
                    Ok(trial)
                });
                trial.map_err(|error| refused(self.group, error))
            });
        let mut trial = everybody(self.group, trial)?;

        let failed = |error: &LaunchError| {
            let words = self.words(error);
            refused(
                self.group,
                format!("self-test of {delivery} by {way}: {words}"),
            )
        };
        let call = CallOptions {
            route: route(way),
            max_blocks: None,
            timeout: SELF_TEST_TIMEOUT,
        };
        let submitted = trial.call(delivery, call).map_err(|error| failed(&error));
        // Where one rank did not come so far, nobody waits for it.
        let agreed = self.group.vote(submitted.is_ok())?.iter().all(|yes| *yes);
        if !agreed {
            lane.abort();
        }
        let delivered = || {
            trial.wait()?;
            if let Some(report) = lane.report() {
                return Err(LaunchError::Failed(report));
            }
            let mut got = vec![0; expected.len()];
            trial.read(&mut got)?;
            Ok(got)
        };
        let tested = submitted.and_then(|()| match delivered() {
            Ok(got) if got == expected => Ok(()),
            Ok(_) => Err(refused(
                self.group,
                format!("self-test of {delivery} by {way}: rows arrive changed or not at all"),
            )),
            // Not this rank's fault: the one that is to blame says why.
            Err(_) if !agreed => Ok(()),
            Err(error) => Err(failed(&error)),
        });
        // Nobody goes on while a slot is being read.
        everybody(self.group, tested)
    }

    /// Why a call of the self-test failed, as a call of the user's would say it.
    fn words(&self, error: &LaunchError) -> String {
        match error {
            LaunchError::Failed(Report { fault, missing }) => {
                let control = self.group.control();
                from_fault(fault, missing, SELF_TEST_TIMEOUT, control).to_string()
            }
            LaunchError::Cuda(error) => error.to_string(),
            LaunchError::Size {
                what,
                expected,
                got,
            } => format!("{what}: expected {expected}, got {got}"),
            LaunchError::Busy
            | LaunchError::SlotInUse { .. }
            | LaunchError::Capturing
            | LaunchError::Placing(_) => "the group's memory is in use".into(),
        }
    }
}

/// Bytes that no two ranks, and no two runs, are likely to share.
fn noise(rank: usize, len: usize) -> Vec<u8> {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let state = RandomState::new();
    (0_u64..)
        .flat_map(|index| {
            let mut hasher = state.build_hasher();
            hasher.write_u64(index);
            hasher.write_usize(rank);
            hasher.finish().to_ne_bytes()
        })
        .take(len)
        .collect()
}

fn unsupported(way: Way, reason: String) -> WorkspaceError {
    WorkspaceError::Unsupported {
        capability: way.to_string(),
        reason,
        instead: match way {
            Way::Push => "pull, or the CPU backend",
            _ => "push, or no way at all to let the group choose",
        }
        .into(),
    }
}
