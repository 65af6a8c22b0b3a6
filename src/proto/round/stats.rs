//! What a session counts; the definitions are in `docs/protocol.md`.

/// One session's counters.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RoundStats {
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Tokens committed.
    pub committed: u32,
    /// Tokens committed by a single-position frame's reply: all but the first, which is the
    /// prompt's answer.
    pub decoded: u32,
    /// Answers that contradicted the draft in flight behind them.
    pub rejections: u32,
    /// Prompt chunks sent.
    pub chunks_sent: u64,
    /// Single-position frames sent past the prompt.
    pub singles_sent: u64,
    /// Frames in flight that were given up: rejected, or past the session's end.
    pub cancelled: u64,
    /// Most frames in flight at once, prompt chunks included.
    pub max_in_flight: u32,
    /// Most replies held at once for one in front of them.
    pub max_early: u32,
    /// Replies that changed nothing: of an older view or epoch, or judged before.
    pub stale_replies: u64,
    /// Drafts in flight that an answer was compared with, by how far ahead of the frontier they
    /// were sent; depth 1 first.
    pub judged: Vec<u64>,
    /// Those of `judged` that were the model's token.
    pub confirmed: Vec<u64>,
}

impl RoundStats {
    /// Committed decode tokens / (rejections + 1).
    #[must_use]
    pub fn acceptance_length(&self) -> f64 {
        f64::from(self.decoded) / (f64::from(self.rejections) + 1.0)
    }

    /// Confirmed / judged, depth 1 first; 0 at a depth where nothing was judged.
    #[must_use]
    pub fn accept_by_depth(&self) -> Vec<f64> {
        let share = |(&confirmed, &judged): (&u64, &u64)| if judged == 0 { 0.0 } else { ratio(confirmed, judged) };
        self.confirmed.iter().zip(&self.judged).map(share).collect()
    }

    /// Single-position frames sent / committed tokens; 0 before the first token.
    #[must_use]
    pub fn frames_per_token(&self) -> f64 {
        if self.committed == 0 { 0.0 } else { ratio(self.singles_sent, u64::from(self.committed)) }
    }

    /// Adds what another round of the same session counted. The replay's own commit is no new one.
    pub fn absorb(&mut self, other: &Self) {
        let replays = u32::from(self.committed > 0 && other.committed > 0);
        self.committed += other.committed - replays;
        self.prompt_tokens = self.prompt_tokens.max(other.prompt_tokens);
        self.decoded += other.decoded;
        self.rejections += other.rejections;
        self.chunks_sent += other.chunks_sent;
        self.singles_sent += other.singles_sent;
        self.cancelled += other.cancelled;
        self.max_in_flight = self.max_in_flight.max(other.max_in_flight);
        self.max_early = self.max_early.max(other.max_early);
        self.stale_replies += other.stale_replies;
        for (mine, theirs) in [(&mut self.judged, &other.judged), (&mut self.confirmed, &other.confirmed)] {
            mine.resize(mine.len().max(theirs.len()), 0);
            mine.iter_mut().zip(theirs).for_each(|(mine, theirs)| *mine += theirs);
        }
    }

    /// Counts a draft sent `depth` ahead that was compared with the model's answer.
    pub(super) fn judge(&mut self, depth: u32, confirmed: bool) {
        let at = depth as usize;
        if self.judged.len() < at {
            self.judged.resize(at, 0);
            self.confirmed.resize(at, 0);
        }
        self.judged[at - 1] += 1;
        self.confirmed[at - 1] += u64::from(confirmed);
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}
