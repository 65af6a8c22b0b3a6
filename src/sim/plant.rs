//! Bugs that are planted to see that they are found.

/// A bug, put into a simulated process's inputs or outputs: production carries none of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Plant {
    /// The coordinator believes replies of cancelled speculations.
    FenceDropped,
    /// Stages take frames of any view from anybody.
    ZombieAccepted,
    /// Tokens are told before the log has them.
    TokenReleasedBeforeLogged,
}

impl Plant {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::FenceDropped, Self::ZombieAccepted, Self::TokenReleasedBeforeLogged];

    /// Its name on command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FenceDropped => "fence-dropped",
            Self::ZombieAccepted => "zombie-accepted",
            Self::TokenReleasedBeforeLogged => "token-released-before-logged",
        }
    }

    /// The one of that name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|plant| plant.name() == name)
    }
}
