//! The instructions whose ordering the protocol rests on, one function each.
//!
//! Rust's own atomics are not used: on this target the compiler drops the ordering of
//! read-modify-write operations. Every block is a single instruction on global memory; the asm
//! blocks are not `nomem`, so the compiler moves no other memory access across them.

use core::arch::asm;

use crate::machine::Shape;

/// Waits for all threads of the block.
#[inline(always)]
pub(super) fn barrier() {
    // SAFETY: every thread of the block gets here: the protocol's control flow around barriers is
    // the same for all of them. (Not `bar.sync`, whose aligned form also wants a warp to arrive as
    // one, which a compiler that duplicates code could break.)
    unsafe { asm!("barrier.sync 0;") }
}

/// Waits for all threads of the block, and tells whether any of them voted yes.
#[inline(always)]
pub(super) fn barrier_any(vote: bool) -> bool {
    let any: u32;
    // SAFETY: as for `barrier`.
    unsafe {
        asm!(
            "{{",
            ".reg .pred %vote, %any;",
            "setp.ne.u32 %vote, {vote}, 0;",
            "barrier.red.or.pred %any, 0, %vote;",
            "selp.u32 {any}, 1, 0, %any;",
            "}}",
            vote = in(reg32) u32::from(vote),
            any = out(reg32) any,
        );
    }
    any != 0
}

/// Orders accesses to one memory through several addresses: a multicast one and a replica's own.
#[cfg(feature = "multicast")]
#[inline(always)]
pub(super) fn fence_alias() {
    // SAFETY: a fence touches no memory.
    unsafe { asm!("fence.proxy.alias;") }
}

/// Defines a function that loads one word.
macro_rules! load {
    ($name:ident, $type:ty, $register:ident, $instruction:literal, $what:literal) => {
        #[doc = $what]
        ///
        /// # Safety
        /// `address` is aligned, and that of a word in global memory.
        #[inline(always)]
        pub(super) unsafe fn $name(address: u64) -> $type {
            let value: $type;
            // SAFETY: the caller's.
            unsafe {
                asm!(
                    concat!($instruction, " {value}, [{address}];"),
                    value = out($register) value,
                    address = in(reg64) address,
                );
            }
            value
        }
    };
}

/// Defines a function that stores one word.
macro_rules! store {
    ($name:ident, $type:ty, $register:ident, $instruction:literal, $what:literal) => {
        #[doc = $what]
        ///
        /// # Safety
        /// `address` is aligned, and that of a word in global memory.
        #[inline(always)]
        pub(super) unsafe fn $name(address: u64, value: $type) {
            // SAFETY: the caller's.
            unsafe {
                asm!(
                    concat!($instruction, " [{address}], {value};"),
                    address = in(reg64) address,
                    value = in($register) value,
                );
            }
        }
    };
}

load!(load_u32, u32, reg32, "ld.global.u32", "An ordinary load.");
load!(load_u64, u64, reg64, "ld.global.u64", "An ordinary load.");
load!(
    load_relaxed_sys_u32,
    u32,
    reg32,
    "ld.relaxed.sys.global.u32",
    "A load of a changing word."
);
load!(
    load_acquire_gpu_u32,
    u32,
    reg32,
    "ld.acquire.gpu.global.u32",
    "Acquires within the GPU."
);
load!(
    load_acquire_gpu_u64,
    u64,
    reg64,
    "ld.acquire.gpu.global.u64",
    "Acquires within the GPU."
);
load!(
    load_acquire_sys_u32,
    u32,
    reg32,
    "ld.acquire.sys.global.u32",
    "Acquires from any GPU."
);

/// Two ordinary loads in one.
///
/// # Safety
/// `address` is a multiple of 16, and that of two words in global memory.
#[inline(always)]
pub(super) unsafe fn load_u64_pair(address: u64) -> (u64, u64) {
    let (first, second): (u64, u64);
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "ld.global.v2.u64 {{{first}, {second}}}, [{address}];",
            first = out(reg64) first,
            second = out(reg64) second,
            address = in(reg64) address,
        );
    }
    (first, second)
}

store!(store_u32, u32, reg32, "st.global.u32", "An ordinary store.");
store!(store_u64, u64, reg64, "st.global.u64", "An ordinary store.");
#[cfg(not(feature = "multicast"))]
store!(
    store_everywhere_u32,
    u32,
    reg32,
    "st.relaxed.sys.global.u32",
    "Stores a changing word of a receiver."
);
#[cfg(feature = "multicast")]
store!(
    store_everywhere_u32,
    u32,
    reg32,
    "multimem.st.relaxed.sys.global.u32",
    "Stores a changing word of every replica of a multicast address."
);
store!(
    store_release_gpu_u32,
    u32,
    reg32,
    "st.release.gpu.global.u32",
    "Releases within the GPU."
);
store!(
    store_release_gpu_u64,
    u64,
    reg64,
    "st.release.gpu.global.u64",
    "Releases within the GPU."
);
store!(
    store_release_sys_u32,
    u32,
    reg32,
    "st.release.sys.global.u32",
    "Releases to any observer."
);

#[cfg(feature = "multicast")]
store!(
    multimem_store_release_sys_u32,
    u32,
    reg32,
    "multimem.st.release.sys.global.u32",
    "Releases to every replica of a multicast address."
);

/// Adds 1, acquires and releases within the GPU, and returns the value before.
///
/// # Safety
/// `address` is aligned, and that of a word in global memory.
#[inline(always)]
pub(super) unsafe fn add_one_acq_rel_gpu(address: u64) -> u32 {
    let before: u32;
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "atom.acq_rel.gpu.global.add.u32 {before}, [{address}], 1;",
            before = out(reg32) before,
            address = in(reg64) address,
        );
    }
    before
}

/// Adds 1 without ordering anything, and returns the value before: for the staged algorithm only.
///
/// # Safety
/// `address` is aligned, and that of a word in global memory.
#[cfg(not(feature = "multicast"))]
#[inline(always)]
pub(super) unsafe fn add_one_relaxed_gpu(address: u64) -> u32 {
    let before: u32;
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "atom.relaxed.gpu.global.add.u32 {before}, [{address}], 1;",
            before = out(reg32) before,
            address = in(reg64) address,
        );
    }
    before
}

/// The fence of the staged algorithm.
#[cfg(not(feature = "multicast"))]
#[inline(always)]
pub(super) fn fence_sc_sys() {
    // SAFETY: a fence touches no memory.
    unsafe { asm!("fence.sc.sys;") }
}

/// Sets a zero word to 1, acquires and releases within the GPU, and tells whether it was zero.
///
/// # Safety
/// `address` is aligned, and that of a word in global memory.
#[inline(always)]
pub(super) unsafe fn claim_acq_rel_gpu(address: u64) -> bool {
    let before: u32;
    // SAFETY: the caller's.
    unsafe {
        asm!(
            "atom.acq_rel.gpu.global.cas.b32 {before}, [{address}], 0, 1;",
            before = out(reg32) before,
            address = in(reg64) address,
        );
    }
    before == 0
}

/// Brings a line of global memory close, or not: a hint.
#[inline(always)]
pub(super) fn prefetch(address: u64) {
    // SAFETY: a hint does not fault, and changes no value.
    unsafe { asm!("prefetch.global.L1 [{0}];", in(reg64) address) }
}

/// Nanoseconds of a clock that all multiprocessors share.
#[inline(always)]
pub(super) fn global_timer() -> u64 {
    let now: u64;
    // SAFETY: reads a special register.
    unsafe { asm!("mov.u64 {now}, %globaltimer;", now = out(reg64) now) }
    now
}

/// Suspends the thread for about `nanoseconds`.
#[inline(always)]
pub(super) fn sleep(nanoseconds: u32) {
    // SAFETY: touches no memory.
    unsafe { asm!("nanosleep.u32 {0};", in(reg32) nanoseconds) }
}

/// A piece of a row that one instruction moves.
pub(super) trait Unit: Copy {
    /// Its size.
    const BYTES: u64;
    /// # Safety
    /// `address` is a multiple of `BYTES`, and that of as many bytes of global memory.
    unsafe fn load(address: u64) -> Self;
    /// Stores it, and lets the cache drop it before other lines. A gather writes up to W times what
    /// it reads: kept like the rest, that would push out what the next kernels read, and the rows
    /// that the gather itself has yet to read. A hint: it changes neither value nor order.
    ///
    /// # Safety
    /// `address` is a multiple of `BYTES`, and that of as many bytes of global memory; where the
    /// module is the multicast one and `everywhere` is set, of multicast memory.
    unsafe fn stream(self, address: u64, everywhere: bool);
}

/// Sixteen bytes.
#[derive(Clone, Copy)]
pub(super) struct Quad(
    pub(super) u32,
    pub(super) u32,
    pub(super) u32,
    pub(super) u32,
);

impl From<Shape> for Quad {
    #[inline(always)]
    fn from(shape: Shape) -> Self {
        Quad(
            shape.rows,
            shape.row_bytes,
            shape.digest as u32,
            (shape.digest >> 32) as u32,
        )
    }
}

impl From<Quad> for Shape {
    #[inline(always)]
    fn from(Quad(rows, row_bytes, low, high): Quad) -> Self {
        let digest = u64::from(high) << 32 | u64::from(low);
        Shape {
            rows,
            row_bytes,
            digest,
        }
    }
}

/// Stores a [`Quad`] by the instruction that is named.
macro_rules! store_quad {
    ($instruction:literal, $quad:expr, $address:expr) => {
        asm!(
            concat!($instruction, " [{address}], {{{a}, {b}, {c}, {d}}};"),
            address = in(reg64) $address,
            a = in(reg32) $quad.0,
            b = in(reg32) $quad.1,
            c = in(reg32) $quad.2,
            d = in(reg32) $quad.3,
        )
    };
}

impl Unit for Quad {
    const BYTES: u64 = 16;

    #[inline(always)]
    unsafe fn load(address: u64) -> Self {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller's.
        unsafe {
            asm!(
                "ld.global.v4.u32 {{{a}, {b}, {c}, {d}}}, [{address}];",
                a = out(reg32) a,
                b = out(reg32) b,
                c = out(reg32) c,
                d = out(reg32) d,
                address = in(reg64) address,
            );
        }
        Quad(a, b, c, d)
    }

    #[inline(always)]
    unsafe fn stream(self, address: u64, everywhere: bool) {
        if everywhere {
            // Multicast stores carry no hint.
            // SAFETY: the caller's.
            return unsafe { self.store(address, true) };
        }
        // SAFETY: the caller's.
        unsafe { store_quad!("st.global.cs.v4.u32", self, address) }
    }
}

impl Quad {
    /// An ordinary store, or one to every replica of a multicast address.
    ///
    /// # Safety
    /// As for [`stream`](Unit::stream).
    #[inline(always)]
    pub(super) unsafe fn store(self, address: u64, everywhere: bool) {
        #[cfg(feature = "multicast")]
        if everywhere {
            // SAFETY: the caller's. A store does not look at the bits, so f32 is as good a type
            // as any; it is the one that has a vector form.
            unsafe { store_quad!("multimem.st.relaxed.sys.global.v4.f32", self, address) };
            return;
        }
        let _ = everywhere;
        // SAFETY: the caller's.
        unsafe { store_quad!("st.global.v4.u32", self, address) }
    }
}

/// Defines a [`Unit`] that one register holds.
macro_rules! unit {
    ($name:ident, $bytes:literal, $held:ty, $register:ident, $suffix:literal) => {
        #[doc = concat!("Bytes: ", $bytes, ".")]
        #[derive(Clone, Copy)]
        pub(super) struct $name(pub(super) $held);

        impl Unit for $name {
            const BYTES: u64 = $bytes;

            #[inline(always)]
            unsafe fn load(address: u64) -> Self {
                let value: $held;
                // SAFETY: the caller's.
                unsafe {
                    asm!(
                        concat!("ld.global.", $suffix, " {value}, [{address}];"),
                        value = out($register) value,
                        address = in(reg64) address,
                    );
                }
                $name(value)
            }

            #[inline(always)]
            unsafe fn stream(self, address: u64, _everywhere: bool) {
                // SAFETY: the caller's.
                unsafe {
                    asm!(
                        concat!("st.global.cs.", $suffix, " [{address}], {value};"),
                        address = in(reg64) address,
                        value = in($register) self.0,
                    );
                }
            }
        }
    };
}

unit!(Double, 8, u64, reg64, "u64");
#[cfg(not(feature = "multicast"))]
unit!(Word, 4, u32, reg32, "u32");
#[cfg(not(feature = "multicast"))]
unit!(Half, 2, u16, reg16, "u16");
#[cfg(not(feature = "multicast"))]
unit!(Byte, 1, u16, reg16, "u8");
