//! Stream capture and graphs.

use core::ffi::c_uint;
use std::sync::Arc;

use super::stream::find;
use crate::abi::Out;
use crate::call::export;
use crate::capture::{Capture, GLOBAL, RELAXED, submit};
use crate::code::{Code, ensure};
use crate::state::{new_handle, require_context, state};
use crate::stream::Kind;

export! {
    fn cuStreamBeginCapture_v2(stream: usize, mode: c_uint) {
        ensure((GLOBAL..=RELAXED).contains(&mode), Code::INVALID_VALUE)?;
        let mut state = state();
        let (stream, _) = find(&mut state, stream)?;
        ensure(!stream.legacy, Code::STREAM_CAPTURE_UNSUPPORTED)?;
        ensure(stream.capture().is_none(), Code::ILLEGAL_STATE)?;
        let capture = Arc::new(Capture::new(stream.handle, mode));
        state.captures.push(Arc::clone(&capture));
        stream.set_capture(Some(capture));
        Ok(())
    }
    fn cuStreamEndCapture(stream: usize, graph: Out<usize>) {
        let mut state = state();
        let (stream, _) = find(&mut state, stream)?;
        let capture = stream.capture().ok_or(Code::ILLEGAL_STATE)?;
        ensure(capture.origin == stream.handle, Code::STREAM_CAPTURE_UNMATCHED)?;
        let here = std::thread::current().id();
        let may_end = capture.mode == RELAXED || capture.thread == here;
        ensure(may_end, Code::STREAM_CAPTURE_WRONG_THREAD)?;
        let finished = capture.finish(stream.context);
        stream.set_capture(None);
        for fork in capture.forks() {
            if let Some(fork) = state.streams.get(&fork) {
                fork.set_capture(None);
            }
        }
        state.captures.retain(|other| !Arc::ptr_eq(other, &capture));
        graph.set(0)?;
        let finished = finished?;
        let handle = new_handle();
        state.graphs.insert(handle, Arc::new(finished));
        graph.set(handle)
    }
    fn cuStreamIsCapturing(stream: usize, status: Out<c_uint>) {
        let (stream, _) = find(&mut state(), stream)?;
        status.set(match stream.capture() {
            None => 0,
            Some(capture) if capture.is_invalid() => 2,
            Some(_) => 1,
        })
    }
    fn cuGraphInstantiateWithFlags(executable: Out<usize>, graph: usize, flags: u64) {
        ensure(flags == 0, Code::INVALID_VALUE)?;
        let mut state = state();
        let graph = state.graphs.get(&graph).cloned().ok_or(Code::INVALID_HANDLE)?;
        let handle = new_handle();
        state.executables.insert(handle, graph);
        executable.set(handle)
    }
    fn cuGraphUpload(executable: usize, stream: usize) {
        let mut state = state();
        let graph = state.executables.get(&executable).cloned().ok_or(Code::INVALID_HANDLE)?;
        let (stream, _) = find(&mut state, stream)?;
        ensure(graph.context == stream.context, Code::INVALID_CONTEXT)
    }
    fn cuGraphLaunch(executable: usize, stream: usize) {
        let mut state = state();
        let graph = state.executables.get(&executable).cloned().ok_or(Code::INVALID_HANDLE)?;
        let (stream, _) = find(&mut state, stream)?;
        ensure(graph.context == stream.context, Code::INVALID_CONTEXT)?;
        let work = Arc::new(move || graph.work.iter().try_for_each(|work| work()));
        submit(&state, &stream, work, Kind::Ordinary)
    }
    fn cuGraphExecDestroy(executable: usize) {
        let mut state = state();
        require_context(&state)?;
        state.executables.remove(&executable).map(drop).ok_or(Code::INVALID_HANDLE)
    }
    fn cuGraphDestroy(graph: usize) {
        let mut state = state();
        require_context(&state)?;
        state.graphs.remove(&graph).map(drop).ok_or(Code::INVALID_HANDLE)
    }
}
