//! The HTTP service of a coordinator: a request comes in, its answer goes out.
//!
//! [`server`] has the routes and the limits, [`keys`] says who may come; [`ask`] reads a request, [`text`] and [`chat`] turn it into
//! token ids; a session's events become an answer through [`chat`], [`stop`] and [`score`]; `resume` reads
//! one on over another connection. What is behind it is a
//! [`Serve`]; `docs/api.md` has every field and status.

use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::coordinator::job::Serve;

mod answer;
pub mod ask;
pub mod chat;
pub mod error;
mod fields;
pub mod keys;
mod logprobs;
mod resume;
pub mod score;
pub mod server;
mod session;
pub mod speech;
mod stall;
pub mod stop;
mod stream;
pub mod text;
mod transcript;

/// Port at which a coordinator serves HTTP unless told otherwise.
pub const HTTP_PORT: u16 = 8080;

/// Serves the API on `listener`, to clients with one of `keys` where there are some, until `stop` becomes `true` or its sender is gone; then lets open
/// answers end for a while ([`server::Settings::drain`]).
pub async fn serve(
    listener: TcpListener,
    coordinator: Arc<dyn Serve>,
    speech: speech::Speech,
    keys: Option<keys::Keys>,
    mut stop: watch::Receiver<bool>,
) {
    let api = server::Api::new(coordinator, Arc::new(speech), server::Settings::default()).keyed(keys);
    api.run(listener, async move { drop(stop.wait_for(|&stop| stop).await) }).await;
}
