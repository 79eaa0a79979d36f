//! `bench --pipeline`: windows that are gathered while earlier ones are read, with two slots, where
//! both take turns, against three, where they overlap. What is printed, and what every rank does on
//! CPUs.

use super::clock::{agree_on_start, now, wait_until, word};
use super::measure::Task;
use super::printer::heading;
use super::{Args, Format, pattern};
use crate::error::Error;
use crate::gpu::Gpus;
use crate::machine;
use crate::ranks::{self, Emit, Message, RankError, WayChoice};
use crate::report::{self, Table, median, micros};
use direct_dcp::{Gathered, Group, KvGather, Pipeline, Ticket, Workspace};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;

/// What was measured, in microseconds of each window.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) size: u64,
    pub(super) rows: usize,
    pub(super) way: String,
    /// Gathered with three slots, and not read.
    pub(super) gather_us: f64,
    /// Times that a reader copies each window, for the reading to be as long as the gather. On GPUs,
    /// the part of it that is copied.
    pub(super) copies: f64,
    /// Gathered and read with two slots.
    pub(super) two_slots_us: f64,
    /// Gathered and read with three slots.
    pub(super) three_slots_us: f64,
    pub(super) ratio: f64,
    pub(super) wrong: Option<u64>,
}

const HEADERS: [&str; 9] = [
    "size", "rows", "way", "gather", "copies", "S=2", "S=3", "ratio", "#wrong",
];
const UNITS: [&str; 9] = ["(B)", "", "", "(us)", "", "(us)", "(us)", "", ""];

/// Runs the ranks, and prints what they say.
pub(super) fn run(args: &Args, task: Task, gpus: Option<&Gpus>) -> Result<(), Error> {
    let table = Table::new(&[12, 8, 11, 9, 6, 9, 9, 6, 7], 0);
    match args.format {
        Format::Table => {
            report::line(&heading(args, gpus, &task.blocks.to_string()))?;
            let read = match gpus {
                Some(_) => "each read by few blocks, as much of it as takes as long",
                None => "each read by as many copies as take as long",
            };
            report::line(&format!(
                "# median of {} loops of {} windows, per window: gathered only; then {read}, with 2 \
                 and 3 slots; ratio = S=3 / S=2",
                args.loops, args.iters
            ))?;
            report::line(&table.row(&HEADERS))?;
            report::line(&table.row(&UNITS))?;
        }
        Format::Csv => report::line(
            "ranks,backend,blocks,row_bytes,size,rows,way,gather_us,copies,two_slots_us,\
             three_slots_us,ratio,wrong",
        )?,
        Format::Json => {}
    }
    let print = |row: &Row| {
        let wrong = row.wrong.map(|wrong| wrong.to_string());
        let cells = [
            row.size.to_string(),
            row.rows.to_string(),
            row.way.clone(),
            micros(row.gather_us),
            format!("{}", (row.copies * 1e4).round() / 1e4),
            micros(row.two_slots_us),
            micros(row.three_slots_us),
            format!("{:.2}", row.ratio),
            wrong.unwrap_or_else(|| "N/A".into()),
        ];
        match args.format {
            Format::Table => report::line(&table.row(&cells)),
            Format::Csv => report::line(&format!(
                "{},{},{},{},{}",
                args.ranks,
                args.backend.name(),
                args.blocks
                    .map_or(String::new(), |blocks| blocks.to_string()),
                args.row_bytes,
                cells.join(","),
            )),
            Format::Json => Ok(()),
        }
    };
    let mut rows: Vec<Row> = Vec::new();
    let work = ranks::Task::Bench(task);
    ranks::run(args.backend, args.ranks, &work, &mut |message| {
        if let Message::Text(text) = message {
            let row = serde_json::from_str(&text).map_err(|error| error.to_string())?;
            print(&row)?;
            rows.push(row);
        }
        Ok(())
    })?;
    if args.format == Format::Json {
        report::line(&format!(
            "{:#}",
            json!({
                "version": env!("CARGO_PKG_VERSION"),
                "ranks": args.ranks,
                "backend": args.backend,
                "processors": machine::cores(),
                "row_bytes": args.row_bytes,
                "iters": args.iters,
                "loops": args.loops,
                "results": rows,
            })
        ))?;
    }
    super::all_right(rows.iter().filter_map(|row| row.wrong).sum())
}

/// One rank's part.
pub(super) fn measure(task: &Task, group: &Group, emit: &mut Emit<'_>) -> Result<(), RankError> {
    for &way in &task.ways {
        for &rows in &task.rows {
            let row = Case::new(task, group, way, rows)?.measure()?;
            say(group, &row, emit)?;
        }
    }
    Ok(())
}

/// Rank 0 tells what was measured.
pub(super) fn say(group: &Group, row: &Row, emit: &mut Emit<'_>) -> Result<(), RankError> {
    if group.rank() > 0 {
        return Ok(());
    }
    let text = serde_json::to_string(row).map_err(|error| error.to_string())?;
    emit(Message::Text(text))
}

/// One rank's part of one row of the result.
struct Case<'a> {
    task: &'a Task,
    group: &'a Group,
    two: Pipeline,
    three: Pipeline,
    local: Arc<[u8]>,
    /// Where windows are copied to.
    out: Vec<u8>,
    crowded: bool,
    wrong: u64,
}

/// The seed of all rows.
pub(super) const SEED: u64 = 1;

impl<'a> Case<'a> {
    fn new(
        task: &'a Task,
        group: &'a Group,
        way: WayChoice,
        rows: usize,
    ) -> Result<Self, RankError> {
        let ranks = group.world_size();
        let pipeline = |slots| -> Result<_, RankError> {
            let options = task
                .options(rows * ranks, way, Some(task.blocks))
                .slots(slots);
            let gather = KvGather::new(Workspace::new(group, options)?);
            Ok(Pipeline::new(gather, 0)?)
        };
        let mut local = vec![0; rows * task.row_bytes];
        pattern::fill(&mut local, SEED, group.rank());
        Ok(Case {
            task,
            group,
            two: pipeline(2)?,
            three: pipeline(3)?,
            out: vec![0; local.len() * ranks],
            local: local.into(),
            // The thread that gathers, and the one that reads.
            crowded: ranks * (task.blocks + 1) > machine::cores(),
            wrong: 0,
        })
    }

    fn measure(mut self) -> Result<Row, RankError> {
        for slots in [2, 3] {
            self.windows(slots, self.task.warmup + 1, 1)?;
        }
        let gather = self.median(|case| case.windows(3, case.task.iters, 0))?;
        let both = self.median(|case| case.windows(2, case.task.iters, 1))?;
        // The same on all ranks, whose clocks are one.
        let copies = (gather / (both - gather).max(gather / 64.0))
            .round()
            .max(1.0) as usize;
        let mut times = [Vec::new(), Vec::new()];
        // In turn, so that what else the machine does hits both alike.
        for _ in 0..self.task.loops {
            for (slots, times) in [2, 3].into_iter().zip(&mut times) {
                times.push(self.windows(slots, self.task.iters, copies)?);
            }
        }
        let [two, three] = times.map(|mut times| {
            times.sort_unstable_by(f64::total_cmp);
            median(&times)
        });
        let wrong = self.group.all_gather(&self.wrong.to_le_bytes())?;
        let wrong = wrong.iter().filter_map(|count| word(count)).sum();
        Ok(Row {
            size: self.out.len() as u64,
            rows: self.local.len() / self.task.row_bytes,
            way: self.two.gather().workspace().way().to_string(),
            gather_us: gather / 1e3,
            copies: copies as f64,
            two_slots_us: two / 1e3,
            three_slots_us: three / 1e3,
            ratio: three / two,
            wrong: self.task.check.then_some(wrong),
        })
    }

    fn median(
        &mut self,
        time: impl Fn(&mut Self) -> Result<f64, RankError>,
    ) -> Result<f64, RankError> {
        let times: Result<Vec<_>, _> = (0..self.task.loops).map(|_| time(self)).collect();
        let mut times = times?;
        times.sort_unstable_by(f64::total_cmp);
        Ok(median(&times))
    }

    /// Collective: nanoseconds of a window in a loop of `count`, each copied `copies` times, from
    /// the first start to the last end on any rank.
    fn windows(&mut self, slots: usize, count: usize, copies: usize) -> Result<f64, RankError> {
        let start = agree_on_start(self.group, self.task.blocks + 1)?;
        wait_until(start, self.crowded);
        let begin = now();
        let pipeline = if slots == 2 {
            &mut self.two
        } else {
            &mut self.three
        };
        let mut waiting: VecDeque<Ticket> = VecDeque::new();
        let mut last: Option<Gathered> = None;
        for window in 0..count {
            // The slots that the one to be read leaves.
            while waiting.len() < (slots - 1).min(count - window) {
                waiting.push_back(pipeline.submit(self.local.clone())?);
            }
            if let Some(ticket) = waiting.pop_front() {
                let rows = pipeline.acquire(&ticket)?;
                for _ in 0..copies {
                    self.out.copy_from_slice(black_box(&rows));
                    black_box(&mut self.out);
                }
                last = (window + 1 == count).then_some(rows);
            }
        }
        let end = now();
        if let Some(rows) = last.filter(|_| self.task.check) {
            self.wrong += pattern::wrong(&rows, SEED, self.group.world_size());
        }
        let own = [begin.to_le_bytes(), end.to_le_bytes()].concat();
        let all = self.group.all_gather(&own)?;
        let begin = all.iter().filter_map(|times| word(times.get(..8)?)).min();
        let end = all.iter().filter_map(|times| word(times.get(8..)?)).max();
        let span = end.zip(begin).map_or(0, |(end, begin)| end - begin);
        Ok(span as f64 / count as f64)
    }
}
