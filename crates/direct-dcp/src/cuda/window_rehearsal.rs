//! Windows in flight of rows that the host has: for checks and benchmarks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use direct_dcp_cuda::gather::{Delivery, LaunchError, Pass, Reader};

use super::gather::{Gathered, KvGather};
use super::layout::upload;
use super::pipeline::{Pipeline, Ticket};
use crate::error::{GatherError, from_cuda, invalid};
use crate::layout::FinalLayout;
use crate::plan::RowMap;

/// A [`Pipeline`] with a reader on a stream of its own, for programs that check or time windows in
/// flight and hold their rows in host memory.
///
/// The reader copies the first rows of each window to other memory, by one launch of few blocks. So
/// it takes its time, as attention does, and leaves multiprocessors to the gathers.
#[derive(Debug)]
pub struct WindowRehearsal {
    reader: Reader,
    pipeline: Pipeline,
    gather: Arc<KvGather>,
    ubatch: usize,
    /// The last window.
    window: Option<Gathered>,
    bytes: usize,
    rows: usize,
}

impl WindowRehearsal {
    /// Windows of `bytes` bytes of each rank, gathered on `ubatch`.
    ///
    /// Device memory is allocated here and by [`set_reading`](WindowRehearsal::set_reading), and
    /// freed on drop: let the group meet, as for [`Rehearsal::new`](super::Rehearsal::new).
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`] or [`GatherError::Driver`].
    pub fn new(
        gather: impl Into<Arc<KvGather>>,
        ubatch: usize,
        bytes: usize,
    ) -> Result<Self, GatherError> {
        let gather = gather.into();
        let (lane, shape) = gather.prepare(ubatch, bytes)?;
        let reader = Reader::new(lane, shape);
        Ok(WindowRehearsal {
            reader: reader.map_err(|error| from_cuda(&error))?,
            pipeline: Pipeline::new(gather.clone(), ubatch)?,
            gather,
            ubatch,
            window: None,
            bytes,
            rows: 0,
        })
    }

    /// The gather that it uses.
    #[must_use]
    pub fn gather(&self) -> &KvGather {
        &self.gather
    }

    /// Sets this rank's rows, which it sends in every window.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`] for bytes that are not as many as this was built for, or
    /// [`GatherError::Driver`].
    pub fn set_rows(&mut self, rows: &[u8]) -> Result<(), GatherError> {
        if rows.len() != self.bytes {
            let expected = format!("{}, as this was built for", self.bytes);
            return Err(invalid("local bytes", expected, rows.len()));
        }
        self.reader
            .set_rows(rows)
            .map_err(|error| from_cuda(&error))
    }

    /// Has the first `rows` rows of each window read, by `blocks` blocks at most. None are read
    /// before this is called.
    ///
    /// # Errors
    /// [`GatherError::InvalidArgument`] for no rows or more than a window has, or
    /// [`GatherError::Driver`].
    pub fn set_reading(&mut self, rows: usize, blocks: u32) -> Result<(), GatherError> {
        let workspace = self.gather.workspace();
        let format = workspace.format();
        let most = self.bytes / format.row_bytes() * workspace.group().world_size();
        let refused = || invalid("rows that are read", format!("1 to {most}"), rows);
        let narrow = u32::try_from(rows).ok();
        let narrow = narrow.filter(|_| (1..=most).contains(&rows));
        let narrow = narrow.ok_or_else(refused)?;
        let map = RowMap::uneven(&[rows], 0);
        let layout = map
            .and_then(|map| FinalLayout::new(&map, format, &[format.dim()]))
            .map_err(|_| refused())?;
        let lane = self.gather.ready(self.ubatch)?;
        let set = upload(lane.stream(), &layout)
            .and_then(|placement| Pass::new(lane, placement, Some(blocks)))
            .and_then(|pass| self.reader.set_pass(pass, narrow));
        set.map_err(|error| from_cuda(&error))?;
        self.rows = rows;
        Ok(())
    }

    /// Submits `count` windows, as many ahead as the slots allow, each of which is read where
    /// `reads`, and waits. Returns the time on the device from the end of the first one's reading to
    /// the end of the last one's: of `count` - 1 windows.
    ///
    /// # Errors
    /// As [`Pipeline::submit`] and [`Pipeline::acquire`].
    pub fn run(&mut self, count: usize, reads: bool) -> Result<Duration, GatherError> {
        let cuda = |error| from_cuda(&error);
        let ahead = self.gather.workspace().slots() - 1;
        let mut waiting: VecDeque<Ticket> = VecDeque::new();
        let mut submitted = 0;
        for window in 0..count {
            self.window = None;
            while submitted < count.min(window + ahead) {
                waiting.push_back(self.submit()?);
                submitted += 1;
            }
            let Some(ticket) = waiting.pop_front() else {
                break;
            };
            let gathered = self.pipeline.acquire(&ticket, self.reader.stream())?;
            if reads {
                let read = self.reader.read(&gathered.0);
                read.map_err(|error| self.explain(error))?;
            }
            if window == 0 || window + 1 == count {
                self.reader.mark().map_err(cuda)?;
            }
            self.window = Some(gathered);
        }
        let laps = self.reader.laps().map_err(cuda)?;
        self.gather.check()?;
        Ok(laps.iter().sum())
    }

    /// Waits, and reads the last window, `[world_size · T, row_bytes]`, and what was copied of it.
    /// No peer may be past the call S - 1 calls later.
    ///
    /// # Errors
    /// As [`KvGather::wait`].
    pub fn read(&self) -> Result<(Vec<u8>, Vec<u8>), GatherError> {
        let cuda = |error| from_cuda(&error);
        let workspace = self.gather.workspace();
        let mut rows = vec![0; self.bytes * workspace.group().world_size()];
        let mut copied = vec![0; self.rows * workspace.format().row_bytes()];
        if let Some(window) = &self.window {
            self.reader.download(&window.0, &mut rows).map_err(cuda)?;
        }
        if self.rows > 0 {
            self.reader.download_copy(&mut copied).map_err(cuda)?;
        }
        self.gather.check()?;
        Ok((rows, copied))
    }

    fn submit(&mut self) -> Result<Ticket, GatherError> {
        let reader = &self.reader;
        self.pipeline
            .submit_by(reader.stream(), |gather, ubatch, side| {
                let (lane, shape) = gather.prepare(ubatch, self.bytes)?;
                let call = gather.submission(lane, Delivery::ZeroCopy, shape, false);
                let held = reader.send(side, call);
                held.map(Gathered)
                    .map_err(|error| gather.explain(error, ubatch))
            })
    }

    fn explain(&self, error: LaunchError) -> GatherError {
        self.gather.explain(error, self.ubatch)
    }
}
