//! Disks of the log that fail in every other way than by being full: one that can't be synced, one that does
//! not answer, one that fails for a while.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use ringfence::config::CoordinatorSettings;
use ringfence::coordinator::job::{AttachError, Event, JobError, Mode, Serve};
use ringfence::coordinator::log::Disk;

use crate::restart::{attach, finished, open, patient, read, rig};
use crate::rig::{prompt, request};

/// What a disk does from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    Work,
    Fill,
    Lose,
    Hang,
}

/// A disk that does what it is told.
#[derive(Debug)]
struct Told {
    does: Mutex<Does>,
    changed: Condvar,
    written: AtomicU64,
}

impl Told {
    fn new() -> Arc<Self> {
        Arc::new(Self { does: Mutex::new(Does::Work), changed: Condvar::new(), written: AtomicU64::new(0) })
    }

    fn tell(&self, does: Does) {
        *self.does.lock().unwrap() = does;
        self.changed.notify_all();
    }

    fn does(&self) -> Does {
        *self.changed.wait_while(self.does.lock().unwrap(), |does| *does == Does::Hang).unwrap()
    }

    fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }
}

struct ToldDisk {
    disk: Box<dyn Disk>,
    told: Arc<Told>,
}

impl Disk for ToldDisk {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.told.does() == Does::Fill {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.disk.append(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        if self.told.does() == Does::Lose {
            return Err(io::Error::other("input/output error"));
        }
        self.told.written.fetch_add(1, Ordering::Relaxed);
        self.disk.sync()
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.disk.truncate(length)
    }

    fn remove(&mut self) -> io::Result<()> {
        self.disk.remove()
    }
}

fn wrap(told: &Arc<Told>) -> impl FnOnce(Box<dyn Disk>) -> Box<dyn Disk> {
    let told = Arc::clone(told);
    move |disk| Box::new(ToldDisk { disk, told })
}

/// Nothing can be written any more: whoever asks whether the ring is ready must hear it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_is_dead_is_said_to_be_missing() {
    let (folder, told) = (tempfile::tempdir().unwrap(), Told::new());
    let mut rig = rig(patient(), open(folder.path()).wrapped(wrap(&told))).await;
    let asked = request(&prompt(20), 400, Mode::Pipelined);
    let mut job = rig.coordinator.submit(asked.clone()).unwrap();
    read(&mut job, 0, 5).await;
    told.tell(Does::Lose);
    let (_, last) = read(&mut job, 5, usize::MAX).await;
    assert!(matches!(&last, Some(Event::Failed(JobError::NotLogged { .. }))), "{last:?}");
    told.tell(Does::Work);
    let status = rig.coordinator.status();
    let why = "the log can't be written: it could not be synced: input/output error; start the coordinator again";
    assert_eq!((status.ready, status.missing.as_deref()), (false, Some(why)));
    let refused = rig.coordinator.submit(asked).unwrap_err();
    assert_eq!(refused.to_string(), format!("the ring is not ready: {why}"));
    rig.restart(|| open(folder.path())).await;
    let mut attached = attach(&rig, &job).await;
    finished(read(&mut attached.job, attached.tokens.len(), usize::MAX).await.1);
    rig.ready().await;
    rig.end().await;
}

/// The disk says neither yes nor no: an operator hears that it is the disk, and nobody waits for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_does_not_answer_is_said_and_given_up() {
    let (folder, told) = (tempfile::tempdir().unwrap(), Told::new());
    let settings = CoordinatorSettings { heal_wait: Duration::from_secs(13), ..patient() };
    let mut rig = rig(settings, open(folder.path()).wrapped(wrap(&told))).await;
    let asked = request(&prompt(20), 400, Mode::Pipelined);
    let expected = rig.run(asked.clone()).await.tokens;
    let mut job = rig.coordinator.submit(asked.clone()).unwrap();
    let (mut tokens, _) = read(&mut job, 0, 5).await;
    told.tell(Does::Hang);
    let late = "the log's disk has not answered for 10 s";
    rig.until("it is said", |rig| rig.coordinator.status().missing.as_deref() == Some(late)).await;
    let (more, last) = read(&mut job, 5, usize::MAX).await;
    tokens.extend(more);
    let Some(Event::Failed(JobError::NotLogged { why })) = last else { panic!("{last:?}") };
    assert_eq!(why, "its disk has not answered for 13 s");
    told.tell(Does::Work);
    rig.ready().await;
    assert_eq!(rig.run(asked).await.tokens, expected, "it goes on as if nothing had been");
    rig.restart(|| open(folder.path())).await;
    let mut attached = attach(&rig, &job).await;
    assert!(attached.tokens.starts_with(&tokens));
    let (rest, last) = read(&mut attached.job, attached.tokens.len(), usize::MAX).await;
    finished(last);
    assert_eq!([attached.tokens, rest].concat(), expected);
    rig.end().await;
}

/// An end that the disk had no room for is written later: a request that was cancelled stays so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_that_could_not_be_written_is_written_later() {
    let (folder, told) = (tempfile::tempdir().unwrap(), Told::new());
    let settings = CoordinatorSettings { reattach: Duration::from_millis(500), ..patient() };
    let mut rig = rig(settings, open(folder.path()).wrapped(wrap(&told))).await;
    let mut job = rig.coordinator.submit(request(&prompt(20), 900, Mode::Plain)).unwrap();
    let session = job.session;
    read(&mut job, 0, 3).await;
    // Without a ring it has no more tokens: what comes next is its end.
    rig.network.kill(rig.stages[1].peer);
    rig.until("the ring is lost", |rig| !rig.coordinator.status().ready).await;
    let settled = Duration::from_millis(200);
    tokio::time::sleep(settled).await;
    told.tell(Does::Fill);
    drop(job);
    rig.until("it is cancelled", |rig| rig.coordinator_sessions() == 0).await;
    let before = told.written();
    tokio::time::sleep(settled).await;
    assert_eq!(told.written(), before);
    told.tell(Does::Work);
    rig.until("its end is written", |_| told.written() > before).await;
    rig.restart(|| open(folder.path())).await;
    assert_eq!(rig.coordinator.attach(session, None).await.err(), Some(AttachError::Unknown));
    rig.end().await;
}
