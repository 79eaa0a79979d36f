//! Assembles a module for real GPUs, to see what becomes of its registers.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::root;

/// The assembler, from `PTXAS`, the path, or a place where it is usually installed.
///
/// # Errors
/// How to install it.
pub(crate) fn find() -> Result<PathBuf, String> {
    let works = |candidate: &PathBuf| {
        let output = Command::new(candidate).arg("--version").output();
        output.is_ok_and(|output| output.status.success())
    };
    let named = std::env::var_os("PTXAS").map(PathBuf::from);
    let usual = [
        PathBuf::from("ptxas"),
        root().join("target/ptxas/nvidia/cu13/bin/ptxas"),
        PathBuf::from("/usr/local/cuda/bin/ptxas"),
    ];
    named.into_iter().chain(usual).find(works).ok_or_else(|| {
        "no ptxas found. Set PTXAS, or `pip install --no-deps --target target/ptxas \
         nvidia-cuda-nvcc==13.0.88`"
            .to_owned()
    })
}

/// Assembles `file` for `gpu`. Returns the most registers that an entry point needs.
///
/// # Errors
/// What the assembler says, or that it spills.
pub(crate) fn assemble(ptxas: &Path, file: &Path, gpu: &str) -> Result<u32, String> {
    let output = Command::new(ptxas)
        .args(["-v", "--output-file", "/dev/null", "--gpu-name", gpu])
        .arg(file)
        .output()
        .map_err(|error| format!("cannot start {}: {error}", ptxas.display()))?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    if !output.status.success() {
        return Err(format!("{gpu}: {said}"));
    }
    needs(&said).map_err(|error| format!("{gpu}: {error}"))
}

/// The most registers by what `ptxas -v` says, once it has said that nothing else is used.
fn needs(said: &str) -> Result<u32, String> {
    let mut registers = Vec::new();
    let mut kept = 0;
    for line in said.lines() {
        let line = line.trim();
        if line.ends_with("bytes spill loads") {
            // Three counts: stack frame, spill stores, spill loads.
            let counts: Vec<&str> = line.split_whitespace().filter(is_number).collect();
            if counts != ["0", "0", "0"] {
                return Err(format!("spills or uses local memory: {line}"));
            }
            kept += 1;
        }
        if let Some((_, used)) = line.split_once(": Used ") {
            if used.contains("lmem") {
                return Err(format!("uses local memory: {used}"));
            }
            let count = used.split(' ').next().unwrap_or_default();
            registers.extend(count.parse::<u32>());
        }
    }
    // Every entry point has a line of each kind.
    match registers.iter().max() {
        Some(&most) if registers.len() == kept => Ok(most),
        _ => Err(format!("ptxas did not say what it uses: {said}")),
    }
}

fn is_number(word: &&str) -> bool {
    word.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'direct_dcp_gather' for 'sm_80'
ptxas info    : Function properties for direct_dcp_gather
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 58 registers, used 1 barriers, 360 bytes cmem[0]
";

    #[test]
    fn registers_are_all_that_may_be_used() {
        assert_eq!(needs(GOOD), Ok(58));
        for (from, to) in [
            ("0 bytes stack frame", "16 bytes stack frame"),
            ("0 bytes spill stores", "8 bytes spill stores"),
            ("0 bytes spill loads", "4 bytes spill loads"),
            ("360 bytes cmem[0]", "24 bytes lmem"),
            (
                "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
                "",
            ),
        ] {
            let bad = GOOD.replace(from, to);
            assert_ne!(bad, GOOD);
            assert!(needs(&bad).is_err(), "{to}");
        }
        assert!(needs("").is_err());
    }
}
