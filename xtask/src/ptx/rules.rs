//! What the emitted text must and must not say.
//!
//! The compiler is free to move code; these rules look at what it made. The order of steps
//! (docs/protocol.md) is checked on the paths of control: "every path from A to B passes C".

use super::flow::Flow;
use super::text::{Function, Module, Statement};

/// What a module is built for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expected {
    pub(crate) version: &'static str,
    pub(crate) target: &'static str,
    /// Whether it stores through multicast addresses.
    pub(crate) multicast: bool,
}

/// Names of the entry points that perform a whole gather.
const GATHERS: &str = "direct_dcp_gather";

/// Atomics that may be relaxed: entry point and opcode.
const RELAXED: [(&str, &str); 0] = [];

/// Everything that is wrong with the module.
pub(crate) fn check(module: &Module, expected: Expected) -> Vec<String> {
    let mut wrong = Vec::new();
    if module.version != expected.version || module.target != expected.target {
        wrong.push(format!(
            "PTX {} for {}, expected {} for {}",
            module.version, module.target, expected.version, expected.target
        ));
    }
    for other in &module.others {
        // A variable's name may differ from build to build, and a declaration is of a callee.
        wrong.push(format!(
            "line {}: `{}` outside of functions",
            other.line, other.opcode
        ));
    }
    for function in &module.functions {
        if !function.entry {
            wrong.push(format!("`{}` is no entry point", function.name));
        }
        let found = function
            .body
            .iter()
            .filter_map(|statement| Some((statement, banned(function, statement, expected)?)));
        wrong.extend(found.map(|(statement, why)| {
            format!("line {}: `{}` {why}", statement.line, statement.opcode)
        }));
    }
    let mut gathers = 0;
    for function in module.entries() {
        match Flow::of(function) {
            Err(error) => wrong.push(error),
            Ok(flow) => {
                let gather = function.name.starts_with(GATHERS);
                gathers += usize::from(gather);
                let steps = Steps::of(&flow);
                let broken = if gather {
                    [steps.missing(), steps.misplaced(expected)].concat()
                } else {
                    steps.misplaced(expected)
                };
                let name = &function.name;
                wrong.extend(broken.into_iter().map(|why| format!("{name}: {why}")));
            }
        }
    }
    if gathers == 0 {
        wrong.push(format!("no entry point `{GATHERS}…`"));
    }
    wrong
}

/// Why a statement may not stand in any function.
fn banned(function: &Function, statement: &Statement, expected: Expected) -> Option<&'static str> {
    let has = |part: &str| statement.parts().any(|p| p == part);
    let name = statement.parts().next().unwrap_or_default();
    match name {
        "trap" | "brkpt" => return Some("makes every later call of the process fail"),
        "call" => return Some("calls what should have been inlined, or a panic"),
        "membar" => return Some("is a fence of the old model: say which order and which proxy"),
        "multimem" if !expected.multicast => return Some("outside of the multicast module"),
        _ => {}
    }
    if has("local") {
        return Some("uses local memory");
    }
    if has("nc") && is_wide(statement) {
        return Some("reads rows past the coherent caches");
    }
    let read_modify_write =
        ["atom", "red"].contains(&name) || name == "multimem" && (has("red") || has("ld_reduce"));
    if read_modify_write && !has("acq_rel") && !has("release") {
        let listed = RELAXED.contains(&(function.name.as_str(), statement.opcode.as_str()));
        if !(has("relaxed") && listed) {
            return Some("orders nothing");
        }
    }
    None
}

/// Whether the instruction moves 16 bytes.
fn is_wide(statement: &Statement) -> bool {
    let has = |part: &str| statement.parts().any(|p| p == part);
    let any = |parts: [&str; 4]| parts.into_iter().any(has);
    has("b128")
        || has("v2") && any(["u64", "b64", "s64", "f64"])
        || has("v4") && any(["u32", "b32", "s32", "f32"])
}

/// The statements that perform the steps of the protocol.
struct Steps<'a> {
    flow: &'a Flow<'a>,
    /// Stores of rows, shapes and reports: whatever has no order of its own.
    plain_stores: Vec<usize>,
    plain_loads: Vec<usize>,
    wide_stores: Vec<usize>,
    wide_loads: Vec<usize>,
    /// Meetings of a block's threads.
    barriers: Vec<usize>,
    /// Those that also count votes.
    votes: Vec<usize>,
    arrivals: Vec<usize>,
    /// Releases to other ranks from which the wait can still be reached.
    publishes: Vec<usize>,
    multicast_stores: Vec<usize>,
    multicast_publishes: Vec<usize>,
    /// Acquires of other ranks' signals.
    waits: Vec<usize>,
    alias_fences: Vec<usize>,
    /// Releases within the GPU: the epoch, or that the generation is poisoned.
    endings: Vec<usize>,
    /// Acquires of those.
    follows: Vec<usize>,
}

impl<'a> Steps<'a> {
    fn of(flow: &'a Flow<'a>) -> Self {
        let is = |name: &'static str, modifiers: &'static [&'static str]| {
            flow.all(|statement| statement.is(name, modifiers))
        };
        let ordered = |s: &Statement| {
            let order = ["relaxed", "acquire", "release", "volatile", "mmio"];
            s.parts().any(|part| order.contains(&part))
        };
        let memory = |s: &Statement| !s.is("ld", &["param"]) && !s.is("st", &["param"]);
        let plain = |name| flow.all(|s: &Statement| s.is(name, &[]) && memory(s) && !ordered(s));
        let wide = |at: &usize| is_wide(&flow.statements[*at]);

        let multicast_stores = is("multimem", &["st", "relaxed"]);
        let mut plain_stores = plain("st");
        plain_stores.extend(&multicast_stores);
        let plain_loads = plain("ld");
        let waits = is("ld", &["acquire", "sys"]);
        let multicast_publishes = is("multimem", &["st", "release", "sys"]);
        let mut publishes = is("st", &["release", "sys"]);
        publishes.extend(&multicast_publishes);
        publishes.retain(|&publish| flow.reaches(&[publish], &waits));
        Steps {
            flow,
            wide_stores: plain_stores.iter().copied().filter(wide).collect(),
            wide_loads: plain_loads.iter().copied().filter(wide).collect(),
            plain_stores,
            plain_loads,
            barriers: flow.all(|s| s.is("bar", &[]) || s.is("barrier", &[])),
            votes: flow.all(|s| s.is("bar", &["red"]) || s.is("barrier", &["red"])),
            arrivals: is("atom", &["acq_rel", "add"]),
            publishes,
            multicast_stores,
            multicast_publishes,
            waits,
            alias_fences: is("fence", &["proxy", "alias"]),
            endings: is("st", &["release", "gpu"]),
            follows: is("ld", &["acquire", "gpu"]),
        }
    }

    /// The steps that a gather lacks.
    fn missing(&self) -> Vec<String> {
        let flow = self.flow;
        let looped = self.wide_loads.iter().any(|&load| {
            self.wide_stores
                .iter()
                .any(|&store| flow.reaches(&[load], &[store]) && flow.reaches(&[store], &[load]))
        });
        let needed = [
            (looped, "no loop loads and stores 16 bytes at a time"),
            (
                flow.reaches(&self.plain_stores, &self.arrivals),
                "no store of rows leads to an acq_rel count",
            ),
            (
                flow.reaches(&self.arrivals, &self.publishes),
                "no acq_rel count leads to a release to the peers",
            ),
            (
                flow.reaches(&self.publishes, &self.waits),
                "no release to the peers leads to an acquire of theirs",
            ),
            (
                flow.reaches(&self.waits, &self.endings),
                "no acquire of the peers leads to a release of the epoch",
            ),
        ];
        let missing = needed.into_iter().filter(|(there, _)| !there);
        missing.map(|(_, what)| what.to_owned()).collect()
    }

    /// The paths on which steps come in another order than the protocol's.
    fn misplaced(&self, expected: Expected) -> Vec<String> {
        let flow = self.flow;
        let mut paths = vec![
            (
                flow.avoids(&self.plain_stores, &self.arrivals, &self.barriers),
                "from a store to the count past no barrier",
            ),
            (
                flow.avoids(&self.arrivals, &self.publishes, &self.votes),
                "from the count to a release to the peers past no vote",
            ),
            (
                self.meetings_before(&self.publishes) < 2,
                "to a release to the peers past fewer than two barriers",
            ),
            (
                self.meetings_before(&self.waits) < 2,
                "to an acquire of the peers past fewer than two barriers",
            ),
            (
                flow.reaches(&self.waits, &self.publishes),
                "from an acquire of the peers back to a release to them",
            ),
            (
                flow.avoids(&self.waits, &self.endings, &self.barriers),
                "from an acquire of the peers to a release of the epoch past no barrier",
            ),
            (
                flow.avoids(&self.follows, &self.wide_loads, &self.barriers),
                "from an acquire of the epoch to a load of rows past no barrier",
            ),
        ];
        if expected.multicast {
            let mut readers = self.barriers.clone();
            readers.extend(&self.plain_loads);
            paths.extend([
                (
                    flow.avoids(
                        &self.multicast_stores,
                        &self.multicast_publishes,
                        &self.alias_fences,
                    ),
                    "from a multicast store to the multicast release past no alias fence",
                ),
                (
                    flow.avoids(&self.waits, &readers, &self.alias_fences),
                    "from an acquire of the peers to a reader past no alias fence",
                ),
            ]);
        }
        let found = paths.into_iter().filter(|(found, _)| *found);
        found
            .map(|(_, path)| format!("a path leads {path}"))
            .collect()
    }

    /// The fewest barriers on any path from the start to one of `ends`.
    fn meetings_before(&self, ends: &[usize]) -> usize {
        let fewest = self.flow.fewest(&[0], &self.barriers);
        let reached = ends.iter().filter_map(|&end| fewest[end]);
        reached.min().unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
pub(super) mod tests;
