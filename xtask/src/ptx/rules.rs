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

/// Begins the names of the entry points that perform a whole gather.
const GATHERS: &str = "direct_dcp_gather_";

/// Begins the names of those that store each row in its final place, and of those that convert
/// elements on the way to twice as many bytes.
const PLACES: &str = "direct_dcp_place_";
const DEQUANTIZES: &str = "direct_dcp_dequantize_";

/// Begins the names of those of the algorithm that this one replaces. They are here to be measured,
/// and the order of their steps is not ours.
const STAGED: &str = "direct_dcp_staged_";

/// Atomics that may be relaxed: entry point and opcode.
const RELAXED: [(&str, &str); 1] = [(
    "direct_dcp_staged_publish",
    "atom.relaxed.gpu.global.add.u32",
)];

/// What a name says: `direct_dcp_gather_into_16` copies out, and stores 16 bytes at a time.
#[derive(Clone, Copy)]
struct Kernel {
    bytes: u32,
    /// Bytes of each load that a store stems from.
    reads: u32,
    copies_out: bool,
}

impl Kernel {
    fn of(name: &str) -> Option<Self> {
        let zero_copy = |width: &str, widens: u32| {
            let bytes = width.parse().ok()?;
            Some(Kernel {
                bytes,
                reads: bytes / widens,
                copies_out: false,
            })
        };
        if let Some(width) = name.strip_prefix(PLACES) {
            return zero_copy(width, 1);
        }
        if let Some(width) = name.strip_prefix(DEQUANTIZES) {
            return zero_copy(width, 2);
        }
        let rest = name.strip_prefix(GATHERS)?;
        let Some(width) = rest.strip_prefix("into_") else {
            return zero_copy(rest, 1);
        };
        let copies_out = true;
        zero_copy(width, 1).map(|kernel| Kernel {
            copies_out,
            ..kernel
        })
    }
}

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
    let mut widest = 0;
    for function in module.entries() {
        let name = &function.name;
        if name.starts_with(STAGED) {
            continue;
        }
        let Some(kernel) = Kernel::of(name) else {
            wrong.push(format!("`{name}` says nothing of what it does"));
            continue;
        };
        widest = widest.max(kernel.bytes);
        match Flow::of(function) {
            Err(error) => wrong.push(error),
            Ok(flow) => {
                let steps = Steps::of(&flow, kernel);
                let broken = [steps.missing(kernel), steps.misplaced(expected)].concat();
                wrong.extend(broken.into_iter().map(|why| format!("{name}: {why}")));
            }
        }
    }
    if widest != 16 {
        wrong.push("no gather moves 16 bytes at a time".to_owned());
    }
    wrong
}

/// Why a statement may not stand in any function.
fn banned(function: &Function, statement: &Statement, expected: Expected) -> Option<&'static str> {
    let has = |part| has(statement, part);
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
    if has("nc") {
        return Some("reads past the coherent caches");
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

fn is_barrier(statement: &Statement) -> bool {
    ["bar", "barrier"].contains(&statement.parts().next().unwrap_or_default())
}

fn has(statement: &Statement, part: &str) -> bool {
    statement.parts().any(|p| p == part)
}

/// How many bytes an instruction moves.
fn bytes(statement: &Statement) -> u32 {
    let size = |part: &str| {
        let bits = part.strip_prefix(['b', 'u', 's', 'f'])?;
        bits.parse::<u32>().ok().map(|bits| bits / 8)
    };
    let element = statement.parts().filter_map(size).last().unwrap_or(0);
    let elements = statement
        .parts()
        .find_map(|part| part.strip_prefix('v')?.parse().ok());
    element * elements.unwrap_or(1)
}

/// The statements that perform the steps of the protocol.
struct Steps<'a> {
    flow: &'a Flow<'a>,
    /// Stores of rows, shapes and reports: whatever has no order of its own.
    plain_stores: Vec<usize>,
    plain_loads: Vec<usize>,
    /// Those of as many bytes as the kernel moves at a time.
    row_stores: Vec<usize>,
    row_loads: Vec<usize>,
    /// Meetings of a block's threads.
    barriers: Vec<usize>,
    /// Those that count votes, and those that do not.
    votes: Vec<usize>,
    meetings: Vec<usize>,
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
    fn of(flow: &'a Flow<'a>, kernel: Kernel) -> Self {
        let is = |name: &'static str, modifiers: &'static [&'static str]| {
            flow.all(|statement| statement.is(name, modifiers))
        };
        let ordered = |s: &Statement| {
            let order = ["relaxed", "acquire", "release", "volatile", "mmio"];
            s.parts().any(|part| order.contains(&part))
        };
        let memory = |s: &Statement| !s.is("ld", &["param"]) && !s.is("st", &["param"]);
        let plain = |name| flow.all(|s: &Statement| s.is(name, &[]) && memory(s) && !ordered(s));
        let of = |size: u32| move |at: &usize| bytes(&flow.statements[*at]) == size;

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
            row_stores: plain_stores
                .iter()
                .copied()
                .filter(of(kernel.bytes))
                .collect(),
            row_loads: plain_loads
                .iter()
                .copied()
                .filter(of(kernel.reads))
                .collect(),
            plain_stores,
            plain_loads,
            barriers: flow.all(is_barrier),
            votes: flow.all(|s| is_barrier(s) && has(s, "red")),
            meetings: flow.all(|s| is_barrier(s) && !has(s, "red")),
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
    fn missing(&self, kernel: Kernel) -> Vec<String> {
        let flow = self.flow;
        let looped = self.row_loads.iter().any(|&load| {
            self.row_stores
                .iter()
                .any(|&store| flow.reaches(&[load], &[store]) && flow.reaches(&[store], &[load]))
        });
        let needed = [
            (
                looped,
                "no loop loads and stores as many bytes at a time as the name says",
            ),
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
            (
                // Only the last block may wait where the grid may be larger than the GPU.
                kernel.copies_out || self.follows.is_empty(),
                "a block that is not the last waits, without a copy to make",
            ),
            (
                !kernel.copies_out || flow.reaches(&self.follows, &self.row_loads),
                "no acquire of the epoch leads to a copy of the peers' rows",
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
                flow.avoids(&self.first_stores(), &self.votes, &self.meetings),
                "from a store of rows to a vote past no barrier before it",
            ),
            (
                flow.avoids(&self.arrivals, &self.publishes, &self.votes),
                "from the count to a release to the peers past no vote",
            ),
            (
                self.unmet(&self.publishes),
                "to a release to the peers past no barrier",
            ),
            (
                self.unmet(&self.waits),
                "to an acquire of the peers past no barrier",
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
                flow.avoids(&self.follows, &self.row_loads, &self.barriers),
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

    /// The stores of rows from which the count can still be reached.
    fn first_stores(&self) -> Vec<usize> {
        let stores = self.row_stores.iter().copied();
        let first = stores.filter(|&store| self.flow.reaches(&[store], &self.arrivals));
        first.collect()
    }

    /// Whether some path leads from the start to one of `ends` past no barrier. (One is enough for
    /// a launch of one block, which does not count; a path that counts must pass a vote too.)
    fn unmet(&self, ends: &[usize]) -> bool {
        self.flow.avoids(&[0], ends, &self.barriers)
    }
}

#[cfg(test)]
pub(super) mod tests;
