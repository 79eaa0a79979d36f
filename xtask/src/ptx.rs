//! `cargo xtask ptx`: the kernels as PTX, built, checked and assembled.
//!
//! The crate `direct-dcp-kernels` is compiled twice for `nvptx64-nvidia-cuda`, without its default
//! features, into the two files that are committed below `ptx/` in its folder:
//!
//! | file | features | for |
//! | --- | --- | --- |
//! | `unicast.ptx` | none | sm_80 and up, PTX 7.0 (the oldest that has sm_80) |
//! | `multicast.ptx` | `multicast` | sm_90 and up, PTX 8.1 (the oldest that has `multimem`) |
//!
//! Entry points are `#[unsafe(no_mangle)] extern "ptx-kernel"` functions with names that begin with
//! `direct_dcp_`. The crate's own `cfg(target_arch = "nvptx64")` tells the device apart.
//!
//! - `cargo xtask ptx` writes the files. Needs a compiler for the target: see [`toolchain`].
//! - `cargo xtask ptx --check` builds them again and compares: byte by byte if the same compiler
//!   built what is committed, by structure otherwise; applies the [`rules`]; and assembles the
//!   committed files with `ptxas` for each GPU of [`UNITS`].
//! - `cargo xtask test` applies the rules to the committed files, which needs neither.

mod assemble;
mod build;
mod flow;
mod rules;
mod text;
mod toolchain;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use crate::{Outcome, root};
use rules::Expected;
use text::Module;
use toolchain::Toolchain;

/// The crate that is compiled.
const KERNELS: &str = "direct-dcp-kernels";

/// A module: how it is compiled, and what it is assembled for.
struct Unit {
    name: &'static str,
    features: &'static str,
    expected: Expected,
    gpus: &'static [&'static str],
}

const UNITS: [Unit; 2] = [
    Unit {
        name: "unicast",
        features: "",
        expected: Expected {
            version: "7.0",
            target: "sm_80",
            multicast: false,
        },
        gpus: &["sm_80", "sm_90", "sm_100", "sm_120"],
    },
    Unit {
        name: "multicast",
        features: "multicast",
        expected: Expected {
            version: "8.1",
            target: "sm_90",
            multicast: true,
        },
        gpus: &["sm_90", "sm_100", "sm_120"],
    },
];

impl Unit {
    /// The committed file.
    fn path(&self) -> PathBuf {
        let folder = root().join("crates").join(KERNELS).join("ptx");
        folder.join(format!("{}.ptx", self.name))
    }

    fn committed(&self) -> Result<String, String> {
        let path = self.path();
        fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// The compiler's name of the PTX version.
    fn feature(&self) -> String {
        format!("ptx{}", self.expected.version.replace('.', ""))
    }

    /// Applies the rules to `text`.
    fn obey(&self, text: &str) -> Result<Module, String> {
        let module = Module::parse(text).map_err(|error| format!("{}: {error}", self.name))?;
        let wrong = rules::check(&module, self.expected);
        if wrong.is_empty() {
            Ok(module)
        } else {
            let wrong = wrong.join("\n  ");
            Err(format!("{}.ptx breaks the rules:\n  {wrong}", self.name))
        }
    }
}

/// Builds the modules and writes them.
pub(crate) fn write() -> Outcome {
    let toolchain = Toolchain::find()?;
    println!("{}", toolchain.version);
    for unit in &UNITS {
        let text = build::build(&toolchain, unit)?;
        unit.obey(&text)?;
        let path = unit.path();
        fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        println!("{}: written", unit.name);
    }
    Ok(())
}

/// Applies the rules to the committed files.
pub(crate) fn check_text() -> Outcome {
    for unit in &UNITS {
        unit.obey(&unit.committed()?)?;
        println!("{}: obeys the rules", unit.name);
    }
    Ok(())
}

/// Builds the modules again, compares them with the committed files, and assembles those.
pub(crate) fn check() -> Outcome {
    check_text()?;
    let toolchain = Toolchain::find()?;
    let ptxas = assemble::find()?;
    for unit in &UNITS {
        let committed = unit.committed()?;
        let built = build::build(&toolchain, unit)?;
        println!("{}: {}", unit.name, compare(unit, &committed, &built)?);
        for gpu in unit.gpus {
            let needs = assemble::assemble(&ptxas, &unit.path(), gpu)
                .map_err(|error| format!("{} on {error}", unit.name))?;
            println!(
                "{}: {gpu} needs {needs} registers at most, spills nothing",
                unit.name
            );
        }
    }
    Ok(())
}

/// Compares a module as built now with the committed one. Returns how.
fn compare(unit: &Unit, committed: &str, built: &str) -> Result<&'static str, String> {
    let stale = |what: &str| {
        let name = unit.name;
        Err(format!(
            "{name}.ptx is stale: {what}. Run `cargo xtask ptx` and commit"
        ))
    };
    let Some(compiler) = build::built_by(committed) else {
        return stale("it names no compiler");
    };
    if Some(compiler) == build::built_by(built) {
        let first = committed.lines().zip(built.lines()).zip(1..);
        let differs = first.into_iter().find(|((old, new), _)| old != new);
        return match differs {
            Some(((old, new), line)) => {
                stale(&format!("line {line} is `{old}`, now built as `{new}`"))
            }
            None if committed.len() != built.len() => stale("its length differs"),
            None => Ok("built again, the same bytes"),
        };
    }
    let old = structure(&unit.obey(committed)?);
    let new = structure(&unit.obey(built)?);
    let differing: Vec<_> = old.symmetric_difference(&new).cloned().collect();
    if differing.is_empty() {
        Ok("built again by another compiler, the same structure")
    } else {
        stale(&format!(
            "its structure differs in {}",
            differing.join(", ")
        ))
    }
}

/// What any compiler must make alike: entry points, their arguments' order aside, and which
/// instructions touch memory or order it. Not how often: compilers unroll loops and copy blocks.
fn structure(module: &Module) -> BTreeSet<String> {
    let mut structure = BTreeSet::from([
        format!(".version {}", module.version),
        format!(".target {}", module.target),
    ]);
    for entry in module.entries() {
        structure.insert(entry.name.clone());
        for statement in &entry.body {
            let name = statement.parts().next().unwrap_or_default();
            let memory = [
                "atom",
                "red",
                "fence",
                "bar",
                "barrier",
                "multimem",
                "ld",
                "st",
                "nanosleep",
            ];
            if memory.contains(&name) && !statement.is("ld", &["param"]) {
                structure.insert(format!("{} {}", entry.name, statement.opcode));
            }
        }
    }
    structure
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "// Built by rustc 1\n.version 7.0\n";

    #[test]
    fn the_same_compiler_must_write_the_same_bytes() {
        let unit = &UNITS[0];
        assert!(compare(unit, FILE, FILE).is_ok());
        assert!(compare(unit, ".version 7.0\n", FILE).is_err());
        for built in [
            "// Built by rustc 1\n.version 7.1\n",
            "// Built by rustc 1\n.version 7.0\n.target sm_80\n",
        ] {
            let error = compare(unit, FILE, built).unwrap_err();
            assert!(error.contains("stale"), "{error}");
        }
    }

    #[test]
    fn another_compiler_must_use_the_same_instructions() {
        let unit = &UNITS[0];
        let by = |compiler: &str| format!("// Built by {compiler}\n{}", rules::tests::GOOD);
        let (committed, built) = (by("rustc 1"), by("rustc 2").replace("%r1", "%r11"));
        assert!(compare(unit, &committed, &built).is_ok());
        let built = built.replace("ld.global.u64", "ld.volatile.global.u64");
        let error = compare(unit, &committed, &built).unwrap_err();
        assert!(error.contains("ld.volatile.global.u64"), "{error}");
    }
}
