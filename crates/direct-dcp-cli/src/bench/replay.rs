//! `bench --trace`: the gathers that a trace of requests comes to.

use super::Format;
use super::trace::{self, Request};
use crate::args;
use crate::error::Error;
use crate::report;
use direct_dcp::plan::{Chunk, ChunkPlanner, Sharding};
use serde::Serialize;
use serde_json::json;
use std::path::PathBuf;
use std::slice;

/// What is replayed, and how it is planned.
#[derive(Debug, clap::Args)]
pub(super) struct Options {
    /// Count, without making them, the gathers of a trace of requests: a file of JSON lines as
    /// Mooncake published
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "minbytes", "maxbytes", "stepfactor", "iters", "cudagraph", "warmup", "check", "loops",
        "rows", "backend", "device", "way", "mode", "blocks", "layout", "requests", "planes",
    ])]
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
}

impl Options {
    /// The plan of the trace, if there is one to replay.
    pub(super) fn plan(&self, ranks: usize, row_bytes: usize) -> Result<Option<TracePlan>, Error> {
        let Some(path) = &self.trace else {
            return Ok(None);
        };
        let planner = Sharding::new(ranks, self.interleave)
            .and_then(|sharding| ChunkPlanner::new(sharding, self.block, self.budget))
            .map_err(|error| error.to_string())?;
        Ok(Some(TracePlan {
            file: path.clone(),
            block: self.block,
            planner,
            row_bytes,
            requests: trace::read(path)?,
        }))
    }
}

const ROWS_PADDED: &str = "what all ranks contribute, padding included";
const BYTES_GATHERED: &str = "stores to one rank's memory when valid rows go straight to their places: rows valid x row bytes";
const BYTES_STAGED: &str = "stores to one rank's memory when padded rows arrive rank by rank, are \
                            copied out, and their valid ones put in order: (2 x rows padded + rows \
                            valid) x row bytes";

/// The gathers of a trace: every request's context, planned by itself when the request comes.
#[derive(Debug)]
pub(super) struct TracePlan {
    file: PathBuf,
    block: usize,
    planner: ChunkPlanner,
    row_bytes: usize,
    requests: Vec<Request>,
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
    /// Prints what it comes to.
    pub(super) fn print(&self, format: Format) -> Result<(), Error> {
        let totals = self.totals()?;
        let (sharding, budget) = (self.planner.sharding(), self.planner.budget_rows());
        match format {
            Format::Json => {
                let document = json!({
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
                report::line(&format!("{document:#}"))
            }
            Format::Table => {
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
                totals.print()
            }
            Format::Csv => Err(Error::Failed(
                "--format csv is not for --trace; use table or json".into(),
            )),
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
