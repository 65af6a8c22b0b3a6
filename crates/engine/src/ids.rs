//! Newtypes for the numbers and names that travel: nothing here computes.
//!
//! Owns the identity of positions, epochs, views, sessions, tokens, layer ranges and wire
//! encodings.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! number {
    ($(#[$meta:meta])* $name:ident($inner:ty)) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(transparent)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// An absolute position in a session's token sequence, from 0.
    Position(u32)
);
number!(
    /// A session's speculation number: rises whenever drafts in flight are cancelled.
    Epoch(u32)
);
number!(
    /// A ring membership number: rises with every re-plan.
    View(u64)
);
number!(
    /// One request's life on the ring; never used twice within a view.
    SessionId(u64)
);
number!(
    /// A token of the model's vocabulary.
    TokenId(u32)
);

impl Position {
    /// The position `n` further on, saturating.
    #[must_use]
    pub fn plus(self, n: u32) -> Self {
        Self(self.0.saturating_add(n))
    }
}

impl Epoch {
    /// The epoch after this one, saturating.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// A contiguous, half-open range of layers, written `40:43`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "(u16, u16)", into = "(u16, u16)")]
pub struct LayerRange {
    lo: u16,
    hi: u16,
}

/// Why a layer range was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayerRangeError {
    /// The text is not two numbers with a colon between.
    #[error("layer range {got:?}: expected LO:HI with LO below HI, like 40:43")]
    Syntax {
        /// The text that came.
        got: String,
    },
    /// The range holds no layer.
    #[error("layer range {lo}:{hi} holds no layer: LO must be below HI")]
    Empty {
        /// First layer.
        lo: u16,
        /// One past the last layer.
        hi: u16,
    },
}

impl LayerRange {
    /// Makes the range `lo:hi`.
    ///
    /// # Errors
    /// [`LayerRangeError::Empty`] unless `lo < hi`.
    pub fn new(lo: u16, hi: u16) -> Result<Self, LayerRangeError> {
        if lo < hi { Ok(Self { lo, hi }) } else { Err(LayerRangeError::Empty { lo, hi }) }
    }

    /// First layer.
    #[must_use]
    pub fn lo(self) -> u16 {
        self.lo
    }

    /// One past the last layer.
    #[must_use]
    pub fn hi(self) -> u16 {
        self.hi
    }

    /// How many layers; at least one.
    #[must_use]
    pub fn count(self) -> usize {
        usize::from(self.hi - self.lo)
    }

    /// Whether `layer` lies in the range.
    #[must_use]
    pub fn contains(self, layer: u16) -> bool {
        (self.lo..self.hi).contains(&layer)
    }

    /// The layers, ascending.
    pub fn layers(self) -> std::ops::Range<u16> {
        self.lo..self.hi
    }
}

impl fmt::Display for LayerRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.lo, self.hi)
    }
}

impl FromStr for LayerRange {
    type Err = LayerRangeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let syntax = || LayerRangeError::Syntax { got: text.to_owned() };
        let (lo, hi) = text.split_once(':').ok_or_else(syntax)?;
        Self::new(lo.trim().parse().map_err(|_| syntax())?, hi.trim().parse().map_err(|_| syntax())?)
    }
}

impl TryFrom<(u16, u16)> for LayerRange {
    type Error = LayerRangeError;

    fn try_from((lo, hi): (u16, u16)) -> Result<Self, Self::Error> {
        Self::new(lo, hi)
    }
}

impl From<LayerRange> for (u16, u16) {
    fn from(range: LayerRange) -> Self {
        (range.lo, range.hi)
    }
}

/// How hidden states are written on the wire; part of a session's arithmetic.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WireEncoding {
    /// bf16 as computed: two bytes a value.
    Bf16,
    /// E4M3 codes with one bf16 scale per position and stream.
    #[default]
    Fp8,
}

impl WireEncoding {
    /// Bytes of one position of `hc` streams of `dim` values.
    #[must_use]
    pub fn position_bytes(self, hc: usize, dim: usize) -> usize {
        match self {
            Self::Bf16 => 2 * hc * dim,
            Self::Fp8 => 2 * hc + hc * dim,
        }
    }
}

impl fmt::Display for WireEncoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        })
    }
}

/// A wire encoding's name was not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("wire encoding {got:?}: expected fp8 or bf16")]
pub struct WireEncodingError {
    /// The text that came.
    pub got: String,
}

impl FromStr for WireEncoding {
    type Err = WireEncodingError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "bf16" => Ok(Self::Bf16),
            "fp8" => Ok(Self::Fp8),
            other => Err(WireEncodingError { got: other.to_owned() }),
        }
    }
}
