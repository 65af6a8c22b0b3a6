//! Dials of a stage: tasks that bring their results to the shell.

use std::sync::Arc;

use libp2p::Multiaddr;
use tokio::sync::mpsc;

use crate::ids::Node;
use crate::transport::redial::peer_of;
use crate::transport::scope::Scope;
use crate::transport::{Link, LinkError};

/// Results of dials that wait for the shell.
pub(super) const DIALS_MAX: usize = 64;

/// How a dial ended.
pub(super) enum Dialled {
    /// Of the coordinator.
    Coordinator(Result<Node, String>),
    /// Of a neighbour.
    Neighbour { peer: Node, result: Result<(), String> },
}

/// Dials the coordinator.
pub(super) fn coordinator(link: &Arc<dyn Link>, dialled: &mpsc::Sender<Dialled>, address: Multiaddr) {
    let (link, dialled) = (Arc::clone(link), dialled.clone());
    tokio::spawn(async move {
        let result = link.dial(address).await.map_err(|error| error.to_string());
        // A shell that ended needs no result.
        let _ = dialled.send(Dialled::Coordinator(result)).await;
    });
}

/// Dials a neighbour at addresses that a peer named, best first; those outside `scope` are not
/// touched.
pub(super) fn neighbour(
    link: &Arc<dyn Link>,
    dialled: &mpsc::Sender<Dialled>,
    (peer, addresses): (Node, Vec<String>),
    scope: Scope,
) {
    let (link, dialled) = (Arc::clone(link), dialled.clone());
    tokio::spawn(async move {
        let mut causes = Vec::new();
        for address in &addresses {
            match dial(&link, peer, address, scope).await {
                Ok(()) => {
                    causes.clear();
                    break;
                }
                Err(cause) => causes.push(cause),
            }
        }
        let result = match (addresses.is_empty(), causes.is_empty()) {
            (true, _) => Err("it offered no address".to_owned()),
            (false, true) => Ok(()),
            (false, false) => Err(causes.join("; ")),
        };
        // A shell that ended needs no result.
        let _ = dialled.send(Dialled::Neighbour { peer, result }).await;
    });
}

async fn dial(link: &Arc<dyn Link>, peer: Node, address: &str, scope: Scope) -> Result<(), String> {
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
