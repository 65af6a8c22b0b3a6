//! Stop strings: finds them across token boundaries and holds back what may become one.

/// Most stop strings of a request.
pub const STOPS_MAX: usize = 4;
/// Longest stop string, in bytes: bounds the text held back.
pub const STOP_BYTES_MAX: usize = 256;

/// Passes text on until a stop string is complete.
///
/// The match that ends first wins (of several ending there, the longest), so the result does not
/// depend on how the text was cut into deltas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopText {
    stops: Vec<String>,
    held: String,
}

/// What [`StopText::push`] lets through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Passed {
    /// Text that can't be part of a stop string any more.
    pub text: String,
    /// A stop string is complete; it and what follows it are dropped.
    pub stopped: bool,
}

impl StopText {
    /// Looks for `stops`; empty strings are left out, for they would match anywhere.
    #[must_use]
    pub fn new(stops: Vec<String>) -> Self {
        Self { stops: stops.into_iter().filter(|stop| !stop.is_empty()).collect(), held: String::new() }
    }

    /// Takes a delta; after a stop, gives back nothing.
    pub fn push(&mut self, delta: &str) -> Passed {
        for c in delta.chars() {
            self.held.push(c);
            let longest = self.stops.iter().filter(|stop| self.held.ends_with(stop.as_str())).map(String::len).max();
            if let Some(len) = longest {
                self.held.truncate(self.held.len() - len);
                return Passed { text: std::mem::take(&mut self.held), stopped: true };
            }
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let held = self.held.split_off(self.held.len() - keep);
        Passed { text: std::mem::replace(&mut self.held, held), stopped: false }
    }

    /// Gives out what was held back: no stop string came.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Bytes of the longest end of `text` that is a beginning of `stop`, but not all of it.
fn overlap(text: &str, stop: &str) -> usize {
    let beginnings = stop.char_indices().map(|(at, _)| at).rev();
    beginnings.filter(|&at| text.ends_with(&stop[..at])).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], deltas: &[&str]) -> (Vec<String>, bool) {
        let mut stop = StopText::new(stops.iter().map(|&s| s.to_owned()).collect());
        let mut out = Vec::new();
        for delta in deltas {
            let passed = stop.push(delta);
            out.push(passed.text);
            if passed.stopped {
                return (out, true);
            }
        }
        out.push(stop.finish());
        (out, false)
    }

    #[test]
    fn a_stop_across_deltas_is_held_back_and_never_passed() {
        assert_eq!(
            run(&["END"], &["to the E", "N", "D of"]),
            (vec!["to the ".into(), String::new(), String::new()], true)
        );
        assert_eq!(run(&["END"], &["an E", "NORMOUS"]), (vec!["an ".into(), "ENORMOUS".into(), String::new()], false));
        assert_eq!(run(&["aab"], &["aa", "aab"]), (vec![String::new(), "aa".into()], true));
    }

    #[test]
    fn what_is_held_at_the_end_comes_out() {
        assert_eq!(run(&["\n\n"], &["a\n"]), (vec!["a".into(), "\n".into()], false));
        assert_eq!(run(&["", "é!"], &["é", "?"]), (vec![String::new(), "é?".into(), String::new()], false));
    }

    proptest! {
        #[test]
        fn the_cut_into_deltas_changes_nothing(
            text in "[abé]{0,24}", stops in prop::collection::vec("[abé]{1,4}", 0..4), cuts in prop::collection::vec(1usize..5, 24),
        ) {
            let whole = {
                let mut stop = StopText::new(stops.clone());
                let passed = stop.push(&text);
                let tail = if passed.stopped { String::new() } else { stop.finish() };
                (passed.text + &tail, passed.stopped)
            };
            let mut stop = StopText::new(stops.clone());
            let (mut out, mut stopped) = (String::new(), false);
            let mut rest: Vec<char> = text.chars().rev().collect();
            for cut in cuts {
                let delta: String = (0..cut).filter_map(|_| rest.pop()).collect();
                let passed = stop.push(&delta);
                out += &passed.text;
                stopped = passed.stopped;
                if stopped { break; }
            }
            if !stopped { out += &stop.finish(); }
            prop_assert_eq!(&(out.clone(), stopped), &whole);
            for s in &stops { prop_assert!(!out.contains(s.as_str())); }
            let first = stops.iter().filter_map(|s| text.find(s.as_str()).map(|at| at + s.len())).min();
            prop_assert_eq!(stopped, first.is_some());
        }
    }
}
