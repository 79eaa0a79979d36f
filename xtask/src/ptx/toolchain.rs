//! Compilers that can write PTX.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A compiler with the sources of its `core` library, which the target is not shipped with.
#[derive(Debug)]
pub(crate) struct Toolchain {
    kind: Kind,
    /// What the compiler says of itself.
    pub(crate) version: Version,
}

#[derive(Debug)]
enum Kind {
    /// rustup's nightly, with the component `rust-src`.
    Nightly,
    /// Debian's packages `rustc-web` and `rust-web-src`, which live beside rustup.
    Debian,
}

/// Debian's compiler: not the one that rustup puts first.
const DEBIAN: &str = "/usr/bin/rustc";

impl Toolchain {
    /// The first that is there.
    ///
    /// # Errors
    /// How to install one.
    pub(crate) fn find() -> Result<Self, String> {
        let nightly = ["rustup", "run", "nightly", "rustc"];
        let found = Self::with(Kind::Nightly, &nightly, "nightly");
        found
            .or_else(|| Self::with(Kind::Debian, &[DEBIAN], ""))
            .ok_or_else(|| {
                "no compiler for nvptx64 found. Either `rustup toolchain install nightly \
                 --component rust-src`, or on Debian `apt-get install rustc-web rust-web-src`"
                    .to_owned()
            })
    }

    fn with(kind: Kind, rustc: &[&str], release: &str) -> Option<Self> {
        let ask = |argument: &[&str]| {
            let output = Command::new(rustc[0])
                .args(&rustc[1..])
                .args(argument)
                .env_remove("LD_LIBRARY_PATH")
                .output()
                .ok()?;
            let text = String::from_utf8(output.stdout).ok()?;
            output.status.success().then(|| text.trim().to_owned())
        };
        let sysroot = PathBuf::from(ask(&["--print", "sysroot"])?);
        let version = Version::parse(&ask(&["-vV"])?)?;
        let usable = has_sources(&sysroot) && version.release.contains(release);
        usable.then_some(Toolchain { kind, version })
    }

    /// Cargo with this compiler, and without what the environment would change.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = match self.kind {
            Kind::Nightly => {
                let mut command = Command::new("rustup");
                command.args(["run", "nightly", "cargo"]);
                command
            }
            Kind::Debian => {
                let mut command = crate::run::cargo([]);
                // It is a stable release, so its unstable features must be asked for.
                command.env("RUSTC", DEBIAN).env("RUSTC_BOOTSTRAP", "1");
                command
            }
        };
        command.current_dir(crate::root());
        for variable in [
            "LD_LIBRARY_PATH",
            "RUSTFLAGS",
            "CARGO_ENCODED_RUSTFLAGS",
            "RUSTC_WRAPPER",
            "RUSTC_WORKSPACE_WRAPPER",
        ] {
            command.env_remove(variable);
        }
        command
    }
}

fn has_sources(sysroot: &Path) -> bool {
    let library = sysroot.join("lib/rustlib/src/rust/library");
    library.join("core/Cargo.toml").exists()
}

/// What decides the emitted text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Version {
    release: String,
    commit: String,
    llvm: String,
}

impl Version {
    /// From the output of `rustc -vV`.
    fn parse(verbose: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = verbose.lines().find_map(|line| line.strip_prefix(name))?;
            Some(line.trim().to_owned())
        };
        Some(Version {
            release: field("release:")?,
            commit: field("commit-hash:")?.chars().take(9).collect(),
            llvm: field("LLVM version:")?,
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Version {
            release,
            commit,
            llvm,
        } = self;
        write!(f, "rustc {release} ({commit}), LLVM {llvm}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_rustc_says() {
        let verbose = "rustc 1.96.0 (ac68faa20 2026-05-25) (built from a source tarball)\n\
                       binary: rustc\ncommit-hash: ac68faa20c58cbccd01ee7208bf3b6e93a7d7f96\n\
                       host: x86_64-unknown-linux-gnu\nrelease: 1.96.0\nLLVM version: 22.1.8\n";
        let version = Version::parse(verbose).unwrap();
        assert_eq!(version.to_string(), "rustc 1.96.0 (ac68faa20), LLVM 22.1.8");
        assert_eq!(Version::parse("rustc 1.96.0"), None);
    }
}
