//! What the files of a log say together, pure: the sessions, their tokens, the highest view.

use std::collections::{BTreeMap, BTreeSet};

use crate::coordinator::job::TokenScores;
use crate::coordinator::log::record::{Ended, Entry, Opened};
use crate::ids::{SessionId, TokenId, VIEW_MAX, View};

/// A session as the log knows it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Logged {
    pub(crate) opened: Opened,
    pub(crate) tokens: Vec<TokenId>,
    /// One for each of them where the request asks for log-probabilities, else none.
    pub(crate) scores: Vec<TokenScores>,
    /// `None`: it goes on.
    pub(crate) ended: Option<Ended>,
}

/// Entries that contradict one another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BookError {
    /// A view that no coordinator gives.
    #[error("view {view}, the highest one is {VIEW_MAX}")]
    View { view: View },
    /// Something about a session that the file did not open.
    #[error("session {session} is not opened in front of this record")]
    Unopened { session: SessionId },
    /// Tokens are missing.
    #[error("tokens of session {session} from {first} on, only {known} are known in front of this record")]
    Gap { session: SessionId, first: u32, known: usize },
    /// Two tokens at one place.
    #[error("session {session} has token {told} at {at}, and {got} came: two coordinators computed differently")]
    Disagree { session: SessionId, at: usize, told: TokenId, got: TokenId },
    /// Log-probabilities that are missing, or were not asked for.
    #[error("session {session} has {got} log-probabilities for {tokens} tokens, {expected} were expected")]
    Scores { session: SessionId, got: usize, tokens: usize, expected: usize },
    /// More tokens than were asked for.
    #[error("session {session} has {got} tokens, {most} were asked for")]
    TooMany { session: SessionId, got: usize, most: u32 },
}

/// The files read so far, lowest first.
#[derive(Debug, Default)]
pub(crate) struct Book {
    view: View,
    sessions: BTreeMap<SessionId, Logged>,
    /// Those that the present file opened.
    in_file: BTreeSet<SessionId>,
}

impl Book {
    /// The next file begins: what it says counts above the files before. Of the sessions that have ended,
    /// the newest `kept` stay known.
    pub(crate) fn begin_file(&mut self, view: View, kept: usize) {
        self.view = self.view.max(view);
        self.in_file.clear();
        self.forget(kept);
    }

    /// Forgets sessions that have ended, but the newest `kept`.
    pub(crate) fn forget(&mut self, kept: usize) {
        let ended = self.sessions.iter().filter(|(_, logged)| logged.ended.is_some()).map(|(id, _)| *id);
        let ended: Vec<SessionId> = ended.collect();
        for id in &ended[..ended.len().saturating_sub(kept)] {
            self.sessions.remove(id);
        }
    }

    /// Takes the next entry.
    ///
    /// # Errors
    /// [`BookError`]: it can't be behind what came before.
    pub(crate) fn take(&mut self, entry: Entry) -> Result<(), BookError> {
        match entry {
            Entry::View(view) if view > VIEW_MAX => return Err(BookError::View { view }),
            Entry::View(view) => self.view = self.view.max(view),
            Entry::Opened(opened) => {
                self.in_file.insert(opened.session);
                match self.sessions.get_mut(&opened.session) {
                    // Carried over from a file before, to go on.
                    Some(logged) if logged.opened == *opened => logged.ended = None,
                    Some(_) | None => {
                        let session = opened.session;
                        let logged = Logged { opened: *opened, tokens: Vec::new(), scores: Vec::new(), ended: None };
                        self.sessions.insert(session, logged);
                    }
                }
            }
            Entry::Tokens { session, first, ids, scores } => self.take_tokens(session, first, (&ids, &scores))?,
            Entry::Ended { session, how } => self.known(session)?.ended = Some(how),
        }
        Ok(())
    }

    fn known(&mut self, session: SessionId) -> Result<&mut Logged, BookError> {
        let known = self.sessions.get_mut(&session).filter(|_| self.in_file.contains(&session));
        known.ok_or(BookError::Unopened { session })
    }

    fn take_tokens(
        &mut self,
        session: SessionId,
        first: u32,
        (ids, scores): (&[TokenId], &[TokenScores]),
    ) -> Result<(), BookError> {
        let logged = self.known(session)?;
        let expected = if logged.opened.request.logprobs.is_some() { ids.len() } else { 0 };
        if scores.len() != expected {
            return Err(BookError::Scores { session, got: scores.len(), tokens: ids.len(), expected });
        }
        let (at, known) = (first as usize, logged.tokens.len());
        if at > known {
            return Err(BookError::Gap { session, first, known });
        }
        for (place, (told, got)) in logged.tokens[at..].iter().zip(ids).enumerate() {
            if told != got {
                return Err(BookError::Disagree { session, at: at + place, told: *told, got: *got });
            }
        }
        logged.tokens.extend_from_slice(ids.get(known - at..).unwrap_or_default());
        logged.scores.extend_from_slice(scores.get(known - at..).unwrap_or_default());
        let (got, most) = (logged.tokens.len(), logged.opened.request.max_new);
        if got > most as usize {
            return Err(BookError::TooMany { session, got, most });
        }
        Ok(())
    }

    /// The highest view.
    pub(crate) fn view(&self) -> View {
        self.view
    }

    /// The sessions, by id.
    pub(crate) fn into_sessions(self) -> BTreeMap<SessionId, Logged> {
        self.sessions
    }
}

/// What says a session in a file of its own: how it was opened, its tokens, its end.
pub(crate) fn carried(logged: &Logged) -> Vec<Entry> {
    let session = logged.opened.session;
    let mut entries = vec![Entry::Opened(Box::new(logged.opened.clone()))];
    if !logged.tokens.is_empty() {
        entries.push(Entry::Tokens { session, first: 0, ids: logged.tokens.clone(), scores: logged.scores.clone() });
    }
    entries.extend(logged.ended.map(|how| Entry::Ended { session, how }));
    entries
}
