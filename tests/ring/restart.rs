//! The coordinator dies under a session and another one goes on from its log: whoever reads the stream on
//! misses nothing and sees nothing twice, and the tokens are those of a run that never failed.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ringfence::config::{CoordinatorSettings, LogSettings};
use ringfence::coordinator::job::{AttachError, Attached, Client, Event, Finish, Job, JobError, Mode, Request, Serve};
use ringfence::coordinator::log::{Disk, Log};
use ringfence::ids::{SessionId, TokenId};
use ringfence::transport::memory::MemoryNetwork;

use crate::rig::{PATIENCE, Rig, collect, prompt, quick, ranges, request, tiny, warm};

const NEW: u32 = 250;

pub(crate) fn open(folder: &Path) -> Log {
    Log::open(&LogSettings::new(folder.to_owned()), tiny().digest()).unwrap()
}

pub(crate) async fn rig(settings: CoordinatorSettings, log: Log) -> Rig {
    let cut = ranges("0:2 2:4 4:7");
    Rig::logged(MemoryNetwork::new(), &cut, settings, (&|engine| Box::new(engine), Some(log))).await
}

/// A killed coordinator of a test still reads that its links are gone: its sessions must wait then, and
/// not end, as those of a dead one do.
pub(crate) fn patient() -> CoordinatorSettings {
    CoordinatorSettings { heal_wait: PATIENCE, ..quick() }
}

/// Reads tokens behind the `from` first ones, until `count` came or the session ends.
pub(crate) async fn read(job: &mut Job, from: usize, count: usize) -> (Vec<TokenId>, Option<Event>) {
    let mut tokens = Vec::new();
    while tokens.len() < count {
        match tokio::time::timeout(PATIENCE, job.events.recv()).await.expect("an event comes") {
            Some(Event::Token { index, token, .. }) => {
                assert_eq!(index as usize, from + tokens.len(), "nothing is missed or repeated");
                tokens.push(token);
            }
            last => return (tokens, last),
        }
    }
    (tokens, None)
}

#[track_caller]
pub(crate) fn finished(last: Option<Event>) {
    assert!(matches!(last, Some(Event::Finished { reason: Finish::Length, .. })), "{last:?}");
}

pub(crate) async fn attach(rig: &Rig, job: &Job) -> Attached {
    rig.coordinator.attach(job.session, None).await.expect("the session is there")
}

/// Kills the coordinator after `first` tokens, as often as `times`.
async fn restarted(request: Request, first: usize, times: usize) {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = rig(CoordinatorSettings { prefill_chunk: 16, ..patient() }, open(folder.path())).await;
    let expected = rig.run(request.clone()).await.tokens;
    assert_eq!(expected.len(), NEW as usize);
    let mut job = rig.coordinator.submit(request.clone()).unwrap();
    let (mut tokens, _) = read(&mut job, 0, first).await;
    for _ in 0..times {
        rig.restart(|| open(folder.path())).await;
        let attached = attach(&rig, &job).await;
        assert_eq!(attached.request, request);
        assert!(attached.tokens.starts_with(&tokens), "what was told was logged before");
        tokens = attached.tokens;
        job = attached.job;
        let (more, last) = read(&mut job, tokens.len(), 6).await;
        tokens.extend(more);
        assert_eq!(last, None);
    }
    let (more, last) = read(&mut job, tokens.len(), usize::MAX).await;
    tokens.extend(more);
    finished(last);
    assert_eq!(tokens, expected, "{request:?}");
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_coordinator_goes_on_where_one_died() {
    for mode in [Mode::Pipelined, Mode::Plain] {
        restarted(request(&prompt(60), NEW, mode), 9, 1).await;
        restarted(Request { sampling: warm(7), ..request(&prompt(60), NEW, mode) }, 9, 2).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_that_dies_during_prefill_costs_nothing() {
    restarted(request(&prompt(200), NEW, Mode::Pipelined), 1, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_connection_is_read_on_and_the_second_reader_wins() {
    let folder = tempfile::tempdir().unwrap();
    let rig = rig(patient(), open(folder.path())).await;
    let asked = request(&prompt(20), 400, Mode::Pipelined);
    let expected = rig.run(asked.clone()).await.tokens;
    let client = Client { authorization: Some([7; 32]), ..Client::default() };
    let mut job = rig.coordinator.submit_as(asked, client).unwrap();
    let session = job.session;
    read(&mut job, 0, 3).await;
    drop(job);
    for wrong in [None, Some([8; 32])] {
        assert_eq!(rig.coordinator.attach(session, wrong).await.err(), Some(AttachError::Unknown));
    }
    let mut first = rig.coordinator.attach(session, Some([7; 32])).await.unwrap();
    let told = first.tokens.len();
    read(&mut first.job, told, 3).await;
    let mut second = rig.coordinator.attach(session, Some([7; 32])).await.unwrap();
    let (_, last) = read(&mut first.job, told + 3, usize::MAX).await;
    assert!(matches!(last, Some(Event::Failed(JobError::Detached { .. }))), "{last:?}");
    drop(first);
    let (rest, last) = read(&mut second.job, second.tokens.len(), usize::MAX).await;
    finished(last);
    assert_eq!([second.tokens, rest].concat(), expected);
    // The end was told, and may not have been read.
    drop(second.job);
    let mut third = rig.coordinator.attach(session, Some([7; 32])).await.unwrap();
    assert_eq!((&third.tokens, third.ended), (&expected, true));
    finished(read(&mut third.job, expected.len(), usize::MAX).await.1);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_nobody_reads_on_is_cancelled() {
    let folder = tempfile::tempdir().unwrap();
    let settings = CoordinatorSettings { reattach: Duration::from_millis(300), ..patient() };
    let mut rig = rig(settings, open(folder.path())).await;
    let mut job = rig.coordinator.submit(request(&prompt(20), 900, Mode::Plain)).unwrap();
    let session = job.session;
    read(&mut job, 0, 3).await;
    drop(job);
    rig.until("the session is freed", |rig| rig.coordinator_sessions() == 0).await;
    assert_eq!(rig.coordinator.attach(session, None).await.err(), Some(AttachError::Unknown));
    // What is told of a later session is in the log behind the end of this one.
    rig.run(request(&prompt(5), 2, Mode::Plain)).await;
    rig.restart(|| open(folder.path())).await;
    let gone = rig.coordinator.attach(session, None).await.err();
    assert_eq!(gone, Some(AttachError::Unknown), "that it was cancelled is logged");
    let later = SessionId(session.0 + (1 << 33));
    let elsewhere = rig.coordinator.attach(later, None).await.err();
    assert_eq!(elsewhere, Some(AttachError::Elsewhere), "an id of a later coordinator is that one's");
    rig.ready().await;
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_found_by_its_clients_name_and_one_that_nobody_can_find_ends_with_its_coordinator() {
    let folder = tempfile::tempdir().unwrap();
    let mut rig = rig(patient(), open(folder.path())).await;
    let asked = request(&prompt(20), 400, Mode::Pipelined);
    let expected = rig.run(asked.clone()).await.tokens;
    let as_client = |name: Option<&str>, authorization, resumable| {
        let client = Client { resumable, name: name.map(str::to_owned), authorization, form: Vec::new() };
        rig.coordinator.submit_as(asked.clone(), client).unwrap()
    };
    let mut jobs = [
        as_client(Some("mine"), Some([7; 32]), true),
        as_client(Some("mine"), Some([7; 32]), true),
        as_client(Some("mine"), None, true),
        as_client(None, None, false),
    ];
    for job in &mut jobs {
        read(job, 0, 3).await;
    }
    let [first, newest, other, unnamed] = jobs.each_ref().map(|job| job.session);
    assert_eq!(rig.coordinator.attach(unnamed, None).await.err(), Some(AttachError::Unknown), "it is its reader's");
    drop(jobs);
    rig.restart(|| open(folder.path())).await;
    let found = async |name: &str, authorization| rig.coordinator.find(name, authorization).await;
    assert_eq!(found("mine", Some([7; 32])).await, Ok(newest), "of two, the newest");
    assert_eq!(found("mine", None).await, Ok(other));
    assert_eq!(found("mine", Some([8; 32])).await, Err(AttachError::Unknown));
    assert_eq!(found("yours", None).await, Err(AttachError::Unknown));
    for (session, authorization) in [(first, Some([7; 32])), (newest, Some([7; 32])), (other, None)] {
        let mut attached = rig.coordinator.attach(session, authorization).await.unwrap();
        let (rest, last) = read(&mut attached.job, attached.tokens.len(), usize::MAX).await;
        finished(last);
        assert_eq!([attached.tokens, rest].concat(), expected);
    }
    assert_eq!(found("mine", None).await, Ok(other), "it is kept for a while");
    assert_eq!(rig.coordinator.attach(unnamed, None).await.err(), Some(AttachError::Unknown));
    rig.until("nothing goes on", |rig| rig.coordinator_sessions() == 0).await;
    rig.end().await;
}

/// A coordinator that was cut off, not killed, comes back: the other one leads, and it serves no more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_coordinator_that_comes_back_spoils_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let settings = CoordinatorSettings { heal_wait: Duration::from_secs(30), ..patient() };
    let mut rig = rig(settings, open(folder.path())).await;
    let asked = request(&prompt(20), 400, Mode::Pipelined);
    let expected = rig.run(asked.clone()).await.tokens;
    let mut job = rig.coordinator.submit(asked).unwrap();
    read(&mut job, 0, 5).await;
    let (old, old_peer) = (rig.coordinator.clone(), rig.coordinator_peer);
    let cut = |rig: &Rig, cut: bool| {
        for stage in &rig.stages {
            if cut { rig.network.cut(old_peer, stage.peer) } else { rig.network.heal(old_peer, stage.peer) }
        }
    };
    cut(&rig, true);
    let (old_stop, old_task) = rig.take_over_beside(open(folder.path()));
    let mut attached = attach(&rig, &job).await;
    let (rest, last) = read(&mut attached.job, attached.tokens.len(), 20).await;
    assert_eq!(last, None);
    let view = rig.coordinator.status().view;
    let misses = async |part: &str| {
        let told = async {
            while !old.status().missing.is_some_and(|why| why.contains(part)) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, told).await.unwrap();
    };
    misses("layers").await;
    cut(&rig, false);
    misses("another coordinator leads").await;
    let last = std::iter::from_fn(|| job.events.try_recv().ok()).last();
    assert!(matches!(last, Some(Event::Failed(JobError::Detached { .. }))), "{last:?}");
    assert_eq!(rig.coordinator.status().view, view, "the ring stays with the new one");
    let told = attached.tokens.len() + rest.len();
    let (end, last) = read(&mut attached.job, told, usize::MAX).await;
    finished(last);
    assert_eq!([attached.tokens, rest, end].concat(), expected);
    let _ = old_stop.send(true);
    old_task.await.unwrap();
    rig.end().await;
}

/// A disk that is full as long as `full`.
struct Filling {
    disk: Box<dyn Disk>,
    full: Arc<AtomicBool>,
}

impl Disk for Filling {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.full.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.disk.append(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.disk.sync()
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.disk.truncate(length)
    }

    fn remove(&mut self) -> io::Result<()> {
        self.disk.remove()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_is_an_error_and_loses_nothing_that_was_told() {
    let folder = tempfile::tempdir().unwrap();
    let full = Arc::new(AtomicBool::new(false));
    let filling = Arc::clone(&full);
    let log = open(folder.path()).wrapped(|disk| Box::new(Filling { disk, full: filling }));
    let mut rig = rig(patient(), log).await;
    let asked = request(&prompt(20), 400, Mode::Pipelined);
    let mut job = rig.coordinator.submit(asked.clone()).unwrap();
    let (mut tokens, _) = read(&mut job, 0, 5).await;
    full.store(true, Ordering::Relaxed);
    let (more, last) = read(&mut job, 5, usize::MAX).await;
    tokens.extend(more);
    assert!(matches!(&last, Some(Event::Failed(JobError::NotLogged { why })) if !why.is_empty()), "{last:?}");
    for resumable in [true, false] {
        // Also what nobody could read on is told only once it is in the log.
        let client = Client { resumable, ..Client::default() };
        let refused = collect(rig.coordinator.submit_as(asked.clone(), client).unwrap()).await;
        let why = &refused.end;
        assert!(matches!(why, Some(Err(JobError::NotLogged { .. }))) && refused.tokens.is_empty(), "{refused:?}");
    }
    full.store(false, Ordering::Relaxed);
    let expected = rig.run(asked).await.tokens;
    rig.restart(|| open(folder.path())).await;
    let mut attached = attach(&rig, &job).await;
    assert!(attached.tokens.starts_with(&tokens));
    let (rest, last) = read(&mut attached.job, attached.tokens.len(), usize::MAX).await;
    finished(last);
    assert_eq!([attached.tokens, rest].concat(), expected);
    rig.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_in_many_small_files_says_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let settings = LogSettings { file_bytes: 200, keep_bytes: 0, ..LogSettings::new(folder.path().to_owned()) };
    let open = || Log::open(&settings, tiny().digest()).unwrap();
    let mut rig = rig(patient(), open()).await;
    let asked = request(&prompt(20), 200, Mode::Pipelined);
    let expected = rig.run(asked.clone()).await.tokens;
    let mut job = rig.coordinator.submit(asked).unwrap();
    read(&mut job, 0, 100).await;
    rig.restart(open).await;
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "the others were taken over");
    let mut attached = attach(&rig, &job).await;
    let (rest, last) = read(&mut attached.job, attached.tokens.len(), usize::MAX).await;
    finished(last);
    assert_eq!([attached.tokens, rest].concat(), expected);
    rig.end().await;
}
