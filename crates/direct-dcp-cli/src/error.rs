//! How the program ends when it does not end well.

use std::fmt;
use std::io;

/// Why a command stopped.
#[derive(Debug)]
pub(crate) enum Error {
    /// Options that do not go together, in one line.
    Usage(String),
    /// Something to tell the user, in one line.
    Failed(String),
    /// The reader of standard output has gone, and with it the interest in what follows.
    OutputClosed,
    /// A signal asked the program to end.
    Interrupted(i32),
}

impl Error {
    /// Names what was being done when the system refused, for `map_err`.
    pub(crate) fn io(what: impl fmt::Display) -> impl FnOnce(io::Error) -> Error {
        move |error| Error::Failed(format!("{what}: {}", plain(&error)))
    }
}

impl From<String> for Error {
    fn from(message: String) -> Self {
        Error::Failed(message)
    }
}

/// The system's words without Rust's `(os error 2)`.
pub(crate) fn plain(error: &io::Error) -> String {
    let text = error.to_string();
    match text.split_once(" (os error") {
        Some((words, _)) => words.to_lowercase(),
        None => text,
    }
}

/// `text` without line breaks or anything else that a terminal would obey. File and tensor names
/// may hold such.
pub(crate) fn one_line(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let plain = (!c.is_control()).then_some(c);
            let escaped = c.is_control().then(|| c.escape_default());
            plain.into_iter().chain(escaped.into_iter().flatten())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::one_line;

    #[test]
    fn control_characters_are_shown() {
        assert_eq!(one_line("größe\n\x1b[31m"), "größe\\n\\u{1b}[31m");
    }
}
