//! Modules: the entry points that a PTX text declares, and the host functions that stand for them.

use core::ffi::c_void;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::code::{Code, Outcome};
use crate::residency;

/// A host function that runs in place of a kernel: arguments as `cuLaunchKernel` has them, blocks,
/// threads of a block.
pub(crate) type Host = extern "C" fn(*mut *mut c_void, u32, u32);

/// A loaded module.
pub(crate) struct Module {
    pub(crate) context: usize,
    /// What it is compiled for, as `sm_90`.
    pub(crate) target: String,
    pub(crate) entries: Vec<(String, Vec<Parameter>)>,
    /// Handles of functions that were looked up.
    pub(crate) functions: Vec<usize>,
}

/// A function of a module.
pub(crate) struct Entry {
    pub(crate) context: usize,
    pub(crate) device: u32,
    pub(crate) name: String,
    pub(crate) target: String,
    pub(crate) parameters: Vec<Parameter>,
}

/// A kernel's parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameter {
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// By name, the host functions and the registers of each thread.
static HOSTS: LazyLock<Mutex<HashMap<String, (Host, u32)>>> = LazyLock::new(Mutex::default);

pub(crate) fn register(name: String, host: Host, registers: u32) {
    HOSTS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(name, (host, registers));
}

/// The host function of an entry, one registered as `name@target`, or else as `name`, and the
/// registers of each thread.
pub(crate) fn host(entry: &Entry) -> Option<(Host, u32)> {
    let hosts = HOSTS.lock().unwrap_or_else(PoisonError::into_inner);
    let special = hosts.get(&format!("{}@{}", entry.name, entry.target));
    special.or_else(|| hosts.get(&entry.name)).copied()
}

thread_local! {
    static LAUNCH: Cell<Option<Launch>> = const { Cell::new(None) };
}

/// A launch that runs on this thread.
#[derive(Clone, Copy)]
pub(crate) struct Launch {
    pub(crate) device: u32,
    /// Registers of each thread.
    pub(crate) registers: u32,
    /// What its kernel says went wrong.
    failure: Option<Code>,
}

/// Runs a kernel, whose threads have so many registers, on behalf of a device.
pub(crate) fn launch(device: u32, registers: u32, kernel: impl FnOnce()) -> Outcome {
    LAUNCH.set(Some(Launch {
        device,
        registers,
        failure: None,
    }));
    residency::run(device, kernel);
    match LAUNCH.take().and_then(|launch| launch.failure) {
        Some(code) => Err(code),
        None => Ok(()),
    }
}

/// The launch that runs on this thread.
pub(crate) fn launched() -> Option<Launch> {
    LAUNCH.get()
}

/// Makes the launch that runs on this thread end with a code.
pub(crate) fn fail_launch(code: Code) {
    if let Some(launch) = LAUNCH.get() {
        let failure = launch.failure.or(Some(code));
        LAUNCH.set(Some(Launch { failure, ..launch }));
    }
}

/// What a module is compiled for.
pub(crate) fn target(ptx: &str) -> String {
    let text = strip_comments(ptx);
    let mut words = text.split_whitespace();
    words.find(|word| *word == ".target");
    let word = words.next().unwrap_or_default();
    word.split(',').next().unwrap_or_default().to_owned()
}

/// Reads what the fake needs of a PTX text: the directives it must have, and each entry's name and
/// parameters. The error is what the compiler's log would say.
pub(crate) fn parse(ptx: &str) -> Result<Vec<(String, Vec<Parameter>)>, String> {
    let text: String = strip_comments(ptx);
    for directive in [".version", ".target", ".address_size"] {
        if !text.contains(directive) {
            return Err(format!("ptxas fatal : missing {directive}"));
        }
    }
    let mut entries = Vec::new();
    for part in text.split(".entry").skip(1) {
        let head = part.split('{').next().unwrap_or_default();
        let (name, rest) = head.split_once('(').unwrap_or((head, ""));
        let name = name.trim();
        if name.is_empty() {
            return Err("ptxas fatal : an entry without a name".into());
        }
        let list = rest.rsplit_once(')').map_or("", |(list, _)| list);
        entries.push((name.to_owned(), parse_parameters(list)?));
    }
    Ok(entries)
}

fn strip_comments(ptx: &str) -> String {
    let lines = ptx
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    let mut rest = lines.collect::<Vec<_>>().join("\n");
    while let Some(start) = rest.find("/*") {
        let end = rest[start..]
            .find("*/")
            .map_or(rest.len(), |end| start + end + 2);
        rest.replace_range(start..end, " ");
    }
    rest
}

fn parse_parameters(list: &str) -> Result<Vec<Parameter>, String> {
    let mut parameters = Vec::new();
    let mut end = 0_usize;
    for declaration in list
        .split(',')
        .map(str::trim)
        .filter(|text| !text.is_empty())
    {
        let bad = || format!("ptxas error : cannot read parameter '{declaration}'");
        let mut words = declaration.split_whitespace();
        if words.next() != Some(".param") {
            return Err(bad());
        }
        let mut alignment = None;
        let mut element = None;
        let mut name = "";
        while let Some(word) = words.next() {
            match word {
                ".align" => alignment = words.next().and_then(|text| text.parse::<usize>().ok()),
                ".ptr" | ".global" | ".const" | ".local" | ".shared" => {}
                _ if word.starts_with('.') && element.is_none() => {
                    element = Some(width(word).ok_or_else(bad)?)
                }
                _ => name = word,
            }
        }
        let element = element.ok_or_else(bad)?;
        let count = match name.split_once('[') {
            Some((_, count)) => count.trim_end_matches(']').parse().map_err(|_| bad())?,
            None => 1,
        };
        // `.ptr .align` is about what a pointer points to.
        let alignment = if declaration.contains(".ptr") {
            None
        } else {
            alignment
        };
        let offset = end.next_multiple_of(alignment.unwrap_or(element).max(1));
        parameters.push(Parameter {
            offset,
            bytes: element * count,
        });
        end = offset + element * count;
    }
    Ok(parameters)
}

/// Bytes of a fundamental type such as `.u64`.
fn width(kind: &str) -> Option<usize> {
    let bits: usize = kind
        .trim_start_matches(|c: char| !c.is_ascii_digit())
        .parse()
        .ok()?;
    matches!(bits, 8 | 16 | 32 | 64 | 128).then_some(bits / 8)
}

#[cfg(test)]
mod tests {
    use super::{Parameter, parse, target};

    #[test]
    fn entries_and_parameters_are_read() {
        let ptx = "// a comment with .entry in it\n.version 8.1\n.target sm_90\n.address_size 64\n\
            .visible .entry push(\n .param .u64 .ptr .align 1 a,\n .param .u32 b,\n\
            .param .align 8 .b8 c[24]\n)\n.maxntid 256, 1, 1\n{ ret; }\n\
            .visible .entry bare()\n{ ret; }\n";
        let entries = parse(ptx).expect("PTX");
        assert_eq!(entries.len(), 2);
        let parameter = |offset, bytes| Parameter { offset, bytes };
        assert_eq!(entries[0].0, "push");
        assert_eq!(
            entries[0].1,
            [parameter(0, 8), parameter(8, 4), parameter(16, 24)]
        );
        assert_eq!(entries[1], ("bare".to_owned(), vec![]));
        assert_eq!(target(ptx), "sm_90");
        assert!(parse(".version 8.1").is_err());
    }
}
