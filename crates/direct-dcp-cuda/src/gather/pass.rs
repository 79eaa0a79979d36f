//! What a caller does with rows that have arrived rank by rank, on a device that has nobody to wait
//! for.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::end::Reach;
use super::kernel::{Kernel, Transport};
use super::lane::{Held, Lane, LaneOptions, LaunchError};
use super::layout::Layout;
use super::place::{DevicePlacement, PlacedRows};
use super::route::{CallOptions, Route};
use super::rows::DeviceRows;
use crate::buffer::DeviceBuffer;
use crate::error::{CudaError, Result};
use crate::stream::Stream;

/// One launch that copies rows to their places in planes, within the memory of one device: padding
/// is dropped, and the rows are put in order and split on the way.
///
/// It is the kernel of a gather in final layout, for a group of one rank: each row is read once and
/// written once, and the signal that ends it comes from the launch itself. Results alternate between
/// two buffers, as those of a gather do.
pub struct Pass {
    held: Option<Held>,
    lane: Arc<Lane>,
    placement: DevicePlacement,
    call: CallOptions,
}

impl Pass {
    /// Passes that place rows by `placement`, on the device of `beside`, which the same ranks share.
    /// A launch has `most_blocks` blocks at most, or as many as pay.
    ///
    /// It allocates, for which drivers may wait until the device is idle, as its end does.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`] for rows that memory cannot hold, else the driver's.
    pub fn new(
        beside: &Lane,
        placement: DevicePlacement,
        most_blocks: Option<u32>,
    ) -> Result<Self> {
        let context = beside.context();
        let too_large =
            || CudaError::invalid("placement", "sizes that fit", format!("{placement:?}"));
        let layout = Layout {
            world_size: 1,
            slots: 2,
            ubatches: 1,
            capacity_rows: placement.total_rows().max(1),
            row_bytes: u32::try_from(placement.row_bytes()).map_err(|_| too_large())?,
        };
        let sizes = layout.bytes().zip(layout.header_bytes());
        let sizes = sizes.and_then(|(bytes, header)| {
            Some((usize::try_from(bytes).ok()?, usize::try_from(header).ok()?))
        });
        let (bytes, header) = sizes.ok_or_else(too_large)?;
        let memory = DeviceBuffer::new(context, bytes)?;
        memory.upload(beside.stream(), 0, &vec![0; header])?;
        let own = layout.receiver(memory.address(), 0).ok_or_else(too_large)?;
        let reach = Reach {
            kernel: match beside.end(Route::Push) {
                Ok(end) => end.kernel.clone(),
                Err(_) => Kernel::load(context, Transport::Unicast)?,
            },
            receivers: vec![own],
        };
        let options = LaneOptions {
            layout,
            rank: 0,
            ubatch: 0,
            sharing: beside.options().sharing,
        };
        let memory: Arc<dyn Any + Send + Sync> = Arc::new(memory);
        Ok(Pass {
            held: None,
            lane: Arc::new(Lane::new(
                options,
                beside.stream(),
                vec![reach],
                own,
                vec![memory],
            )?),
            placement,
            call: CallOptions {
                route: Route::Push,
                max_blocks: most_blocks,
                // It waits for nobody.
                timeout: Duration::MAX,
            },
        })
    }

    /// Submits one pass over `rows`, as many as the placement has.
    pub(super) fn submit(
        &mut self,
        stream: &Stream,
        rows: DeviceRows,
    ) -> std::result::Result<(), LaunchError> {
        // The result of the pass before is let go.
        self.held = None;
        let rows = PlacedRows::dense(rows);
        let held = self.lane.place(stream, &self.placement, &rows, self.call)?;
        self.held = Some(held);
        Ok(())
    }

    /// Notes that a captured pass was replayed.
    pub(super) fn replayed(&mut self) {
        if let Some(held) = &mut self.held {
            held.replayed();
        }
    }

    /// Waits, and reads what the last pass has placed, from byte `offset` of all planes on.
    pub(super) fn read(&self, stream: &Stream, offset: usize, to: &mut [u8]) -> Result<()> {
        let held = self.held.as_ref().ok_or(CudaError::WrongOrder {
            what: "read",
            needed: "a pass to have been submitted",
        })?;
        held.read(stream, offset, to)
    }
}

impl fmt::Debug for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pass")
            .field("lane", &self.lane)
            .field("placement", &self.placement)
            .finish_non_exhaustive()
    }
}
