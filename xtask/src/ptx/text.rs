//! PTX, taken apart: a module, its functions, and their instructions.

/// A PTX module.
#[derive(Debug, Default)]
pub(crate) struct Module {
    /// As written: `8.1`.
    pub(crate) version: String,
    /// As written: `sm_90`.
    pub(crate) target: String,
    pub(crate) functions: Vec<Function>,
    /// Statements outside of functions, apart from the version, the target and the address size.
    pub(crate) others: Vec<Statement>,
}

/// An entry point, or a function that one calls.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) entry: bool,
    pub(crate) body: Vec<Statement>,
}

/// An instruction, a directive or a label.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Statement {
    /// Counted from 1.
    pub(crate) line: usize,
    /// The predicate of a conditional instruction, with its `@`.
    pub(crate) guard: Option<String>,
    /// `ld.global.u32`, `.reg`, or the name of a label with its colon.
    pub(crate) opcode: String,
    pub(crate) operands: String,
}

impl Statement {
    fn new(line: usize, text: &str) -> Self {
        let (guard, text) = match text.starts_with('@') {
            true => {
                let (guard, text) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
                (Some(guard.to_owned()), text.trim())
            }
            false => (None, text),
        };
        let (opcode, operands) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        Statement {
            line,
            guard,
            opcode: opcode.to_owned(),
            operands: operands.trim().to_owned(),
        }
    }

    /// The parts of the opcode: `ld`, `global`, `u32`.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &str> {
        self.opcode.split('.')
    }

    /// Whether the opcode begins with `name` and has all `modifiers`.
    pub(crate) fn is(&self, name: &str, modifiers: &[&str]) -> bool {
        self.parts().next() == Some(name)
            && modifiers
                .iter()
                .all(|modifier| self.parts().any(|part| part == *modifier))
    }

    /// The label that this statement is.
    pub(crate) fn label(&self) -> Option<&str> {
        self.opcode.strip_suffix(':')
    }
}

impl Module {
    /// Takes `text` apart.
    ///
    /// # Errors
    /// A sentence, where the text is not what a compiler writes.
    pub(crate) fn parse(text: &str) -> Result<Module, String> {
        let text = without_comments(text);
        let mut scanner = Scanner {
            rest: &text,
            line: 1,
        };
        let mut module = Module::default();
        while let Some((line, head, end)) = scanner.until(&['\n', ';', '{']) {
            let statement = Statement::new(line, &head);
            match (statement.opcode.as_str(), end) {
                (".version", '\n') => module.version = statement.operands,
                (".target", '\n') => module.target = statement.operands,
                (".address_size", '\n') => {}
                (_, '\n') => {
                    // A header that goes on.
                    let (_, rest, end) = scanner
                        .until(&[';', '{'])
                        .ok_or_else(|| format!("line {line}: `{head}` does not end"))?;
                    module.add(line, &format!("{head} {rest}"), end, &mut scanner)?;
                }
                (_, end) => module.add(line, &head, end, &mut scanner)?,
            }
        }
        Ok(module)
    }

    /// Adds what the header `head` begins, which `end` follows.
    fn add(
        &mut self,
        line: usize,
        head: &str,
        end: char,
        scanner: &mut Scanner<'_>,
    ) -> Result<(), String> {
        let mut words = head.split_whitespace();
        let kind = words.find(|word| [".entry", ".func"].contains(word));
        let (Some(kind), '{') = (kind, end) else {
            self.others.push(Statement::new(line, head));
            return Ok(());
        };
        // A function's result stands in parentheses before its name.
        let name = words
            .find(|word| !word.starts_with(['.', '(']) && !word.ends_with(')'))
            .unwrap_or_default();
        self.functions.push(Function {
            name: name.split('(').next().unwrap_or_default().to_owned(),
            entry: kind == ".entry",
            body: body(scanner).ok_or_else(|| format!("line {line}: `{name}` does not end"))?,
        });
        Ok(())
    }

    /// The entry points.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &Function> {
        self.functions.iter().filter(|function| function.entry)
    }
}

/// The statements up to the brace that closes a function.
fn body(scanner: &mut Scanner<'_>) -> Option<Vec<Statement>> {
    let mut statements = Vec::new();
    let mut depth = 1;
    loop {
        scanner.skip_space();
        let line = scanner.line;
        // At the start of a statement a brace opens or closes a scope; elsewhere it groups operands.
        if scanner.take('{') {
            depth += 1;
        } else if scanner.take('}') {
            depth -= 1;
            if depth == 0 {
                return Some(statements);
            }
        } else {
            let (_, text, end) = scanner.until(&[';', ':'])?;
            let text = match end {
                ':' => format!("{text}:"),
                _ => text,
            };
            statements.push(Statement::new(line, &text));
        }
    }
}

struct Scanner<'a> {
    rest: &'a str,
    line: usize,
}

impl Scanner<'_> {
    fn advance(&mut self, bytes: usize) {
        let (passed, rest) = self.rest.split_at(bytes);
        self.line += passed.matches('\n').count();
        self.rest = rest;
    }

    fn skip_space(&mut self) {
        let space = self.rest.len() - self.rest.trim_start().len();
        self.advance(space);
    }

    fn take(&mut self, c: char) -> bool {
        let found = self.rest.starts_with(c);
        if found {
            self.advance(c.len_utf8());
        }
        found
    }

    /// The text up to one of `ends`, with the line where it starts, and which one it was. Spaces
    /// and line breaks before it are skipped.
    fn until(&mut self, ends: &[char]) -> Option<(usize, String, char)> {
        self.skip_space();
        let at = self.rest.find(ends)?;
        let line = self.line;
        let words: Vec<&str> = self.rest[..at].split_whitespace().collect();
        let text = words.join(" ");
        let end = self.rest[at..].chars().next()?;
        self.advance(at + end.len_utf8());
        Some((line, text, end))
    }
}

/// The text without comments, its line breaks kept.
pub(crate) fn without_comments(text: &str) -> String {
    let lines = text.lines().map(|line| match line.split_once("//") {
        Some((code, _)) => code.trim_end(),
        None => line.trim_end(),
    });
    lines.flat_map(|line| [line, "\n"]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_a_module_apart() {
        let module = Module::parse(
            "// comment\n.version 7.0\n.target sm_80\n.address_size 64\n\n\
             .global .align 4 .b8 data[4];\n\
             .visible .func (.param .b32 r) helper(\n\t.param .b64 p\n)\n.noreturn\n{\n\tret;\n}\n\
             .visible .entry gather(\n\t.param .b64 a,\n\t.param .b64 b\n)\n{\n\
             \t.reg .b32 \t%r<2>;\n$L__1:\n\t// inline\n\t{\n.reg .pred %p;\n}\n\
             \tld.global.v2.u64 \t{%rd1, %rd2}, [%rd3];\n\t@!%p1 bra.uni \t$L__1;\n\tret;\n}\n",
        )
        .unwrap();
        assert_eq!(
            (module.version.as_str(), module.target.as_str()),
            ("7.0", "sm_80")
        );
        assert_eq!(module.others[0].opcode, ".global");
        let [helper, gather] = &module.functions[..] else {
            panic!("{module:?}");
        };
        assert_eq!((helper.name.as_str(), helper.entry), ("helper", false));
        assert_eq!((gather.name.as_str(), gather.entry), ("gather", true));
        let opcodes: Vec<&str> = gather.body.iter().map(|s| s.opcode.as_str()).collect();
        assert_eq!(
            opcodes,
            [
                ".reg",
                "$L__1:",
                ".reg",
                "ld.global.v2.u64",
                "bra.uni",
                "ret"
            ]
        );
        let load = &gather.body[3];
        assert_eq!(
            (load.line, load.operands.as_str()),
            (25, "{%rd1, %rd2}, [%rd3]")
        );
        assert!(load.is("ld", &["v2", "global"]) && !load.is("ld", &["v4"]));
        assert_eq!(gather.body[4].guard.as_deref(), Some("@!%p1"));
        assert_eq!(gather.body[1].label(), Some("$L__1"));
    }

    #[test]
    fn what_does_not_end_is_refused() {
        for bad in [
            ".visible .entry gather(\n)\n{\n\tret;\n",
            ".visible .entry gather(\n",
        ] {
            assert!(Module::parse(bad).is_err(), "{bad}");
        }
    }
}
