//! Tables as text.

use std::fmt;
use std::str::FromStr;

use direct_dcp_cuda::gather::Delivery;

use super::{Backend, Entry, Setting, Tuning, TuningError};

/// The first line.
const HEAD: &str = "direct-dcp-tuning 1";

/// The columns, in a comment.
const COLUMNS: &str = "# backend ranks devices mode up-to-bytes way blocks device";

impl fmt::Display for Tuning {
    /// The text that parses to the same table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEAD}\n{COLUMNS}")?;
        for entry in self.entries() {
            let Setting {
                backend,
                ranks,
                devices,
                device,
            } = &entry.setting;
            let blocks = entry.blocks.map_or("auto".into(), |n| n.to_string());
            writeln!(
                f,
                "{backend} {ranks} {devices} {} {} {} {blocks} {device}",
                entry.delivery,
                up_to(entry),
                entry.way,
            )?;
        }
        Ok(())
    }
}

/// The column of the size.
pub(super) fn up_to(entry: &Entry) -> String {
    entry.up_to.map_or("any".into(), |bytes| bytes.to_string())
}

impl FromStr for Tuning {
    type Err = TuningError;

    fn from_str(text: &str) -> Result<Self, TuningError> {
        let lines = (1..).zip(text.lines().map(str::trim));
        let mut lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let (line, head) = lines.next().unwrap_or((1, "nothing"));
        if head != HEAD {
            return Err(wrong(line, "head of the table", HEAD, head));
        }
        let entries = lines.map(|(line, text)| Ok((line, Columns { line, rest: text }.entry()?)));
        Tuning::of_lines(entries.collect::<Result<_, _>>()?)
    }
}

/// A line that is being read.
struct Columns<'a> {
    line: usize,
    rest: &'a str,
}

impl<'a> Columns<'a> {
    fn entry(mut self) -> Result<Entry, TuningError> {
        let backend = self.one_of("backend", Backend::ALL)?;
        let ranks = self.number("ranks")?;
        let devices = self.number("devices")?;
        let delivery = self.one_of("mode", [Delivery::CopyOut, Delivery::ZeroCopy])?;
        let up_to = self.number_or("up-to-bytes", "any")?;
        let way = self.one_of("way", backend.ways())?;
        let blocks = self.number_or("blocks", "auto")?;
        let words: Vec<&str> = self.rest.split_whitespace().collect();
        Ok(Entry {
            setting: Setting {
                backend,
                ranks,
                devices,
                device: words.join(" "),
            },
            delivery,
            up_to,
            way,
            blocks,
        })
    }

    fn next(&mut self) -> &'a str {
        let rest = self.rest.trim_start();
        let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
        let (word, rest) = rest.split_at(end);
        self.rest = rest;
        word
    }

    fn one_of<T: fmt::Display>(
        &mut self,
        what: &'static str,
        all: impl IntoIterator<Item = T>,
    ) -> Result<T, TuningError> {
        let word = self.next();
        let mut names = Vec::new();
        for one in all {
            let name = one.to_string();
            if name == word {
                return Ok(one);
            }
            names.push(name);
        }
        Err(wrong(self.line, what, &names.join(", "), word))
    }

    fn number(&mut self, what: &'static str) -> Result<usize, TuningError> {
        let word = self.next();
        let number = word.parse();
        number.map_err(|_| wrong(self.line, what, "a whole number", word))
    }

    fn number_or(&mut self, what: &'static str, none: &str) -> Result<Option<usize>, TuningError> {
        let word = self.next();
        if word == none {
            return Ok(None);
        }
        let expected = format!("a whole number, or {none}");
        let number = word.parse().map(Some);
        number.map_err(|_| wrong(self.line, what, &expected, word))
    }
}

fn wrong(line: usize, what: &'static str, expected: &str, got: &str) -> TuningError {
    TuningError::Line {
        line,
        what,
        expected: expected.into(),
        got: match got {
            "" => "nothing".into(),
            got => got.into(),
        },
    }
}
