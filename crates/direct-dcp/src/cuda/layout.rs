//! Final layout on GPUs.

use std::ops::Range;

use direct_dcp_cuda::gather::{DevicePlacement, Held};
use direct_dcp_cuda::{CudaError, Stream};

use super::workspace::Workspace;
use crate::error::{GatherError, from_cuda};
use crate::format::RowFormat;

/// A [`FinalLayout`](crate::FinalLayout) in the memory of a device, for any number of calls. It
/// stays until they, and each replay of those that were captured, have finished.
#[derive(Debug)]
pub struct FinalLayout {
    placement: DevicePlacement,
    layout: crate::FinalLayout,
}

impl FinalLayout {
    /// Uploads `layout` to the device of `workspace`, and waits.
    ///
    /// # Errors
    /// [`GatherError::Driver`].
    pub fn new(workspace: &Workspace, layout: &crate::FinalLayout) -> Result<Self, GatherError> {
        let placement = upload(workspace.stream(), layout);
        Ok(FinalLayout {
            placement: placement.map_err(|error| from_cuda(&error))?,
            layout: layout.clone(),
        })
    }

    /// The device address of `[local_rows]` i32: the row of the result that each local row becomes,
    /// or -1. An engine that captures a graph may have others written here before each replay, as
    /// long as they are below the rows of the result and name each once over all ranks. One that is
    /// not below fails the call. The copy engines go by the layout that was uploaded.
    #[must_use]
    pub fn places(&self) -> u64 {
        self.placement.address()
    }

    pub(super) fn placement(&self) -> &DevicePlacement {
        &self.placement
    }

    pub(super) fn format(&self) -> RowFormat {
        self.layout.format()
    }

    /// Where each plane lies in a slot with room for `capacity_rows` rows.
    pub(super) fn spans(&self, capacity_rows: usize) -> Vec<Range<usize>> {
        self.layout.spans(capacity_rows)
    }
}

/// The placement of `layout`, in the memory of a device.
pub(super) fn upload(
    stream: &Stream,
    layout: &crate::FinalLayout,
) -> Result<DevicePlacement, CudaError> {
    let placement = layout.placement();
    DevicePlacement::new(
        stream,
        &placement.places(),
        placement.total_rows(),
        placement.planes(),
        placement.digest(),
    )
}

/// The result of a gather in its final layout, in a slot of this rank's device, lent as
/// [`Gathered`](super::Gathered) is.
#[derive(Debug)]
pub struct Planes {
    pub(super) held: Held,
    pub(super) spans: Vec<Range<usize>>,
}

impl Planes {
    /// The device address of plane `index`, `[total_rows, plane_bytes]`. `None` for one that the
    /// layout does not have, and where the call was captured: see
    /// [`address_word`](Planes::address_word).
    #[must_use]
    pub fn address(&self, index: usize) -> Option<u64> {
        let span = self.spans.get(index)?;
        Some(self.held.address()? + span.start as u64)
    }

    /// Where plane `index` lies in the slot, in bytes.
    #[must_use]
    pub fn span(&self, index: usize) -> Option<Range<usize>> {
        self.spans.get(index).cloned()
    }

    /// The device address of a u64 that holds the address of the slot after the call, and after each
    /// replay of it.
    #[must_use]
    pub fn address_word(&self) -> u64 {
        self.held.address_word()
    }

    /// The call of its ubatch, counted by the host, from 1.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.held.epoch()
    }

    /// Releases the slot after what `stream` has to do so far.
    ///
    /// # Errors
    /// [`GatherError::Driver`]; the slot is released all the same, and the stream was waited for.
    pub fn release_after(self, stream: &Stream) -> Result<(), GatherError> {
        let released = self.held.release_after(stream);
        released.map_err(|error| from_cuda(&error))
    }
}
