//! The same layers in PyTorch on the same device, where python3 has it.

use std::io::Write;
use std::process::{Command, Stdio};

/// The script, which goes to the interpreter by its standard input.
const SCRIPT: &str = include_str!("../torch_layer.py");

/// What the script measured.
#[derive(Debug)]
pub(crate) struct Torch {
    /// Lines that are no measurement: versions, checks, what was not run.
    pub(crate) said: String,
    times: Vec<Time>,
}

#[derive(Debug)]
struct Time {
    kind: String,
    variant: String,
    mode: String,
    m: usize,
    us: f64,
}

impl Torch {
    /// Runs the script.
    ///
    /// # Errors
    /// Why there is nothing to compare with.
    pub(crate) fn run() -> Result<Self, String> {
        let mut child = Command::new("python3")
            .arg("-")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|why| format!("python3: {why}"))?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(SCRIPT.as_bytes()).map_err(|why| format!("python3: {why}"))?;
        }
        let ended = child.wait_with_output().map_err(|why| format!("python3: {why}"))?;
        let out = String::from_utf8_lossy(&ended.stdout);
        if !ended.status.success() {
            return Err(format!("python3 ended with {}: {out}", ended.status));
        }
        let mut torch = Self { said: String::new(), times: Vec::new() };
        for line in out.lines() {
            match time(line) {
                Some(time) => torch.times.push(time),
                None => torch.said += &format!("{line}\n"),
            }
        }
        for time in &torch.times {
            let Time { kind, variant, mode, m, us } = time;
            torch.said += &format!("PyTorch, {kind}, {variant}, {mode}, {m} positions: {us:.1} µs\n");
        }
        Ok(torch)
    }

    /// The fastest variant.
    pub(crate) fn best(&self, kind: &str, mode: &str, m: usize) -> Option<(f64, &str)> {
        let fits = |time: &&Time| time.kind == kind && time.mode == mode && time.m == m;
        let best = self.times.iter().filter(fits).min_by(|a, b| a.us.total_cmp(&b.us))?;
        Some((best.us, best.variant.as_str()))
    }
}

/// `time`, then kind, variant, mode, positions and microseconds, tabs between.
fn time(line: &str) -> Option<Time> {
    let mut parts = line.strip_prefix("time\t")?.split('\t');
    let mut next = || parts.next().map(str::to_owned);
    Some(Time { kind: next()?, variant: next()?, mode: next()?, m: next()?.parse().ok()?, us: next()?.parse().ok()? })
}
