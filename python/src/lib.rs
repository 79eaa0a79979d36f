//! The native module of the Python package `direct_dcp`.
//!
//! It is private to the package: it takes addresses and streams as integers, and the package's
//! Python files take those from objects that they hold for the time of the call.
//!
//! | file | holds |
//! |---|---|
//! | `group` | the ranks |
//! | `gather` | gathers in workspaces of ours |
//! | `guest` | gathers in memory that an engine owns |
//! | `memory` | addresses become memory here, and nowhere else |
//! | `signals` | Ctrl-C while a call waits |
//! | `stream` | the caller's streams |
//! | `errors` | errors become exceptions |

mod errors;
mod gather;
mod group;
mod guest;
mod memory;
mod signals;
mod stream;

use std::ffi::OsString;
use std::process::Command;

use pyo3::prelude::*;

/// Runs the program `direct-dcp`: `args` begins with its name, `again` is the command that starts
/// it once more. Returns the exit status.
#[pyfunction]
fn run(py: Python<'_>, args: Vec<OsString>, again: Vec<OsString>) -> u8 {
    let again = move || {
        let mut words = again.iter();
        let mut command = Command::new(words.next().cloned().unwrap_or_default());
        command.args(words);
        command
    };
    py.detach(|| direct_dcp_cli::run(args, again))
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<group::Group>()?;
    module.add_class::<gather::Gather>()?;
    module.add_class::<gather::Lent>()?;
    module.add_class::<guest::Kernel>()?;
    module.add_class::<guest::Lane>()?;
    module.add_function(wrap_pyfunction!(gather::memory_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(run, module)?)
}
