//! `direct-dcp gather`: shards a tensor over ranks, gathers it on every one, and checks every byte.

mod cache;
mod device;
mod pieces;
mod plan;
mod rank_major;
mod report;
mod request_major;
mod task;

pub(crate) use task::Task;

use crate::error::Error;
use crate::gpu::{Gpus, Place};
use crate::output::Output;
use crate::ranks::{self, Backend, Message, WayChoice};
use crate::report::{Format, line};
use crate::tensor_file::Tensor;
use crate::tuning::Table;
use crate::{args, machine};
use report::RankReport;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Gather a tensor over ranks and check every byte.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
The rows are dealt to the ranks as decode context parallelism does it: token t belongs to rank
(t / interleave) mod ranks. Every rank then gathers the rows of all, once with a copy into a buffer
and once in place, and compares what it got with the file. With --layout request-major each row is
stored where its consumer wants it: the tokens of request after request, inside a request rank by
rank, without padding, split into planes. What is timed is then all gathers of the plan.

Examples:
  direct-dcp gather examples/data/minilm_kv_small.safetensors
  direct-dcp gather kv.safetensors --ranks 8 --interleave 16 --backend processes
  direct-dcp gather kv.safetensors --way push --output gathered.safetensors
  direct-dcp gather kv.safetensors --backend cuda --way push
  direct-dcp gather kv.safetensors --layout request-major --requests 3000,200,896 --planes 384,384 \
    --chunk-rows 1024 --paged 16
  direct-dcp gather kv.safetensors --layout request-major --paged 16 --backend cuda --way push

On GPUs, times are of the device, from one call's end to the next one's. Where the two kinds of call
go by two ways, both are named: pull/push copies out by pull and lends by push.")]
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
    /// Go by the ways that this file of bench --tune names for such ranks, where none is forced; on
    /// CPUs by one for all calls, that of the largest zero-copy
    #[arg(long, value_name = "FILE", conflicts_with = "layout")]
    tuning: Option<PathBuf>,
    #[command(flatten)]
    layout: plan::Options,
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
    args.layout.check(args.way)?;
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
        tuning: Table::wanted(args.tuning.as_deref(), args.backend, args.ranks)?,
        iterations: args.iterations,
        restore: output.is_some(),
        request_major: args.layout.plan(tensor.rows, tensor.dim)?,
    };
    let sharding = task.sharding(args.ranks).map_err(Error::Usage)?;
    let padded_rows = match &task.request_major {
        Some(plan) => plan.rows(sharding, 0).1,
        None => task.padded_rows(sharding),
    };
    let plan = match &task.request_major {
        Some(plan) => Some(plan.describe(sharding, format)?),
        None => None,
    };
    let what = format!(
        "gathering {} rows on {} ranks with interleave {}",
        tensor.rows, args.ranks, args.interleave
    );
    let instead = match plan {
        Some(_) => "use fewer ranks, or smaller chunks, pages or interleave",
        None => "use fewer ranks or a smaller interleave",
    };
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

    let mut document = json!({
        "file": args.file.to_string_lossy(),
        "tensor": tensor.name,
        "dtype": tensor.dtype,
        "shape": [tensor.rows, tensor.dim],
        "ranks": args.ranks,
        "backend": args.backend,
        "interleave": args.interleave,
        "layout": args.layout.layout,
        "padded_rows": padded_rows,
        "iterations": args.iterations,
        "verified": true,
        "per_rank": rows,
        "output": written.as_ref().map(|path| path.to_string_lossy()),
    });
    if let (Value::Object(document), Some(plan)) = (&mut document, &plan) {
        document.extend(plan.fields());
    }
    match args.format {
        Format::Json => line(&format!("{document:#}")),
        Format::Table => {
            line(&format!(
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
            if let Some(plan) = &plan {
                line(&plan.to_string())?;
            }
            report::print(&rows)?;
            let how = match plan {
                Some(_) => "in its final place",
                None => "by copy-out and by zero-copy",
            };
            line(&format!(
                "{} of {} ranks got every row as it is in the file, {how}",
                rows.len(),
                args.ranks
            ))?;
            match &written {
                Some(path) => line(&format!("wrote {}", path.display())),
                None => Ok(()),
            }
        }
    }
}
