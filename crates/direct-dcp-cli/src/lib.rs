//! The program `direct-dcp`: gathers a tensor over ranks and checks every byte, times gathers beside
//! plain copies, and tells what the machine can do.
//!
//! | file | holds |
//! |---|---|
//! | `gather`, `bench`, `doctor` | the subcommands: their options, what a rank does, what is printed |
//! | `ranks` | running a task on ranks that are threads or processes |
//! | `tensor_file`, `output` | reading and writing safetensors files |
//! | `machine`, `gpu` | processors, memory and limits; devices |
//! | `report`, `error`, `interrupt`, `args` | printing, failing, being told to stop, and options |
//! | `tuning` | tables of measured ways |
//! | `again` | starting the program once more |
//!
//! It is a library so that other launchers, such as `python -m direct_dcp`, are the same program.
#![forbid(unsafe_code)]

mod again;
mod args;
mod bench;
mod doctor;
mod error;
mod gather;
mod gpu;
mod interrupt;
mod machine;
mod output;
mod ranks;
mod report;
mod tensor_file;
mod tuning;

use clap::{CommandFactory, Parser, Subcommand};
use error::{Error, one_line};
use std::ffi::OsString;
use std::io::Write;
use std::process::Command as Process;

/// Direct symmetric-memory KV gather for decode context parallelism.
#[derive(Debug, Parser)]
#[command(
    name = "direct-dcp",
    version,
    after_help = "\
Examples:
  direct-dcp gather examples/data/minilm_kv_small.safetensors --ranks 4
  direct-dcp gather examples/data/minilm_kv_small.safetensors --backend cuda
  direct-dcp bench --ranks 2
  direct-dcp doctor

Exit status: 0 if all went well, 1 if not, 2 if the command line is wrong."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Gather(gather::Args),
    Bench(bench::Args),
    Doctor(doctor::Args),
    /// Print a completion script for a shell.
    #[command(
        after_help = "Example:\n  direct-dcp completions bash > ~/.local/share/bash-completion/completions/direct-dcp"
    )]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Be one rank of a group, as another direct-dcp process asks.
    #[command(hide = true)]
    Rank,
}

/// Runs the program: `args` as the system passes them, its name first, and `again` what starts it
/// anew, to which arguments are added. Returns the exit status.
///
/// It belongs at the start of a process, once: it listens for signals from then on, and may replace
/// the process by one with another environment.
pub fn run(
    args: impl IntoIterator<Item = OsString>,
    again: impl Fn() -> Process + Send + Sync + 'static,
) -> u8 {
    let args: Vec<OsString> = args.into_iter().collect();
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    again::remember(again, args);
    interrupt::outlive_full_files();
    let done = match &cli.command {
        // Ranks leave it to their parent to tidy up.
        Command::Rank => ranks::serve(),
        command => start(command),
    };
    match done {
        // Nobody is left to be told.
        Ok(()) | Err(Error::OutputClosed) => 0,
        Err(Error::Usage(message)) => complain(&message, 2),
        Err(Error::Failed(message)) => complain(&message, 1),
        Err(Error::Interrupted(signal)) => {
            // Ends the program as the signal would have; if that fails, the status says it.
            let _ = signal_hook::low_level::emulate_default_handler(signal);
            1
        }
    }
}

fn start(command: &Command) -> Result<(), Error> {
    match command {
        Command::Gather(args) => gpu::want_queues(args.backend())?,
        Command::Bench(args) => gpu::want_queues(args.backend())?,
        _ => {}
    }
    interrupt::listen();
    perform(command)
}

fn perform(command: &Command) -> Result<(), Error> {
    match command {
        Command::Gather(args) => gather::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "direct-dcp", &mut script);
            report::raw(&script)
        }
        Command::Rank => Ok(()),
    }
}

/// Says what is wrong with the command line in one line, or prints the help that was asked for.
fn refuse(error: &clap::Error) -> u8 {
    use clap::error::ErrorKind;
    if !error.use_stderr() {
        return match report::raw(error.to_string().as_bytes()) {
            Err(Error::Failed(message)) => complain(&message, 1),
            _ => 0,
        };
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = std::io::stderr().write_all(error.to_string().as_bytes());
        return 2;
    }
    let text = error.to_string();
    // What follows is how to use it, which --help tells better.
    let message = text.split("\n\nUsage").next().unwrap_or_default();
    let message = message.split("\n\nFor more").next().unwrap_or_default();
    let mut line = String::new();
    for part in message
        .lines()
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        if !line.is_empty() {
            line.push_str(if line.ends_with(':') { " " } else { "; " });
        }
        line.push_str(part);
    }
    complain(line.strip_prefix("error: ").unwrap_or(&line), 2)
}

fn complain(message: &str, status: u8) -> u8 {
    // If standard error is gone, the exit status has to do.
    let _ = writeln!(std::io::stderr(), "error: {}", one_line(message));
    status
}

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
