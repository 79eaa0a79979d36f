//! Starting the program once more: to be a rank, or in another environment.

use std::ffi::OsString;
use std::process::Command;
use std::sync::OnceLock;

static START: OnceLock<Start> = OnceLock::new();

struct Start {
    again: Box<dyn Fn() -> Command + Send + Sync>,
    args: Vec<OsString>,
}

/// Keeps what starts the program, and the arguments that it was started with, its name first.
pub(crate) fn remember(again: impl Fn() -> Command + Send + Sync + 'static, args: Vec<OsString>) {
    START.get_or_init(|| Start {
        again: Box::new(again),
        args,
    });
}

/// The program, without arguments. None where it was not started as a program.
pub(crate) fn program() -> Option<Command> {
    START.get().map(|start| (start.again)())
}

/// The program with the arguments that it was started with.
pub(crate) fn same() -> Option<Command> {
    let start = START.get()?;
    let mut command = (start.again)();
    command.args(start.args.iter().skip(1));
    Some(command)
}
