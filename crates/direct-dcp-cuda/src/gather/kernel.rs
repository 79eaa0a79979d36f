//! The gather kernel, loaded into a context, and how many of its blocks fit the device.

use std::sync::Arc;

use direct_dcp_kernels::device::{
    GATHER_ENTRIES, MULTICAST_PTX, PLACE_ENTRIES, STAGED_ENTRIES, UNICAST_PTX,
};

use crate::context::Context;
use crate::device::DeviceAttribute;
use crate::error::Result;
use crate::function::{Function, LaunchShape};
use crate::module::Module;

/// Threads of a block at most.
const THREADS: u32 = 256;

/// Accesses that a thread should have, at least: fewer, and more blocks than pay would queue to
/// count themselves as arrived.
const ACCESSES: u64 = 2;

/// How the kernel's stores reach the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// One store for each rank.
    Unicast,
    /// One store for all.
    Multicast,
}

/// One kernel of those that differ in the bytes of an access and in a kind.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    width: u32,
    /// Whether it copies out, or converts.
    kind: bool,
    pub(super) function: Function,
    /// Blocks that are resident at once on a device that does nothing else.
    pub(super) resident_blocks: u32,
}

/// The gather kernels of one context.
#[derive(Clone, Debug)]
pub struct Kernel {
    pub(super) transport: Transport,
    module: Arc<Module>,
    functions: Vec<Entry>,
    /// Those that store each row in its final place: bytes of a store, whether they convert.
    placers: Vec<Entry>,
    /// The staged algorithm's launches: advance, publish, copy.
    staged: Option<[Function; 3]>,
    /// Blocks that are resident at once on a device that does nothing else, whichever of the gather
    /// kernels each of them is of.
    resident_blocks: u32,
}

impl Kernel {
    /// Compiles the embedded PTX for the context's device.
    ///
    /// # Errors
    /// [`CudaError::Jit`](crate::CudaError::Jit) where the device or the driver is too old for it,
    /// else the driver's.
    pub fn load(context: &Context, transport: Transport) -> Result<Self> {
        let (text, widths) = match transport {
            Transport::Unicast => (UNICAST_PTX, 1..=16),
            Transport::Multicast => (MULTICAST_PTX, 16..=16),
        };
        let module = Module::load_ptx(context, text)?;
        let multiprocessors = context
            .device()
            .attribute(DeviceAttribute::MultiprocessorCount)?
            .unsigned_abs();
        let load = |entries: &[(u32, bool, &str)]| {
            let entries = entries.iter().filter(|entry| widths.contains(&entry.0));
            let load = |&(width, kind, name): &_| {
                let function = module.function(name)?;
                let each = function.max_active_blocks_per_multiprocessor(THREADS, 0)?;
                Ok(Entry {
                    width,
                    kind,
                    function,
                    resident_blocks: each.saturating_mul(multiprocessors).max(1),
                })
            };
            entries.map(load).collect::<Result<Vec<_>>>()
        };
        let functions = load(&GATHER_ENTRIES)?;
        let placers = load(&PLACE_ENTRIES)?;
        let staged = match transport {
            Transport::Unicast => {
                let [advance, publish, copy] = STAGED_ENTRIES;
                Some([
                    module.function(advance)?,
                    module.function(publish)?,
                    module.function(copy)?,
                ])
            }
            Transport::Multicast => None,
        };
        let entries = functions.iter().chain(&placers);
        let resident_blocks = entries.map(|entry| entry.resident_blocks).min();
        Ok(Kernel {
            transport,
            module,
            functions,
            placers,
            staged,
            resident_blocks: resident_blocks.unwrap_or(1),
        })
    }

    /// The context it is loaded into.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.module.context()
    }

    /// The kernel for accesses of `width` bytes; of a width that the module does not have, none.
    pub(super) fn entry(&self, width: u32, copy_out: bool) -> Option<&Entry> {
        find(&self.functions, width, copy_out)
    }

    /// The kernel that stores rows in their final places by stores of `width` bytes.
    pub(super) fn placer(&self, width: u32, converts: bool) -> Option<&Entry> {
        find(&self.placers, width, converts)
    }

    /// The most blocks of a launch all of whose blocks wait: all must be resident beside those of
    /// every other call, of each of `ubatches` and of the ranks `sharing` the device, whose kernels
    /// may be others and leave no room that this one fits in. See "Who may wait" in docs/protocol.md.
    pub(super) fn most_waiting_blocks(&self, sharing: u32, ubatches: u32) -> u32 {
        let calls = sharing.max(1).saturating_mul(ubatches.max(1));
        self.resident_blocks / calls
    }

    /// The launches of the staged algorithm, each with its shape, for slices of `bytes` of
    /// `world_size` ranks, with the limits that its authors chose.
    pub(super) fn staged(
        &self,
        bytes: u64,
        world_size: u32,
    ) -> Option<[(&Function, LaunchShape); 3]> {
        const THREADS: u32 = 256;
        let blocks = |bytes: u64, most: u32| {
            let blocks = bytes.div_ceil(16 * u64::from(THREADS));
            u32::try_from(blocks).unwrap_or(u32::MAX).clamp(1, most)
        };
        let [advance, publish, copy] = self.staged.as_ref()?;
        let gathered = bytes.saturating_mul(world_size.into());
        Some([
            (advance, LaunchShape::linear(1, 1)),
            (publish, LaunchShape::linear(blocks(bytes, 128), THREADS)),
            (copy, LaunchShape::linear(blocks(gathered, 1024), THREADS)),
        ])
    }

    /// A launch that moves slices of `bytes` by accesses of `width`, with `most` blocks at most.
    pub(super) fn shape(&self, bytes: u64, width: u32, most: u32) -> LaunchShape {
        let units = bytes.div_ceil(width.into());
        let threads = u32::try_from(units).unwrap_or(u32::MAX).clamp(32, THREADS);
        let threads = threads.next_multiple_of(32);
        let blocks = units.div_ceil(u64::from(threads) * ACCESSES);
        let blocks = u32::try_from(blocks)
            .unwrap_or(u32::MAX)
            .clamp(1, most.max(1));
        LaunchShape::linear(blocks, threads)
    }
}

fn find(entries: &[Entry], width: u32, kind: bool) -> Option<&Entry> {
    let is_it = |entry: &&Entry| (entry.width, entry.kind) == (width, kind);
    entries.iter().find(is_it)
}
