//! The tasks that read a connection: one for control, one for all data lanes.
//!
//! A packet often brings something for several lanes. In tasks of their own each of them would wake
//! some thread, and the owner once more; in one task they wake it once, and are then read in the
//! order in which they had something.

use std::future::Future;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};

use super::lines::End;

/// What reads the lanes of a connection.
#[derive(Debug)]
pub(super) struct Readers {
    ends: mpsc::Receiver<End>,
    tasks: JoinSet<()>,
}

impl Readers {
    /// Starts to read control and data lanes, each until it ends.
    pub(super) fn start<R>(control: R, lanes: Vec<R>) -> Self
    where
        R: Future<Output = End> + Send + 'static,
    {
        let (ended, ends) = mpsc::channel(lanes.len() + 1);
        let mut tasks = JoinSet::new();
        tasks.spawn(read(lanes, ended.clone()));
        tasks.spawn(read(vec![control], ended));
        Self { ends, tasks }
    }

    /// Waits for the next lane to end, or for a reader that failed; `None` when all have ended.
    /// Dropped while waiting, it loses nothing.
    pub(super) async fn next(&mut self) -> Option<Result<End, JoinError>> {
        loop {
            tokio::select! {
                biased;
                Some(end) = self.ends.recv() => return Some(Ok(end)),
                joined = self.tasks.join_next(), if !self.tasks.is_empty() => if let Some(Err(error)) = joined {
                    return Some(Err(error));
                },
                else => return None,
            }
        }
    }
}

async fn read<R: Future<Output = End>>(lanes: Vec<R>, ended: mpsc::Sender<End>) {
    let mut lanes: FuturesUnordered<R> = lanes.into_iter().collect();
    while let Some(end) = lanes.next().await {
        // There is room for the end of every lane; without a connection nobody asks for it.
        let _ = ended.try_send(end);
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::time::Duration;

    use futures::FutureExt;
    use futures::future::BoxFuture;
    use tokio::time::timeout;

    use super::*;

    fn farewell(reason: &str) -> BoxFuture<'static, End> {
        ready(End::Farewell(reason.to_owned())).boxed()
    }

    async fn next(readers: &mut Readers) -> Option<Result<End, JoinError>> {
        timeout(Duration::from_secs(20), readers.next()).await.expect("no end came")
    }

    async fn reason(readers: &mut Readers) -> Option<String> {
        match next(readers).await? {
            Ok(End::Farewell(reason)) => Some(reason),
            other => panic!("expected a farewell, got {other:?}"),
        }
    }

    #[tokio::test]
    async fn every_end_comes_once_and_a_lane_that_waits_holds_up_none() {
        let (go, gone) = tokio::sync::oneshot::channel::<()>();
        let late = gone.map(|_| End::Farewell("late".to_owned())).boxed();
        let mut readers = Readers::start(farewell("control"), vec![late, farewell("a"), farewell("b")]);
        let mut ends = Vec::new();
        for _ in 0..3 {
            ends.extend(reason(&mut readers).await);
        }
        ends.sort();
        assert_eq!(ends, ["a", "b", "control"]);
        assert!(readers.next().now_or_never().is_none(), "one lane is still read");
        drop(go);
        assert_eq!(reason(&mut readers).await.as_deref(), Some("late"));
        assert!(next(&mut readers).await.is_none());
    }

    #[tokio::test]
    async fn a_reader_that_fails_is_told_while_others_read_on() {
        let failing = async { panic!("broken") }.boxed();
        let mut readers = Readers::start(pending().boxed(), vec![failing]);
        assert!(matches!(next(&mut readers).await, Some(Err(error)) if error.is_panic()));
        assert!(readers.next().now_or_never().is_none(), "control is still read");
    }
}
