//! Writing results: lines, and columns that line up.

use crate::error::{Error, plain};
use std::io::{self, Write};

/// How a command prints what it found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Columns for people.
    Table,
    /// One JSON document.
    Json,
}

/// Writes `text` and a line break to standard output.
pub(crate) fn line(text: &str) -> Result<(), Error> {
    raw(format!("{text}\n").as_bytes())
}

/// Writes to standard output.
pub(crate) fn raw(bytes: &[u8]) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    let done = out.write_all(bytes).and_then(|()| out.flush());
    done.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => Error::OutputClosed,
        _ => Error::Failed(format!("standard output: {}", plain(&error))),
    })
}

/// Says something on standard error that does not end the program.
pub(crate) fn note(text: &str) {
    // Whoever does not listen misses no result.
    let _ = writeln!(io::stderr(), "note: {text}");
}

/// Columns whose widths are known before the first row, so that rows can be printed as they come.
/// The first `left` ones are flush left, the others flush right.
#[derive(Debug)]
pub(crate) struct Table {
    widths: Vec<usize>,
    left: usize,
}

impl Table {
    pub(crate) fn new(widths: &[usize], left: usize) -> Self {
        Table {
            widths: widths.to_vec(),
            left,
        }
    }

    pub(crate) fn row<T: AsRef<str>>(&self, cells: &[T]) -> String {
        let mut line = String::new();
        for (i, (cell, &width)) in cells.iter().zip(&self.widths).enumerate() {
            let cell = cell.as_ref();
            if i > 0 {
                line.push_str("  ");
            }
            line.push_str(&if i < self.left {
                format!("{cell:<width$}")
            } else {
                format!("{cell:>width$}")
            });
        }
        line.trim_end().to_string()
    }
}

/// Microseconds to about three digits.
pub(crate) fn micros(us: f64) -> String {
    if us >= 100.0 {
        format!("{us:.0}")
    } else if us >= 10.0 {
        format!("{us:.1}")
    } else {
        format!("{us:.2}")
    }
}

/// Bytes in the largest binary unit that leaves a number of at least 1.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

/// The middle of `sorted`, or 0 of nothing.
pub(crate) fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        len if len % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// The smallest value of `sorted` that at least 99 % do not exceed, or 0 of nothing.
pub(crate) fn p99(sorted: &[f64]) -> f64 {
    let rank = (sorted.len() * 99).div_ceil(100);
    rank.checked_sub(1).map_or(0.0, |index| sorted[index])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_statistics() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!((median(&values), p99(&values)), (100.5, 198.0));
        assert_eq!((median(&values[..3]), p99(&values[..3])), (2.0, 3.0));
        assert_eq!((median(&[]), p99(&[])), (0.0, 0.0));
    }

    #[test]
    fn columns_line_up() {
        let table = Table::new(&[5, 6], 1);
        assert_eq!(table.row(&["way", "time"]), "way      time");
        assert_eq!(bytes(1536), "1.5 KiB");
    }
}
