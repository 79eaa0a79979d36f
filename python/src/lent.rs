//! Results in slots, lent to Python.

use std::sync::{Mutex, PoisonError};

use direct_dcp::cuda::{self, Context};
use direct_dcp::{GatherError, Gathered, Planes};
use pyo3::prelude::*;

use crate::errors;
use crate::memory::{self, Span};
use crate::stream;

/// The rows of all ranks in a slot, or their planes, which nobody overwrites until they are
/// released.
#[pyclass(frozen, module = "direct_dcp._native")]
pub(crate) struct Lent {
    spans: Vec<Span>,
    held: Mutex<Option<Held>>,
}

/// What holds the slot.
pub(crate) enum Held {
    Rows(Gathered),
    Planes(Planes),
    OnDevice(OnDevice),
}

pub(crate) struct OnDevice {
    pub(crate) result: DeviceResult,
    pub(crate) context: Context,
    /// The stream whose work so far comes before the next call anyway, if there is one.
    pub(crate) own: Option<u64>,
}

pub(crate) enum DeviceResult {
    Rows(cuda::Gathered),
    Planes(cuda::Planes),
}

impl Held {
    /// Where the rows are, or each plane. None in a graph.
    fn spans(&self) -> Option<Vec<Span>> {
        match self {
            Held::Rows(rows) => Some(vec![Span::of(rows)]),
            Held::Planes(planes) => Some(planes.iter().map(Span::of).collect()),
            Held::OnDevice(held) => match &held.result {
                DeviceResult::Rows(rows) => {
                    Some(vec![Span::new(rows.address()?, rows.bytes() as usize)])
                }
                DeviceResult::Planes(planes) => (0..)
                    .map_while(|index| Some((index, planes.span(index)?)))
                    .map(|(index, span)| Some(Span::new(planes.address(index)?, span.len())))
                    .collect(),
            },
        }
    }
}

impl OnDevice {
    /// Lets the slot go after what `stream` has to do so far.
    fn release(self, stream: u64) -> PyResult<()> {
        if self.own == Some(stream) {
            return Ok(());
        }
        let stream = memory::stream(&self.context, stream).map_err(errors::cuda)?;
        let released = match self.result {
            DeviceResult::Rows(rows) => rows.release_after(&stream),
            DeviceResult::Planes(planes) => planes.release_after(&stream),
        };
        released.map_err(errors::gather)
    }
}

impl Lent {
    pub(crate) fn new(held: Held) -> PyResult<Self> {
        let captured = || {
            errors::gather(GatherError::Unsupported {
                capability: "a zero-copy gather in a graph",
                reason: "each replay delivers into another slot",
                instead: "gather_into",
            })
        };
        Ok(Lent {
            spans: held.spans().ok_or_else(captured)?,
            held: Mutex::new(Some(held)),
        })
    }
}

#[pymethods]
impl Lent {
    /// The address and the size of the rows, or of each plane.
    #[getter]
    fn spans(&self) -> Vec<(u64, usize)> {
        self.spans.iter().map(|span| span.parts()).collect()
    }

    /// Lets the slot go: on a GPU, after what `stream` has to do so far.
    fn release(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = stream::raw)] stream: u64,
    ) -> PyResult<()> {
        let held = self
            .held
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match held {
            Some(Held::OnDevice(held)) => py.detach(|| held.release(stream)),
            _ => Ok(()),
        }
    }
}

impl Drop for Lent {
    /// It may be the last to hold the workspace.
    fn drop(&mut self) {
        let held = self.held.get_mut();
        crate::drop_detached(held.unwrap_or_else(PoisonError::into_inner).take());
    }
}
