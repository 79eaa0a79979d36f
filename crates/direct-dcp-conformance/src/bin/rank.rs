//! One rank of a case, as a process.

use std::process::ExitCode;

fn main() -> ExitCode {
    direct_dcp_conformance::backends::worker()
}
