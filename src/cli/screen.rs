//! Text on stdout with a progress line below it on stderr, where that is a terminal.

use std::fmt;
use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressState, ProgressStyle};

/// Characters of an unfinished line that are shown above the progress line.
const LINE_CHARS_MAX: usize = 1_000;

/// Progress where stdout is elsewhere.
const ALONE: &str = "{spinner} {pos}/{len} tokens, {speed} tokens/s, {elapsed}";
/// Progress below the unfinished line of text.
const SHARED: &str = "{msg}\n{spinner} {pos}/{len} tokens, {speed} tokens/s, {elapsed}";

/// Shows an answer as it comes.
pub(crate) struct Screen<'a> {
    out: &'a mut dyn Write,
    bar: Option<ProgressBar>,
    /// The unfinished line, where text and progress share a terminal: it is drawn with the
    /// progress line, and written once it is complete.
    line: Option<String>,
    last: Option<char>,
}

impl<'a> Screen<'a> {
    /// Writes text to `out`; `shared` says whether that is a terminal. `tokens` is the most that
    /// can come.
    pub(crate) fn new(out: &'a mut dyn Write, shared: bool, tokens: u64) -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(tokens);
            let template = if shared { SHARED } else { ALONE };
            // The templates are constants; if one were wrong, the default style would show.
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.with_key("speed", |state: &ProgressState, text: &mut dyn fmt::Write| {
                    // Writing to a text in memory does not fail.
                    let _ = write!(text, "{:.1}", state.per_sec());
                }));
            }
            bar.enable_steady_tick(std::time::Duration::from_millis(100));
            bar
        });
        let line = (shared && bar.is_some()).then(String::new);
        Self { out, bar, line, last: None }
    }

    /// Shows a delta after `tokens` tokens.
    pub(crate) fn show(&mut self, delta: &str, tokens: u64) -> io::Result<()> {
        self.last = delta.chars().last().or(self.last);
        if let (Some(bar), Some(line)) = (&self.bar, &mut self.line) {
            line.push_str(delta);
            let rest = line.split_off(line.rfind('\n').map_or(0, |end| end + 1));
            let complete = std::mem::replace(line, rest);
            let skip = line.chars().count().saturating_sub(LINE_CHARS_MAX);
            bar.set_message(line.chars().skip(skip).collect::<String>());
            if !complete.is_empty() {
                bar.suspend(|| self.out.write_all(complete.as_bytes()).and_then(|()| self.out.flush()))?;
            }
        } else {
            self.out.write_all(delta.as_bytes())?;
            self.out.flush()?;
        }
        if let Some(bar) = &self.bar {
            bar.set_position(tokens);
        }
        Ok(())
    }

    /// Shows a note between the lines of the text.
    pub(crate) fn say(&mut self, note: &str) -> io::Result<()> {
        let mut err = io::stderr();
        match &self.bar {
            Some(bar) => bar.suspend(|| writeln!(err, "[{note}]")),
            None => writeln!(err, "\n[{note}]"),
        }
    }

    /// Takes the progress line away and ends the text with a line feed.
    pub(crate) fn finish(self) -> io::Result<()> {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.out.write_all(self.line.unwrap_or_default().as_bytes())?;
        if self.last.is_some_and(|c| c != '\n') {
            self.out.write_all(b"\n")?;
        }
        self.out.flush()
    }
}
