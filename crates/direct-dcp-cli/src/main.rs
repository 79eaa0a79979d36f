//! The program `direct-dcp`; the library beside this file is what it does.
#![forbid(unsafe_code)]

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    // This very program, even if its file was replaced or removed since it was started.
    let again = || {
        let mut command = Command::new("/proc/self/exe");
        command.arg0("direct-dcp");
        command
    };
    ExitCode::from(direct_dcp_cli::run(std::env::args_os(), again))
}
