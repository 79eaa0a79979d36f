//! `cargo xtask lint`: rules of this project that no compiler knows.
//!
//! Each rule is a function from sources to findings, in a file of its own, with a bad sample that
//! it must find.

mod atomics;
mod panics;
mod source;
mod sync;
mod unsafety;
mod words;

use std::fmt;
use std::fs;
use std::path::Path;

use crate::Outcome;
use source::{Rust, Text};

/// A place that breaks a rule.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    path: String,
    /// Counted from 1; 0 for the whole file.
    line: usize,
    message: String,
}

impl Finding {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Finding {
            path: path.to_owned(),
            line,
            message: message.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.message)
    }
}

/// The document whose headings are the `SYNC` tags.
const PROTOCOL: &str = "docs/protocol.md";

/// Applies all rules to the workspace at `root`, and prints what they find.
pub(crate) fn lint(root: &Path) -> Outcome {
    let mut texts = Vec::new();
    collect(root, "", &mut texts)?;
    let protocol = texts
        .iter()
        .find(|text| text.path == PROTOCOL)
        .ok_or_else(|| format!("{PROTOCOL} is missing"))?;
    let rust = Rust::all(&texts);

    let rules = [
        ("atomics in device code", atomics::check(&rust)),
        ("unsafe code", unsafety::check(&rust)),
        ("panics in libraries", panics::check(&rust)),
        ("SYNC tags", sync::check(&rust, protocol)),
        ("words", words::check(&texts)),
    ];
    for (rule, findings) in &rules {
        println!("{rule}: {} findings", findings.len());
        for finding in findings {
            println!("  {finding}");
        }
    }
    match rules.iter().map(|(_, findings)| findings.len()).sum() {
        0 => Ok(()),
        count => Err(format!("{count} findings in {} files", texts.len())),
    }
}

/// Folders that hold no sources of ours.
const SKIPPED: [&str; 6] = [
    ".git",
    "target",
    "__pycache__",
    ".venv",
    "node_modules",
    ".pytest_cache",
];

/// Reads all text files below `root`/`folder`.
fn collect(root: &Path, folder: &str, texts: &mut Vec<Text>) -> Outcome {
    let failed = |error: std::io::Error| format!("reading {folder:?}: {error}");
    let mut entries = fs::read_dir(root.join(folder))
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(failed)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if folder.is_empty() {
            name.clone()
        } else {
            format!("{folder}/{name}")
        };
        let kind = entry.file_type().map_err(failed)?;
        if kind.is_dir() && !SKIPPED.contains(&name.as_str()) {
            collect(root, &path, texts)?;
        } else if kind.is_file()
            // What is not UTF-8 is not text.
            && let Ok(content) = fs::read_to_string(entry.path())
        {
            texts.push(Text { path, content });
        }
    }
    Ok(())
}
