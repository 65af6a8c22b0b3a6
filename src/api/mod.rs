//! The HTTP service of a coordinator: a request comes in, its answer goes out.
//!
//! [`server`] has the routes and the limits; [`ask`] reads a request, [`text`] turns it into token
//! ids; a session's events become an answer through [`stop`] and [`score`]. What is behind it is a
//! [`Serve`](crate::coordinator::job::Serve); `docs/api.md` has every field and status.

mod answer;
pub mod ask;
pub mod error;
pub mod score;
pub mod server;
mod session;
mod stall;
pub mod stop;
pub mod text;
mod transcript;

/// Port at which a coordinator serves HTTP unless told otherwise.
pub const HTTP_PORT: u16 = 8437;
