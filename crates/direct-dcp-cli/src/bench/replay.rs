//! `bench --trace`: the gathers that a trace of requests comes to.

use super::Format;
use super::timed::{self, Timed};
use super::trace::{self, Request};
use crate::error::Error;
use crate::interrupt;
use crate::ranks::{self, Backend, Message};
use crate::{args, machine, report};
use direct_dcp::plan::{Chunk, ChunkPlanner, Sharding};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::slice;

/// What is replayed, and how it is planned.
// The conflicts are those of every option here: an option that conflicts with a required one makes that
// one no longer required, so `requires` alone would let `--time --rows 1` pass.
#[derive(Debug, clap::Args)]
#[group(id = "replay", conflicts_with_all = [
    "minbytes", "maxbytes", "stepfactor", "iters", "cudagraph", "warmup", "check", "loops", "rows",
    "device", "way", "mode", "blocks", "layout", "requests", "planes", "pipeline", "tune", "tuning",
])]
pub(super) struct Options {
    /// Count, without making them, the gathers of a trace of requests: a file of JSON lines as
    /// Mooncake published
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Traces: how many neighbouring tokens go to one rank
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = args::positive, requires = "trace")]
    interleave: usize,
    /// Traces: rows of one gather over all ranks, padding included, at most; rounded up to whole
    /// pages and rounds
    #[arg(long, value_name = "ROWS", default_value_t = 65_536, value_parser = args::positive, requires = "trace")]
    budget: usize,
    /// Traces: tokens of a cache page, at which contexts are cut
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = args::positive, requires = "trace")]
    block: usize,
    /// Traces: make the gathers too, in final layout, and time them. CPUs only
    #[arg(long, requires = "trace")]
    time: bool,
    /// Traces: only the first N requests
    #[arg(long, value_name = "N", value_parser = args::positive, requires = "trace")]
    limit: Option<usize>,
}

impl Options {
    /// The plan of the trace, if there is one to replay.
    pub(super) fn plan(&self, ranks: usize, row_bytes: usize) -> Result<Option<TracePlan>, Error> {
        let Some(path) = &self.trace else {
            return Ok(None);
        };
        let planner = Sharding::new(ranks, self.interleave)
            .and_then(|sharding| ChunkPlanner::new(sharding, self.block, self.budget))
            .map_err(|error| Error::Usage(error.to_string()))?;
        let mut requests = trace::read(path)?;
        requests.truncate(self.limit.unwrap_or(usize::MAX));
        Ok(Some(TracePlan {
            file: path.clone(),
            block: self.block,
            planner,
            row_bytes,
            requests,
            time: self.time,
        }))
    }
}

const ROWS_PADDED: &str = "what all ranks contribute, padding included";
const BYTES_GATHERED: &str = "stores to one rank's memory when valid rows go straight to their places: rows valid x row bytes";
const BYTES_STAGED: &str = "stores to one rank's memory when padded rows arrive rank by rank, are \
                            copied out, and their valid ones put in order: (2 x rows padded + rows \
                            valid) x row bytes";

const STAGED_SECONDS: &str = "computed: seconds x rows padded / rows valid for the gathers, and \
                              the copy out and the copy in order, (rows padded + rows valid) x row \
                              bytes, at the median rate of plain copies as large as the mean \
                              gather, of all ranks at once";

/// The gathers of a trace: every request's context, planned by itself when the request comes.
#[derive(Debug)]
pub(super) struct TracePlan {
    file: PathBuf,
    block: usize,
    planner: ChunkPlanner,
    row_bytes: usize,
    requests: Vec<Request>,
    time: bool,
}

/// What a plan comes to. Lengths are in tokens.
#[derive(Debug, Default, Serialize)]
struct Totals {
    requests: u64,
    /// From the first request to the last.
    milliseconds: u64,
    input_tokens: u64,
    output_tokens: u64,
    context_tokens: u64,
    gathers: u64,
    rows_valid: u64,
    rows_padded: u64,
    bytes_gathered: u64,
    bytes_staged: u64,
}

impl TracePlan {
    /// Prints what it comes to, and how long that takes if it is to be timed.
    pub(super) fn run(&self, backend: Backend, format: Format) -> Result<(), Error> {
        let fail = |why: String| Err(Error::Usage(why));
        if format == Format::Csv {
            return fail("--format csv is not for --trace; use table or json".into());
        }
        if backend.on_gpus() {
            return fail(format!(
                "--trace is not for --backend {}; use threads or processes",
                backend.name()
            ));
        }
        if backend != Backend::Threads && !self.time {
            return fail("--backend is for --trace with --time; nothing runs without".into());
        }
        let totals = self.totals()?;
        let speed = match self.time {
            true => Some(self.measure(backend, &totals)?),
            false => None,
        };
        self.print(&totals, speed.as_ref(), format)
    }

    /// Makes all gathers.
    fn measure(&self, backend: Backend, totals: &Totals) -> Result<Speed, Error> {
        if totals.gathers == 0 {
            return Err(Error::Failed(
                "no request of the trace has a context to gather".into(),
            ));
        }
        let sharding = self.planner.sharding();
        let task = timed::Task {
            contexts: self
                .requests
                .iter()
                .map(|request| request.context)
                .collect(),
            interleave: sharding.interleave(),
            block: self.block,
            budget: self.planner.budget_rows(),
            row_bytes: self.row_bytes,
        };
        let ranks = sharding.world_size();
        let instead = "use fewer ranks, shorter rows or a smaller --budget";
        machine::check_memory(task.memory(ranks), "this trace", instead)?;
        let mut timed: Option<Timed> = None;
        ranks::run(backend, ranks, &ranks::Task::Replay(task), &mut |message| {
            if let Message::Text(text) = message {
                timed = Some(serde_json::from_str(&text).map_err(|error| error.to_string())?);
            }
            Ok(())
        })?;
        let timed = timed.ok_or_else(|| String::from("rank 0 said nothing"))?;
        let (found, planned) = (
            (timed.gathers, timed.bytes_gathered),
            (totals.gathers, totals.bytes_gathered),
        );
        if found != planned {
            return Err(Error::Failed(format!(
                "{} gathers delivered {} bytes, where {} of {} bytes were planned",
                found.0, found.1, planned.0, planned.1
            )));
        }
        let padded = totals.rows_padded as f64 * self.row_bytes as f64;
        let valid = totals.bytes_gathered as f64;
        let seconds = timed.seconds;
        Ok(Speed {
            backend: backend.name(),
            way: timed.way,
            seconds,
            gathers_per_second: totals.gathers as f64 / seconds,
            gathered_gbs: valid / seconds / 1e9,
            copy_gbs: timed.copy_gbs,
            staged_seconds: seconds * padded / valid + (padded + valid) / timed.copy_gbs / 1e9,
        })
    }

    fn print(&self, totals: &Totals, speed: Option<&Speed>, format: Format) -> Result<(), Error> {
        let (sharding, budget) = (self.planner.sharding(), self.planner.budget_rows());
        match format {
            Format::Json => {
                let mut document = json!({
                    "version": env!("CARGO_PKG_VERSION"),
                    "trace": self.file.to_string_lossy(),
                    "ranks": sharding.world_size(),
                    "interleave": sharding.interleave(),
                    "block": self.block,
                    "budget_rows": budget,
                    "row_bytes": self.row_bytes,
                    "rows_padded_is": ROWS_PADDED,
                    "bytes_gathered_is": BYTES_GATHERED,
                    "bytes_staged_is": BYTES_STAGED,
                    "totals": totals,
                });
                if let (Value::Object(document), Some(speed)) = (&mut document, speed) {
                    document.insert("staged_seconds_is".into(), json!(STAGED_SECONDS));
                    document.insert("timed".into(), json!(speed));
                }
                report::line(&format!("{document:#}"))
            }
            Format::Table | Format::Csv => {
                report::line(&format!(
                    "# {}: {} ranks, interleave {}, pages of {} tokens, at most {budget} rows in a \
                     gather, rows of {} bytes",
                    self.file.display(),
                    sharding.world_size(),
                    sharding.interleave(),
                    self.block,
                    self.row_bytes,
                ))?;
                report::line(&format!("# rows padded: {ROWS_PADDED}"))?;
                report::line(&format!("# bytes gathered: {BYTES_GATHERED}"))?;
                report::line(&format!("# bytes staged: {BYTES_STAGED}"))?;
                totals.print()?;
                speed.map_or(Ok(()), Speed::print)
            }
        }
    }

    /// All gathers, in order. A part's request is 0, for requests are planned one by one.
    fn chunks(&self) -> impl Iterator<Item = Chunk> {
        let contexts = self.requests.iter().map(|request| &request.context);
        contexts.flat_map(|context| self.planner.chunks(slice::from_ref(context)))
    }

    fn totals(&self) -> Result<Totals, Error> {
        let mut totals = Totals::default();
        let times = || self.requests.iter().map(|request| request.timestamp);
        totals.milliseconds = times().max().unwrap_or(0) - times().min().unwrap_or(0);
        for request in &self.requests {
            totals.requests += 1;
            totals.input_tokens += request.input as u64;
            totals.output_tokens += request.output as u64;
            totals.context_tokens += request.context as u64;
        }
        let ranks = self.planner.sharding().world_size();
        for chunk in self.chunks() {
            interrupt::check()?;
            totals.gathers += 1;
            totals.rows_valid += chunk.total_rows() as u64;
            totals.rows_padded += (chunk.local_rows() * ranks) as u64;
        }
        let bytes = |rows: u64| {
            let bytes = rows.checked_mul(self.row_bytes as u64);
            bytes.ok_or_else(|| Error::Failed(format!("{rows} rows are more than 2^64 bytes")))
        };
        totals.bytes_gathered = bytes(totals.rows_valid)?;
        totals.bytes_staged = bytes(2 * totals.rows_padded + totals.rows_valid)?;
        Ok(totals)
    }
}

/// How fast the gathers were.
#[derive(Debug, Serialize)]
struct Speed {
    backend: &'static str,
    way: String,
    seconds: f64,
    gathers_per_second: f64,
    gathered_gbs: f64,
    copy_gbs: f64,
    staged_seconds: f64,
}

impl Speed {
    fn print(&self) -> Result<(), Error> {
        report::line(&format!(
            "# timed on {} by {}; GB/s: bytes gathered of one rank; copies: plain ones of one rank, \
             all at once",
            self.backend, self.way
        ))?;
        report::line(&format!("# staged seconds: {STAGED_SECONDS}"))?;
        let table = report::Table::new(&[16, 20], 1);
        for (name, number) in [
            ("seconds", format!("{:.3}", self.seconds)),
            ("gathers/s", format!("{:.0}", self.gathers_per_second)),
            ("GB/s", format!("{:.2}", self.gathered_gbs)),
            ("copies GB/s", format!("{:.2}", self.copy_gbs)),
            ("staged seconds", format!("{:.3}", self.staged_seconds)),
        ] {
            report::line(&table.row(&[name, &number]))?;
        }
        Ok(())
    }
}

impl Totals {
    fn print(&self) -> Result<(), Error> {
        let table = report::Table::new(&[16, 20, 12], 1);
        for (name, number) in [
            ("requests", self.requests),
            ("milliseconds", self.milliseconds),
            ("input tokens", self.input_tokens),
            ("output tokens", self.output_tokens),
            ("context tokens", self.context_tokens),
            ("gathers", self.gathers),
            ("rows valid", self.rows_valid),
            ("rows padded", self.rows_padded),
        ] {
            report::line(&table.row(&[name, &number.to_string()]))?;
        }
        for (name, number) in [
            ("bytes gathered", self.bytes_gathered),
            ("bytes staged", self.bytes_staged),
        ] {
            report::line(&table.row(&[name, &number.to_string(), &report::bytes(number)]))?;
        }
        Ok(())
    }
}
