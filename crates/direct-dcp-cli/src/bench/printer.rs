//! What a benchmark prints: rows as they come, where the format allows it.

use super::device::Copies;
use super::measure::Task;
use super::round::Row;
use super::split::Split;
use super::{Args, Format};
use crate::error::Error;
use crate::gpu::Gpus;
use crate::machine;
use crate::report::{self, Table, micros};
use serde_json::{Value, json};

const STAGED: &str =
    "staged = a gather rank by rank, and a pass that drops padding, reorders and splits";

const TIME_ON_GPUS: &str =
    "between events around a loop, per call; median of the loops, on the slowest rank";

pub(super) struct Printer<'a> {
    args: &'a Args,
    /// None if the kernels choose.
    blocks: Option<usize>,
    gpus: Option<Gpus>,
    /// What request-major gathers deliver, in words.
    requests: Option<String>,
    table: Table,
}

/// The first line of a table: what is timed. On CPUs ranks have `blocks` threads.
pub(super) fn heading(args: &Args, gpus: Option<&Gpus>, blocks: &str) -> String {
    let place = match gpus {
        Some(gpus) => gpus.describe(args.ranks),
        None => format!("{} processors, {blocks} threads per rank", machine::cores()),
    };
    format!(
        "# direct-dcp {}: {} ranks as {}, {place}, rows of {} bytes",
        env!("CARGO_PKG_VERSION"),
        args.ranks,
        args.backend,
        args.row_bytes,
    )
}

impl<'a> Printer<'a> {
    pub(super) fn new(args: &'a Args, task: &Task, gpus: Option<Gpus>) -> Self {
        Printer {
            args,
            blocks: match gpus {
                Some(_) => args.blocks,
                None => Some(task.blocks),
            },
            gpus,
            requests: task.request_major.as_ref().map(Split::to_string),
            table: Table::new(&[12, 8, 11, 9, 9, 9, 8, 8, 9, 6, 7], 0),
        }
    }

    /// What no gather can beat by much, as the columns call it.
    fn bound(&self) -> &'static str {
        match (&self.gpus, &self.requests) {
            (_, Some(_)) => "staged",
            (Some(_), None) => "floor",
            (None, None) => "ceiling",
        }
    }

    fn blocks(&self) -> String {
        self.blocks
            .map_or(String::new(), |blocks| blocks.to_string())
    }

    /// What is known before the ranks start.
    pub(super) fn begin(&self) -> Result<(), Error> {
        let args = self.args;
        match args.format {
            Format::Json => return Ok(()),
            Format::Csv => {
                return report::line(&format!(
                    "ranks,backend,blocks,row_bytes,size,rows,way,mode,time_us,p99_us,algbw_gbs,\
                     busbw_gbs,{}_us,ratio,wrong",
                    self.bound()
                ));
            }
            Format::Table => {}
        }
        report::line(&heading(args, self.gpus.as_ref(), &self.blocks()))?;
        let calls = match args.cudagraph {
            Some(launches) => format!("{launches} launches of a graph of {} calls", args.iters),
            None => format!("{} calls", args.iters),
        };
        report::line(&format!(
            "# size = S = ranks x rows x row bytes, the receive buffer of one rank; time = \
             median of {} loops of {calls}, per call",
            args.loops
        ))?;
        if self.gpus.is_some() && self.requests.is_none() {
            // The columns follow when the copies have been timed.
            return Ok(());
        }
        let bound = match &self.requests {
            None => "ceiling = plain copies of what a call delivers; ratio = time / ceiling".into(),
            Some(requests) => {
                report::line(&format!("# request-major: {requests}"))?;
                format!("{STAGED}; ratio = time / staged")
            }
        };
        report::line(&format!(
            "# algbw = S / time; busbw = algbw x (ranks - 1) / ranks; {bound}"
        ))?;
        self.columns()
    }

    /// How fast the devices copy.
    pub(super) fn copies(&self, copies: &Copies) -> Result<(), Error> {
        if self.args.format != Format::Table {
            return Ok(());
        }
        let floor = match copies.across {
            true => format!(
                "what comes in over a device's link, at {:.0} GB/s of copies between two devices",
                copies.gbs
            ),
            false => format!(
                "(W + W x W) slices, at {:.0} GB/s read and written by copies on the device",
                2.0 * copies.gbs
            ),
        };
        report::line(&format!(
            "# algbw = S / time; busbw = algbw x (ranks - 1) / ranks; floor = {floor}; ratio = time \
             / floor"
        ))?;
        self.columns()
    }

    fn columns(&self) -> Result<(), Error> {
        let bound = self.bound();
        report::line(&self.table.row(&[
            "size", "rows", "way", "mode", "time", "p99", "algbw", "busbw", bound, "ratio",
            "#wrong",
        ]))?;
        report::line(&self.table.row(&[
            "(B)", "", "", "", "(us)", "(us)", "(GB/s)", "(GB/s)", "(us)", "", "",
        ]))
    }

    pub(super) fn row(&self, row: &Row) -> Result<(), Error> {
        let args = self.args;
        match args.format {
            Format::Json => Ok(()),
            Format::Csv => report::line(&format!(
                "{},{},{},{},{},{},{},{},{:.4},{:.4},{:.6},{:.6},{:.4},{:.4},{}",
                args.ranks,
                args.backend.name(),
                self.blocks(),
                args.row_bytes,
                row.size,
                row.rows,
                row.way,
                row.mode,
                row.time_us,
                row.p99_us,
                row.algbw_gbs,
                row.busbw_gbs,
                row.ceiling_us,
                row.ratio,
                row.wrong.map_or(String::new(), |wrong| wrong.to_string()),
            )),
            Format::Table => report::line(&self.table.row(&[
                row.size.to_string(),
                row.rows.to_string(),
                row.way.clone(),
                row.mode.to_string(),
                micros(row.time_us),
                micros(row.p99_us),
                format!("{:.2}", row.algbw_gbs),
                format!("{:.2}", row.busbw_gbs),
                micros(row.ceiling_us),
                format!("{:.2}", row.ratio),
                row.wrong.map_or("N/A".into(), |wrong| wrong.to_string()),
            ])),
        }
    }

    pub(super) fn end(&self, rows: &[Row], copies: Option<&Copies>) -> Result<(), Error> {
        if self.args.format != Format::Json {
            return Ok(());
        }
        let mut document = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "ranks": self.args.ranks,
            "backend": self.args.backend,
            "processors": machine::cores(),
            "blocks": self.blocks,
            "row_bytes": self.args.row_bytes,
            "iters": self.args.iters,
            "loops": self.args.loops,
            "warmup_iters": self.args.warmup,
            "size_is": "ranks x rows x row_bytes, the receive buffer of one rank",
        });
        let mut results = json!(rows);
        let bound = format!("{}_us", self.bound());
        for row in results.as_array_mut().into_iter().flatten() {
            if let Some(row) = row.as_object_mut() {
                let value = row.remove("ceiling_us").unwrap_or_default();
                row.insert(bound.clone(), value);
            }
        }
        let more = match &self.gpus {
            None if self.requests.is_some() => json!({
                "time_is": "first start to last end of a loop on any rank, per call; median of the loops",
                "staged_is": STAGED,
                "request_major": self.requests,
            }),
            None => json!({
                "time_is": "first start to last end of a loop on any rank, per call; median of the loops",
                "ceiling_is": "the same of plain copies of the bytes that a call delivers to each rank",
            }),
            Some(gpus) if self.requests.is_some() => json!({
                "devices": gpus.describe(self.args.ranks),
                "cudagraph": self.args.cudagraph,
                "time_is": TIME_ON_GPUS,
                "staged_is": STAGED,
                "request_major": self.requests,
            }),
            Some(gpus) => json!({
                "devices": gpus.describe(self.args.ranks),
                "cudagraph": self.args.cudagraph,
                "copy_gbs": copies.map(|copies| copies.gbs),
                "copies_between_devices": copies.map(|copies| copies.across),
                "time_is": TIME_ON_GPUS,
                "floor_is": "one device: (W + W x W) slices at 2 x copy_gbs; several: the slices that come in over one device's link at copy_gbs",
            }),
        };
        if let (Value::Object(document), Value::Object(more)) = (&mut document, more) {
            document.extend(more);
            document.insert("results".into(), results);
        }
        report::line(&format!("{document:#}"))
    }
}
