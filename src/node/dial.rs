//! Dials of a stage: what is dialled, and how a dial ends. Whoever drives the shell carries them out.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use libp2p::Multiaddr;
use tokio::sync::mpsc;
use tokio::time::timeout;

use crate::ids::Node;
use crate::transport::redial::peer_of;
use crate::transport::scope::Scope;
use crate::transport::{Link, LinkError};

/// Results of dials that wait for the shell.
pub(super) const DIALS_MAX: usize = 64;

/// After how long without an answer the next address is dialled too.
const NEXT_AFTER: Duration = Duration::from_millis(250);

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
            let result = side_by_side(&link, peer, &addresses, scope).await;
            Dialled::Neighbour { peer, result }
        }
    }
}

/// Dials one address after the other without waiting for the end of the one before, until one answers.
async fn side_by_side(link: &Arc<dyn Link>, peer: Node, addresses: &[String], scope: Scope) -> Result<(), String> {
    let mut left = addresses.iter();
    let mut under_way = FuturesUnordered::new();
    let mut causes = Vec::new();
    loop {
        under_way.extend(left.next().map(|address| neighbour(link, peer, address, scope)));
        let ended = if left.len() == 0 {
            under_way.next().await
        } else {
            // What has not answered by then goes on beside the next one.
            let Ok(ended) = timeout(NEXT_AFTER, under_way.next()).await else { continue };
            ended
        };
        match ended {
            Some(Ok(())) => return Ok(()),
            Some(Err(cause)) => causes.push(cause),
            None => break,
        }
    }
    Err(if addresses.is_empty() { "it offered no address".to_owned() } else { causes.join("; ") })
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use bytes::Bytes;
    use futures::FutureExt as _;
    use futures::future::BoxFuture;

    use super::*;
    use crate::transport::{HopStats, Lane};

    #[derive(Debug, Clone, Copy)]
    enum Path {
        Answers,
        /// Once the next address was dialled.
        AnswersLate,
        Refuses,
        Silent,
    }

    /// Addresses, and what becomes of a dial there.
    struct Paths(Node, BTreeMap<Multiaddr, Path>);

    impl Link for Paths {
        fn dial(&self, address: Multiaddr) -> BoxFuture<'_, Result<Node, LinkError>> {
            let path = self.1[&address];
            async move {
                match path {
                    Path::Answers => Ok(self.0),
                    Path::AnswersLate => {
                        tokio::time::sleep(NEXT_AFTER * 2).await;
                        Ok(self.0)
                    }
                    Path::Refuses => Err(LinkError::Dial { address, why: "refused".to_owned() }),
                    Path::Silent => std::future::pending().await,
                }
            }
            .boxed()
        }

        fn local(&self) -> Node {
            self.0
        }

        fn addresses(&self) -> Vec<Multiaddr> {
            Vec::new()
        }

        fn send(&self, _: Node, _: Lane, _: Bytes) -> BoxFuture<'_, Result<(), LinkError>> {
            std::future::ready(Err(LinkError::Closed)).boxed()
        }

        fn try_send(&self, _: Node, _: Lane, _: Bytes) -> Result<(), LinkError> {
            Err(LinkError::Closed)
        }

        fn disconnect(&self, _: Node, _: &str) {}

        fn hop_stats(&self, _: Node) -> Option<HopStats> {
            None
        }

        fn shutdown(&self) -> BoxFuture<'_, ()> {
            std::future::ready(()).boxed()
        }
    }

    /// How a dial of addresses that behave like this ends.
    async fn dialled(paths: &[Path]) -> Result<(), String> {
        let peer = Node::random();
        let addresses: Vec<String> = (1..=paths.len()).map(|at| format!("/memory/{at}/p2p/{}", peer.peer)).collect();
        let known = addresses.iter().map(|address| address.parse().unwrap()).zip(paths.iter().copied());
        let link: Arc<dyn Link> = Arc::new(Paths(peer, known.collect()));
        let dial = run(link, Dial::Neighbour { peer, addresses }, Scope::Loopback);
        match timeout(Duration::from_secs(60), dial).await {
            Ok(Dialled::Neighbour { result, .. }) => result,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn an_address_that_does_not_answer_holds_up_no_other() {
        assert_eq!(dialled(&[Path::Silent, Path::Answers]).await, Ok(()));
        assert_eq!(dialled(&[Path::Silent, Path::Refuses, Path::Answers, Path::Silent]).await, Ok(()));
        assert_eq!(dialled(&[Path::AnswersLate, Path::Silent]).await, Ok(()), "the first one goes on");
        let failed = dialled(&[Path::Refuses, Path::Refuses]).await.unwrap_err();
        assert_eq!(failed.matches("refused").count(), 2, "{failed}");
        assert_eq!(dialled(&[]).await, Err("it offered no address".to_owned()));
    }
}
