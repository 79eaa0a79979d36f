//! What devices can do with each other's memory, found out by doing it.

#![allow(unsafe_code)] // copies on devices

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::DeviceBuffer;
use crate::context::Context;
use crate::error::Result;
use crate::event::Event;
use crate::stream::Stream;
use crate::vmm::{AddressRange, Allocation, Granularity, HandleTypes, Mapping};

/// Whether bytes that device `from` writes into memory of device `to`, and reads from there,
/// arrive unchanged. The memory is mapped as a group maps it.
///
/// Some machines offer peer access and drop the writes: PCIe with ACS, or an IOMMU.
///
/// # Errors
/// The driver's.
pub fn peer_memory_works(from: &Context, to: &Context, bytes: &[u8]) -> Result<bool> {
    let memory = Allocation::create(to, bytes.len(), HandleTypes::NONE, Granularity::Minimum)?;
    let mapping = map(to, &memory, &[from, to])?;
    let buffer = DeviceBuffer::new(from, bytes.len())?;
    let (near, far) = (Stream::new(from)?, Stream::new(to)?);

    let inverted: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
    mapping.upload(&far, 0, &inverted)?;
    buffer.upload(&near, 0, bytes)?;
    copy(&near, mapping.address(), buffer.address(), bytes.len())?;
    let mut found = vec![0; bytes.len()];
    mapping.download(&far, 0, &mut found)?;
    if found != bytes {
        return Ok(false);
    }

    buffer.upload(&near, 0, &inverted)?;
    copy(&near, buffer.address(), mapping.address(), bytes.len())?;
    found.fill(0);
    buffer.download(&near, 0, &mut found)?;
    Ok(found == bytes)
}

/// Whether memory that is exported as a file descriptor and imported again is the same memory.
///
/// # Errors
/// The driver's; [`CudaError::is_unsupported`](crate::CudaError::is_unsupported) where it cannot.
pub fn exported_memory_works(context: &Context, bytes: &[u8]) -> Result<bool> {
    let kind = HandleTypes::POSIX_FD;
    let ours = Allocation::create(context, bytes.len(), kind, Granularity::Minimum)?;
    let fd = ours.export_fd()?;
    let theirs = Allocation::import_fd(context, fd.as_fd(), ours.bytes())?;
    let (ours, theirs) = (
        map(context, &ours, &[context])?,
        map(context, &theirs, &[context])?,
    );
    let stream = Stream::new(context)?;
    let mut found: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
    theirs.upload(&stream, 0, &found)?;
    ours.upload(&stream, 0, bytes)?;
    theirs.download(&stream, 0, &mut found)?;
    Ok(found == bytes)
}

/// Creates memory that can be shared across machines, and gives it back.
///
/// # Errors
/// The driver's; `CUDA_ERROR_NOT_PERMITTED` where the process has no IMEX channel.
pub fn fabric_memory_works(context: &Context) -> Result<()> {
    Allocation::create(context, 1, HandleTypes::FABRIC, Granularity::Minimum)
        .and_then(|memory| memory.export_fabric().map(drop))
}

/// The time that one copy of `bytes` bytes takes, from memory of device `from` to memory of device
/// `to`, which may be the same: the mean of several.
///
/// # Errors
/// The driver's.
pub fn copy_time(from: &Context, to: &Context, bytes: usize) -> Result<Duration> {
    const COPIES: u32 = 10;
    let (source, destination) = (
        DeviceBuffer::new(from, bytes)?,
        DeviceBuffer::new(to, bytes)?,
    );
    if from != to {
        from.enable_peer_access(to)?;
    }
    let stream = Stream::new(from)?;
    let (start, end) = (Event::with_timing(from)?, Event::with_timing(from)?);
    let measured = (|| {
        for round in 0..=COPIES {
            // The first copy is for the clocks to rise.
            if round == 1 {
                start.record(&stream)?;
            }
            // SAFETY: both buffers outlive the work, which is waited for below, and nobody else
            // knows them.
            unsafe { stream.copy_on_device(destination.address(), source.address(), bytes) }?;
        }
        end.record(&stream)
    })();
    stream.synchronize()?;
    measured?;
    let milliseconds = f64::from(end.elapsed_ms_since(&start)?);
    Ok(Duration::from_secs_f64(milliseconds.max(1e-6) / 1e3) / COPIES)
}

fn map(context: &Context, memory: &Arc<Allocation>, users: &[&Context]) -> Result<Mapping> {
    let range = AddressRange::reserve(context, memory.bytes(), 0)?;
    let mut devices: Vec<_> = users.iter().map(|context| context.device()).collect();
    devices.dedup();
    Mapping::new(&range, 0, memory, memory.bytes(), &devices)
}

/// Copies and waits.
fn copy(stream: &Stream, to: u64, from: u64, bytes: usize) -> Result<()> {
    // SAFETY: the callers own both ranges and keep them; the copy is over when this returns, or
    // the context is broken and executes nothing more.
    let submitted = unsafe { stream.copy_on_device(to, from, bytes) };
    let waited = stream.synchronize();
    submitted.and(waited)
}
