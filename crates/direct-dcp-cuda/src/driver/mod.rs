//! The opened driver: found at run time, shared by everything else.

mod table;

use std::env;
use std::error::Error as _;
use std::ffi::OsString;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{CudaError, Result};
use table::Table;

/// Names the file to open instead of the system's driver. Tests set it to a fake driver.
pub const LIBRARY_VARIABLE: &str = "DIRECT_DCP_LIBCUDA";

/// Where the driver is looked for when [`LIBRARY_VARIABLE`] is not set, in this order.
const LIBRARY_NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The NVIDIA driver, opened and initialised.
///
/// The library is opened at run time, so a program that links this crate starts on a machine with
/// no NVIDIA driver and gets [`CudaError::LibraryMissing`] from [`Driver::load`]. It stays open
/// until the process ends: drivers do not survive being unloaded.
#[derive(Debug)]
pub struct Driver {
    table: Table,
    library: String,
    version: u32,
    refused: Mutex<Refused>,
}

/// Failures of calls that give something back. `Drop` cannot return them.
#[derive(Debug, Default)]
struct Refused {
    count: u64,
    first: Option<CudaError>,
}

/// Functions that come and go together, by the feature that needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SymbolGroup {
    /// Devices, contexts, streams, events, memory, modules: nothing works without.
    Core,
    /// Loading a kernel before its first launch, and checking its parameters (CUDA 12.4). Without
    /// it, the first launch loads it, and they go unchecked.
    Functions,
    /// How many blocks are resident at once.
    Occupancy,
    /// Capturing and replaying graphs.
    Graphs,
    /// Writing and waiting for a word in stream order.
    StreamMemoryOps,
    /// Virtual memory: memory that can be shared between processes.
    Vmm,
    /// Multicast objects (CUDA 12.1).
    Multicast,
}

impl SymbolGroup {
    /// Every group, in the order of a report.
    pub const ALL: [Self; 7] = [
        Self::Core,
        Self::Functions,
        Self::Occupancy,
        Self::Graphs,
        Self::StreamMemoryOps,
        Self::Vmm,
        Self::Multicast,
    ];
}

/// One line of [`Driver::symbols`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SymbolReport {
    /// The group.
    pub group: SymbolGroup,
    /// Functions of the group that the driver lacks; empty when the group is complete.
    pub missing: Vec<&'static str>,
}

impl SymbolReport {
    /// Whether every function of the group is there.
    pub fn is_available(&self) -> bool {
        self.missing.is_empty()
    }
}

/// Drivers opened by [`Driver::load`], by the setting they were opened under.
static OPENED: Mutex<Vec<(Option<OsString>, Arc<Driver>)>> = Mutex::new(Vec::new());

impl Driver {
    /// Opens and initialises the driver, once for the process.
    ///
    /// Success is remembered for each value of [`LIBRARY_VARIABLE`]; failure is not, so a later
    /// call tries again.
    ///
    /// # Errors
    /// [`CudaError::LibraryMissing`] where there is no driver, [`CudaError::SymbolMissing`] where
    /// the file is not one, and [`CudaError::Driver`] where it does not initialise (a driver but no
    /// device: `CUDA_ERROR_NO_DEVICE`).
    pub fn load() -> Result<Arc<Self>> {
        let setting = env::var_os(LIBRARY_VARIABLE).filter(|value| !value.is_empty());
        let mut opened = lock(&OPENED);
        if let Some((_, driver)) = opened.iter().find(|(key, _)| *key == setting) {
            return Ok(Arc::clone(driver));
        }
        let driver = match &setting {
            Some(path) => Self::open(Path::new(path))?,
            None => Self::open_first(&LIBRARY_NAMES.map(Path::new))?,
        };
        opened.push((setting, Arc::clone(&driver)));
        Ok(driver)
    }

    /// Opens and initialises the driver in this file, every time it is called.
    ///
    /// # Errors
    /// As [`Driver::load`].
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        Self::open_first(&[path])
    }

    fn open_first(paths: &[&Path]) -> Result<Arc<Self>> {
        let mut tried: Vec<(String, String)> = Vec::new();
        for path in paths {
            match open_library(path) {
                Ok(library) => return Self::initialise(library, path.display().to_string()),
                Err(error) => {
                    let name = path.display().to_string();
                    tried.push((name.clone(), why_not_opened(&name, &error)));
                }
            }
        }
        // Mostly it is the same with all names, and said once.
        tried.dedup_by(|(later, why), (names, before)| {
            let same = why == before;
            if same {
                names.push_str(&format!(", {later}"));
            }
            same
        });
        let tried: Vec<String> = tried
            .iter()
            .map(|(names, why)| format!("{names}: {why}"))
            .collect();
        Err(CudaError::LibraryMissing {
            tried: tried.join("; "),
        })
    }

    fn initialise(library: libloading::Library, name: String) -> Result<Arc<Self>> {
        let table = Table::load(&library, name.clone());
        core::mem::forget(library); // never unloaded: the table points into it
        let version = initialise(&table)?;
        Ok(Arc::new(Self {
            table,
            library: name,
            version,
            refused: Mutex::default(),
        }))
    }

    /// The CUDA version that the driver supports: 13010 is 13.1.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The file that was opened.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Which features the driver has functions for, group by group.
    ///
    /// That a function is there does not say that a device supports it: ask
    /// [`Device`](crate::Device) as well.
    pub fn symbols(&self) -> Vec<SymbolReport> {
        let inventory = self.table.inventory();
        let missing = |group| {
            let of_group = inventory
                .iter()
                .filter(move |(g, _, found)| *g == group && !found);
            of_group.map(|(_, name, _)| *name).collect()
        };
        SymbolGroup::ALL
            .map(|group| SymbolReport {
                group,
                missing: missing(group),
            })
            .into()
    }

    /// Whether every function of the group is there.
    pub fn has(&self, group: SymbolGroup) -> bool {
        self.table
            .inventory()
            .iter()
            .all(|(g, _, found)| *g != group || *found)
    }

    /// How many calls that give something back (destroy, free, unmap, release) have failed.
    ///
    /// They are made by `Drop`, which returns nothing. What such a call was to give back may be
    /// lost until the process ends. They are not retried: a driver that reports an earlier
    /// launch's failure from a destroy call may have destroyed the object all the same.
    pub fn refused_releases(&self) -> u64 {
        lock(&self.refused).count
    }

    /// Takes the first such failure since the last call of this function.
    pub fn take_release_error(&self) -> Option<CudaError> {
        lock(&self.refused).first.take()
    }

    /// The functions.
    pub(crate) fn api(&self) -> &Table {
        &self.table
    }

    /// Remembers the outcome of a call that gives something back.
    pub(crate) fn released(&self, outcome: Result<()>) {
        if let Err(error) = outcome {
            let mut refused = lock(&self.refused);
            refused.count += 1;
            refused.first.get_or_insert(error);
        }
    }
}

/// Locks, also after a thread panicked while it held the lock: the data here is always consistent.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The loader's own words, without the name of the file, with which they begin as a rule.
fn why_not_opened(name: &str, error: &libloading::Error) -> String {
    let words = match error.source() {
        Some(loader) => loader.to_string(),
        None => error.to_string(),
    };
    let own = words
        .strip_prefix(name)
        .and_then(|rest| rest.strip_prefix(':'));
    one_line(own.unwrap_or(&words))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[allow(unsafe_code)]
fn open_library(path: &Path) -> core::result::Result<libloading::Library, libloading::Error> {
    // SAFETY: loading runs the library's initialisers. It is the NVIDIA driver, or a file that the
    // user named to stand for it.
    unsafe { libloading::Library::new(path) }
}

/// Initialises the driver and asks for its version.
#[allow(unsafe_code)]
fn initialise(table: &Table) -> Result<u32> {
    // SAFETY: takes no pointer; may be called any number of times.
    unsafe { table.cuInit(0) }?;
    let mut version = 0;
    // SAFETY: writes one integer to a place that lives through the call.
    unsafe { table.cuDriverGetVersion(&mut version) }?;
    Ok(version.unsigned_abs())
}
