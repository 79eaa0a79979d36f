//! Streams and events, copies and fills, stream memory operations.

#![allow(unsafe_code)] // moving the bytes

use core::ffi::{c_uint, c_void};
use core::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::abi::{Copy2d, End2d, In, Out};
use crate::call::export;
use crate::capture::{refuse_captured, submit};
use crate::code::{Code, Outcome, ensure};
use crate::memory::{check_access, is_pinned};
use crate::state::{State, new_handle, require_context, state};
use crate::stream::{Event, Kind, Stream, Work};

/// `CU_MEMORYTYPE_UNIFIED`.
const UNIFIED: c_uint = 4;

/// The largest pitch of a device, about.
const MOST_PITCH: usize = 1 << 31;

/// Finds a live stream of the current context; 0 and 1 are the legacy default stream, 2 is the
/// calling thread's.
pub(super) fn find(state: &mut State, handle: usize) -> Outcome<(Arc<Stream>, u32)> {
    let (context, device) = require_context(state)?;
    if handle > 2 {
        let stream = state
            .streams
            .get(&handle)
            .cloned()
            .ok_or(Code::INVALID_HANDLE)?;
        ensure(stream.context == context, Code::INVALID_CONTEXT)?;
        return Ok((stream, device));
    }
    let legacy = handle < 2;
    let key = (context, if legacy { 0 } else { thread_number() });
    if let Some(stream) = state.default_streams.get(&key) {
        return Ok((Arc::clone(stream), device));
    }
    let stream = Stream::start(new_handle(), (context, device), !legacy, legacy)?;
    state.default_streams.insert(key, Arc::clone(&stream));
    Ok((stream, device))
}

fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static MINE: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    MINE.with(|mine| *mine)
}

/// Submits work to a stream of the current context.
fn queue(handle: usize, work: impl FnOnce(&State, &Stream, u32) -> Outcome<Work>) -> Outcome {
    let mut state = state();
    let (stream, device) = find(&mut state, handle)?;
    let work = work(&state, &stream, device)?;
    submit(&state, &stream, work, Kind::Ordinary)
}

/// Pointers that work carries to the stream's thread.
#[derive(Clone, Copy)]
struct Carried(*mut c_void);

// SAFETY: only the stream's thread uses it; that the memory stays is what the caller of an
// asynchronous copy promises.
unsafe impl Send for Carried {}
// SAFETY: as above.
unsafe impl Sync for Carried {}

/// One end of a copy: host memory that was promised, or device memory that is checked each time.
#[derive(Clone, Copy)]
enum End {
    Host(Carried),
    Device(u64),
}

impl End {
    /// Whether this is host memory that the driver has not pinned.
    fn is_pageable(self, state: &State) -> bool {
        match self {
            Self::Host(pointer) => !is_pinned(state, pointer.0.addr() as u64),
            Self::Device(_) => false,
        }
    }

    fn resolve(self, state: &State, device: u32, bytes: usize, write: bool) -> Outcome<Carried> {
        match self {
            Self::Host(pointer) => {
                ensure(!pointer.0.is_null() || bytes == 0, Code::INVALID_VALUE)?;
                Ok(pointer)
            }
            Self::Device(address) => {
                check_access(state, device, address, bytes, write, true).map(Carried)
            }
        }
    }
}

///
/// Host memory that is not pinned is copied on idle streams only. A real driver may wait for the
/// stream there, with a lock held that other threads need to submit what the stream waits for.
fn copy(stream: usize, to: End, from: End, bytes: usize) -> Outcome {
    queue(stream, |state, stream, device| {
        if to.is_pageable(state) || from.is_pageable(state) {
            let busy = stream.capture().is_none() && stream.query() == Err(Code::NOT_READY);
            ensure(!busy, Code::NOT_PERMITTED)?;
        }
        to.resolve(state, device, bytes, true)?;
        from.resolve(state, device, bytes, false)?;
        Ok(Arc::new(move || {
            // Looked up again: a graph may be replayed after the memory is gone.
            let state = crate::state::state();
            let to = to
                .resolve(&state, device, bytes, true)
                .map_err(|_| Code::ILLEGAL_ADDRESS)?;
            let from = from.resolve(&state, device, bytes, false);
            let from = from.map_err(|_| Code::ILLEGAL_ADDRESS)?;
            // SAFETY: device ends are accessible and cannot go away while the state is locked;
            // host ends were promised by the caller.
            unsafe { core::ptr::copy(from.0.cast::<u8>(), to.0.cast::<u8>(), bytes) };
            Ok(())
        }))
    })
}

/// Copies rows between device memory.
fn copy_rows(stream: usize, copy: Copy2d) -> Outcome {
    let Copy2d {
        from,
        to,
        width,
        height,
    } = copy;
    let plain = |end: &End2d| end.kind == UNIFIED && (end.x, end.y) == (0, 0);
    let wide = |end: &End2d| end.pitch >= width && end.pitch < MOST_PITCH;
    let right = [from, to].iter().all(|end| plain(end) && wide(end));
    ensure(right, Code::INVALID_VALUE)?;
    let (from, to) = ((from.device, from.pitch), (to.device, to.pitch));
    let at = |(start, pitch): (u64, usize), row: usize| start + (row * pitch) as u64;
    queue(stream, |state, _, device| {
        for row in 0..height {
            check_access(state, device, at(from, row), width, false, true)?;
            check_access(state, device, at(to, row), width, true, true)?;
        }
        Ok(Arc::new(move || {
            let state = crate::state::state();
            for row in 0..height {
                let from = check_access(&state, device, at(from, row), width, false, true);
                let from = from.map_err(|_| Code::ILLEGAL_ADDRESS)?;
                let to = check_access(&state, device, at(to, row), width, true, true);
                let to = to.map_err(|_| Code::ILLEGAL_ADDRESS)?;
                // SAFETY: both are accessible and cannot go away while the state is locked.
                unsafe { core::ptr::copy(from.cast::<u8>(), to.cast::<u8>(), width) };
            }
            Ok(())
        }))
    })
}

/// Fills with a repeated pattern of 1 or 4 bytes.
fn fill<const N: usize>(stream: usize, address: u64, pattern: [u8; N], count: usize) -> Outcome {
    let bytes = count.checked_mul(N).ok_or(Code::INVALID_VALUE)?;
    ensure(address.is_multiple_of(N as u64), Code::INVALID_VALUE)?;
    queue(stream, |state, _, device| {
        check_access(state, device, address, bytes, true, true)?;
        Ok(Arc::new(move || {
            let state = crate::state::state();
            let to = check_access(&state, device, address, bytes, true, true);
            let to = to.map_err(|_| Code::ILLEGAL_ADDRESS)?.cast::<[u8; N]>();
            for index in 0..count {
                // SAFETY: inside the checked span, which cannot go away while the state is locked.
                let place = unsafe { to.add(index) };
                // SAFETY: as above.
                unsafe { place.write(pattern) };
            }
            Ok(())
        }))
    })
}

/// A word of device memory, for the time of one access.
fn with_word<R>(device: u32, address: u64, body: impl FnOnce(&AtomicU32) -> R) -> Outcome<R> {
    let state = state();
    let word = check_access(&state, device, address, 4, true, false);
    let word = word.map_err(|_| Code::ILLEGAL_ADDRESS)?.cast::<u32>();
    // SAFETY: accessible and aligned, and cannot go away while the state is locked.
    Ok(body(unsafe { AtomicU32::from_ptr(word) }))
}

export! {
    fn cuStreamCreate(stream: Out<usize>, flags: c_uint) {
        ensure(flags <= 1, Code::INVALID_VALUE)?;
        let mut state = state();
        let owner = require_context(&state)?;
        let handle = new_handle();
        let created = Stream::start(handle, owner, flags == 0, false)?;
        state.streams.insert(handle, created);
        stream.set(handle)
    }
    fn cuStreamDestroy_v2(stream: usize) {
        let mut state = state();
        ensure(stream > 2, Code::INVALID_HANDLE)?;
        let (found, _) = find(&mut state, stream)?;
        refuse_captured(&found)?;
        found.close();
        state.streams.remove(&stream);
        Ok(())
    }
    fn cuStreamGetCtx(stream: usize, context: Out<usize>) {
        let state = state();
        let found = state.streams.get(&stream).ok_or(Code::INVALID_HANDLE)?;
        context.set(found.context)
    }
    fn cuStreamSynchronize(stream: usize) {
        let found = find(&mut state(), stream)?.0;
        refuse_captured(&found)?;
        found.wait_for(found.position())
    }
    fn cuStreamQuery(stream: usize) {
        let found = find(&mut state(), stream)?.0;
        refuse_captured(&found)?;
        found.query()
    }
    fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) {
        ensure(flags == 0, Code::INVALID_VALUE)?;
        let mut state = state();
        let (stream, _) = find(&mut state, stream)?;
        let event = state.events.get(&event).cloned().ok_or(Code::INVALID_HANDLE)?;
        match (stream.capture(), event.captured()) {
            (Some(capture), Some((other, from))) => {
                ensure(Arc::ptr_eq(&capture, &other), Code::STREAM_CAPTURE_MERGE)?;
                capture.join(stream.handle, from);
                Ok(())
            }
            (None, Some((capture, from))) => {
                ensure(!stream.legacy, Code::STREAM_CAPTURE_IMPLICIT)?;
                capture.join(stream.handle, from);
                stream.set_capture(Some(capture));
                Ok(())
            }
            (Some(capture), None) if event.last() > 0 => {
                capture.invalidate();
                Err(Code::STREAM_CAPTURE_ISOLATION)
            }
            (_, None) => {
                let number = event.last();
                let wait = move || {
                    event.wait_for(number);
                    Ok(())
                };
                if stream.capture().is_some() { Ok(()) } else { submit(&state, &stream, Arc::new(wait), Kind::Ordinary) }
            }
        }
    }

    fn cuEventCreate(event: Out<usize>, flags: c_uint) {
        ensure(flags & !3 == 0, Code::INVALID_VALUE)?;
        let mut state = state();
        let (context, _) = require_context(&state)?;
        let handle = new_handle();
        state.events.insert(handle, Arc::new(Event::new(context, flags & 2 == 0)));
        event.set(handle)
    }
    fn cuEventDestroy_v2(event: usize) {
        let mut state = state();
        require_context(&state)?;
        state.events.remove(&event).map(drop).ok_or(Code::INVALID_HANDLE)
    }
    fn cuEventRecord(event: usize, stream: usize) {
        let mut state = state();
        let (stream, _) = find(&mut state, stream)?;
        let event = state.events.get(&event).cloned().ok_or(Code::INVALID_HANDLE)?;
        ensure(event.context == stream.context, Code::INVALID_HANDLE)?;
        match stream.capture() {
            Some(capture) => {
                event.record_captured(capture, stream.handle);
                Ok(())
            }
            None => submit(&state, &stream, event.record(), Kind::Record),
        }
    }
    fn cuEventQuery(event: usize) {
        let event = state().events.get(&event).cloned().ok_or(Code::INVALID_HANDLE)?;
        event.query()
    }
    fn cuEventSynchronize(event: usize) {
        let event = state().events.get(&event).cloned().ok_or(Code::INVALID_HANDLE)?;
        ensure(event.captured().is_none(), Code::CAPTURED_EVENT)?;
        event.wait_for(event.last());
        Ok(())
    }
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) {
        let state = state();
        let find = |handle| state.events.get(&handle).cloned().ok_or(Code::INVALID_HANDLE);
        let (start, end) = (find(start)?, find(end)?);
        ensure(start.timing && end.timing, Code::INVALID_HANDLE)?;
        let (from, to) = (start.time()?, end.time()?);
        milliseconds.set(to.saturating_duration_since(from).as_secs_f32() * 1e3)
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: *mut c_void, bytes: usize, stream: usize) {
        copy(stream, End::Device(to), End::Host(Carried(from)), bytes)
    }
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: usize) {
        copy(stream, End::Host(Carried(to)), End::Device(from), bytes)
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) {
        copy(stream, End::Device(to), End::Device(from), bytes)
    }
    fn cuMemcpy2DAsync_v2(copy: In<Copy2d>, stream: usize) {
        copy_rows(stream, copy.get()?)
    }
    fn cuMemsetD8Async(to: u64, value: u8, count: usize, stream: usize) {
        fill(stream, to, [value], count)
    }
    fn cuMemsetD32Async(to: u64, value: c_uint, count: usize, stream: usize) {
        fill(stream, to, value.to_ne_bytes(), count)
    }

    fn cuStreamWriteValue32_v2(stream: usize, address: u64, value: u32, flags: c_uint) {
        ensure(flags <= 1 && address.is_multiple_of(4), Code::INVALID_VALUE)?;
        queue(stream, |state, _, device| {
            check_access(state, device, address, 4, true, false)?;
            Ok(Arc::new(move || {
                with_word(device, address, |word| word.store(value, Ordering::Release))
            }))
        })
    }
    fn cuStreamWaitValue32_v2(stream: usize, address: u64, value: u32, flags: c_uint) {
        ensure(flags <= 1 && address.is_multiple_of(4), Code::INVALID_VALUE)?;
        queue(stream, |state, _, device| {
            check_access(state, device, address, 4, false, false)?;
            Ok(Arc::new(move || loop {
                let seen = with_word(device, address, |word| word.load(Ordering::Acquire))?;
                let over = if flags == 1 { seen == value } else { seen.wrapping_sub(value) as i32 >= 0 };
                if over {
                    return Ok(());
                }
                std::thread::sleep(Duration::from_micros(50));
            }))
        })
    }
}
