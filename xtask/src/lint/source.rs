//! Sources as the rules see them: code, comments and literals apart.

/// A text file of the workspace.
#[derive(Debug)]
pub(super) struct Text {
    /// Relative to the workspace, with slashes.
    pub(super) path: String,
    pub(super) content: String,
}

/// A Rust file, taken apart.
#[derive(Debug)]
pub(super) struct Rust {
    pub(super) path: String,
    /// Whether the whole file is test code.
    test: bool,
    pub(super) lines: Vec<Line>,
}

/// A line of a Rust file.
#[derive(Debug, Default)]
pub(super) struct Line {
    /// The code, without comments and without the content of literals.
    pub(super) code: String,
    /// The comments, with their `//`.
    pub(super) comment: String,
    /// Whether the line belongs to an item under `#[cfg(test)]`.
    pub(super) test: bool,
}

impl Rust {
    /// Takes the Rust files among `texts` apart.
    pub(super) fn all(texts: &[Text]) -> Vec<Rust> {
        let rust = texts.iter().filter(|text| text.path.ends_with(".rs"));
        let mut rust: Vec<Rust> = rust.map(Rust::new).collect();
        let tests: Vec<String> = rust.iter().flat_map(Rust::test_modules).collect();
        for file in &mut rust {
            let module = file.path.trim_end_matches(".rs");
            let of_test = |test: &String| {
                let below = module.strip_prefix(test.as_str());
                below.is_some_and(|below| below.is_empty() || below.starts_with('/'))
            };
            file.test |= tests.iter().any(of_test);
        }
        rust
    }

    fn new(text: &Text) -> Rust {
        let mut lines = take_apart(&text.content);
        mark_tests(&mut lines);
        Rust {
            path: text.path.clone(),
            test: text.path.contains("/tests/"),
            lines,
        }
    }

    /// Paths, without `.rs`, of the modules that this file declares under `#[cfg(test)]`.
    fn test_modules(&self) -> impl Iterator<Item = String> {
        let module = self.path.trim_end_matches(".rs");
        let folder = ["/mod", "/lib", "/main"]
            .iter()
            .find_map(|root| module.strip_suffix(root))
            .unwrap_or(module);
        let tests = self.lines.iter().filter(|line| line.test);
        tests.filter_map(move |line| {
            let name = line.code.trim().strip_prefix("mod ")?.strip_suffix(';')?;
            Some(format!("{folder}/{name}"))
        })
    }

    /// The numbered lines that are no test code.
    pub(super) fn product(&self) -> impl Iterator<Item = (usize, &Line)> {
        (1..)
            .zip(&self.lines)
            .filter(|(_, line)| !self.test && !line.test)
    }

    #[cfg(test)]
    pub(super) fn sample(path: &str, content: &str) -> Rust {
        Rust::new(&Text {
            path: path.to_owned(),
            content: content.to_owned(),
        })
    }
}

/// Whether `code` contains `word` with no further letter, digit or underscore beside it.
pub(super) fn has_word(code: &str, word: &str) -> bool {
    let joins = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word)
        .any(|(at, _)| !code[..at].ends_with(joins) && !code[at + word.len()..].starts_with(joins))
}

/// What the scanner is inside of.
#[derive(Clone, Copy, PartialEq)]
enum Within {
    Code,
    LineComment,
    /// How deep block comments nest.
    BlockComment(u32),
    /// A string in which a backslash escapes.
    Text,
    /// A raw string that ends with a quote and this many hashes.
    Raw(usize),
}

fn take_apart(content: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    let mut within = Within::Code;
    for text in content.lines() {
        if within == Within::LineComment {
            within = Within::Code;
        }
        let mut line = Line::default();
        let mut rest = text;
        while !rest.is_empty() {
            let taken = match within {
                Within::Code => {
                    let (next, taken) = in_code(rest, &line.code);
                    match next {
                        Within::LineComment | Within::BlockComment(_) => {
                            line.comment.push_str(&rest[..taken]);
                        }
                        _ => line.code.push_str(if taken <= 1 || next != Within::Code {
                            &rest[..taken]
                        } else {
                            // A character literal.
                            "' '"
                        }),
                    }
                    within = next;
                    taken
                }
                Within::LineComment => {
                    line.comment.push_str(rest);
                    rest.len()
                }
                Within::BlockComment(depth) => {
                    let (taken, depth) = match rest.get(..2) {
                        Some("/*") => (2, depth + 1),
                        Some("*/") => (2, depth - 1),
                        _ => (first_len(rest), depth),
                    };
                    line.comment.push_str(&rest[..taken]);
                    if depth == 0 {
                        within = Within::Code;
                    } else {
                        within = Within::BlockComment(depth);
                    }
                    taken
                }
                Within::Text => {
                    if let Some(escaped) = rest.strip_prefix('\\') {
                        1 + first_len(escaped)
                    } else {
                        if rest.starts_with('"') {
                            line.code.push('"');
                            within = Within::Code;
                        }
                        first_len(rest)
                    }
                }
                Within::Raw(hashes) => {
                    let end = format!("\"{}", "#".repeat(hashes));
                    if rest.starts_with(&end) {
                        line.code.push_str(&end);
                        within = Within::Code;
                        end.len()
                    } else {
                        first_len(rest)
                    }
                }
            };
            rest = &rest[taken..];
        }
        lines.push(line);
    }
    lines
}

/// Bytes of the first character.
fn first_len(rest: &str) -> usize {
    rest.chars().next().map_or(0, char::len_utf8)
}

/// What begins at the start of `rest`, after the code `before` on its line, and how many bytes
/// begin it.
fn in_code(rest: &str, before: &str) -> (Within, usize) {
    if rest.starts_with("//") {
        return (Within::LineComment, 2);
    }
    if rest.starts_with("/*") {
        return (Within::BlockComment(1), 2);
    }
    if rest.starts_with('"') {
        return (Within::Text, 1);
    }
    if let Some(raw) = rest.strip_prefix('r')
        && !before.ends_with(|c: char| c.is_alphanumeric() && !matches!(c, 'b' | 'c') || c == '_')
    {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        if raw[hashes..].starts_with('"') {
            return (Within::Raw(hashes), 2 + hashes);
        }
    }
    if let Some(quoted) = rest.strip_prefix('\'') {
        // A character, or else the name of a lifetime or a loop.
        let inner = match quoted.strip_prefix('\\') {
            Some(escaped) => {
                1 + escaped[1.min(escaped.len())..]
                    .find('\'')
                    .map_or(0, |at| at + 1)
            }
            None => first_len(quoted),
        };
        if quoted
            .get(inner..)
            .is_some_and(|rest| rest.starts_with('\''))
        {
            return (Within::Code, inner + 2);
        }
    }
    (Within::Code, first_len(rest))
}

/// Marks the lines of each item under `#[cfg(test)]`: up to its closing brace, or its semicolon.
fn mark_tests(lines: &mut [Line]) {
    let mut depth = 0;
    let mut waiting = false;
    for line in lines {
        if depth == 0 && line.code.contains("#[cfg(test)]") {
            waiting = true;
        }
        line.test = waiting || depth > 0;
        if !line.test {
            continue;
        }
        for c in line.code.chars() {
            match c {
                '{' => {
                    depth += 1;
                    waiting = false;
                }
                '}' => depth -= 1,
                ';' if depth == 0 => waiting = false,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(content: &str) -> Vec<String> {
        take_apart(content)
            .into_iter()
            .map(|line| line.code)
            .collect()
    }

    #[test]
    fn comments_and_literals_are_no_code() {
        assert_eq!(
            codes("a(\"b // c\"); // d\n/* e\n /* f */ g */ h"),
            ["a(\"\"); ", "", " h"]
        );
        assert_eq!(codes("r#\"a\" // b\"# c"), ["r#\"\"# c"]);
        assert_eq!(codes("let a = \"b\\\"c\nd\" e"), ["let a = \"", "\" e"]);
        assert_eq!(codes("for r\"a\""), ["for r\"\""]);
        assert_eq!(take_apart("a // b")[0].comment, "// b");
    }

    #[test]
    fn quotes_of_characters_and_lifetimes() {
        assert_eq!(
            codes("'\"' 'a '\\'' '\\u{e9}' 'b: x"),
            ["' ' 'a ' ' ' ' 'b: x"]
        );
        assert_eq!(
            codes("fn f<'a>(x: &'a str) {}"),
            ["fn f<'a>(x: &'a str) {}"]
        );
    }

    #[test]
    fn test_items_end_with_their_brace() {
        let rust = Rust::sample(
            "crates/a/src/a.rs",
            "a\n#[cfg(test)]\nmod tests {\n  fn b() { \"}\"; }\n}\nc\n#[cfg(test)]\nmod d;\ne",
        );
        let tests: Vec<bool> = rust.lines.iter().map(|line| line.test).collect();
        assert_eq!(
            tests,
            [false, true, true, true, true, false, true, true, false]
        );
    }

    #[test]
    fn files_of_test_modules_are_tests() {
        let text = |path: &str, content: &str| Text {
            path: path.to_owned(),
            content: content.to_owned(),
        };
        let rust = Rust::all(&[
            text("a/lib.rs", "#[cfg(test)]\nmod b;\nmod c;"),
            text("a/b.rs", "x"),
            text("a/b/d.rs", "x"),
            text("a/c.rs", "#[cfg(test)]\nmod e;"),
            text("a/c/e.rs", "x"),
        ]);
        let tests: Vec<bool> = rust.iter().map(|file| file.test).collect();
        assert_eq!(tests, [false, true, true, false, true]);
    }

    #[test]
    fn words_stand_alone() {
        assert!(has_word("(unsafe {", "unsafe"));
        assert!(!has_word("allow(unsafe_code)", "unsafe"));
    }
}
