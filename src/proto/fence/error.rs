//! Why a session fails at a fence.

use std::time::Duration;

use crate::ids::{Epoch, Position, SessionId, View};

/// Why a session fails on a stage.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FenceError {
    /// A frame of a membership that this session was not opened in.
    #[error("session {session}: frame of view {got}, this session was opened in view {expected}")]
    View {
        /// The session.
        session: SessionId,
        /// The session's view.
        expected: View,
        /// The frame's view.
        got: View,
    },
    /// Positions in front of a frame were never seen.
    #[error(
        "session {session}: epoch {epoch} continues at {got}, this stage expects {expected} \
         (waited {} ms): frames were lost on the way, or sent out of order by the coordinator", .waited.as_millis()
    )]
    Gap {
        /// The session.
        session: SessionId,
        /// The frame's epoch.
        epoch: Epoch,
        /// The position that should come first.
        expected: Position,
        /// The position that came.
        got: Position,
        /// How long the frame was held; zero where nothing that may come can close the gap.
        waited: Duration,
    },
    /// An epoch re-opens a settled position.
    #[error("session {session}: epoch {epoch} re-opens at {start}, positions below {floor} are settled")]
    BelowFloor {
        /// The session.
        session: SessionId,
        /// The frame's epoch.
        epoch: Epoch,
        /// Where the epoch starts.
        start: Position,
        /// The settled floor.
        floor: Position,
    },
    /// A frame lies below its own settled floor.
    #[error("session {session}: frame at {pos} says that positions below {settled} are settled")]
    Settled {
        /// The session.
        session: SessionId,
        /// First position.
        pos: Position,
        /// The frame's settled floor.
        settled: Position,
    },
    /// A frame says that positions are settled which this stage has not computed.
    #[error("session {session}: frame settles positions below {settled}, this stage computed those below {next}")]
    Unsettled {
        /// The session.
        session: SessionId,
        /// The frame's settled floor.
        settled: Position,
        /// Next position to compute.
        next: Position,
    },
    /// A frame is further ahead than the session's state is sized for.
    #[error(
        "session {session}: frame {pos}+{len} with {settled} settled reaches {}, \
         the session was opened with reach {reach}",
        (u64::from(.pos.0) + u64::from(*.len)).saturating_sub(u64::from(.settled.0))
    )]
    Reach {
        /// The session.
        session: SessionId,
        /// First position.
        pos: Position,
        /// Positions.
        len: u32,
        /// The frame's settled floor.
        settled: Position,
        /// The session's reach.
        reach: u32,
    },
    /// A frame runs past the session's last position.
    #[error("session {session}: frame {pos}+{len} runs past the session's end at {end}")]
    PastEnd {
        /// The session.
        session: SessionId,
        /// First position.
        pos: Position,
        /// Positions.
        len: u32,
        /// One past the last position.
        end: Position,
    },
    /// A frame holds no position.
    #[error("session {session}: frame at {pos} holds no position, expected at least one")]
    Empty {
        /// The session.
        session: SessionId,
        /// Its position.
        pos: Position,
    },
    /// A frame lies before its epoch's first position, or its epoch starts in two places.
    #[error("session {session}: frame at {pos} says that epoch {epoch} starts at {got}, expected {expected}")]
    Start {
        /// The session.
        session: SessionId,
        /// The frame's epoch.
        epoch: Epoch,
        /// The frame's position.
        pos: Position,
        /// Where the epoch started for this stage, or the highest start possible.
        expected: Position,
        /// The frame's start.
        got: Position,
    },
    /// Too many frames wait.
    #[error("session {session}: {limit} frames wait on this stage already: the coordinator sends more than it may")]
    HeldFull {
        /// The session.
        session: SessionId,
        /// Frames allowed.
        limit: usize,
    },
}
