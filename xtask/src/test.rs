//! `cargo xtask test`: every check that needs nothing but stable Rust and Python.

use crate::run::{Run, cargo, run, run_tests};
use crate::{Outcome, lint, ptx, python, root};

/// Does all steps, and stops at the first that fails.
pub(crate) fn test() -> Outcome {
    let mut steps = Run::default();
    let outcome = all(&mut steps);
    steps.summary(&outcome);
    outcome
}

const PYTHON: &str = "the Python package";

/// Does the one step of it that is Python's.
pub(crate) fn only_python() -> Outcome {
    let mut steps = Run::default();
    let outcome = steps.step(PYTHON, python::test);
    steps.summary(&outcome);
    outcome
}

fn all(steps: &mut Run) -> Outcome {
    steps.step("format", |_| run(&mut cargo(["fmt", "--all", "--check"])))?;
    steps.step("lints of our own", |_| lint::lint(&root()))?;
    steps.step("PTX, as committed", |_| ptx::check_text())?;
    steps.step("clippy", |_| {
        let mut clippy = cargo(["clippy", "--workspace", "--all-targets", "--quiet"]);
        run(clippy.args(["--", "-D", "warnings"]))
    })?;
    steps.step("clippy, kernels without std", |_| {
        let mut clippy = cargo([
            "clippy",
            "--package",
            "direct-dcp-kernels",
            "--lib",
            "--quiet",
        ]);
        run(clippy.args(["--no-default-features", "--", "-D", "warnings"]))
    })?;
    // Without a choice of targets cargo also builds the examples, which a test runs.
    steps.step(
        "tests of units, crates, examples and documentation",
        |tally| run_tests(&mut cargo(["test", "--workspace", "--no-fail-fast"]), tally),
    )?;
    steps.step(PYTHON, python::test)?;
    steps.step("documentation", |_| {
        let mut doc = cargo(["doc", "--workspace", "--no-deps", "--quiet"]);
        run(doc.env("RUSTDOCFLAGS", "-D warnings"))
    })
}
