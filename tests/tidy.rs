//! The style as a test: caps on size, headers, and where the clock, the environment and `unsafe` may be.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::fs;
use std::path::{Path, PathBuf};

const FILE_LINES_MAX: usize = 700;
const FUNCTION_LINES_MAX: usize = 70;
const PARAMETERS_MAX: usize = 6;

/// Files that may say `unsafe`: the kernels, the mapped weights, and system calls on processes.
const UNSAFE_ALLOWED: &[&str] =
    &["crates/engine/src/engine/cpu/", "crates/cuda/", "crates/engine/src/model/source.rs", "src/cli/process.rs"];

/// What no file may say, and what to do; the pattern is cut in two so that this file does not say it.
const FORBIDDEN: &[(&str, &str, &str)] = &[
    ("todo", "!(", "write it"),
    ("unimpl", "emented!(", "write it"),
    ("#[ign", "ore", "a check that does not run proves nothing"),
    ("dbg", "!(", "use a log"),
    ("../sh", "ared", "the repository stands alone"),
    ("/work", "/", "no path of one machine"),
    ("/tmp", "/wt", "no path of one machine"),
    ("/home", "/", "no path of one machine"),
    ("/root", "/", "no path of one machine"),
    ("FIX", "ME", "fix it"),
    ("TO", "DO", "do it"),
];

/// What only one file may say.
const RESERVED: &[(&str, &str, &str)] = &[
    ("Instant::", "now(", "src/clock.rs"),
    ("SystemTime::", "now(", "src/clock.rs"),
    ("env::", "var(", "src/config.rs"),
    ("env::", "var_os(", "src/config.rs"),
    ("env::", "vars(", "src/config.rs"),
];

struct Source {
    /// Relative to the package, with `/`.
    name: String,
    text: String,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn collect(folder: &Path, extensions: &[&str], into: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, extensions, into);
        } else if path.extension().is_some_and(|e| extensions.iter().any(|&wanted| e == wanted)) {
            into.push(path);
        }
    }
}

fn read(paths: Vec<PathBuf>) -> Vec<Source> {
    let one = |path: PathBuf| {
        let name = path.strip_prefix(root()).unwrap().to_str().unwrap().replace('\\', "/");
        Source { name, text: fs::read_to_string(&path).unwrap() }
    };
    let mut sources: Vec<Source> = paths.into_iter().map(one).collect();
    sources.sort_by(|a, b| a.name.cmp(&b.name));
    sources
}

fn rust() -> Vec<Source> {
    let mut paths = Vec::new();
    for folder in ["src", "tests", "benches", "crates"] {
        collect(&root().join(folder), &["rs"], &mut paths);
    }
    read(paths)
}

/// Everything that a reader may read.
fn words() -> Vec<Source> {
    let mut paths = Vec::new();
    for folder in ["docs", "benches", "src", "tests", "crates", ".ci"] {
        collect(&root().join(folder), &["rs", "md", "toml", "sh"], &mut paths);
    }
    for file in ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "Cargo.toml", "deny.toml", "clippy.toml", ".ci/run"] {
        paths.extend(Some(root().join(file)).filter(|path| path.exists()));
    }
    read(paths)
}

/// Whether a file is one of tests, or a bench of a crate below, which has no clock of the project.
fn in_tests(name: &str) -> bool {
    let below = name.starts_with("crates/") && (name.contains("/tests/") || name.contains("/benches/"));
    name.starts_with("tests/") || below
}

fn report(problems: &[String]) {
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}

#[test]
fn files_have_a_header_and_a_bound() {
    let mut problems = Vec::new();
    for Source { name, text } in rust() {
        let lines = text.lines().count();
        if lines > FILE_LINES_MAX {
            problems.push(format!("{name}: {lines} lines, {FILE_LINES_MAX} is the cap"));
        }
        if !text.starts_with("//! ") || text.lines().next().is_some_and(|line| line.len() < 12) {
            problems.push(format!("{name}: starts without a `//!` sentence that says what it owns"));
        }
    }
    report(&problems);
}

#[test]
fn functions_are_short_and_take_few_parameters() {
    let mut problems = Vec::new();
    for Source { name, text } in rust() {
        problems.extend(long_functions(&text).into_iter().map(|problem| format!("{name}:{problem}")));
    }
    report(&problems);
}

#[test]
fn nothing_is_left_for_another_day() {
    let mut problems = Vec::new();
    for Source { name, text } in words() {
        for (at, line) in text.lines().enumerate() {
            for (a, b, advice) in FORBIDDEN {
                if line.contains(&format!("{a}{b}")) {
                    problems.push(format!("{name}:{}: {a}{b}: {advice}", at + 1));
                }
            }
        }
    }
    report(&problems);
}

#[test]
fn clock_environment_and_unsafe_are_where_they_belong() {
    let mut problems = Vec::new();
    for Source { name, text } in rust() {
        let unsafe_ok = UNSAFE_ALLOWED.iter().any(|allowed| name.starts_with(allowed)) || in_tests(&name);
        for (at, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            for (a, b, owner) in RESERVED {
                if code.contains(&format!("{a}{b}")) && name != *owner && !in_tests(&name) {
                    problems.push(format!("{name}:{}: {a}{b}) belongs in {owner}", at + 1));
                }
            }
            if !unsafe_ok && code.contains(concat!("unsafe", " ")) {
                problems.push(format!("{name}:{}: unsafe outside {UNSAFE_ALLOWED:?}", at + 1));
            }
        }
    }
    report(&problems);
}

/// Functions over the caps, as `LINE: what`. Reads formatted code: a function ends at the first
/// line that is a closing brace at the indentation of its `fn`.
fn long_functions(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut problems = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(name) = function_name(line) else { continue };
        let indent = line.len() - line.trim_start().len();
        let signature = signature(&lines[at..]);
        let parameters = parameters(&signature);
        if parameters > PARAMETERS_MAX {
            problems.push(format!("{}: fn {name} takes {parameters} parameters, {PARAMETERS_MAX} is the cap", at + 1));
        }
        if signature.ends_with(';') || line.trim_end().ends_with('}') {
            continue;
        }
        let close = format!("{}}}", " ".repeat(indent));
        let length = lines[at..].iter().position(|line| *line == close).map_or(0, |end| end + 1);
        if length > FUNCTION_LINES_MAX {
            problems.push(format!("{}: fn {name} has {length} lines, {FUNCTION_LINES_MAX} is the cap", at + 1));
        }
    }
    problems
}

/// The name, where a line begins a function.
fn function_name(line: &str) -> Option<&str> {
    let mut rest = line.trim_start();
    for word in ["pub", "(crate)", "(super)", "const", "async", "unsafe", "extern", "\"C\""] {
        rest = rest.strip_prefix(word).unwrap_or(rest).trim_start();
    }
    // A macro's `fn $name` is measured where its text is, not where it is used.
    let name = rest.strip_prefix("fn ").filter(|name| !name.starts_with('$'))?;
    Some(name.split(['(', '<']).next().unwrap_or(name))
}

/// Everything up to the body's brace or the semicolon.
fn signature(lines: &[&str]) -> String {
    let mut signature = String::new();
    for line in lines {
        signature.push_str(line.trim());
        if signature.contains('{') || signature.ends_with(';') {
            break;
        }
        signature.push(' ');
    }
    signature
}

/// Top-level commas of the parameter list tell how many there are; `self` counts.
fn parameters(signature: &str) -> usize {
    let mut angle = 0;
    let mut previous = ' ';
    let start = signature.char_indices().find(|&(_, c)| {
        match c {
            '<' => angle += 1,
            '>' if previous != '-' => angle -= 1,
            _ => {}
        }
        previous = c;
        c == '(' && angle == 0
    });
    let Some((start, _)) = start else { return 0 };
    let (mut depth, mut count, mut something) = (0, 0, false);
    let mut previous = ' ';
    for c in signature[start..].chars() {
        match c {
            '(' | '[' | '<' => depth += 1,
            '>' if previous == '-' => {}
            ')' | ']' | '>' => depth -= 1,
            ',' if depth == 1 => {
                count += 1;
                something = false;
            }
            c if !c.is_whitespace() => something = true,
            _ => {}
        }
        previous = c;
        if depth == 0 {
            break;
        }
    }
    count + usize::from(something)
}

#[test]
fn the_scanner_sees_what_it_should() {
    assert_eq!(parameters("fn a()"), 0);
    assert_eq!(parameters("fn a<T: Fn(u8, u8) -> u8>(&self, b: Vec<(u8, u8)>, c: impl Fn(u8, u8) -> u8,) {"), 3);
    assert_eq!(function_name("    pub(crate) async fn go<T>(x: T) {"), Some("go"));
    assert_eq!(function_name("    let fn_pointer = 3;"), None);
    let many = format!("fn f({}) {{}}\n", "a: u8, ".repeat(7));
    assert_eq!(long_functions(&many), ["1: fn f takes 7 parameters, 6 is the cap"]);
    let long = format!("fn f() {{\n{}}}\n", "    x();\n".repeat(69));
    assert_eq!(long_functions(&long), ["1: fn f has 71 lines, 70 is the cap"]);
    let short = format!("fn f() {{\n{}}}\n", "    x();\n".repeat(68));
    assert_eq!(long_functions(&short), [""; 0]);
}
