//! `direct-dcp bench`: how long gathers take, next to plain copies of the bytes that they deliver.
//!
//! | file | holds |
//! |---|---|
//! | `mod` | the command line |
//! | `measure` | what every rank does on CPUs |
//! | `device` | what every rank does on GPUs |
//! | `device_loop` | loops between two points of a stream |
//! | `request_major` | what every rank does for gathers in final layout, and what they replace |
//! | `device_request_major` | the same on GPUs |
//! | `split` | the requests and planes of those |
//! | `arrival` | what has to arrive of them |
//! | `round` | rounds of loops, and what comes out of them |
//! | `ceiling` | the plain copies |
//! | `clock` | one time for all ranks, and loops that start together |
//! | `printer` | what is printed |
//! | `pattern` | random rows that any rank can check |
//! | `pipeline` | windows that are gathered while earlier ones are read |
//! | `device_pipeline` | the same on GPUs |
//! | `trace` | a trace of requests, and what each finds in the cache |
//! | `replay` | the gathers that a trace comes to |
//! | `timed` | making them |
//! | `tune` | which way is fastest for which size, as a table |

mod arrival;
mod ceiling;
mod clock;
mod device;
mod device_loop;
mod device_pipeline;
mod device_request_major;
mod measure;
mod pattern;
mod pipeline;
mod printer;
mod replay;
mod request_major;
mod round;
mod split;
mod timed;
mod trace;
mod tune;

pub(crate) use measure::Task;
pub(crate) use timed::Task as ReplayTask;
pub(crate) use tune::Task as TuneTask;

use crate::error::Error;
use crate::gpu::{Gpus, Place};
use crate::ranks::{self, Backend, Message, WayChoice};
use crate::tuning::Table;
use crate::{args, machine};
use device::{Copies, Gpu};
use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};
use measure::Mode;
use printer::Printer;
use round::Row;
use serde::{Deserialize, Serialize};
use std::io::IsTerminal;
use std::path::PathBuf;

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

On GPUs (--backend cuda or cuda-processes):

time     of a loop between two events on a rank's stream, divided by its calls, after a call that
         lets the ranks start together; the median of the loops, on the slowest rank. With -G the
         calls of a loop are a graph, launched that many times between the events
p99      of the loops of all ranks
floor    in place of the ceiling, at the rate of plain device-to-device copies in the same run. Ranks
         that share one device: each slice is read once and written once for every rank, so W + W x W
         slices at the rate of bytes read and written. Ranks on several devices: the slices that come
         in over one device's link, at the rate of copies between two devices

With --layout request-major the rows are those of a few requests, each with padding:

time     of gathers in final layout, which store each valid row once, where it belongs
staged   in place of the ceiling or the floor, what they replace: a gather rank by rank with padding,
         and then a pass over what arrived, which drops the padding, puts the rows in order and splits
         them into planes; in loops that take turns with the others. --mode says whether that gather
         copies out or lends. On CPUs the pass is made by the same thread of each rank. On GPUs it is
         one launch on the same stream, and in the same graph, that reads each valid row once, by the
         widest accesses that fit, and writes it once, to other memory of the device: the kernel of
         gathers in final layout, for this rank alone. Engines take one launch or more for it

With --trace no sizes are timed. The context of each request, which is what earlier requests left in
the cache, is cut into gathers, and what those move is counted. With --time they are made as well, in
final layout, and what is counted where the rows arrive has to be what was planned.

With --pipeline windows are gathered by a thread of their own while the rank reads earlier ones, by as
many copies as take as long: with 2 slots, where both take turns, and with 3, where they overlap. On
GPUs they are gathered on a stream of their own, and read on another by a launch of 8 blocks, which
leaves multiprocessors to the gathers, and copies as much of the window as takes as long. That part
(copies) is found out in the run. Times are of a window, between two events on the reader's stream, on
the slowest rank. Windows have to be large for the host to submit them as fast: 50 us and more.

With --tune the ways that the backend has are measured for each size and mode, in loops that take
turns, and the fastest of each are written to a file, which --tuning, or a program, has a group go by.
What the file says of other numbers of ranks, devices and modes stays: tune for each, into one file.

Examples:
  direct-dcp bench
  direct-dcp bench --ranks 2 --rows 1,1024 --mode zero-copy --way shared-slot,push
  direct-dcp bench -b 1K -e 16M -f 4 -n 50 --backend processes --format csv
  direct-dcp bench --backend cuda --ranks 4 -G 20 --way push,pull,staged
  direct-dcp bench --layout request-major --planes 1024,128 --rows 128,1024,4096
  direct-dcp bench --layout request-major --planes 1024,128 --backend cuda --way push -G 5
  direct-dcp bench --pipeline --ranks 2 --rows 1024,4096 --blocks 1
  direct-dcp bench --pipeline --backend cuda --ranks 2 --rows 65536
  direct-dcp bench --tune h200.tuning --backend cuda --ranks 4 -G 20 --rows 1,128,1024,4096
  direct-dcp bench --tuning h200.tuning --backend cuda --ranks 4 -G 20
  direct-dcp bench --trace conversation.jsonl --ranks 8 --interleave 16
  direct-dcp bench --trace conversation.jsonl --time --limit 500")]
pub(crate) struct Args {
    /// The smallest size S [default: the largest]; K, M and G stand for powers of 1024. Sizes are
    /// rounded down to whole rows of every rank, but to one row at least
    #[arg(short = 'b', long, value_name = "SIZE", value_parser = args::size, conflicts_with = "rows")]
    minbytes: Option<usize>,
    /// The largest size S [default: the smallest]
    #[arg(short = 'e', long, value_name = "SIZE", value_parser = args::size, conflicts_with = "rows")]
    maxbytes: Option<usize>,
    /// By what the size grows from the smallest to the largest, 2 or more
    #[arg(
        short = 'f',
        long,
        value_name = "N",
        default_value_t = 2,
        value_parser = factor,
        requires_all = ["minbytes", "maxbytes"],
        conflicts_with = "rows"
    )]
    stepfactor: usize,
    /// Calls in each timed loop
    #[arg(short = 'n', long, value_name = "N", default_value_t = 20, value_parser = args::iterations)]
    iters: usize,
    /// GPUs: make the calls of a loop a graph, and launch it this many times in each loop
    #[arg(short = 'G', long, value_name = "N", value_parser = args::iterations)]
    cudagraph: Option<usize>,
    /// Calls before the first loop
    #[arg(
        short = 'w',
        long = "warmup_iters",
        alias = "warmup-iters",
        value_name = "N",
        default_value_t = 5,
        value_parser = args::iterations_or_none
    )]
    warmup: usize,
    /// Whether to check the bytes, 1 or 0. On GPUs, those of the last loop
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
    /// The GPU of all ranks [default: of rank r, device r modulo their number]
    #[arg(long, value_name = "N")]
    device: Option<u32>,
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
    /// Threads that share a rank's copies [default: processors / ranks, 8 at most]; on GPUs, the
    /// most blocks of a launch [default: as many as pay]
    #[arg(long, value_name = "N", value_parser = blocks)]
    blocks: Option<usize>,
    /// Time gathers that overlap with the reading of earlier results, with 2 slots and with 3
    #[arg(long, conflicts_with_all = ["mode", "cudagraph", "layout"])]
    pipeline: bool,
    /// Find the fastest way of each size and mode, and write them to this file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pipeline", "layout", "tuning"])]
    tune: Option<PathBuf>,
    /// Go by the ways that this file names for such ranks, where none is forced; on CPUs by one for
    /// all calls of a workspace, that of the largest zero-copy
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pipeline", "layout"])]
    tuning: Option<PathBuf>,
    /// How to print the result
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
    #[command(flatten)]
    layout: split::LayoutOptions,
    #[command(flatten)]
    replay: replay::Options,
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

/// Something that rank 0 tells of a benchmark.
#[derive(Debug, Serialize, Deserialize)]
enum Found {
    Copies(Copies),
    Row(Row),
}

impl Args {
    pub(crate) fn backend(&self) -> Backend {
        self.backend
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Error> {
    if let Some(plan) = args.replay.plan(args.ranks, args.row_bytes)? {
        return plan.run(args.backend, args.format);
    }
    let place = Place::of(args.backend, args.device)?;
    for way in &args.way {
        way.check(args.backend)?;
    }
    if args.cudagraph.is_some() && !args.backend.on_gpus() {
        return Err(Error::Usage(
            "--cudagraph is for GPUs; use it with --backend cuda or cuda-processes".into(),
        ));
    }
    if args.cudagraph.is_some() && args.way.contains(&WayChoice::CopyEngine) {
        return Err(Error::Usage(
            "--way copy-engine cannot be captured into a graph; leave out --cudagraph".into(),
        ));
    }
    if let Some(path) = &args.tune {
        return tune::run(args, path);
    }
    let request_major = args
        .layout
        .split(args.backend, &args.way, args.blocks, args.row_bytes)?;
    let (gpus, gpu) = match place {
        Place::Cpu => (None, None),
        Place::Cuda { device } => {
            let gpu = Gpu {
                device,
                launches: args.cudagraph,
                blocks: args.blocks,
            };
            (Some(Gpus::open(device)?), Some(gpu))
        }
    };
    let task = Task {
        gpu,
        rows: rows(args)?,
        row_bytes: args.row_bytes,
        ways: args.way.clone(),
        tuning: Table::wanted(args.tuning.as_deref(), args.backend, args.ranks)?,
        modes: args.mode.clone(),
        blocks: match &request_major {
            Some(_) => 1,
            None => args
                .blocks
                .unwrap_or_else(|| machine::default_blocks(args.ranks)),
        },
        iters: args.iters,
        warmup: args.warmup,
        loops: args.loops,
        check: args.check == 1,
        request_major,
        pipeline: args.pipeline,
    };
    if task.cases() == 0 {
        return Err(Error::Usage(
            "in a graph the staged way only copies out; leave out -G, or use --mode copy-out"
                .into(),
        ));
    }
    let instead = "use fewer ranks, or fewer or shorter rows";
    machine::check_memory(task.memory(args.ranks), "this benchmark", instead)?;
    if let Some(gpus) = &gpus {
        let bytes = task.device_memory(args.ranks);
        gpus.check_memory(args.ranks, bytes, "this benchmark", instead)?;
    }

    if args.pipeline {
        return pipeline::run(args, task, gpus.as_ref());
    }
    let progress = progress(task.cases() as u64);
    let printer = Printer::new(args, &task, gpus);
    // The bar and the table may share a terminal.
    let shown = |print: &dyn Fn() -> Result<(), Error>| progress.suspend(print);
    shown(&|| printer.begin())?;
    let mut rows: Vec<Row> = Vec::new();
    let mut copies: Option<Copies> = None;
    let work = ranks::Task::Bench(task);
    ranks::run(args.backend, args.ranks, &work, &mut |message| {
        if let Message::Text(text) = message {
            match serde_json::from_str(&text).map_err(|error| error.to_string())? {
                Found::Copies(found) => {
                    shown(&|| printer.copies(&found))?;
                    copies = Some(found);
                }
                Found::Row(row) => {
                    shown(&|| printer.row(&row))?;
                    rows.push(row);
                    progress.inc(1);
                }
            }
        }
        Ok(())
    })?;
    progress.finish_and_clear();
    printer.end(&rows, copies.as_ref())?;
    all_right(rows.iter().filter_map(|row| row.wrong).sum())
}

fn all_right(wrong: u64) -> Result<(), Error> {
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
        return Err(Error::Usage(format!(
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
