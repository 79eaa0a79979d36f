//! Tables of measured ways: which way calls of what size are to take, on what machine.
//!
//! `direct-dcp bench --tune FILE` measures the ways and writes such a table;
//! [`WorkspaceOptions::tuning`](crate::WorkspaceOptions::tuning) has a workspace go by it. Nothing
//! is loaded unless asked for. A table says nothing but what is fast: a workspace that finds no
//! entry for itself goes as it would without one, and so does one whose group cannot have the way
//! that an entry names.
//!
//! ```
//! use direct_dcp::tuning::{Backend, Setting, Tuning};
//! use direct_dcp::{Way, cuda::Delivery};
//!
//! let table: Tuning = "
//! direct-dcp-tuning 1
//! ## backend ranks devices mode up-to-bytes way blocks device
//! cuda 4 1 copy-out 147456 push auto NVIDIA H200
//! cuda 4 1 copy-out any pull auto NVIDIA H200
//! "
//! .parse()?;
//! let setting = Setting {
//!     backend: Backend::Cuda,
//!     ranks: 4,
//!     devices: 1,
//!     device: "NVIDIA H200".into(),
//! };
//! let entry = table.entry(&setting, Delivery::CopyOut, 147_457).unwrap();
//! assert_eq!(entry.way, Way::Pull);
//! # Ok::<(), direct_dcp::tuning::TuningError>(())
//! ```
//!
//! # The file
//!
//! Lines of text. Empty lines, and what follows a `#` at the start of a line, mean nothing. The
//! first other line is `direct-dcp-tuning 1`; each after it is an entry of eight columns, divided by
//! white space, the last of which is the rest of the line:
//!
//! | column | is |
//! | --- | --- |
//! | backend | `threads`, `processes`, `cuda` (ranks are threads with GPUs) or `cuda-processes` |
//! | ranks | of the group, 2 or more |
//! | devices | different GPUs among them; 0 on CPUs |
//! | mode | `copy-out` or `zero-copy` |
//! | up-to-bytes | the largest slice, bytes of one rank's rows, that the entry is for, or `any` |
//! | way | one of the backend's, as [`Way`] prints; never `staged` |
//! | blocks | the most blocks of a launch, or the threads of a rank on CPUs: 1 to 1,024, or `auto` |
//! | device | the name of rank 0's GPU; `cpu` on CPUs |
//!
//! On CPUs ranks map their slots when a workspace is built, so one entry says the way of all its calls:
//! the one for zero-copy calls of the workspace's capacity, or else the one for those that copy out.
//!
//! The order of entries does not matter. A call goes by the entry with the smallest `up-to-bytes`
//! that is not below its slice. No two entries may be for the same sizes.

/// Bytes of a file at most: thousands of entries.
const MOST_BYTES: u64 = 256 << 10;

mod text;

use std::fmt;
use std::path::Path;

use direct_dcp_cuda::gather::Delivery;

use crate::options::{MOST_BLOCKS, Way};

/// What the ranks of a group are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Backend {
    /// Threads of one process, rows in host memory.
    Threads,
    /// Processes, rows in host memory.
    Processes,
    /// Threads of one process, rows on GPUs.
    Cuda,
    /// Processes, rows on GPUs.
    CudaProcesses,
}

impl Backend {
    const ALL: [Backend; 4] = [
        Backend::Threads,
        Backend::Processes,
        Backend::Cuda,
        Backend::CudaProcesses,
    ];

    /// The ways that a table may name for it, [`Way::CPU`] or [`Way::CUDA`] without
    /// [`Way::Staged`].
    pub fn ways(self) -> impl Iterator<Item = Way> {
        let ways: &'static [Way] = match self {
            Backend::Threads | Backend::Processes => &Way::CPU,
            Backend::Cuda | Backend::CudaProcesses => &Way::CUDA,
        };
        ways.iter().copied().filter(|way| *way != Way::Staged)
    }

    fn on_gpus(self) -> bool {
        matches!(self, Backend::Cuda | Backend::CudaProcesses)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Threads => "threads",
            Backend::Processes => "processes",
            Backend::Cuda => "cuda",
            Backend::CudaProcesses => "cuda-processes",
        })
    }
}

/// Where times were measured: groups that are alike in this are taken for alike in times.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Setting {
    /// What the ranks are.
    pub backend: Backend,
    /// How many there are.
    pub ranks: usize,
    /// Different GPUs among them; 0 on CPUs.
    pub devices: usize,
    /// The name of rank 0's GPU; `cpu` on CPUs.
    pub device: String,
}

impl Setting {
    /// That of `ranks` ranks on CPUs.
    pub(crate) fn cpu(one_process: bool, ranks: usize) -> Self {
        Setting {
            backend: match one_process {
                true => Backend::Threads,
                false => Backend::Processes,
            },
            ranks,
            devices: 0,
            device: "cpu".into(),
        }
    }
}

/// What calls up to a size are to go by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    /// Where that was measured.
    pub setting: Setting,
    /// Whether calls copy out.
    pub delivery: Delivery,
    /// The most bytes of one rank's rows, or `None` for any number.
    pub up_to: Option<usize>,
    /// How rows travel.
    pub way: Way,
    /// The most blocks of a launch, or the threads of a rank on CPUs; `None` for the default.
    pub blocks: Option<usize>,
}

impl Entry {
    /// What no two entries of a table share, in the order of a table.
    fn key(&self) -> (&Setting, Delivery, bool, Option<usize>) {
        (
            &self.setting,
            self.delivery,
            self.up_to.is_none(),
            self.up_to,
        )
    }

    fn check(&self, line: usize) -> Result<(), TuningError> {
        let wrong = |what, expected: String, got: &dyn fmt::Display| TuningError::Line {
            line,
            what,
            expected,
            got: got.to_string(),
        };
        let Setting {
            backend,
            ranks,
            devices,
            device,
        } = &self.setting;
        if *ranks < 2 {
            return Err(wrong("ranks", "2 or more".into(), ranks));
        }
        let possible = match backend.on_gpus() {
            true => 1..=*ranks,
            false => 0..=0,
        };
        if !possible.contains(devices) {
            let expected = format!("{} to {}", possible.start(), possible.end());
            return Err(wrong("devices", expected, devices));
        }
        let plain = device.split_whitespace().collect::<Vec<_>>().join(" ");
        if device.is_empty() || *device != plain {
            let expected = "a name in one line, without spaces to spare".into();
            return Err(wrong("device", expected, device));
        }
        if !backend.ways().any(|way| way == self.way) {
            let ways: Vec<String> = backend.ways().map(|way| way.to_string()).collect();
            return Err(wrong("way", ways.join(", "), &self.way));
        }
        if let Some(blocks) = self.blocks.filter(|n| !(1..=MOST_BLOCKS).contains(n)) {
            return Err(wrong(
                "blocks",
                format!("1 to {MOST_BLOCKS}, or auto"),
                &blocks,
            ));
        }
        Ok(())
    }
}

/// A table of measured ways.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    /// In the order of their keys, which differ.
    entries: Vec<Entry>,
}

impl Tuning {
    /// A table of these entries, in any order.
    ///
    /// # Errors
    /// [`TuningError::Line`] for an entry that could not be in a file, counted from 1.
    pub fn new(entries: impl IntoIterator<Item = Entry>) -> Result<Self, TuningError> {
        Self::of_lines((1..).zip(entries).collect())
    }

    /// Reads a table from a file.
    ///
    /// # Errors
    /// [`TuningError::File`] where it cannot be read, is no regular file or larger than 256 KiB, and
    /// for the first line that is wrong.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, TuningError> {
        let path = path.as_ref();
        let file = |reason: String| TuningError::File {
            path: path.display().to_string(),
            reason,
        };
        // Before opening, which would wait for a writer of a pipe.
        let found = std::fs::metadata(path).map_err(|error| file(error.to_string()))?;
        if !found.is_file() {
            return Err(file("not a regular file".into()));
        }
        if found.len() > MOST_BYTES {
            let reason = format!(
                "{} bytes, where a table has at most {MOST_BYTES}",
                found.len()
            );
            return Err(file(reason));
        }
        let text = std::fs::read_to_string(path).map_err(|error| file(error.to_string()))?;
        text.parse().map_err(|error| match error {
            TuningError::Line { .. } => file(error.to_string()),
            error => error,
        })
    }

    /// The entries, those of one setting and mode together, from the smallest size up.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The entry for calls with slices of `bytes` bytes: what each rank gathers from one.
    #[must_use]
    pub fn entry(&self, setting: &Setting, delivery: Delivery, bytes: usize) -> Option<&Entry> {
        self.entries_for(setting, delivery)
            .find(|entry| entry.up_to.is_none_or(|most| bytes <= most))
    }

    /// The entries for calls of one kind, from the smallest size up.
    pub(crate) fn entries_for(
        &self,
        setting: &Setting,
        delivery: Delivery,
    ) -> impl Iterator<Item = &Entry> {
        let entries = self.entries.iter();
        entries.filter(move |entry| entry.setting == *setting && entry.delivery == delivery)
    }

    /// What ranks compare: equal for equal tables.
    pub(crate) fn digest(&self) -> String {
        // 64-bit FNV-1a over the text.
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        let hash = self.to_string().bytes().fold(0xcbf2_9ce4_8422_2325, step);
        format!("a table of {} entries ({hash:016x})", self.entries.len())
    }

    fn of_lines(mut lines: Vec<(usize, Entry)>) -> Result<Self, TuningError> {
        for (line, entry) in &lines {
            entry.check(*line)?;
        }
        lines.sort_by(|(_, one), (_, other)| one.key().cmp(&other.key()));
        let twice = lines
            .windows(2)
            .find(|pair| pair[0].1.key() == pair[1].1.key());
        if let Some(pair) = twice {
            return Err(TuningError::Line {
                line: pair[1].0,
                what: "size",
                expected: format!("another than that of line {}", pair[0].0),
                got: text::up_to(&pair[1].1),
            });
        }
        Ok(Tuning {
            entries: lines.into_iter().map(|(_, entry)| entry).collect(),
        })
    }
}

/// Why there is no table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TuningError {
    /// A file that cannot be read, or that is no table.
    #[error("tuning table {path}: {reason}")]
    File {
        /// The file.
        path: String,
        /// Why.
        reason: String,
    },
    /// A line, or an entry, that a table cannot have.
    #[error("line {line}: {what}: expected {expected}, got {got}")]
    Line {
        /// The line of the text, or the entry, from 1.
        line: usize,
        /// The column.
        what: &'static str,
        /// What it must be.
        expected: String,
        /// What it is.
        got: String,
    },
}
