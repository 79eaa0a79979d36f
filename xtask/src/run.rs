//! A run of steps, and the commands that they start.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::tally::Tally;

/// Steps one after the other, until one fails.
#[derive(Default)]
pub(crate) struct Run {
    done: Vec<(&'static str, Duration)>,
    tally: Tally,
}

impl Run {
    /// Does one step, under a header of one line.
    pub(crate) fn step(
        &mut self,
        name: &'static str,
        work: impl FnOnce(&mut Tally) -> Outcome,
    ) -> Outcome {
        println!("\n==> {name}");
        let started = Instant::now();
        work(&mut self.tally).map_err(|message| format!("{name}: {message}"))?;
        self.done.push((name, started.elapsed()));
        Ok(())
    }

    /// Says what was done, and closes with the tally, alone on its line, if any test ran.
    pub(crate) fn summary(&self, outcome: &Outcome) {
        println!("\n==> summary");
        for (name, took) in &self.done {
            println!("ok      {:6.1} s  {name}", took.as_secs_f64());
        }
        if let Err(message) = outcome {
            println!("FAILED            {message}");
        }
        if self.tally != Tally::default() {
            println!("{}", self.tally);
        }
    }
}

/// `cargo` with these arguments: the one that runs this task.
pub(crate) fn cargo<const N: usize>(arguments: [&str; N]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(crate::root());
    command
}

/// Runs a command that must succeed.
pub(crate) fn run(command: &mut Command) -> Outcome {
    let status = command
        .status()
        .map_err(|error| format!("cannot start {command:?}: {error}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{} ended with {status}", shown(command)))
    }
}

/// Runs `cargo test`, shows what it prints, and adds its tests to the tally.
pub(crate) fn run_tests(command: &mut Command, tally: &mut Tally) -> Outcome {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cannot start {command:?}: {error}"))?;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.map_err(|error| error.to_string())?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            if let Some(counted) = Tally::of(&line) {
                *tally += counted;
            }
        }
    }
    let status = child.wait().map_err(|error| error.to_string())?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{} ended with {status}", shown(command)))
    }
}

/// The command as a person would type it.
pub(crate) fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(command.get_program());
    let words = std::iter::once(name).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_step_that_fails_is_an_error_with_its_name() {
        let mut steps = Run::default();
        steps.step("good", |_| run(&mut shell("true"))).unwrap();
        let error = steps.step("bad", |_| run(&mut shell("false"))).unwrap_err();
        assert!(error.starts_with("bad: "), "{error}");
        assert_eq!(steps.done.len(), 1);
    }

    #[test]
    fn failed_tests_are_counted_and_are_an_error() {
        let mut tally = Tally::default();
        let line = "test result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out";
        let script = format!("echo '{line}'; exit 101");
        run_tests(&mut shell(&script), &mut tally).unwrap_err();
        assert_eq!((tally.passed, tally.failed), (4, 1));
    }
}
