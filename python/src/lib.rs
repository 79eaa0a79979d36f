//! The native module of the Python package `direct_dcp`.
//!
//! It is private to the package: it takes addresses and streams as integers, and the package's
//! Python files take those from objects that they hold for the time of the call.
//!
//! | file | holds |
//! |---|---|
//! | `group` | the ranks |
//! | `options` | what workspaces are asked to be |
//! | `gather` | gathers in workspaces of ours |
//! | `layout` | final layouts, and the rows that are stored by them |
//! | `pipeline` | windows in flight |
//! | `lent` | results in slots |
//! | `guest` | gathers in memory that an engine owns |
//! | `plan`, `row_map` | what to gather, and where it belongs |
//! | `tensor` | where tensors of torch lie |
//! | `memory` | addresses become memory here, and nowhere else |
//! | `signals` | Ctrl-C while a call waits |
//! | `stream` | the caller's streams |
//! | `errors` | errors become exceptions |

mod errors;
mod gather;
mod group;
mod guest;
mod layout;
mod lent;
mod memory;
mod options;
mod pipeline;
mod plan;
mod row_map;
mod signals;
mod stream;
mod tensor;

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

/// Drops what may have to wait for peers, which may be threads of this process: without the lock of
/// the interpreter.
fn drop_detached<T: Send>(value: T) {
    let _ = Python::try_attach(|py| py.detach(move || drop(value)));
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<group::Group>()?;
    module.add_class::<gather::Gather>()?;
    module.add_class::<lent::Lent>()?;
    module.add_class::<layout::Layout>()?;
    module.add_class::<pipeline::Pipeline>()?;
    module.add_class::<pipeline::Ticket>()?;
    module.add_class::<guest::Kernel>()?;
    module.add_class::<guest::Lane>()?;
    module.add_class::<plan::Sharding>()?;
    module.add_class::<plan::ChunkPlanner>()?;
    module.add_class::<plan::ChunkPlan>()?;
    module.add_class::<plan::Chunk>()?;
    module.add_class::<plan::Part>()?;
    module.add_class::<row_map::RowMap>()?;
    module.add_function(wrap_pyfunction!(row_map::slots, module)?)?;
    module.add_function(wrap_pyfunction!(options::memory_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(tensor::span, module)?)?;
    module.add_function(wrap_pyfunction!(run, module)?)
}
