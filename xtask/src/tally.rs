//! How many tests ran, from the lines that Rust's harness and pytest close with.

use std::fmt;
use std::ops::AddAssign;

/// Tests that passed, failed and were skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

impl Tally {
    /// The tally of a line such as `test result: ok. 3 passed; 0 failed; 1 ignored; …` or
    /// `1 failed, 3 passed, 1 skipped in 0.12s`.
    pub(crate) fn of(line: &str) -> Option<Tally> {
        Tally::of_cargo(line).or_else(|| Tally::of_pytest(line))
    }

    fn of_pytest(line: &str) -> Option<Tally> {
        let (counts, took) = line.trim().trim_matches(['=', ' ']).split_once(" in ")?;
        if !took.starts_with(|c: char| c.is_ascii_digit()) {
            return None;
        }
        let mut tally = Tally::default();
        for count in counts.split(", ") {
            let (number, what) = count.split_once(' ')?;
            let number: u64 = number.parse().ok()?;
            match what {
                "passed" | "xfailed" => tally.passed += number,
                "failed" | "xpassed" | "error" | "errors" => tally.failed += number,
                "skipped" => tally.skipped += number,
                "deselected" | "warning" | "warnings" => {}
                _ => return None,
            }
        }
        Some(tally)
    }

    fn of_cargo(line: &str) -> Option<Tally> {
        let counts = line.trim().strip_prefix("test result: ")?;
        let (_, counts) = counts.split_once(". ")?;
        let count = |what: &str| {
            counts
                .split("; ")
                .find_map(|part| part.strip_suffix(what)?.trim().parse().ok())
        };
        Some(Tally {
            passed: count("passed")?,
            failed: count("failed")?,
            skipped: count("ignored")?,
        })
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        if self.skipped > 0 {
            write!(f, ", {} skipped", self.skipped)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_up_what_the_harness_says() {
        let mut sum = Tally::default();
        for line in [
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.07s",
            "test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.20s",
        ] {
            sum += Tally::of(line).unwrap();
        }
        assert_eq!(sum.to_string(), "13 passed, 2 failed, 1 skipped");
        for line in [
            "37 passed in 13.49s",
            "=== 1 failed, 8 passed, 10 skipped, 1 warning in 82.59s (0:01:22) ===",
            "1 error in 0.10s",
        ] {
            sum += Tally::of(line).unwrap();
        }
        assert_eq!(sum.to_string(), "58 passed, 4 failed, 11 skipped");
    }

    #[test]
    fn other_lines_say_nothing() {
        for line in [
            "test a_test ... ok",
            "running 3 tests",
            "test result: ",
            "3 passed in time",
            "4 of 4 in 3s",
            "",
        ] {
            assert_eq!(Tally::of(line), None);
        }
    }
}
