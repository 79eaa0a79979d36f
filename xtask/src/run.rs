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
    let failed = |error: std::io::Error| format!("{}: {error}", shown(command));
    // One pipe for both, so that the lines stay in order.
    let (output, stdout) = std::io::pipe().map_err(failed)?;
    let stderr = stdout.try_clone().map_err(failed)?;
    let mut child = command
        .stdout(stdout)
        .stderr(stderr)
        .spawn()
        .map_err(|error| format!("cannot start {command:?}: {error}"))?;
    // Or the pipe would never end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    // Tests start test programs of their own, whose results may be shown too: of what a program
    // prints, the last line counts.
    let mut last = None;
    for line in BufReader::new(output).split(b'\n') {
        let line = line.map_err(|error| error.to_string())?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        if let Some(counted) = Tally::of(&line) {
            last = Some(counted);
        } else if starts_program(&line) {
            *tally += last.take().unwrap_or_default();
        }
    }
    *tally += last.unwrap_or_default();
    let status = child.wait().map_err(|error| error.to_string())?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{} ended with {status}", shown(command)))
    }
}

/// Whether cargo says with this line that it starts a test program.
fn starts_program(line: &str) -> bool {
    line.starts_with("     Running ") || line.starts_with("   Doc-tests ")
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
        let result = |passed, failed| {
            format!(
                "test result: x. {passed} passed; {failed} failed; 0 ignored; 0 measured; \
                 0 filtered out"
            )
        };
        let lines = [
            "     Running tests/a.rs (target/a)",
            // Of a program that a test has started.
            &result(1, 1),
            &result(4, 1),
            "   Doc-tests b",
            &result(2, 0),
        ];
        let script = format!("echo '{}' >&2; exit 101", lines.join("\n"));
        let mut tally = Tally::default();
        run_tests(&mut shell(&script), &mut tally).unwrap_err();
        assert_eq!((tally.passed, tally.failed), (6, 1));
    }
}
