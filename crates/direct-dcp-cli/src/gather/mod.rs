//! `direct-dcp gather`: shards a tensor over ranks, gathers it on every one, and checks every byte.

mod device;
mod pieces;

use crate::error::Error;
use crate::gpu::{Gpus, Place};
use crate::output::Output;
use crate::ranks::{self, Backend, Emit, Message, RankError, WayChoice};
use crate::report::{self, Format, Table, median, micros, p99};
use crate::tensor_file::{RowSource, Tensor};
use crate::{args, machine};
use direct_dcp::plan::Sharding;
use direct_dcp::{DType, Group, KvGather, RowFormat, Workspace, WorkspaceOptions};
use pieces::Pieces;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::PathBuf;
use std::time::Instant;

/// Fills the padding of shards. It travels, and must not come out.
const JUNK: u8 = 0xEE;
/// Fills the buffers that rows are gathered into.
const POISON: u8 = 0xA5;
/// Bytes of restored rows that are passed on at a time.
const CHUNK: usize = 4 << 20;

/// Gather a tensor over ranks and check every byte.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The rows are dealt to the ranks as decode context parallelism does it: token t belongs to rank
(t / interleave) mod ranks. Every rank then gathers the rows of all, once with a copy into a buffer
and once in place, and compares what it got with the file.

Examples:
  direct-dcp gather examples/data/minilm_kv_small.safetensors
  direct-dcp gather kv.safetensors --ranks 8 --interleave 16 --backend processes
  direct-dcp gather kv.safetensors --way push --output gathered.safetensors
  direct-dcp gather kv.safetensors --backend cuda --way push

On GPUs, times are of the device, from one call's end to the next one's.")]
pub(crate) struct Args {
    /// The safetensors file to read
    file: PathBuf,
    /// The tensor to gather: [rows, dim] of F16, BF16, F8_E4M3, U8 or I8
    #[arg(long, value_name = "NAME", default_value = "kv")]
    tensor: String,
    /// How many ranks, 2 to 1024
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = args::ranks)]
    ranks: usize,
    /// How many neighbouring tokens go to one rank
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = args::positive)]
    interleave: usize,
    /// What the ranks are
    #[arg(long, value_enum, default_value_t = Backend::Threads)]
    backend: Backend,
    /// The GPU of all ranks [default: of rank r, device r modulo their number]
    #[arg(long, value_name = "N")]
    device: Option<u32>,
    /// How rows travel
    #[arg(long, value_enum, default_value_t = WayChoice::Auto)]
    way: WayChoice,
    /// How many gathers of each mode to time
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = args::iterations)]
    iterations: usize,
    /// Write the gathered rows, in token order, to this safetensors file
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// How to print the result
    #[arg(long, value_enum, default_value_t = Format::Table)]
    format: Format,
}

impl Args {
    pub(crate) fn backend(&self) -> Backend {
        self.backend
    }
}

pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let place = Place::of(args.backend, args.device)?;
    args.way.check(args.backend)?;
    let gpus = match place {
        Place::Cuda { device } => Some(Gpus::open(device)?),
        Place::Cpu => None,
    };
    let tensor = Tensor::open(&args.file, &args.tensor)?;
    let mut output = match &args.output {
        Some(path) => Some(Output::create(path, &tensor)?),
        None => None,
    };
    let format = tensor.format();
    let task = Task {
        source: tensor.data.clone(),
        dtype: format.dtype().into(),
        dim: format.dim(),
        interleave: args.interleave,
        place,
        way: args.way,
        iterations: args.iterations,
        restore: output.is_some(),
    };
    let padded_rows = task.padded_rows(task.sharding(args.ranks)?);
    let what = format!(
        "gathering {} rows on {} ranks with interleave {}",
        tensor.rows, args.ranks, args.interleave
    );
    let instead = "use fewer ranks or a smaller interleave";
    machine::check_memory(task.memory(args.ranks), &what, instead)?;
    if let Some(gpus) = &gpus {
        gpus.check_memory(args.ranks, task.device_memory(args.ranks), &what, instead)?;
    }

    let mut rows: Vec<RankReport> = Vec::new();
    let task = ranks::Task::Gather(task);
    ranks::run(args.backend, args.ranks, &task, &mut |message| {
        match (message, &mut output) {
            (Message::Text(text), _) => {
                rows = serde_json::from_str(&text).map_err(|error| error.to_string())?;
            }
            (Message::Bytes(bytes), Some(output)) => output.append(&bytes)?,
            (Message::Bytes(_), None) => {}
        }
        Ok(())
    })?;
    let written = match output {
        Some(output) => Some(output.finish()?),
        None => None,
    };

    let document = json!({
        "file": args.file.to_string_lossy(),
        "tensor": tensor.name,
        "dtype": tensor.dtype,
        "shape": [tensor.rows, tensor.dim],
        "ranks": args.ranks,
        "backend": args.backend,
        "interleave": args.interleave,
        "padded_rows": padded_rows,
        "iterations": args.iterations,
        "verified": true,
        "per_rank": rows,
        "output": written.as_ref().map(|path| path.to_string_lossy()),
    });
    match args.format {
        Format::Json => report::line(&format!("{document:#}")),
        Format::Table => {
            report::line(&format!(
                "{} {:?}: {} [{}, {}], {} {}, interleave {}",
                args.file.display(),
                tensor.name,
                tensor.dtype,
                tensor.rows,
                tensor.dim,
                args.ranks,
                args.backend,
                args.interleave
            ))?;
            print_table(&rows)?;
            report::line(&format!(
                "{} of {} ranks got every row as it is in the file, by copy-out and by zero-copy",
                rows.len(),
                args.ranks
            ))?;
            match &written {
                Some(path) => report::line(&format!("wrote {}", path.display())),
                None => Ok(()),
            }
        }
    }
}

fn print_table(rows: &[RankReport]) -> Result<(), Error> {
    let table = Table::new(&[5, 13, 11, 11, 10, 10, 10, 10], 0);
    report::line(&table.row(&["", "rows", "", "", "copy-out", "", "zero-copy", ""]))?;
    report::line(&table.row(&[
        "rank",
        "valid/padded",
        "bytes",
        "way",
        "median us",
        "p99 us",
        "median us",
        "p99 us",
    ]))?;
    for row in rows {
        report::line(&table.row(&[
            row.rank.to_string(),
            format!("{}/{}", row.valid_rows, row.padded_rows),
            row.bytes.to_string(),
            row.way.clone(),
            micros(row.copy_out.median_us),
            micros(row.copy_out.p99_us),
            micros(row.zero_copy.median_us),
            micros(row.zero_copy.p99_us),
        ]))?;
    }
    Ok(())
}

/// What every rank does.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    source: RowSource,
    dtype: Element,
    dim: usize,
    interleave: usize,
    place: Place,
    way: WayChoice,
    iterations: usize,
    /// Whether rank 0 passes on the rows in token order.
    restore: bool,
}

/// The library's element type, as it travels to a rank.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Element {
    F16,
    BF16,
    F8E4M3,
    Bytes,
}

impl From<DType> for Element {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F16 => Element::F16,
            DType::BF16 => Element::BF16,
            DType::F8E4M3 => Element::F8E4M3,
            _ => Element::Bytes,
        }
    }
}

impl From<Element> for DType {
    fn from(element: Element) -> Self {
        match element {
            Element::F16 => DType::F16,
            Element::BF16 => DType::BF16,
            Element::F8E4M3 => DType::F8E4M3,
            Element::Bytes => DType::Bytes,
        }
    }
}

/// What a rank has when all of its gathers were right.
struct Gathered {
    way: String,
    /// Microseconds of each call.
    copy_out: Vec<f64>,
    zero_copy: Vec<f64>,
    /// What the last copy-out delivered.
    rows: Vec<u8>,
}

/// One rank's line of the result.
#[derive(Debug, Serialize, Deserialize)]
struct RankReport {
    rank: usize,
    valid_rows: usize,
    padded_rows: usize,
    /// Bytes that a gather delivers to it.
    bytes: usize,
    way: String,
    copy_out: Times,
    zero_copy: Times,
}

#[derive(Debug, Serialize, Deserialize)]
struct Times {
    median_us: f64,
    p99_us: f64,
}

impl Times {
    fn of(mut micros: Vec<f64>) -> Self {
        micros.sort_unstable_by(f64::total_cmp);
        Times {
            median_us: median(&micros),
            p99_us: p99(&micros),
        }
    }
}

impl Task {
    fn sharding(&self, ranks: usize) -> Result<Sharding, String> {
        Sharding::new(ranks, self.interleave).map_err(|error| error.to_string())
    }

    /// Rows of every rank's shard.
    fn padded_rows(&self, sharding: Sharding) -> usize {
        sharding.padded_rows(self.source.rows())
    }

    /// The host memory that all ranks need together; none if it cannot be counted.
    fn memory(&self, ranks: usize) -> Option<usize> {
        let padded = self.padded_rows(self.sharding(ranks).ok()?);
        let capacity = padded.checked_mul(ranks)?;
        let shared = match self.place {
            Place::Cpu => self.options(capacity).memory_bytes(ranks).ok()?,
            Place::Cuda { .. } => 0,
        };
        shared.checked_add(self.rows_memory(ranks)?.checked_mul(ranks)?)
    }

    /// The device memory that each rank needs; none if it cannot be counted.
    fn device_memory(&self, ranks: usize) -> Option<usize> {
        let padded = self.padded_rows(self.sharding(ranks).ok()?);
        let capacity = padded.checked_mul(ranks)?;
        let shared = self.options(capacity).device_bytes(ranks).ok()?;
        shared.checked_add(self.rows_memory(ranks)?)
    }

    /// Bytes of a rank's shard, and of a buffer for the rows of all.
    fn rows_memory(&self, ranks: usize) -> Option<usize> {
        let padded = self.padded_rows(self.sharding(ranks).ok()?);
        let slice = padded.checked_mul(self.source.row_bytes())?;
        slice.checked_mul(ranks.checked_add(1)?)
    }

    fn options(&self, capacity: usize) -> WorkspaceOptions {
        let options = WorkspaceOptions::new(capacity, RowFormat::new(self.dtype.into(), self.dim));
        match self.way.forced() {
            Some(way) => options.way(way),
            None => options,
        }
    }

    /// One rank's part.
    pub(crate) fn run(&self, group: &Group, emit: &mut Emit<'_>) -> Result<(), RankError> {
        let (rank, ranks) = (group.rank(), group.world_size());
        let sharding = self.sharding(ranks)?;
        let padded = self.padded_rows(sharding);
        let local = self.shard(sharding, rank)?;
        let Gathered {
            way,
            copy_out,
            zero_copy,
            rows: out,
        } = match self.place {
            Place::Cpu => self.on_cpu(group, sharding, &local)?,
            Place::Cuda { device } => self.on_gpu(group, sharding, &local, device)?,
        };

        let report = RankReport {
            rank,
            valid_rows: sharding.local_len(self.source.rows(), rank),
            padded_rows: padded,
            bytes: out.len(),
            way,
            copy_out: Times::of(copy_out),
            zero_copy: Times::of(zero_copy),
        };
        let report = serde_json::to_vec(&report).map_err(|error| error.to_string())?;
        // Everybody has verified when this returns.
        let reports = group.all_gather(&report)?;
        if rank == 0 {
            let reports = reports.join(&b","[..]);
            emit(Message::Text(format!(
                "[{}]",
                String::from_utf8_lossy(&reports)
            )))?;
            if self.restore {
                self.restore(sharding, &out, emit)?;
            }
        }
        Ok(())
    }

    fn on_cpu(
        &self,
        group: &Group,
        sharding: Sharding,
        local: &[u8],
    ) -> Result<Gathered, RankError> {
        let ranks = group.world_size();
        let options = self.options(ranks * self.padded_rows(sharding));
        let gather = KvGather::new(Workspace::new(group, options)?);

        let mut out = vec![POISON; ranks * local.len()];
        gather.gather_into(0, local, &mut out)?;
        self.verify(sharding, &out, "copy-out")?;
        out.fill(POISON);
        let mut copy_out = Vec::with_capacity(self.iterations);
        group.barrier()?;
        for _ in 0..self.iterations {
            let start = Instant::now();
            gather.gather_into(0, local, &mut out)?;
            copy_out.push(start.elapsed().as_secs_f64() * 1e6);
        }
        self.verify(sharding, &out, "copy-out")?;

        self.verify(sharding, &gather.gather(0, local)?, "zero-copy")?;
        let mut zero_copy = Vec::with_capacity(self.iterations);
        group.barrier()?;
        for i in 1..=self.iterations {
            let start = Instant::now();
            let rows = gather.gather(0, local)?;
            zero_copy.push(start.elapsed().as_secs_f64() * 1e6);
            if i == self.iterations {
                self.verify(sharding, &rows, "zero-copy")?;
            }
        }
        Ok(Gathered {
            way: gather.workspace().way().to_string(),
            copy_out,
            zero_copy,
            rows: out,
        })
    }

    /// The rows of `rank`, from the file, and junk behind them.
    fn shard(&self, sharding: Sharding, rank: usize) -> Result<Vec<u8>, String> {
        let row_bytes = self.source.row_bytes();
        let mut local = vec![JUNK; self.padded_rows(sharding) * row_bytes];
        let mut runs = Pieces::new(sharding.runs(self.source.rows()));
        self.source.each_chunk(|token, chunk| {
            for piece in runs.within(token, chunk.len() / row_bytes) {
                if piece.rank == rank {
                    let from = &chunk[(piece.token - token) * row_bytes..][..piece.len * row_bytes];
                    local[piece.row * row_bytes..][..from.len()].copy_from_slice(from);
                }
            }
            Ok::<_, String>(())
        })?;
        Ok(local)
    }

    /// Compares gathered rows with the file.
    fn verify(&self, sharding: Sharding, gathered: &[u8], mode: &str) -> Result<(), String> {
        let row_bytes = self.source.row_bytes();
        let shard_bytes = self.padded_rows(sharding) * row_bytes;
        let mut runs = Pieces::new(sharding.runs(self.source.rows()));
        self.source.each_chunk(|token, chunk| {
            for piece in runs.within(token, chunk.len() / row_bytes) {
                let expected = &chunk[(piece.token - token) * row_bytes..][..piece.len * row_bytes];
                let start = piece.rank * shard_bytes + piece.row * row_bytes;
                let found = &gathered[start..][..expected.len()];
                if found != expected {
                    let at = found.iter().zip(expected).position(|(a, b)| a != b);
                    let at = at.unwrap_or_default();
                    return Err(format!(
                        "wrong bytes after a {mode} gather: token {}, from rank {}, is {:#04x} at \
                         byte {} where the file has {:#04x}",
                        piece.token + at / row_bytes,
                        piece.rank,
                        found[at],
                        at % row_bytes,
                        expected[at]
                    ));
                }
            }
            Ok(())
        })
    }

    /// Passes on gathered rows in token order.
    fn restore(
        &self,
        sharding: Sharding,
        gathered: &[u8],
        emit: &mut Emit<'_>,
    ) -> Result<(), RankError> {
        let row_bytes = self.source.row_bytes();
        let shard_bytes = self.padded_rows(sharding) * row_bytes;
        let mut chunk = Vec::new();
        for run in sharding.runs(self.source.rows()) {
            let start = run.rank * shard_bytes + run.row * row_bytes;
            // A run may be as long as the file.
            for piece in gathered[start..][..run.len * row_bytes].chunks(CHUNK) {
                chunk.extend_from_slice(piece);
                if chunk.len() >= CHUNK {
                    emit(Message::Bytes(std::mem::take(&mut chunk)))?;
                }
            }
        }
        if !chunk.is_empty() {
            emit(Message::Bytes(chunk))?;
        }
        Ok(())
    }
}
