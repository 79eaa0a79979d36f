//! `bench --tune`: which way is fastest for calls of what size, as a table.
//!
//! | file | holds |
//! |---|---|
//! | `mod` | what is asked for, and what becomes of the times |
//! | `measure` | what every rank does |
//! | `subject` | one way whose calls are timed |

mod measure;
mod subject;

pub(crate) use measure::Task;

use super::{Args, Format, rows};
use crate::error::Error;
use crate::gpu::{Gpus, Place};
use crate::machine;
use crate::ranks::{self, Message, WayChoice};
use crate::report::{self, micros};
use crate::tuning::{Draft, Table};
use direct_dcp::Tuning;
use direct_dcp::cuda::Delivery;
use direct_dcp::tuning::{Entry, Setting};
use measure::Measured;
use serde_json::json;
use std::path::Path;

/// Measures every way that the backend has, and writes the table to `path`. Entries that are there
/// for other settings and modes stay.
pub(super) fn run(args: &Args, path: &Path) -> Result<(), Error> {
    let place = Place::of(args.backend, args.device)?;
    let ways = ways(args)?;
    let old = match path.exists() {
        true => Table::load(path)?.0,
        false => Tuning::default(),
    };
    let mut rows = rows(args)?;
    rows.sort_unstable();
    rows.dedup();
    let task = Task {
        place,
        rows,
        row_bytes: args.row_bytes,
        // Without an explicit list, what ranks should not do is left out where they find it.
        all: ways.is_empty(),
        ways: match ways.is_empty() {
            true => all(args),
            false => ways,
        },
        modes: args.mode.clone(),
        blocks: args.blocks,
        iters: args.iters,
        launches: args.cudagraph,
        warmup: args.warmup,
        loops: args.loops,
    };
    let instead = "use fewer ranks, fewer ways, or fewer or shorter rows";
    let what = "this tuning";
    machine::check_memory(task.memory(args.ranks), what, instead)?;
    if let Place::Cuda { device } = place {
        let gpus = Gpus::open(device)?;
        gpus.check_memory(args.ranks, task.device_memory(args.ranks), what, instead)?;
    }
    // Before anything is measured in vain.
    let draft = Draft::create(path)?;
    let mut all: Vec<Measured> = Vec::new();
    let work = ranks::Task::Tune(task);
    ranks::run(args.backend, args.ranks, &work, &mut |message| {
        if let Message::Text(text) = message {
            let measured = serde_json::from_str(&text).map_err(|error| error.to_string())?;
            all.push(measured);
        }
        Ok(())
    })?;

    let new = entries(args, &all);
    let replaced = |old: &Entry| {
        new.iter()
            .any(|new| new.setting == old.setting && new.delivery == old.delivery)
    };
    let kept = old.entries().iter().filter(|old| !replaced(old)).cloned();
    let table = Tuning::new(kept.chain(new.iter().cloned())).map_err(|error| error.to_string())?;
    draft.finish(&table)?;
    print(args, &all, &table, path)
}

/// The ways that are asked for by name.
fn ways(args: &Args) -> Result<Vec<WayChoice>, Error> {
    let fail = |why: &str| Err(Error::Usage(why.into()));
    if args.way == [WayChoice::Auto] {
        return Ok(Vec::new());
    }
    for way in &args.way {
        way.check(args.backend)?;
        match way {
            WayChoice::Auto => return fail("--tune compares ways; name none, or leave out auto"),
            WayChoice::Staged => return fail("a tuning table does not name staged"),
            WayChoice::CopyEngine if args.cudagraph.is_some() => {
                return fail("--way copy-engine cannot be captured into a graph; leave out -G");
            }
            _ => {}
        }
    }
    Ok(args.way.clone())
}

fn all(args: &Args) -> Vec<WayChoice> {
    match (args.backend.on_gpus(), args.cudagraph) {
        (false, _) => vec![WayChoice::SharedSlot, WayChoice::Push, WayChoice::Pull],
        (true, None) => vec![
            WayChoice::Multicast,
            WayChoice::Push,
            WayChoice::Pull,
            WayChoice::CopyEngine,
        ],
        (true, Some(_)) => vec![WayChoice::Multicast, WayChoice::Push, WayChoice::Pull],
    }
}

/// Of each mode, an entry for each run of sizes for which the same way is the fastest.
fn entries(args: &Args, all: &[Measured]) -> Vec<Entry> {
    let backend = args.backend.tuned();
    let mut entries: Vec<Entry> = Vec::new();
    // Mode by mode, in the order of sizes.
    for mode in &args.mode {
        let delivery = Delivery::from(*mode);
        for measured in all.iter().filter(|measured| measured.mode == *mode) {
            let Some(way) = measured.fastest().and_then(WayChoice::forced) else {
                continue;
            };
            let entry = Entry {
                setting: Setting {
                    backend,
                    ranks: args.ranks,
                    devices: measured.devices,
                    device: measured.device.clone(),
                },
                delivery,
                up_to: Some(measured.rows * args.row_bytes),
                way,
                blocks: args.blocks,
            };
            match entries.last_mut() {
                Some(last) if (last.delivery, last.way) == (delivery, way) => {
                    last.up_to = entry.up_to;
                }
                _ => entries.push(entry),
            }
        }
        // Beyond what was measured, as at its end.
        if let Some(last) = entries.last_mut() {
            last.up_to = None;
        }
    }
    entries
}

fn print(args: &Args, all: &[Measured], table: &Tuning, path: &Path) -> Result<(), Error> {
    match args.format {
        Format::Json => {
            let document = json!({
                "version": env!("CARGO_PKG_VERSION"),
                "ranks": args.ranks,
                "backend": args.backend,
                "row_bytes": args.row_bytes,
                "iters": args.iters,
                "loops": args.loops,
                "results": all,
                "table": table.to_string(),
                "written": path.display().to_string(),
            });
            report::line(&format!("{document:#}"))
        }
        Format::Csv => {
            report::line("mode,rows,bytes,way,time_us")?;
            for measured in all {
                let Measured {
                    mode, rows, times, ..
                } = measured;
                let bytes = rows * args.row_bytes;
                for (way, us) in times {
                    report::line(&format!("{mode},{rows},{bytes},{},{us:.3}", way.name()))?;
                }
            }
            Ok(())
        }
        Format::Table => {
            report::line("# mode, rows and bytes of each rank; us of each way, the fastest first")?;
            for measured in all {
                let mut times = measured.times.clone();
                times.sort_by(|(_, one), (_, other)| one.total_cmp(other));
                let times = times
                    .iter()
                    .map(|(way, us)| format!("{} {}", way.name(), micros(*us)));
                report::line(&format!(
                    "# {:<9} {:>7} {:>10}  {}",
                    measured.mode,
                    measured.rows,
                    measured.rows * args.row_bytes,
                    times.collect::<Vec<_>>().join(", ")
                ))?;
            }
            report::line(&format!("# wrote {}", path.display()))?;
            report::raw(table.to_string().as_bytes())
        }
    }
}
