//! What is printed of the ranks.

use crate::error::Error;
use crate::report::{self, Table, median, micros, p99};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One rank's line of the result.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RankReport {
    pub(super) rank: usize,
    pub(super) valid_rows: usize,
    pub(super) padded_rows: usize,
    /// Bytes that a gather delivers to it, or all gathers of a plan.
    pub(super) bytes: usize,
    pub(super) way: String,
    /// By mode: the same on all ranks.
    #[serde(flatten)]
    pub(super) times: BTreeMap<String, Times>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Times {
    median_us: f64,
    p99_us: f64,
}

impl Times {
    pub(super) fn of(mut micros: Vec<f64>) -> Self {
        micros.sort_unstable_by(f64::total_cmp);
        Times {
            median_us: median(&micros),
            p99_us: p99(&micros),
        }
    }
}

/// A line for each rank.
pub(super) fn print(rows: &[RankReport]) -> Result<(), Error> {
    let modes = rows
        .first()
        .map(|row| row.times.keys())
        .into_iter()
        .flatten();
    let (mut heads, mut columns) = (vec![String::new(); 4], vec![]);
    heads[1] = "rows".into();
    for name in ["rank", "valid/padded", "bytes", "way"] {
        columns.push(name.to_string());
    }
    for mode in modes {
        heads.extend([mode.replace('_', "-"), String::new()]);
        columns.extend(["median us", "p99 us"].map(String::from));
    }
    let widths = [5, 13, 11, 11]
        .into_iter()
        .chain(std::iter::repeat_n(10, columns.len() - 4));
    let table = Table::new(&widths.collect::<Vec<_>>(), 0);
    report::line(&table.row(&heads))?;
    report::line(&table.row(&columns))?;
    for row in rows {
        let mut cells = vec![
            row.rank.to_string(),
            format!("{}/{}", row.valid_rows, row.padded_rows),
            row.bytes.to_string(),
            row.way.clone(),
        ];
        for times in row.times.values() {
            cells.extend([micros(times.median_us), micros(times.p99_us)]);
        }
        report::line(&table.row(&cells))?;
    }
    Ok(())
}
