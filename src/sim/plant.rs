//! Bugs that are planted to see that they are found.

/// A bug, put into a simulated process's inputs or outputs: production carries none of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Plant {
    /// What a journal sends to a rebuilt stage lacks its last position.
    JournalOneFrameShort,
    /// A healed session goes on one token behind where it was.
    ResumeOffByOne,
    /// A rebuilt tail has its state, and not its drafter's windows.
    DraftWindowNotRebuilt,
    /// The coordinator believes replies of cancelled speculations.
    FenceDropped,
    /// Stages take frames of any view from anybody.
    ZombieAccepted,
    /// Tokens are told before the log has them.
    TokenReleasedBeforeLogged,
    /// A coordinator panics when a session is rebuilt.
    PanicAtRebuild,
}

impl Plant {
    /// Every one.
    pub const ALL: [Self; 7] = [
        Self::FenceDropped,
        Self::ResumeOffByOne,
        Self::JournalOneFrameShort,
        Self::DraftWindowNotRebuilt,
        Self::ZombieAccepted,
        Self::TokenReleasedBeforeLogged,
        Self::PanicAtRebuild,
    ];

    /// Its name on command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::JournalOneFrameShort => "journal-one-frame-short",
            Self::ResumeOffByOne => "resume-off-by-one",
            Self::DraftWindowNotRebuilt => "draft-window-not-rebuilt",
            Self::FenceDropped => "fence-dropped",
            Self::ZombieAccepted => "zombie-accepted",
            Self::TokenReleasedBeforeLogged => "token-released-before-logged",
            Self::PanicAtRebuild => "panic-at-rebuild",
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|plant| plant.name() == name)
    }
}
