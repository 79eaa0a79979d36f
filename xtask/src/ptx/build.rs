//! Compiles the kernels' crate to PTX, and trims what the compiler writes.

use std::fs;
use std::path::PathBuf;

use super::text;
use super::toolchain::Toolchain;
use super::{KERNELS, Unit};
use crate::root;

/// The first line of a written file; the second names the toolchain.
const HEADER: &str = "// Written by `cargo xtask ptx`; do not edit.";
const BUILT_BY: &str = "// Built by ";

/// Compiles one module. Returns the text of its file.
///
/// # Errors
/// What the compiler says.
pub(super) fn build(toolchain: &Toolchain, unit: &Unit) -> Result<String, String> {
    let target = target_folder();
    fs::create_dir_all(&target).map_err(|error| format!("{}: {error}", target.display()))?;
    let written = target.join(format!("{}.s", unit.name));

    // Cargo knows nothing of the file, so it must not find the crate fresh; and the compiler adds
    // to a file that is there.
    let clean = toolchain
        .cargo()
        .args(["clean", "--quiet", "--release", "--package", KERNELS])
        .args(["--target", "nvptx64-nvidia-cuda", "--target-dir"])
        .arg(&target)
        .output();
    drop(clean);
    if written.exists() {
        fs::remove_file(&written).map_err(|error| format!("{}: {error}", written.display()))?;
    }

    let mut cargo = toolchain.cargo();
    cargo
        .args(["rustc", "--package", KERNELS, "--lib", "--release"])
        .args(["-Zbuild-std=core", "--target", "nvptx64-nvidia-cuda"])
        .args(["--no-default-features", "--features", unit.features])
        .args(["--config", "profile.release.panic='abort'"])
        .args(["--config", "profile.release.codegen-units=1"])
        .args(["--config", "profile.release.debug=false"])
        .arg("--target-dir")
        .arg(&target)
        .arg("--")
        .arg(format!("--emit=asm={}", written.display()))
        .arg(format!("-Ctarget-cpu={}", unit.expected.target))
        .arg(format!("-Ctarget-feature=+{}", unit.feature()));
    let output = cargo
        .output()
        .map_err(|error| format!("cannot start {cargo:?}: {error}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("compiling `{}` failed:\n{said}", unit.name));
    }
    let raw = fs::read_to_string(&written)
        .map_err(|error| format!("the compiler left no {}: {error}", written.display()))?;
    Ok(format!(
        "{HEADER}\n{BUILT_BY}{}\n{}",
        toolchain.version,
        trim(&raw)
    ))
}

/// Where everything that is built here goes, apart from what the host builds.
fn target_folder() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    // Relative to where cargo was started, as cargo takes it.
    let target = target.map(|target| std::path::absolute(&target).unwrap_or(target));
    target.unwrap_or_else(|| root().join("target")).join("ptx")
}

/// The text without comments and empty lines, and without the functions of the crate that are
/// not entry points: nothing calls them (the rules see to that), and their names differ from
/// folder to folder.
fn trim(raw: &str) -> String {
    let mut trimmed = String::new();
    let mut skipping = false;
    for line in text::without_comments(raw).lines() {
        skipping |= line.starts_with(".visible .func") || line.starts_with(".func");
        if !skipping && !line.trim().is_empty() {
            trimmed.extend([line, "\n"]);
        }
        skipping &= line != "}";
    }
    trimmed
}

/// The toolchain that a written file names.
pub(super) fn built_by(file: &str) -> Option<&str> {
    file.lines().find_map(|line| line.strip_prefix(BUILT_BY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_empty_lines_go() {
        let raw = "//\n// LLVM\n//\n\n.version 7.0\n\tbar.sync 0; // all\n\n}\n";
        assert_eq!(trim(raw), ".version 7.0\n\tbar.sync 0;\n}\n");
    }

    #[test]
    fn functions_that_nothing_calls_go() {
        let raw =
            ".visible .func _R1f(\n\t.param .b64 p\n)\n{\n\tret;\n}\n.visible .entry g(\n)\n{\n}\n";
        assert_eq!(trim(raw), ".visible .entry g(\n)\n{\n}\n");
    }

    #[test]
    fn a_file_names_its_toolchain() {
        let file = format!("{HEADER}\n{BUILT_BY}rustc 1\n.version 7.0\n");
        assert_eq!(built_by(&file), Some("rustc 1"));
        assert_eq!(built_by(".version 7.0\n"), None);
    }
}
