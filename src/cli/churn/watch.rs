//! What a coordinator tells of its ring, and a stream as its client sees it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::Value;

use crate::cli::answer::Answer;
use crate::cli::client::{Client, ClientError};
use crate::clock;

/// Pause between tries to read a stream on.
const READ_ON_PAUSE: Duration = Duration::from_millis(50);

/// The part of `/ring` that matters here.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Ring {
    pub(crate) ready: bool,
    pub(crate) members: Vec<Member>,
    pub(crate) heals: Vec<Heal>,
    pub(crate) uptime_ms: u64,
    pub(crate) rejections: u64,
    pub(crate) sessions: u32,
    pub(crate) in_flight: u32,
}

/// A stage of it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Member {
    pub(crate) peer: String,
    pub(crate) range: String,
    pub(crate) pid: Option<u32>,
    pub(crate) in_ring: bool,
    pub(crate) alive: bool,
    pub(crate) addresses: Vec<String>,
}

/// A break of it.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Heal {
    pub(crate) peer: String,
    pub(crate) reason: String,
    pub(crate) detected_ms: u64,
    pub(crate) whole_ms: Option<u64>,
    pub(crate) rebuilt_ms: Option<u64>,
    pub(crate) replayed_bytes: u64,
}

impl Ring {
    /// The members that serve, head first.
    pub(crate) fn serving(&self) -> Vec<&Member> {
        self.members.iter().filter(|member| member.in_ring).collect()
    }

    /// The members that wait.
    pub(crate) fn waiting(&self) -> Vec<&Member> {
        self.members.iter().filter(|member| !member.in_ring && member.alive).collect()
    }

    /// A stage.
    pub(crate) fn member(&self, peer: &str) -> Option<&Member> {
        self.members.iter().find(|member| member.peer == peer)
    }
}

/// A token as it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) at: Instant,
    /// Tokens so far, this one included.
    pub(crate) tokens: u64,
}

/// A stream under way, read on a thread of its own.
#[derive(Debug, Clone)]
pub(crate) struct Stream {
    state: Arc<Mutex<State>>,
    pub(crate) begun: Instant,
}

#[derive(Debug, Default)]
struct State {
    seen: Vec<Seen>,
    end: Option<Result<Vec<Value>, String>>,
}

impl Stream {
    /// Asks, and reads what comes.
    /// With `patience`, a stream that breaks off is read on, from whoever answers there next.
    pub(crate) fn start(client: Client, body: Value, patience: Duration) -> Self {
        let stream = Self { state: Arc::default(), begun: clock::now() };
        let theirs = stream.clone();
        std::thread::spawn(move || {
            let mut answer = Answer::default();
            let take = |answer: &mut Answer, event: &Value| {
                let before = answer.token_ids.len();
                answer.take(event)?;
                if answer.token_ids.len() > before {
                    theirs.lock().seen.push(Seen { at: clock::now(), tokens: answer.token_ids.len() as u64 });
                }
                Ok::<(), ClientError>(())
            };
            let mut read = client.stream(&body, |event| take(&mut answer, &event));
            let broken = clock::now();
            while read.is_err() && clock::now() - broken < patience {
                std::thread::sleep(READ_ON_PAUSE);
                // Each event so far was a token's, so the last one's number is known.
                let last = (answer.token_ids.len() as u64).checked_sub(1);
                let name = answer.id.clone();
                read = match last {
                    Some(last) => client.read_on((&name, last), |event| take(&mut answer, &event)),
                    None => client.stream(&body, |event| take(&mut answer, &event)),
                };
            }
            let end = match read {
                Ok(()) => Ok(answer.token_ids),
                Err(error) => Err(error.to_string()),
            };
            theirs.lock().end = Some(end);
        });
        stream
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tokens so far.
    pub(crate) fn tokens(&self) -> u64 {
        self.lock().seen.last().map_or(0, |seen| seen.tokens)
    }

    /// The token ids or the error, once it has ended.
    pub(crate) fn end(&self) -> Option<Result<Vec<Value>, String>> {
        self.lock().end.clone()
    }

    /// Every token as it came.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.lock().seen.clone()
    }

    /// The longest time between two events, the request being the first.
    pub(crate) fn stall(&self) -> Duration {
        let mut last = self.begun;
        let mut longest = Duration::ZERO;
        for seen in self.seen() {
            longest = longest.max(seen.at.saturating_duration_since(last));
            last = seen.at;
        }
        longest
    }
}
