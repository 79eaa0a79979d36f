//! What no file says: places of one machine, marks of unfinished work, numbers of tickets, and
//! addresses of hosts that nobody agreed on.

use super::Finding;
use super::source::Text;

/// Top-level folders that every Linux has, or that none has; any other absolute path is
/// somebody's own.
const SYSTEM: [&str; 14] = [
    "bin",
    "dev",
    "etc",
    "lib",
    "lib64",
    "opt",
    "proc",
    "run",
    "sys",
    "tmp",
    "usr",
    "var",
    "no",
    "nonexistent",
];

/// Hosts that documents may point to.
const HOSTS: [&str; 5] = [
    "www.apache.org",
    "docs.nvidia.com",
    "github.com",
    "doc.rust-lang.org",
    "huggingface.co",
];

const UNFINISHED: [&str; 4] = [
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X"),
    concat!("HA", "CK"),
];

/// Files that are made by tools, or are somebody else's words.
const EXEMPT: [&str; 2] = ["Cargo.lock", "LICENSE"];

pub(super) fn check(texts: &[Text]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for text in texts {
        let name = text.path.rsplit('/').next().unwrap_or_default();
        if EXEMPT.contains(&name) {
            continue;
        }
        for (line, number) in text.content.lines().zip(1..) {
            let found = [path(line), mark(line), ticket(line), host(line)];
            let found = found.into_iter().flatten();
            findings.extend(found.map(|message| Finding::new(&text.path, number, message)));
        }
    }
    findings
}

/// An absolute path with a top-level folder that is not the system's.
fn path(line: &str) -> Option<String> {
    let starts = line
        .match_indices('/')
        .filter(|&(at, _)| at == 0 || line[..at].ends_with([' ', '"', '\'', '`', '=', '(', ',']));
    for (at, _) in starts {
        let rest = &line[at + 1..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && !"-_.".contains(c));
        // A path has a second part; what begins with a capital is no folder.
        let Some(end) = end.filter(|&end| rest[end..].starts_with('/')) else {
            continue;
        };
        let folder = &rest[..end];
        let beyond = &rest[end + 1..];
        if folder.starts_with(|c: char| c.is_ascii_lowercase())
            && beyond.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '$')
            && !SYSTEM.contains(&folder)
        {
            return Some(format!("`/{folder}/` is a place of one machine"));
        }
    }
    None
}

fn mark(line: &str) -> Option<String> {
    let mark = UNFINISHED
        .into_iter()
        .find(|mark| super::source::has_word(line, mark))?;
    Some(format!("`{mark}` marks unfinished work"))
}

/// The number of a ticket: a hash sign and digits, not joined to anything.
fn ticket(line: &str) -> Option<String> {
    line.match_indices('#').find_map(|(at, _)| {
        let rest = &line[at + 1..];
        let end = rest.find(|c: char| !c.is_ascii_digit());
        let (digits, beyond) = rest.split_at(end.unwrap_or(rest.len()));
        let alone = line[..at].ends_with([' ', '(']) && !beyond.starts_with(['-', '_']);
        (alone && !digits.is_empty()).then(|| format!("`#{digits}` is a ticket of somebody's"))
    })
}

fn host(line: &str) -> Option<String> {
    line.split("://").skip(1).find_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && !".-".contains(c));
        let host = &rest[..end.unwrap_or(rest.len())];
        let named = host.contains('.') && host.contains(|c: char| c.is_ascii_alphabetic());
        (named && !HOSTS.contains(&host)).then(|| format!("`{host}` is no host to point to"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(line: &str) -> usize {
        let texts = [Text {
            path: "docs/a.md".to_owned(),
            content: line.to_owned(),
        }];
        check(&texts).len()
    }

    #[test]
    fn each_kind_of_word_is_found() {
        // Put together here, so that this file does not say them either.
        for bad in [
            ["see /ho", "me/someone/notes"].concat(),
            ["let p = \"/ro", "ot/x\";"].concat(),
            ["// TO", "DO: later"].concat(),
            ["as in issue #", "12"].concat(),
            ["(#", "7)"].concat(),
            ["https:", "//example.com/x"].concat(),
        ] {
            assert_eq!(found(&bad), 1, "{bad}");
        }
    }

    #[test]
    fn ordinary_text_is_not() {
        for good in [
            "/dev/nvidia-caps, /proc/self/fd and/or a/b/c",
            "#[cfg(test)] # 3 steps, [a](#3-steps), r#\"x\"#",
            "https://github.com/NVIDIA/nccl-tests and tcp://127.0.0.1:5",
            "acquire/release, 1/2/3, //! docs, // SYNC",
        ] {
            assert_eq!(found(good), 0, "{good}");
        }
    }
}
