//! Each acquire/release pair carries one tag on both sides, and the protocol document explains it.
//!
//! A side is a comment `// SYNC: tag`. The document has one heading per tag, in backquotes.

use std::collections::BTreeMap;

use super::source::{Rust, Text};
use super::{Finding, PROTOCOL};

const MARK: &str = "SYNC:";

pub(super) fn check(sources: &[Rust], protocol: &Text) -> Vec<Finding> {
    let mut findings = Vec::new();
    let headings: BTreeMap<&str, usize> = headings(&protocol.content).collect();
    let mut sides: BTreeMap<String, Vec<(&str, usize)>> = BTreeMap::new();
    for rust in sources {
        if !(rust.path.starts_with("crates/") && rust.path.contains("/src/")) {
            continue;
        }
        for (number, line) in rust.product() {
            for mention in line.comment.split(MARK).skip(1) {
                let tag = tag(mention);
                if !headings.contains_key(tag) {
                    let message = format!("`{tag}` has no heading in {PROTOCOL}");
                    findings.push(Finding::new(&rust.path, number, message));
                }
                // In documentation a tag is only mentioned.
                if !line.comment.starts_with("///") && !line.comment.starts_with("//!") {
                    let places = sides.entry(tag.to_owned()).or_default();
                    places.push((&rust.path, number));
                }
            }
        }
    }
    for (tag, places) in &sides {
        if let [(path, number)] = places[..] {
            let message = format!("`{tag}` has one side only");
            findings.push(Finding::new(path, number, message));
        }
    }
    for (heading, number) in headings {
        if !sides.contains_key(heading) {
            let message = format!("no code carries `{MARK} {heading}`");
            findings.push(Finding::new(PROTOCOL, number, message));
        }
    }
    findings
}

/// The tag at the start of what follows the mark.
fn tag(mention: &str) -> &str {
    let mention = mention.trim_start();
    let end = mention.find(|c: char| !c.is_ascii_lowercase() && c != '-');
    &mention[..end.unwrap_or(mention.len())]
}

/// The headings that are a tag in backquotes, with their lines.
fn headings(content: &str) -> impl Iterator<Item = (&str, usize)> {
    content.lines().zip(1..).filter_map(|(line, number)| {
        let title = line.strip_prefix('#')?.trim_start_matches('#').trim();
        let tag = title.strip_prefix('`')?.strip_suffix('`')?;
        Some((tag, number))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(code: &str, document: &str) -> Vec<String> {
        let protocol = Text {
            path: PROTOCOL.to_owned(),
            content: document.to_owned(),
        };
        check(&[Rust::sample("crates/a/src/a.rs", code)], &protocol)
            .into_iter()
            .map(|finding| finding.to_string())
            .collect()
    }

    #[test]
    fn two_sides_and_a_heading() {
        let code = "//! Says `SYNC: meet`.\n// SYNC: meet. Releases.\n// SYNC: meet";
        assert_eq!(messages(code, "# A\n### `meet`\ntext"), [""; 0]);
    }

    #[test]
    fn each_way_to_break_the_rule_is_found() {
        assert_eq!(
            messages("// SYNC: meet\n// SYNC: meet", "# meet"),
            [
                "crates/a/src/a.rs:1: `meet` has no heading in docs/protocol.md",
                "crates/a/src/a.rs:2: `meet` has no heading in docs/protocol.md"
            ]
        );
        assert_eq!(
            messages("/// SYNC: meet\n// SYNC: meet", "## `meet`"),
            ["crates/a/src/a.rs:2: `meet` has one side only"]
        );
        assert_eq!(
            messages("// nothing", "## `meet`"),
            ["docs/protocol.md:1: no code carries `SYNC: meet`"]
        );
        assert_eq!(
            messages("// SYNC: Meet\n// SYNC:", "")[0],
            "crates/a/src/a.rs:1: `` has no heading in docs/protocol.md"
        );
    }
}
