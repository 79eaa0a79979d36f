//! Shared memory: what is refused, what is visible, what is left behind.

mod common;

use common::{noise, open_fds, open_maps};
use direct_dcp_shm::{Mapping, SharedMemory, ShmError};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

const LEN: usize = 10_000; // no multiple of a page

/// Writes `bytes` to the start of `mapping` by 8-byte words.
fn fill(mapping: &Mapping, bytes: &[u8]) {
    for (i, word) in bytes.as_chunks().0.iter().enumerate() {
        let cell = mapping.atomic_u64(8 * i).unwrap();
        cell.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
    }
}

/// The first `len` bytes of `mapping`, read by 4-byte words.
fn contents(mapping: &Mapping, len: usize) -> Vec<u8> {
    (0..len / 4)
        .map(|i| mapping.atomic_u32(4 * i).unwrap())
        .flat_map(|cell| cell.load(Ordering::Relaxed).to_ne_bytes())
        .collect()
}

fn memfd(seals: SealFlags, len: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("foreign", flags).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[test]
fn the_size_and_the_seals_are_fixed() {
    let memory = SharedMemory::create("sealed", LEN).unwrap();
    assert_eq!(memory.len(), LEN);
    let seals = rustix::fs::fcntl_get_seals(memory.fd()).unwrap();
    assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL));
    assert!(rustix::fs::ftruncate(memory.fd(), 1).is_err());
    assert!(rustix::fs::ftruncate(memory.fd(), 1 << 20).is_err());
    assert!(rustix::fs::fcntl_add_seals(memory.fd(), SealFlags::WRITE).is_err());
}

#[test]
fn every_page_is_allocated_at_creation() {
    let memory = SharedMemory::create("allocated", 40 << 20).unwrap();
    let stat = rustix::fs::fstat(memory.fd()).unwrap();
    assert!(stat.st_blocks * 512 >= 40 << 20, "{}", stat.st_blocks);
}

#[test]
fn adopting_allocates_what_its_creator_did_not() {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let sparse = memfd(seals, LEN as u64);
    assert_eq!(rustix::fs::fstat(&sparse).unwrap().st_blocks, 0);
    let memory = SharedMemory::from_fd(sparse, LEN).unwrap();
    let stat = rustix::fs::fstat(memory.fd()).unwrap();
    assert!(stat.st_blocks * 512 >= LEN as i64, "{}", stat.st_blocks);
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let create = |len| SharedMemory::create("refused", len).unwrap_err();
    assert!(matches!(create(0), ShmError::Empty));
    assert!(matches!(create(usize::MAX), ShmError::TooLarge { .. }));
    // More than any machine has: an error, and nobody is killed for memory.
    assert!(matches!(
        create(1 << 50),
        ShmError::OutOfMemory { requested, .. } if requested == 1 << 50
    ));
    assert_eq!(open_fds("refused"), 0);
}

#[test]
fn names_that_cannot_be_are_refused() {
    for name in ["a\0b", &"n".repeat(1000)] {
        let error = SharedMemory::create(name, LEN).unwrap_err();
        assert!(
            matches!(&error, ShmError::Io { call, .. } if *call == "memfd_create"),
            "{error}"
        );
    }
}

#[test]
fn another_size_is_refused() {
    let memory = SharedMemory::create("size", LEN).unwrap();
    for len in [1, LEN - 1, LEN + 1, 2 * LEN] {
        let error = SharedMemory::from_fd(memory.try_clone_fd().unwrap(), len).unwrap_err();
        assert!(
            matches!(error, ShmError::WrongSize { expected, got }
                if expected == len as u64 && got == LEN as u64),
            "{error}"
        );
    }
}

#[test]
fn missing_seals_are_refused_by_name() {
    let all = [
        (SealFlags::SHRINK, "F_SEAL_SHRINK"),
        (SealFlags::GROW, "F_SEAL_GROW"),
        (SealFlags::SEAL, "F_SEAL_SEAL"),
    ];
    for (left_out, name) in all {
        let seals = (SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL) - left_out;
        let error = SharedMemory::from_fd(memfd(seals, LEN as u64), LEN).unwrap_err();
        assert!(
            matches!(&error, ShmError::NotSealed { missing } if missing == name),
            "{error}"
        );
    }
    let error = SharedMemory::from_fd(memfd(SealFlags::empty(), LEN as u64), LEN).unwrap_err();
    assert!(error.to_string().contains("F_SEAL_SHRINK, F_SEAL_GROW"));
}

#[test]
fn what_is_no_memfd_is_refused() {
    // A file of a disk cannot be sealed; one of a tmpfs can never have the seals.
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN as u64).unwrap();
    let error = SharedMemory::from_fd(file.into(), LEN).unwrap_err();
    assert!(
        matches!(error, ShmError::NotMemfd | ShmError::NotSealed { .. }),
        "{error}"
    );
    let (pipe, _writer) = std::io::pipe().unwrap();
    let error = SharedMemory::from_fd(pipe.into(), LEN).unwrap_err();
    assert!(matches!(error, ShmError::NotMemfd), "{error}");
}

#[test]
fn mappings_of_one_memory_show_the_same_bytes() {
    let memory = SharedMemory::create("seen", LEN).unwrap();
    let again = SharedMemory::from_fd(memory.try_clone_fd().unwrap(), LEN).unwrap();
    let (a, b, c) = (
        memory.map().unwrap(),
        memory.map().unwrap(),
        again.map().unwrap(),
    );
    assert_eq!(contents(&a, LEN), vec![0; LEN]);
    let bytes = noise(LEN);
    fill(&b, &bytes);
    // The mappings outlive the descriptors.
    drop((memory, again));
    for mapping in [a, b, c] {
        assert_eq!(mapping.len(), LEN);
        assert!(mapping.as_ptr().addr().is_multiple_of(4096));
        assert_eq!(contents(&mapping, LEN), bytes);
    }
}

#[test]
fn atomics_are_checked_for_bounds_and_alignment() {
    let mapping = SharedMemory::create("bounds", 20).unwrap().map().unwrap();
    let u32_at: Vec<usize> = (0..40)
        .filter(|&offset| mapping.atomic_u32(offset).is_some())
        .collect();
    let u64_at: Vec<usize> = (0..40)
        .filter(|&offset| mapping.atomic_u64(offset).is_some())
        .collect();
    assert_eq!(u32_at, [0, 4, 8, 12, 16]);
    assert_eq!(u64_at, [0, 8]);
    for offset in [
        usize::MAX,
        usize::MAX - 3,
        usize::MAX - 7,
        isize::MAX as usize,
    ] {
        assert!(mapping.atomic_u32(offset).is_none());
        assert!(mapping.atomic_u64(offset).is_none());
    }
}

#[test]
fn nothing_is_left_behind() {
    for round in 0..1_000 {
        let memory = SharedMemory::create("rounds", LEN).unwrap();
        let mapping = memory.map().unwrap();
        mapping
            .atomic_u32(LEN - 4)
            .unwrap()
            .store(round, Ordering::Relaxed);
        if round == 0 {
            // The counts below would see a leak.
            assert_eq!((open_fds("rounds"), open_maps("rounds")), (1, 1));
        }
    }
    assert_eq!((open_fds("rounds"), open_maps("rounds")), (0, 0));
}
