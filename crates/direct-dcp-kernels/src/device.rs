//! What the host hands to a GPU launch: the kernel's arguments and the memory they point to.
//!
//! Addresses are those of the device, as integers, so that the host can build these without
//! touching them.

use crate::machine::Shape;

/// The module whose kernel stores to each peer, for sm_80 and up.
#[cfg(not(target_arch = "nvptx64"))]
pub const UNICAST_PTX: &str = include_str!("../ptx/unicast.ptx");

/// The module whose kernel stores to all ranks at once, for sm_90 and up.
#[cfg(not(target_arch = "nvptx64"))]
pub const MULTICAST_PTX: &str = include_str!("../ptx/multicast.ptx");

/// The gather kernels: bytes that every access moves, whether the launch ends with a copy, name.
/// Their one parameter is [`Arguments`]. The multicast module has only those of 16 bytes.
pub const GATHER_ENTRIES: [(u32, bool, &str); 10] = [
    (16, false, "direct_dcp_gather_16"),
    (8, false, "direct_dcp_gather_8"),
    (4, false, "direct_dcp_gather_4"),
    (2, false, "direct_dcp_gather_2"),
    (1, false, "direct_dcp_gather_1"),
    (16, true, "direct_dcp_gather_into_16"),
    (8, true, "direct_dcp_gather_into_8"),
    (4, true, "direct_dcp_gather_into_4"),
    (2, true, "direct_dcp_gather_into_2"),
    (1, true, "direct_dcp_gather_into_1"),
];

/// The kernels that store each row in its final place: bytes that every store moves, whether e4m3
/// elements become bf16 ones on the way, name. Their one parameter is [`PlaceArguments`]. The
/// multicast module has only those of 16 bytes.
pub const PLACE_ENTRIES: [(u32, bool, &str); 7] = [
    (16, false, "direct_dcp_place_16"),
    (8, false, "direct_dcp_place_8"),
    (4, false, "direct_dcp_place_4"),
    (2, false, "direct_dcp_place_2"),
    (1, false, "direct_dcp_place_1"),
    (16, true, "direct_dcp_dequantize_16"),
    (2, true, "direct_dcp_dequantize_2"),
];

/// The three kernels of the staged algorithm, in the unicast module, for comparison: advance the
/// epoch; store, publish and wait; copy out. Their one parameter is [`Arguments`].
pub const STAGED_ENTRIES: [&str; 3] = [
    "direct_dcp_staged_advance",
    "direct_dcp_staged_publish",
    "direct_dcp_staged_copy",
];

/// Where one receiver's memory lies, for one ubatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Receiver {
    /// `[slots][slot_bytes]` bytes of rows.
    pub rows: u64,
    /// `[slots][world_size]` u32 signals.
    pub signals: u64,
    /// `[slots][world_size]` shapes, or 0 where ranks do not publish any.
    pub shapes: u64,
    /// A u32 that is 0, or 1 + a rank which failed; or 0 where ranks do not tell.
    pub notice: u64,
}

impl Receiver {
    /// What [`Arguments::near_rows`] says of `receivers`.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn near_rows(receivers: &[Receiver]) -> [u64; NEAR] {
        let mut near = [0; NEAR];
        for (place, receiver) in near.iter_mut().zip(receivers) {
            *place = receiver.rows;
        }
        near
    }

    /// The table that [`Arguments::receivers`] points to: all rows, then all signals, all shapes
    /// and all notices. So the entries that a thread needs next to each other lie next to each
    /// other.
    #[cfg(not(target_arch = "nvptx64"))]
    pub fn table(receivers: &[Receiver]) -> impl Iterator<Item = u64> {
        let fields: [fn(&Receiver) -> u64; 4] =
            [|r| r.rows, |r| r.signals, |r| r.shapes, |r| r.notice];
        fields
            .into_iter()
            .flat_map(move |field| receivers.iter().map(field))
    }
}

/// What a rank keeps to itself, per ubatch, in device memory. The first 16 bytes are what every
/// thread of a launch reads, at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct State {
    /// Calls completed, where the caller has no word of its own for that.
    pub epoch: u64,
    /// Not 0 once a call has failed.
    pub poisoned: u32,
    /// Not 0 once a thread has claimed the right to report the first fault.
    pub reported: u32,
    /// The address of the slot of the last completed call, for consumers of a captured graph.
    pub rows: u64,
    /// Blocks of the launch under way that have arrived; 0 between launches.
    pub arrivals: u32,
    /// Makes the size a multiple of 8.
    pub reserved: u32,
}

/// The report of a failed launch, in memory that the host can read. `missing` follows it: a u32
/// per rank, not 0 for those that did not publish in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Status {
    /// Not 0 once everything else is written.
    pub ready: u32,
    /// A [`FaultCode`](crate::FaultCode).
    pub code: u32,
    /// The rank that the fault is about.
    pub source: u32,
    /// Makes the next field aligned.
    pub reserved: u32,
    /// The call that failed.
    pub epoch: u64,
    /// This rank's side.
    pub ours: u64,
    /// The source's side.
    pub theirs: u64,
}

/// Receivers whose rows [`Arguments`] names itself.
pub const NEAR: usize = 8;

/// The arguments of a gather kernel, passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Arguments {
    /// This rank's rows.
    pub local: u64,
    /// The output, or 0 where the caller reads the slot. Addresses and sizes are multiples of the
    /// kernel's access.
    pub out: u64,
    /// The rows of the first receivers, as in the table: arguments reach all blocks by the constant
    /// cache, where a table in memory, read by every warp at the same time, is a place to queue.
    pub near_rows: [u64; NEAR],
    /// `[4][receiver_count]` addresses in device memory, the fields of [`Receiver`]: one that
    /// reaches all ranks, or one a rank.
    pub receivers: u64,
    /// This rank's own memory: where it observes and reads.
    pub own: Receiver,
    /// This rank's [`State`].
    pub state: u64,
    /// This rank's [`Status`], in host memory.
    pub status: u64,
    /// `[1 + world_size]` u32 in host memory: not 0 to abort, and for each rank not 0 once it is
    /// lost.
    pub interrupts: u64,
    /// What this rank gathers.
    pub shape: Shape,
    /// Bytes from one slot to the next.
    pub slot_bytes: u64,
    /// How long to wait for the peers, in nanoseconds.
    pub timeout: u64,
    /// A u64, the calls completed: the state's own, or the caller's.
    pub epoch: u64,
    /// Ranks of the group.
    pub world_size: u32,
    /// This rank.
    pub rank: u32,
    /// Slots per ubatch.
    pub slots: u32,
    /// Receivers of rows and signals: 1 or `world_size`.
    pub receiver_count: u32,
    /// Not 0 where rows stay with their rank, and the others read them there.
    pub pull: u32,
    /// Not 0 where the rows are in place before the launch, by copies of the host's; then the
    /// launch does not copy out.
    pub stored: u32,
}

/// Planes of a result at most.
pub const PLANES: usize = 4;

/// The arguments of a kernel that stores each row in its final place, passed by value.
///
/// `gather.shape` is the result's: its rows, and the bytes of a row in all planes together.
/// `gather.local` is where the rows, or the pages of the cache, begin.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PlaceArguments {
    /// As for any gather, without an output.
    pub gather: Arguments,
    /// `[local_rows]` i32 in device memory: the row of the result that each row becomes, or -1.
    pub places: u64,
    /// `[local_rows]` u32 in device memory: the slot of each row in the cache; or 0 where rows lie
    /// one behind the other.
    pub cache_slots: u64,
    /// Bytes from one page of the cache to the next.
    pub page_stride: u64,
    /// Bytes from one row to the next, in a page or among all.
    pub row_stride: u64,
    /// Rows of a page.
    pub page_rows: u32,
    /// Slots of the cache.
    pub cache_rows: u32,
    /// Rows of this rank.
    pub local_rows: u32,
    /// Rows for which each plane of a slot has room.
    pub capacity_rows: u32,
    /// Bytes of a row in each plane; 0 for planes that there are not.
    pub planes: [u32; PLANES],
    /// What e4m3 elements are multiplied by.
    pub scale: f32,
    /// Makes the size a multiple of 8.
    pub reserved: u32,
}
