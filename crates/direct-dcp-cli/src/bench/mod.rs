//! `direct-dcp bench`: how long gathers take, next to plain copies of the bytes that they deliver.
//!
//! | file | holds |
//! |---|---|
//! | `mod` | the command line, and what is printed |
//! | `measure` | what every rank does |
//! | `ceiling` | the plain copies |
//! | `clock` | one time for all ranks, and loops that start together |
//! | `pattern` | random rows that any rank can check |

mod ceiling;
mod clock;
mod measure;
mod pattern;

pub(crate) use measure::Task;

use crate::error::Error;
use crate::ranks::{self, Backend, Message, WayChoice};
use crate::report::{self, Table, micros};
use crate::{args, machine};
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use measure::{Mode, Row};
use serde_json::json;
use std::io::IsTerminal;

/// Time gathers beside plain copies of the same bytes.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Words and columns are those of nccl-tests. Size is S, the whole receive buffer of one rank: ranks x
rows x row bytes. algbw = S / time; busbw = algbw x (ranks - 1) / ranks.

time     of a loop of --iters calls from its first start to its last end on any rank, divided by
         --iters; the median of --loops such loops
p99      of single calls, each as long as on the slowest rank, from loops of their own
ceiling  what plain copies take of the bytes that one call must deliver to each rank, on all ranks at
         once, with as many threads, in loops that take turns with those of the gather. For a
         zero-copy gather by the shared slot that is the rank's own slice; for everything else it is
         the slices of all ranks
#wrong   bytes that were not as sent, on all ranks, in warm-up and at the end of every loop

Examples:
  direct-dcp bench
  direct-dcp bench --ranks 2 --rows 1,1024 --mode zero-copy --way shared-slot,push
  direct-dcp bench -b 1K -e 16M -f 4 -n 50 --backend processes --format csv")]
pub(crate) struct Args {
    /// The smallest size S; K, M and G stand for powers of 1024
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = args::size, conflicts_with = "rows")]
    minbytes: Option<usize>,
    /// The largest size S
    #[arg(short = 'e', long, value_name = "SIZE", value_parser = args::size, conflicts_with = "rows")]
    maxbytes: Option<usize>,
    /// By what the size grows from step to step, 2 or more
    #[arg(short = 'f', long, value_name = "N", default_value_t = 2, value_parser = factor)]
    stepfactor: usize,
    /// Calls in each timed loop
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = args::iterations)]
    iters: usize,
    /// Calls before the first loop
    #[arg(
        short = 'w',
        long = "warmup_iters",
        alias = "warmup-iters",
        value_name = "N",
        default_value_t = 5
    )]
    warmup: usize,
    /// Whether to check the bytes, 1 or 0
    #[arg(short = 'c', long, value_name = "0|1", default_value_t = 1, value_parser = clap::value_parser!(u8).range(0..=1))]
    check: u8,
    /// Timed loops of each kind
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = args::iterations)]
    loops: usize,
    /// Rows of each rank, instead of sizes [default: 1,17,128,1024,4096]
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = args::positive)]
    rows: Vec<usize>,
    /// Bytes of a row
    #[arg(long, value_name = "SIZE", default_value = "1152", value_parser = args::size)]
    row_bytes: usize,
    /// How many ranks, 2 to 1024
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = args::ranks)]
    ranks: usize,
    /// What the ranks are
    #[arg(long, value_enum, default_value_t = Backend::Threads)]
    backend: Backend,
    /// How rows travel, one or more
    #[arg(
        long,
        value_name = "LIST",
        value_enum,
        value_delimiter = ',',
        default_value = "auto"
    )]
    way: Vec<WayChoice>,
    /// With a copy into a buffer, in place, or both
    #[arg(
        long,
        value_name = "LIST",
        value_enum,
        value_delimiter = ',',
        default_value = "copy-out,zero-copy"
    )]
    mode: Vec<Mode>,
    /// Threads that share a rank's copies [default: processors / ranks, 8 at most]
    #[arg(long, value_name = "N", value_parser = blocks)]
    blocks: Option<usize>,
    /// How to print the result
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

/// How to print the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// Columns for people.
    Table,
    /// Comma-separated values, with a line of names.
    Csv,
    /// One JSON document.
    Json,
}

fn factor(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(factor @ 2..) => Ok(factor),
        _ => Err("a whole number of at least 2 is wanted".into()),
    }
}

fn blocks(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(blocks @ 1..=1024) => Ok(blocks),
        _ => Err("a number from 1 to 1024 is wanted".into()),
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let task = Task {
        rows: rows(args)?,
        row_bytes: args.row_bytes,
        ways: args.way.clone(),
        modes: args.mode.clone(),
        blocks: args
            .blocks
            .unwrap_or_else(|| machine::default_blocks(args.ranks)),
        iters: args.iters,
        warmup: args.warmup,
        loops: args.loops,
        check: args.check == 1,
    };
    let instead = "use fewer ranks, or fewer or shorter rows";
    machine::check_memory(task.memory(args.ranks), "this benchmark", instead)?;

    let progress = progress(task.cases() as u64);
    let printer = Printer::new(args, &task);
    // The bar and the table may share a terminal.
    let shown = |print: &dyn Fn() -> Result<(), Error>| progress.suspend(print);
    shown(&|| printer.begin())?;
    let mut rows: Vec<Row> = Vec::new();
    let work = ranks::Task::Bench(task);
    ranks::run(args.backend, args.ranks, &work, &mut |message| {
        if let Message::Text(text) = message {
            let row: Row = serde_json::from_str(&text).map_err(|error| error.to_string())?;
            shown(&|| printer.row(&row))?;
            rows.push(row);
            progress.inc(1);
        }
        Ok(())
    })?;
    progress.finish_and_clear();
    printer.end(&rows)?;
    let wrong: u64 = rows.iter().filter_map(|row| row.wrong).sum();
    match wrong {
        0 => Ok(()),
        _ => Err(Error::Failed(format!(
            "{wrong} bytes were not as sent; see the column #wrong"
        ))),
    }
}

/// The rows per rank of each step.
fn rows(args: &Args) -> Result<Vec<usize>, Error> {
    if !args.rows.is_empty() {
        return Ok(args.rows.clone());
    }
    if args.minbytes.is_none() && args.maxbytes.is_none() {
        return Ok(vec![1, 17, 128, 1024, 4096]);
    }
    let row = args.ranks.saturating_mul(args.row_bytes);
    let min = args.minbytes.or(args.maxbytes).unwrap_or(row);
    let max = args.maxbytes.unwrap_or(min);
    if min > max {
        return Err(Error::Failed(format!(
            "--minbytes {min} is more than --maxbytes {max}"
        )));
    }
    // Sizes that are no whole rows are rounded down, and what is measured is printed.
    let steps = std::iter::successors(Some(min), |size| size.checked_mul(args.stepfactor));
    let mut rows: Vec<usize> = steps
        .take_while(|&size| size <= max)
        .map(|size| (size / row).max(1))
        .collect();
    rows.dedup();
    Ok(rows)
}

fn progress(cases: u64) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    // Whatever ends the run, an error message must not follow a bar.
    let bar = ProgressBar::new(cases).with_finish(ProgressFinish::AndClear);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed}") {
        bar.set_style(style);
    }
    bar.tick();
    bar
}

/// Prints rows as they come, where the format allows it.
struct Printer<'a> {
    args: &'a Args,
    blocks: usize,
    table: Table,
}

impl<'a> Printer<'a> {
    fn new(args: &'a Args, task: &Task) -> Self {
        Printer {
            args,
            blocks: task.blocks,
            table: Table::new(&[12, 8, 11, 9, 9, 9, 8, 8, 9, 6, 7], 0),
        }
    }

    fn begin(&self) -> Result<(), Error> {
        match self.args.format {
            Format::Json => Ok(()),
            Format::Csv => report::line(
                "ranks,backend,blocks,row_bytes,size,rows,way,mode,time_us,p99_us,algbw_gbs,\
                 busbw_gbs,ceiling_us,ratio,wrong",
            ),
            Format::Table => {
                report::line(&format!(
                    "# direct-dcp {}: {} ranks as {}, {} processors, {} threads per rank, rows of {} bytes",
                    env!("CARGO_PKG_VERSION"),
                    self.args.ranks,
                    self.args.backend,
                    machine::cores(),
                    self.blocks,
                    self.args.row_bytes,
                ))?;
                report::line(&format!(
                    "# size = S = ranks x rows x row bytes, the receive buffer of one rank; time = \
                     median of {} loops of {} calls, per call",
                    self.args.loops, self.args.iters
                ))?;
                report::line(
                    "# algbw = S / time; busbw = algbw x (ranks - 1) / ranks; ceiling = plain copies of what a call \
                     delivers; ratio = time / ceiling",
                )?;
                report::line(&self.table.row(&[
                    "size", "rows", "way", "mode", "time", "p99", "algbw", "busbw", "ceiling",
                    "ratio", "#wrong",
                ]))?;
                report::line(&self.table.row(&[
                    "(B)", "", "", "", "(us)", "(us)", "(GB/s)", "(GB/s)", "(us)", "", "",
                ]))
            }
        }
    }

    fn row(&self, row: &Row) -> Result<(), Error> {
        let args = self.args;
        match args.format {
            Format::Json => Ok(()),
            Format::Csv => report::line(&format!(
                "{},{},{},{},{},{},{},{},{:.4},{:.4},{:.6},{:.6},{:.4},{:.4},{}",
                args.ranks,
                args.backend,
                self.blocks,
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

    fn end(&self, rows: &[Row]) -> Result<(), Error> {
        if self.args.format != Format::Json {
            return Ok(());
        }
        let document = json!({
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
            "time_is": "first start to last end of a loop on any rank, per call; median of the loops",
            "ceiling_is": "the same of plain copies of the bytes that a call delivers to each rank",
            "results": rows,
        });
        report::line(&format!("{document:#}"))
    }
}
