//! Percentiles, CPU time, rows of tables, and bars.

use std::time::Duration;

/// What is asked of a hop, and whether it was met.
#[derive(Debug, Default)]
pub(crate) struct Bars {
    lines: Vec<String>,
    missed: usize,
}

impl Bars {
    /// Holds a value against the most that is allowed.
    pub(crate) fn hold(&mut self, what: &str, value: f64, most: f64) {
        let verdict = if value <= most { "PASS" } else { "MISS" };
        self.missed += usize::from(value > most);
        let line = format!("{verdict}  {what}: {value:.2}, {most:.2} at most");
        println!("{line}");
        self.lines.push(line);
    }

    /// Prints all again, at the end.
    pub(crate) fn print(&self) {
        println!("\nbars: {} held, {} missed", self.lines.len() - self.missed, self.missed);
        for line in &self.lines {
            println!("{line}");
        }
    }
}

/// Times in order.
#[derive(Debug, Clone)]
pub(crate) struct Times(Vec<Duration>);

impl Times {
    /// # Panics
    /// Where there are none.
    pub(crate) fn new(mut times: Vec<Duration>) -> Self {
        assert!(!times.is_empty(), "nothing was measured");
        times.sort_unstable();
        Self(times)
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// In ms: the time that `percent` of a hundred stay within.
    pub(crate) fn percentile(&self, percent: usize) -> f64 {
        self.0[(self.0.len() * percent).div_ceil(100).clamp(1, self.0.len()) - 1].as_secs_f64() * 1e3
    }

    pub(crate) fn p50(&self) -> f64 {
        self.percentile(50)
    }

    pub(crate) fn p99(&self) -> f64 {
        self.percentile(99)
    }

    pub(crate) fn max(&self) -> f64 {
        self.percentile(100)
    }
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// CPU time of this process, both ends of a hop.
pub(crate) fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap(), u32::try_from(time.tv_nsec).unwrap())
}

/// Starts a table.
pub(crate) fn head(title: &str, columns: &[&str]) {
    println!("\n{title}\n\n| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len()));
}

/// Adds a row.
pub(crate) fn row(cells: &[String]) {
    println!("| {} |", cells.join(" | "));
}

/// A number, or a dash where there is none.
pub(crate) fn ratio(value: Option<f64>) -> String {
    value.map_or_else(|| "–".to_owned(), |value| format!("{value:.2}"))
}

/// A time in ms, as precise as it is worth.
pub(crate) fn ms(value: f64) -> String {
    if value < 10.0 { format!("{value:.3}") } else { format!("{value:.1}") }
}
