//! The project's own commands: `cargo xtask test`, and parts of it: `lint`, `python`, `ptx`.

mod lint;
mod ptx;
mod python;
mod run;
mod tally;
mod test;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Checks and builds what cargo alone does not.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Runs every check that needs nothing but stable Rust and Python: format, lints, tests, docs,
    /// examples, the Python package.
    Test,
    /// Runs the project's own checks of its sources.
    Lint,
    /// Builds the Python package and tests it, as `test` does among others.
    Python,
    /// Compiles the kernels to PTX and writes the committed files.
    Ptx {
        /// Writes nothing: builds again, compares, applies the rules and assembles.
        #[arg(long)]
        check: bool,
    },
}

/// What a task ends with: nothing, or a sentence for the person who started it.
type Outcome = Result<(), String>;

fn main() -> ExitCode {
    let outcome = match Arguments::parse().task {
        Task::Test => test::test(),
        Task::Lint => lint::lint(&root()),
        Task::Python => test::only_python(),
        Task::Ptx { check: true } => ptx::check(),
        Task::Ptx { check: false } => ptx::write(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("error: {message}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace's folder.
fn root() -> PathBuf {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}
