//! The paths of control through a function.

use std::collections::HashMap;

use super::text::{Function, Statement};

/// A function's statements, and which may follow which.
#[derive(Debug)]
pub(crate) struct Flow<'a> {
    pub(crate) statements: &'a [Statement],
    next: Vec<Vec<usize>>,
}

impl<'a> Flow<'a> {
    /// # Errors
    /// A sentence, where a branch leads nowhere.
    pub(crate) fn of(function: &'a Function) -> Result<Self, String> {
        let statements = &function.body[..];
        let labels: HashMap<&str, usize> = (0..)
            .zip(statements)
            .filter_map(|(at, statement)| Some((statement.label()?, at)))
            .collect();
        let find = |statement: &Statement, name: &str| {
            let line = statement.line;
            let found = labels.get(name).copied();
            found.ok_or_else(|| format!("line {line}: no label {name}"))
        };
        let mut next = Vec::with_capacity(statements.len());
        for (at, statement) in statements.iter().enumerate() {
            let mut follow = Vec::new();
            let name = statement.parts().next().unwrap_or_default();
            if name == "bra" {
                follow.push(find(statement, &statement.operands)?);
            } else if name == "brx" {
                // An index, and the label of a table of labels.
                let (_, table) = statement.operands.split_once(", ").unwrap_or_default();
                let table = find(statement, table)? + 1;
                let targets = statements.get(table).map_or("", |table| &table.operands);
                for target in targets.split(", ") {
                    follow.push(find(statement, target)?);
                }
            }
            let ends = ["bra", "brx", "ret", "exit", "trap"].contains(&name);
            if at + 1 < statements.len() && (!ends || statement.guard.is_some()) {
                follow.push(at + 1);
            }
            next.push(follow);
        }
        Ok(Flow { statements, next })
    }

    /// The statements with this property.
    pub(crate) fn all(&self, property: impl Fn(&Statement) -> bool) -> Vec<usize> {
        (0..self.statements.len())
            .filter(|&at| property(&self.statements[at]))
            .collect()
    }

    /// Whether some path leads from one of `starts` to one of `ends` past none of `milestones`.
    pub(crate) fn avoids(&self, starts: &[usize], ends: &[usize], milestones: &[usize]) -> bool {
        let mut seen = vec![false; self.statements.len()];
        let mut open: Vec<usize> = starts.to_vec();
        while let Some(at) = open.pop() {
            for &next in &self.next[at] {
                if !seen[next] {
                    seen[next] = true;
                    if !milestones.contains(&next) {
                        open.push(next);
                    }
                }
            }
        }
        ends.iter().any(|&end| seen[end])
    }

    /// Whether some path leads from one of `starts` to one of `ends`.
    pub(crate) fn reaches(&self, starts: &[usize], ends: &[usize]) -> bool {
        self.avoids(starts, ends, &[])
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::Module;
    use super::*;

    fn function(body: &str) -> Function {
        let text = format!(".entry f(\n)\n{{\n{body}\n}}\n");
        Module::parse(&text).unwrap().functions.remove(0)
    }

    #[test]
    fn paths_branch_loop_and_end() {
        let function = function("start; @%p bra $B; stop; ret; $B: bar; $C: bar; @%q bra $C; end;");
        let flow = Flow::of(&function).unwrap();
        let at = |name: &str| flow.all(|s| s.opcode == name);
        let [start, stop, bars, end] = [at("start"), at("stop"), at("bar"), at("end")];
        assert!(flow.reaches(&start, &stop) && !flow.reaches(&stop, &end));
        assert!(flow.avoids(&start, &stop, &bars) && !flow.avoids(&start, &end, &bars));
        assert!(flow.reaches(&bars[1..], &bars[1..]) && !flow.reaches(&bars[..1], &bars[..1]));
    }

    #[test]
    fn a_table_of_branches() {
        let body = "start; $T: .branchtargets\n$A,\n$B; brx.idx %r1, $T; no; $A: a; ret; $B: b;";
        let function = function(body);
        let flow = Flow::of(&function).unwrap();
        let reached = |name: &str| {
            let at = |name: &str| flow.all(|s| s.opcode == name);
            flow.reaches(&at("start"), &at(name))
        };
        assert!(reached("a") && reached("b") && !reached("no"));
    }

    #[test]
    fn a_branch_to_nowhere_is_refused() {
        for bad in [
            "bra $X;",
            "brx.idx %r1, $T;",
            "$T: .branchtargets $X; brx.idx %r1, $T;",
        ] {
            assert!(Flow::of(&function(bad)).is_err(), "{bad}");
        }
    }
}
