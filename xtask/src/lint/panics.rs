//! Libraries return errors; they do not panic.
//!
//! An approximation: it sees what is spelled out, not indexing or arithmetic.

use super::Finding;
use super::source::{Rust, has_word};

/// The crates that users link.
const LIBRARIES: [&str; 5] = [
    "crates/direct-dcp/src/",
    "crates/direct-dcp-cuda/src/",
    "crates/direct-dcp-kernels/src/",
    "crates/direct-dcp-shm/src/",
    "python/src/",
];

const METHODS: [&str; 4] = [".unwrap()", ".unwrap_err()", ".expect(", ".expect_err("];
const MACROS: [&str; 5] = [
    "panic!",
    "unreachable!",
    "assert!",
    "assert_eq!",
    "assert_ne!",
];

/// File, code of the line, and why it may stand.
const ALLOWED: [(&str, &str, &str); 0] = [];

pub(super) fn check(sources: &[Rust]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for rust in sources {
        if !LIBRARIES
            .iter()
            .any(|library| rust.path.starts_with(library))
        {
            continue;
        }
        for (number, line) in rust.product() {
            let allowed = ALLOWED
                .iter()
                .any(|(path, code, _)| rust.path == *path && line.code.contains(code));
            if let Some(what) = banned(&line.code)
                && !allowed
            {
                let message = format!("`{what}` in a library: return an error");
                findings.push(Finding::new(&rust.path, number, message));
            }
        }
    }
    findings
}

fn banned(code: &str) -> Option<&'static str> {
    let method = METHODS.into_iter().find(|method| code.contains(method));
    method.or_else(|| {
        // The compiler evaluates what is constant.
        let constant = code.contains("const {") || code.trim_start().starts_with("const _:");
        let called = MACROS.into_iter().find(|name| has_word(code, name));
        called.filter(|_| !constant)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIBRARY: &str = "crates/direct-dcp/src/gather.rs";

    #[test]
    fn panics_are_found_in_libraries_only() {
        for bad in METHODS.into_iter().chain(MACROS) {
            let code = format!("{{f(){}{bad}", if bad.ends_with('!') { ";" } else { "" });
            assert_eq!(check(&[Rust::sample(LIBRARY, &code)]).len(), 1, "{bad}");
            for path in [
                "crates/direct-dcp-litmus/src/slots.rs",
                "crates/direct-dcp/tests/a.rs",
            ] {
                assert_eq!(check(&[Rust::sample(path, &code)]), [], "{bad}");
            }
        }
    }

    #[test]
    fn tests_documents_and_constants_may() {
        let good = "/// f().unwrap();\ndebug_assert!(a);\nconst _: () = assert!(A);\n#[cfg(test)]\nmod tests { fn g() { panic!() } }";
        assert_eq!(check(&[Rust::sample(LIBRARY, good)]), []);
    }
}
