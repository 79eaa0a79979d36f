//! The Python package: built as a wheel, installed where nothing else is, tested with pytest.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::{cargo, run, run_tests};
use crate::tally::Tally;
use crate::{Outcome, root};

/// Builds, installs and tests it.
///
/// Needs Python with `venv`, and pip to get what `python/requirements-test.txt` names.
pub(crate) fn test(tally: &mut Tally) -> Outcome {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(root().join("target"), PathBuf::from);
    let folder = target.join("python");
    let program = |name: &str| folder.join("venv").join("bin").join(name);
    if !program("pytest").exists() {
        prepare(&folder)?;
    }
    // The driver and the kernels that tests run instead of a GPU's.
    run(&mut cargo([
        "build",
        "--quiet",
        "--package",
        "direct-dcp-fake-cuda",
        "--package",
        "direct-dcp-fake-gpu",
    ]))?;
    let wheels = folder.join("wheels");
    let mut build = Command::new(program("maturin"));
    build
        .args([
            "build",
            "--quiet",
            "--locked",
            "--compatibility",
            "linux",
            "--out",
        ])
        .arg(&wheels)
        .current_dir(root().join("python"));
    run(&mut build)?;
    let mut install = pip(&folder);
    install
        .args([
            "--force-reinstall",
            "--no-deps",
            "--no-index",
            "--find-links",
        ])
        .arg(&wheels)
        .arg("direct-dcp");
    run(&mut install)?;
    let mut pytest = Command::new(program("pytest"));
    pytest
        .args(["-q", "-p", "no:cacheprovider"])
        .env("DIRECT_DCP_FAKE_GPU", target.join("debug"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .current_dir(root().join("python"));
    run_tests(&mut pytest, tally)
}

/// Makes the virtual environment.
fn prepare(folder: &Path) -> Outcome {
    let mut venv = Command::new("python3");
    run(venv.args(["-m", "venv"]).arg(folder.join("venv")))?;
    let requirements = root().join("python").join("requirements-test.txt");
    run(pip(folder).arg("--requirement").arg(requirements))
}

fn pip(folder: &Path) -> Command {
    let mut pip = Command::new(folder.join("venv").join("bin").join("python"));
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]);
    pip
}
