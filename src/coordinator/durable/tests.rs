//! What waits for a disk that does not answer stays bounded.

use super::*;
use crate::config::LogSettings;
use crate::coordinator::tests::shell;
use crate::proto::control::Join;
use crate::transport::memory::MemoryNetwork;

#[tokio::test]
async fn joins_that_wait_are_those_of_the_newest_view() {
    let folder = tempfile::tempdir().unwrap();
    let log = Log::open(&LogSettings::new(folder.path().to_owned()), [7; 32]).unwrap();
    let (gate, _scribe, batches) = LogGate::open(log);
    let (link, _events) = MemoryNetwork::new().link();
    let (_handle, _commands, mut shell) = shell(link, gate);
    shell.recover();
    let members = [Node::random(), Node::random(), Node::random()];
    for view in (1..100).map(View) {
        for to in members {
            let join = Join { view, predecessor: None, successor: None };
            shell.send_logged(to, Control::Join(Box::new(join)));
        }
        shell.flush_log();
        assert_eq!(shell.log.joins.len(), members.len(), "view {view}");
    }
    // The first batch is answered at last: the joins of its view are of no use, the newest still wait.
    assert!(batches.try_recv().is_ok());
    shell.handle_synced(Synced::Durable);
    assert_eq!((shell.log.view, shell.log.joins.len()), (View(1), members.len()));
    shell.flush_log();
    assert!(batches.try_recv().is_ok());
    shell.handle_synced(Synced::Durable);
    assert_eq!((shell.log.view, shell.log.joins.len()), (View(99), 0));
}
