//! Traces of requests: how much context each finds in the cache.
//!
//! A trace is the format that Mooncake published: a JSON object a line, with `timestamp` (ms),
//! `input_length` and `output_length` (tokens), and `hash_ids`, one number for each block of 512
//! input tokens, the last one maybe shorter. Equal numbers are equal blocks behind equal prefixes.

use crate::error::{Error, plain};
use serde::Deserialize;
use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::path::Path;

/// Tokens of a block.
const BLOCK: usize = 512;

/// A line of a trace, as it is written.
#[derive(Debug, Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// A request, and what of it is cached when it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    /// Milliseconds since the trace began.
    pub(super) timestamp: u64,
    /// Tokens.
    pub(super) input: usize,
    /// Tokens.
    pub(super) output: usize,
    /// The leading input tokens that some earlier request has computed, which is what a chunked
    /// prefill gathers: 512 for each leading block that is in any line before this one, but at most
    /// all input tokens except the last, which has to be computed for the first output. Nothing is
    /// ever evicted, and outputs are not cached.
    pub(super) context: usize,
}

/// What is wrong with a trace.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum TraceError {
    /// A line that is no request.
    Line {
        /// Counted from 1.
        number: usize,
        why: String,
    },
    /// No line holds a request.
    Empty,
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TraceError::Line { number, why } => write!(f, "line {number}: {why}"),
            TraceError::Empty => f.write_str("it holds no requests"),
        }
    }
}

/// The requests of a file.
pub(super) fn read(path: &Path) -> Result<Vec<Request>, Error> {
    let fail = |why: &str| Error::Failed(format!("trace {}: {why}", path.display()));
    let system = |error| fail(&plain(&error));
    if !fs::metadata(path).map_err(system)?.is_file() {
        return Err(fail("is not a regular file"));
    }
    let text = fs::read(path).map_err(system)?;
    parse(&text).map_err(|error| fail(&error.to_string()))
}

/// The requests of a trace, in the order of its lines. Blank lines are skipped.
pub(super) fn parse(text: &[u8]) -> Result<Vec<Request>, TraceError> {
    let mut cached = HashSet::new();
    let mut requests = Vec::new();
    for (line, number) in text.split(|&byte| byte == b'\n').zip(1..) {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let wrong = |why| TraceError::Line { number, why };
        let line = read_line(line).map_err(wrong)?;
        let input = line.input_length as usize;
        let hits = line.hash_ids.iter().take_while(|id| cached.contains(*id));
        // No more blocks than the tokens of the input fill.
        let hits = hits.count() * BLOCK;
        requests.push(Request {
            timestamp: line.timestamp,
            input,
            output: line.output_length as usize,
            context: hits.min(input - 1),
        });
        cached.extend(line.hash_ids);
    }
    match requests.is_empty() {
        true => Err(TraceError::Empty),
        false => Ok(requests),
    }
}

/// A line with at least one input token, and as many blocks as its tokens fill.
fn read_line(text: &[u8]) -> Result<Line, String> {
    let line: Line = serde_json::from_slice(text).map_err(|error| {
        let text = error.to_string();
        // The parser sees one line of many.
        let words = text.split(" at line ").next().unwrap_or_default();
        match error.column() {
            0 => format!("no request in JSON: {words}"),
            column => format!("no request in JSON: {words} at column {column}"),
        }
    })?;
    if line.input_length == 0 {
        return Err("input_length is 0; a request has at least one token".into());
    }
    let blocks = (line.input_length as usize).div_ceil(BLOCK);
    match line.hash_ids.len() {
        found if found == blocks => Ok(line),
        found => Err(format!(
            "{found} hash_ids for {} input tokens, which fill {blocks} blocks of {BLOCK}",
            line.input_length
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::{TraceError, parse};
    use proptest::prelude::*;

    fn line(input: usize, ids: &[u64]) -> String {
        format!(r#"{{"timestamp":7,"input_length":{input},"output_length":3,"hash_ids":{ids:?}}}"#)
    }

    fn contexts(lines: &[String]) -> Vec<usize> {
        let requests = parse(lines.join("\n").as_bytes()).unwrap();
        requests.iter().map(|request| request.context).collect()
    }

    #[test]
    fn contexts_are_the_leading_blocks_that_came_before() {
        let lines = [
            line(1_200, &[1, 2, 3]),
            // The same again: all but the last token.
            line(1_200, &[1, 2, 3]),
            // A turn later; the blocks before are full.
            line(1_700, &[1, 2, 4, 5]),
            // Its second block is new, so the third does not count.
            line(1_536, &[1, 6, 3]),
            // Not from the start.
            line(600, &[9, 2]),
            line(1_024, &[1, 2]),
            line(1, &[1]),
            // A block repeated in one request is new in it.
            line(1_024, &[8, 8]),
        ];
        assert_eq!(contexts(&lines), [0, 1_199, 1_024, 512, 0, 1_023, 0, 0]);
    }

    #[test]
    fn garbage_is_named_by_its_line() {
        let good = line(600, &[1, 2]);
        for (bad, words) in [
            ("{", "EOF"),
            ("not JSON", "expected"),
            ("[1, 2]", "expected"),
            ("\u{0}\u{1}", "expected value"),
            ("{\"timestamp\":0}", "input_length"),
            (&line(0, &[]), "at least one token"),
            (&line(600, &[1]), "1 hash_ids for 600"),
            (&line(4_000_000_000, &[1]), "hash_ids"),
            (&good.replace("600", "-600"), "invalid value"),
            (&good.replace("600", "600.5"), "floating point"),
            (&good.replace("600", "99999999999"), "u32"),
            (&good.replace("[1, 2]", "[1, \"2\"]"), "string"),
            (&format!("{good} {good}"), "trailing"),
        ] {
            let text = format!("{good}\n\n{bad}\n{good}\n");
            let error = parse(text.as_bytes()).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, TraceError::Line { number: 3, .. }), "{bad}");
            assert!(
                text.starts_with("line 3: ") && text.contains(words),
                "{text}"
            );
            assert!(!text.contains("at line 1"), "{text}");
        }
        assert_eq!(parse(b" \n\r\n"), Err(TraceError::Empty));
        assert_eq!(parse(b""), Err(TraceError::Empty));
    }

    proptest! {
        #[test]
        fn noise_is_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(parse(&bytes).is_err());
        }
    }
}
