//! Rows stored in their final places.
#![allow(unsafe_code)] // launches, and constructors that make a promise

use std::sync::Arc;

use direct_dcp_kernels::Shape;
use direct_dcp_kernels::device::{Arguments, PLANES, PlaceArguments};

use super::lane::{Held, Lane, LaunchError, size};
use super::route::{CallOptions, Route};
use super::rows::DeviceRows;
use super::runs::Run;
use crate::buffer::DeviceBuffer;
use crate::error::{CudaError, Result};
use crate::function::Param;
use crate::stream::Stream;

/// A placement in device memory, for any number of calls in one context.
#[derive(Debug)]
pub struct DevicePlacement {
    /// `[local_rows]` i32.
    places: DeviceBuffer,
    /// The same, for copies that the host submits.
    pub(super) runs: Vec<Run>,
    local_rows: u32,
    total_rows: u32,
    pub(super) row_bytes: u64,
    pub(super) planes: [u32; PLANES],
    digest: u64,
}

impl DevicePlacement {
    /// Uploads `places`, the row of the result that each local row becomes, or -1, on `stream`, and
    /// waits. The result has `total_rows` rows, split after each of `planes` bytes; `digest` is the
    /// same on all ranks of a call.
    ///
    /// # Errors
    /// [`CudaError::InvalidArgument`](crate::CudaError::InvalidArgument) for no planes, an empty
    /// one, or too many, else the driver's.
    pub fn new(
        stream: &Stream,
        places: &[i32],
        total_rows: u32,
        planes: &[u32],
        digest: u64,
    ) -> Result<Self> {
        let local_rows = u32::try_from(places.len()).ok();
        let usable = (1..=PLANES).contains(&planes.len()) && !planes.contains(&0);
        let Some(local_rows) = local_rows.filter(|_| usable) else {
            let got = format!("{} rows, planes {planes:?}", places.len());
            return Err(CudaError::invalid("placement", "sizes that fit", got));
        };
        let bytes: Vec<u8> = places
            .iter()
            .flat_map(|place| place.to_ne_bytes())
            .collect();
        // Also a rank without rows has an address.
        let buffer = DeviceBuffer::new(stream.context(), bytes.len().max(4))?;
        buffer.upload(stream, 0, &bytes)?;
        let mut widths = [0; PLANES];
        for (to, &width) in widths.iter_mut().zip(planes) {
            *to = width;
        }
        Ok(DevicePlacement {
            places: buffer,
            runs: Run::of(places),
            local_rows,
            total_rows,
            row_bytes: planes.iter().copied().map(u64::from).sum(),
            planes: widths,
            digest,
        })
    }

    /// The device address of `[local_rows]` i32, the row of the result that each row becomes, or
    /// -1. Work that a call's stream is ordered after may write others, below the rows of the
    /// result and each once: a call finds what is not below, and fails. Calls by the copy engines
    /// go by what they were at first.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.places.address()
    }

    /// Rows that a call takes, padding included.
    pub(super) fn local_rows(&self) -> u32 {
        self.local_rows
    }

    /// Rows of the result.
    pub(super) fn total_rows(&self) -> u32 {
        self.total_rows
    }

    /// Bytes of a row in all planes.
    pub(super) fn row_bytes(&self) -> u64 {
        self.row_bytes
    }
}

/// Rows that a call stores in their final places.
#[derive(Clone, Copy, Debug)]
pub struct PlacedRows {
    memory: DeviceRows,
    cache: Option<Cache>,
    scale: Option<f32>,
}

#[derive(Clone, Copy, Debug)]
struct Cache {
    slots: u64,
    page_rows: u32,
    page_stride: u64,
    row_stride: u64,
}

impl PlacedRows {
    /// Rows one behind the other.
    #[must_use]
    pub fn dense(rows: DeviceRows) -> Self {
        PlacedRows {
            memory: rows,
            cache: None,
            scale: None,
        }
    }

    /// Rows in the pages of the cache `cache`: row i is at place `slots[i] % page_rows` of page
    /// `slots[i] / page_rows`. Strides are in bytes. A slot that the cache does not have fails the
    /// call, unless its row is padding.
    ///
    /// # Safety
    /// `slots` is the device address of a u32 for each local row, under the same promises as
    /// [`DeviceRows`].
    #[must_use]
    pub unsafe fn paged(
        cache: DeviceRows,
        page_rows: u32,
        page_stride: u64,
        row_stride: u64,
        slots: u64,
    ) -> Self {
        PlacedRows {
            memory: cache,
            cache: Some(Cache {
                slots,
                page_rows,
                page_stride,
                row_stride,
            }),
            scale: None,
        }
    }

    /// The rows are of e4m3 elements, and become bf16 ones, each multiplied by `scale`.
    #[must_use]
    pub fn dequantized(self, scale: f32) -> Self {
        PlacedRows {
            scale: Some(scale),
            ..self
        }
    }

    /// What elements are multiplied by, if they are converted.
    #[must_use]
    pub fn scale(&self) -> Option<f32> {
        self.scale
    }
}

impl Cache {
    /// Slots whose rows of `row_bytes` lie within `bytes` bytes, all of them before the first that
    /// does not.
    fn rows_within(&self, bytes: u64, row_bytes: u64) -> u32 {
        let page_rows = u64::from(self.page_rows);
        // The last row of a page, from the page's start.
        let Some(page_end) = page_rows
            .checked_sub(1)
            .and_then(|last| last.checked_mul(self.row_stride))
            .and_then(|last| last.checked_add(row_bytes))
        else {
            return 0;
        };
        let rest = |start: u64| bytes.checked_sub(start);
        let whole = match (rest(page_end), self.page_stride) {
            (None, _) => 0,
            // Every page is the same one.
            (Some(_), 0) => u64::from(u32::MAX) / page_rows,
            (Some(rest), stride) => rest / stride + 1,
        };
        // Rows of the page that is not whole.
        let begun = whole
            .checked_mul(self.page_stride)
            .and_then(rest)
            .and_then(|rest| rest.checked_sub(row_bytes))
            .map_or(0, |rest| match self.row_stride {
                0 => page_rows,
                stride => (rest / stride + 1).min(page_rows),
            });
        let rows = whole.saturating_mul(page_rows).saturating_add(begun);
        u32::try_from(rows).unwrap_or(u32::MAX)
    }
}

impl Lane {
    /// Submits a gather that stores each row of all ranks in its place in a slot, and lends the
    /// slot: all of it, of which only the places that the ranks' placements name are written.
    ///
    /// `placement` stays until the call, and each replay of it, has finished.
    ///
    /// # Errors
    /// See [`LaunchError`]; nothing was submitted then.
    pub fn place(
        self: &Arc<Self>,
        stream: &Stream,
        placement: &DevicePlacement,
        rows: &PlacedRows,
        call: CallOptions,
    ) -> std::result::Result<Held, LaunchError> {
        let mut book = self.turn()?;
        let copies = call.route == Route::CopyEngine;
        let obstacle = match (call.route, rows) {
            (Route::Pull | Route::Staged, _) => Some("rows travel in one piece"),
            (Route::CopyEngine, PlacedRows { scale: Some(_), .. }) => {
                Some("the copy engines convert nothing")
            }
            (Route::CopyEngine, PlacedRows { cache: Some(_), .. }) => {
                Some("only the device knows where in its pages a row is")
            }
            _ => None,
        };
        if let Some(reason) = obstacle {
            return Err(LaunchError::Placing(reason));
        }
        let end = self.end(call.route)?;
        let layout = &self.options().layout;
        let row_bytes = u64::from(layout.row_bytes);
        if placement.row_bytes != row_bytes {
            let what = "bytes of a row in all planes";
            return Err(size(what, row_bytes, placement.row_bytes));
        }
        if placement.total_rows > layout.capacity_rows {
            let what = "rows of the result, at most";
            return Err(size(
                what,
                layout.capacity_rows.into(),
                placement.total_rows.into(),
            ));
        }
        // The kernels look at each place themselves, where others may have been written meanwhile.
        let end_of_runs = || placement.runs.iter().map(Run::end).max();
        let beyond = copies.then(end_of_runs).flatten();
        if let Some(end) = beyond.filter(|end| *end > placement.total_rows.into()) {
            let what = "end of the places of rows, at most";
            return Err(size(what, placement.total_rows.into(), end));
        }
        let source_bytes = match rows.scale {
            Some(_) => row_bytes / 2,
            None => row_bytes,
        };
        let local_rows = u64::from(placement.local_rows);
        let memory = rows.memory.bytes() as u64;
        if rows.cache.is_none() && memory != local_rows * source_bytes {
            return Err(size("local bytes", local_rows * source_bytes, memory));
        }
        let width = self.place_width(placement, rows, source_bytes);
        let units = local_rows * row_bytes / u64::from(width);
        if units > u64::from(u32::MAX >> 1) {
            let most = u64::from(u32::MAX >> 1) * u64::from(width);
            return Err(size("local bytes, at most", most, local_rows * row_bytes));
        }
        let entry = end.kernel.placer(width, rows.scale.is_some());
        let entry = entry.ok_or_else(|| LaunchError::Size {
            what: "alignment of rows, strides and planes",
            expected: "16-byte multiples, for this way".into(),
            got: width.into(),
        })?;
        self.check_slots(&book)?;
        let capturing = stream.is_capturing()?;
        if copies && capturing {
            return Err(LaunchError::Capturing);
        }
        if !capturing {
            self.follow_up(&mut book, stream, true)?;
        }
        let cache = rows.cache.unwrap_or(Cache {
            slots: 0,
            page_rows: 0,
            page_stride: 0,
            row_stride: source_bytes,
        });
        let arguments = PlaceArguments {
            gather: Arguments {
                local: rows.memory.address(),
                shape: Shape {
                    rows: placement.total_rows,
                    row_bytes: layout.row_bytes,
                    digest: placement.digest,
                }
                .in_form(false),
                ..self.arguments(end, call.timeout)
            },
            places: placement.places.address(),
            cache_slots: cache.slots,
            page_stride: cache.page_stride,
            row_stride: cache.row_stride,
            page_rows: cache.page_rows,
            cache_rows: cache.rows_within(memory, source_bytes),
            // What is copied is not to be stored once more.
            local_rows: if copies { 0 } else { placement.local_rows },
            capacity_rows: layout.capacity_rows,
            planes: placement.planes,
            scale: rows.scale.unwrap_or(1.0),
            reserved: 0,
        };
        if copies {
            let slot = (book.issued + 1) % u64::from(layout.slots);
            self.place_by_copies(end, stream, placement, rows.memory, slot)?;
        }
        let most = self.most_blocks(entry, false, &call);
        let launch = end.kernel.shape(local_rows * row_bytes, width, most);
        // SAFETY: the kernel's one parameter is `PlaceArguments`. The lane's memory lives as long as
        // the lane, which waits for its last call; the promises of `DeviceRows` and of `paged`
        // cover the caller's, and freeing a placement waits for what runs. The kernel checks every
        // place and slot before it uses them.
        let launched = unsafe {
            entry
                .function
                .launch(launch, stream, &[Param::new(&arguments)])
        };
        self.launched(&mut book, stream, capturing, launched)?;
        book.issued += 1;
        self.submitted(&mut book, stream, capturing)?;
        let bytes = u64::from(layout.capacity_rows) * row_bytes;
        Ok(self.lend(&book, capturing, bytes))
    }

    /// The widest store that divides every address, stride and width of a call, and whose load
    /// does.
    fn place_width(&self, placement: &DevicePlacement, rows: &PlacedRows, source: u64) -> u32 {
        let planes = placement.planes.iter().copied().map(u64::from);
        let planes = planes.fold(0, |all, width| all | width);
        let strides = rows.cache.map_or(source, |cache| {
            cache.page_stride | cache.row_stride | source
        });
        let from = rows.memory.address() | strides;
        match rows.scale {
            None => 1 << (from | planes).trailing_zeros().min(4),
            Some(_) if from.is_multiple_of(8) && planes.is_multiple_of(16) => 16,
            Some(_) => 2,
        }
    }
}
