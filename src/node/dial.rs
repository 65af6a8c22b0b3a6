//! Dials of a stage: what is dialled, and how a dial ends. Whoever drives the shell carries them out.

use std::sync::Arc;

use libp2p::Multiaddr;
use tokio::sync::mpsc;

use crate::ids::Node;
use crate::transport::redial::peer_of;
use crate::transport::scope::Scope;
use crate::transport::{Link, LinkError};

/// Results of dials that wait for the shell.
pub(super) const DIALS_MAX: usize = 64;

/// A dial that the shell wants.
#[derive(Debug)]
pub(crate) enum Dial {
    /// Of the coordinator.
    Coordinator(Multiaddr),
    /// Of a neighbour, at addresses that a peer named, best first.
    Neighbour { peer: Node, addresses: Vec<String> },
}

/// How a dial ended.
#[derive(Debug)]
pub(crate) enum Dialled {
    /// Of the coordinator.
    Coordinator(Result<Node, String>),
    /// Of a neighbour.
    Neighbour { peer: Node, result: Result<(), String> },
}

/// Dials as a task that brings its result to the shell.
pub(super) fn spawn(link: &Arc<dyn Link>, dialled: &mpsc::Sender<Dialled>, dial: Dial, scope: Scope) {
    let (link, dialled) = (Arc::clone(link), dialled.clone());
    tokio::spawn(async move {
        // A shell that ended needs no result.
        let _ = dialled.send(run(link, dial, scope).await).await;
    });
}

/// Dials; a neighbour's addresses outside `scope` are not touched.
pub(crate) async fn run(link: Arc<dyn Link>, dial: Dial, scope: Scope) -> Dialled {
    match dial {
        Dial::Coordinator(address) => Dialled::Coordinator(link.dial(address).await.map_err(|error| error.to_string())),
        Dial::Neighbour { peer, addresses } => {
            let mut causes = Vec::new();
            for address in &addresses {
                match neighbour(&link, peer, address, scope).await {
                    Ok(()) => return Dialled::Neighbour { peer, result: Ok(()) },
                    Err(cause) => causes.push(cause),
                }
            }
            let none = addresses.is_empty();
            let why = if none { "it offered no address".to_owned() } else { causes.join("; ") };
            Dialled::Neighbour { peer, result: Err(why) }
        }
    }
}

async fn neighbour(link: &Arc<dyn Link>, peer: Node, address: &str, scope: Scope) -> Result<(), String> {
    let address: Multiaddr = address.parse().map_err(|error| format!("address {address:?}: {error}"))?;
    if peer_of(&address) != Some(peer.peer) {
        return Err(format!("address {address} does not end in /p2p/{peer}"));
    }
    scope.check(&address).map_err(|error| error.to_string())?;
    match link.dial(address).await {
        Ok(node) if node == peer => Ok(()),
        Ok(_) => Err("another process answers there: it was restarted".to_owned()),
        Err(error @ (LinkError::Dial { .. } | LinkError::Closed)) => Err(error.to_string()),
        Err(error) => Err(format!("the dial failed: {error}")),
    }
}
