//! The log against damage: whatever is cut off or flipped, no wrong token, no panic, and what was synced
//! stands or its loss is said.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use super::book::{Book, Logged};
use super::folder::host::HostFolder;
use super::folder::{Name, list, read_file};
use super::record::{self, Ended, Entry, FileHead, LOG_VERSION, Opened};
use super::writer::{Batch, Scribe, Synced};
use super::{Disk, Log, LogError};
use crate::config::LogSettings;
use crate::coordinator::job::{Client, Finish, Request};
use crate::coordinator::session::Arithmetic;
use crate::engine::NUMERICS_ID;
use crate::ids::{SessionId, TokenId, VIEW_MAX, View, WireEncoding};
use crate::proto::control::Sampling;

const MODEL: [u8; 32] = [7; 32];
const START: u64 = 0x0123_4567_89ab_cdef;
const MOST: u32 = 500;

fn opened(session: u64) -> Opened {
    Opened {
        session: SessionId(session),
        request: Request {
            prompt: vec![TokenId(3), TokenId(300)],
            max_new: MOST,
            sampling: Sampling { temperature: 0.8, top_k: 0, top_p: 0.95, min_p: 0.0, seed: 9 },
            mode: None,
            encoding: None,
            score: None,
            logprobs: None,
            ignore_eos: true,
        },
        arithmetic: Arithmetic { boundaries: vec![2, 4], encoding: WireEncoding::Fp8 },
        client: Client { resumable: true, name: Some("a".into()), authorization: Some([1; 32]), form: b"{}".to_vec() },
    }
}

/// The one true token of a session at a place.
fn truth(session: u64, at: usize) -> TokenId {
    TokenId(u32::try_from(session * 31 + at as u64 * 7).unwrap() % 2_000)
}

fn tokens(session: u64, from: usize, count: usize) -> Entry {
    let ids = (from..from + count).map(|at| truth(session, at)).collect();
    Entry::Tokens { session: SessionId(session), first: u32::try_from(from).unwrap(), ids, scores: Vec::new() }
}

/// Batches as a coordinator writes them: per step a session and its next tokens; 0 tokens end it.
fn batches(steps: &[(u64, usize)]) -> Vec<Vec<Entry>> {
    let mut known: BTreeMap<u64, (usize, bool)> = BTreeMap::new();
    let mut all = vec![vec![Entry::View(View(9))]];
    for &(session, count) in steps {
        let mut batch = Vec::new();
        let (told, over) = known.entry(session).or_insert_with(|| {
            batch.push(Entry::Opened(Box::new(opened(session))));
            (0, false)
        });
        if *over {
            continue;
        }
        if count == 0 {
            batch.push(Entry::Ended { session: SessionId(session), how: Ended::Finished(Finish::Stop) });
            *over = true;
        } else {
            batch.push(tokens(session, *told, count));
            *told += count;
        }
        all.push(batch);
    }
    all
}

fn head(view: u64, start: u64) -> FileHead {
    FileHead { version: LOG_VERSION, view: View(view), start, part: 0, model: MODEL, numerics: NUMERICS_ID.to_owned() }
}

/// A file, and where each of its records ends.
fn file(batches: &[Vec<Entry>]) -> (Vec<u8>, Vec<usize>) {
    let mut bytes = record::frame(START, 0, &record::encode_head(&head(8, START)).unwrap()).unwrap();
    let mut ends = vec![bytes.len()];
    for (at, batch) in batches.iter().enumerate() {
        let serial = u32::try_from(at + 1).unwrap();
        bytes.extend(record::frame(START, serial, &record::encode(batch).unwrap()).unwrap());
        ends.push(bytes.len());
    }
    (bytes, ends)
}

fn load(bytes: &[u8]) -> Result<BTreeMap<SessionId, Logged>, LogError> {
    let mut book = Book::default();
    let name = Name { view: 8, part: 0, start: START };
    read_file(Path::new("view.log"), name, bytes, &mut book, (MODEL, NUMERICS_ID))?;
    Ok(book.into_sessions())
}

/// Asserts that every token is the true one, and gives how many there are.
fn count_true(sessions: &BTreeMap<SessionId, Logged>) -> usize {
    for (id, logged) in sessions {
        assert_eq!(logged.opened, opened(id.0));
        for (at, token) in logged.tokens.iter().enumerate() {
            assert_eq!(*token, truth(id.0, at));
        }
    }
    sessions.values().map(|logged| logged.tokens.len()).sum()
}

fn steps() -> impl Strategy<Value = Vec<(u64, usize)>> {
    prop::collection::vec((1u64..4, 0usize..6), 0..20)
}

proptest! {
    #[test]
    fn a_whole_file_says_everything(steps in steps()) {
        let batches = batches(&steps);
        let (bytes, _) = file(&batches);
        let sessions = load(&bytes).unwrap();
        let written: usize = batches.iter().flatten().map(|entry| match entry {
            Entry::Tokens { ids, .. } => ids.len(),
            Entry::View(_) | Entry::Opened(_) | Entry::Ended { .. } => 0,
        }).sum();
        prop_assert_eq!(count_true(&sessions), written);
    }

    #[test]
    fn a_torn_end_costs_the_torn_record_only(steps in steps(), cut in any::<prop::sample::Index>()) {
        let (bytes, ends) = file(&batches(&steps));
        let cut = cut.index(bytes.len() + 1);
        let whole = ends.iter().copied().filter(|end| *end <= cut).max().unwrap_or(0);
        let torn = load(&bytes[..cut]).unwrap();
        count_true(&torn);
        prop_assert_eq!(torn, load(&bytes[..whole]).unwrap());
    }

    #[test]
    fn a_flipped_bit_is_found(steps in steps(), at in any::<prop::sample::Index>(), bit in 0u32..8) {
        let (mut bytes, ends) = file(&batches(&steps));
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let record = ends.iter().position(|end| at < *end).unwrap();
        let last = record + 1 == ends.len();
        match load(&bytes) {
            // Nothing tells it from a record that was not written to its end.
            Ok(sessions) => {
                prop_assert!(last);
                count_true(&sessions);
                let before = if record == 0 { 0 } else { ends[record - 1] };
                prop_assert_eq!(sessions, load(&bytes[..before]).unwrap());
            }
            Err(LogError::Broken { offset, .. }) => {
                prop_assert!(!last);
                prop_assert_eq!(offset, if record == 0 { 0 } else { ends[record - 1] });
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    #[test]
    fn a_record_taken_out_is_found(steps in steps(), which in any::<prop::sample::Index>()) {
        let (mut bytes, ends) = file(&batches(&steps));
        let which = which.index(ends.len());
        prop_assume!(which + 1 < ends.len());
        bytes.drain(if which == 0 { 0 } else { ends[which - 1] }..ends[which]);
        let broken = matches!(load(&bytes), Err(LogError::Broken { .. }));
        prop_assert!(broken);
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = load(&bytes);
        let _ = record::decode::<Vec<Entry>>(&bytes);
        let framed = record::frame(START, 0, &bytes).unwrap();
        let _ = load(&framed);
    }

    /// A frozen twin wrote on in its own, lower file: the same tokens, then an end that is not one.
    #[test]
    fn a_twin_spoils_nothing(told in 0usize..20, twin in 0usize..20, more in 0usize..20) {
        let mut book = Book::default();
        let opening = |session| Entry::Opened(Box::new(opened(session)));
        book.begin_file(View(3), 64);
        for entry in [opening(1), tokens(1, 0, told), tokens(1, told, twin)] {
            book.take(entry).unwrap();
        }
        book.take(Entry::Ended { session: SessionId(1), how: Ended::Failed }).unwrap();
        book.begin_file(View(4), 64);
        for entry in [opening(1), tokens(1, 0, told), tokens(1, told, more)] {
            book.take(entry).unwrap();
        }
        let sessions = book.into_sessions();
        prop_assert_eq!(sessions[&SessionId(1)].ended, None);
        prop_assert_eq!(count_true(&sessions), told + twin.max(more));
    }
}

#[test]
fn contradictions_are_named() {
    let mut book = Book::default();
    book.begin_file(View(1), 64);
    let error = book.take(tokens(1, 0, 1)).unwrap_err().to_string();
    assert_eq!(error, "session 1 is not opened in front of this record");
    book.take(Entry::Opened(Box::new(opened(1)))).unwrap();
    let error = book.take(tokens(1, 2, 1)).unwrap_err().to_string();
    assert_eq!(error, "tokens of session 1 from 2 on, only 0 are known in front of this record");
    book.take(tokens(1, 0, 2)).unwrap();
    let wrong = Entry::Tokens { session: SessionId(1), first: 1, ids: vec![TokenId(1_999)], scores: Vec::new() };
    let error = book.take(wrong).unwrap_err().to_string();
    assert!(error.contains("session 1 has token 38 at 1, and 1999 came"), "{error}");
    assert!(book.take(tokens(1, 2, MOST as usize)).unwrap_err().to_string().contains("502 tokens, 500"));
}

/// Session ids begin at view · 2^32: of a higher view they would come again.
#[test]
fn views_without_room_for_what_is_derived_of_them_are_refused() {
    let over = View(VIEW_MAX.0 + 1);
    let (bytes, ends) = file(&[vec![], vec![Entry::View(over)]]);
    match load(&bytes) {
        Err(LogError::Broken { offset, why, .. }) => {
            assert_eq!((offset, why.as_str()), (ends[1], "view 2147483648, the highest one is 2147483647"));
        }
        other => panic!("{other:?}"),
    }
    let bytes = record::frame(START, 0, &record::encode_head(&head(over.0, START)).unwrap()).unwrap();
    let name = Name { view: over.0, part: 0, start: START };
    let error = read_file(Path::new("view.log"), name, &bytes, &mut Book::default(), (MODEL, NUMERICS_ID));
    assert!(error.unwrap_err().to_string().contains("view 2147483648, expected at most 2147483647"));
    let folder = tempfile::tempdir().unwrap();
    let settings = LogSettings::new(folder.path().to_owned());
    let mut log = Log::open(&settings, MODEL).unwrap();
    let payload = record::encode(&[Entry::View(VIEW_MAX)]).unwrap();
    assert_eq!(log.scribe.write(&Batch { payload, fresh: false, leads: false }), Synced::Durable);
    let error = Log::open(&settings, MODEL).unwrap_err().to_string();
    assert!(error.contains("view 2147483647, and none is left above: give another folder"), "{error}");
}

#[test]
fn a_new_coordinator_is_above_all_files_and_old_ones_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let settings = LogSettings::new(folder.path().join("log"));
    let mut first = Log::open(&settings, MODEL).unwrap();
    assert_eq!((first.view, first.own), (View(0), View(1)));
    let batch = |entries: &[Entry]| Batch { payload: record::encode(entries).unwrap(), fresh: false, leads: false };
    let begin = [Entry::View(View(5)), Entry::Opened(Box::new(opened(2))), tokens(2, 0, 3)];
    assert_eq!(first.scribe.write(&batch(&begin)), Synced::Durable);
    let second = Log::open(&settings, MODEL).unwrap();
    assert_eq!((second.view, second.own), (View(5), View(6)));
    assert_eq!(count_true(&second.sessions), 3);
    // The first one was only frozen, and writes on where nobody minds.
    assert_eq!(first.scribe.write(&batch(&[tokens(2, 3, 2)])), Synced::Durable);
    let third = Log::open(&LogSettings { keep_bytes: 0, ..settings.clone() }, MODEL).unwrap();
    assert_eq!(count_true(&third.sessions), 5);
    assert_eq!(list(&HostFolder(settings.folder.clone())).unwrap().len(), 1, "what was taken over is removed");
    let fourth = Log::open(&settings, MODEL).unwrap();
    assert_eq!(count_true(&fourth.sessions), 5);
    let error = Log::open(&settings, [8; 32]).unwrap_err().to_string();
    assert!(error.contains("model 0707070707070707, expected 0808080808080808"), "{error}");
}

#[test]
fn a_folder_that_can_not_be_had_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, "no folder").unwrap();
    let error = Log::open(&LogSettings::new(path.clone()), MODEL).unwrap_err().to_string();
    assert!(error.contains(path.to_str().unwrap()) && error.contains("may read and write"), "{error}");
    let error = Log::open(&LogSettings::new(PathBuf::from("/proc/log")), MODEL).unwrap_err().to_string();
    assert!(error.contains("/proc/log"), "{error}");
}

/// A disk with room for so many bytes; half of what does not fit is written all the same.
struct Small {
    disk: Box<dyn Disk>,
    room: Arc<AtomicU64>,
    can_cut: bool,
}

impl Disk for Small {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let length = bytes.len() as u64;
        if self.room.load(Ordering::Relaxed) < length {
            self.disk.append(&bytes[..bytes.len() / 2])?;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.room.fetch_sub(length, Ordering::Relaxed);
        self.disk.append(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.disk.sync()
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        if self.can_cut { self.disk.truncate(length) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    fn remove(&mut self) -> io::Result<()> {
        self.disk.remove()
    }
}

#[test]
fn a_full_disk_loses_nothing_that_was_synced() {
    for can_cut in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let settings = LogSettings::new(folder.path().to_owned());
        let room = Arc::new(AtomicU64::new(1_000));
        let host = Arc::new(HostFolder(folder.path().to_owned()));
        let mut scribe = Scribe::begin(host, settings.clone(), head(1, START), &record::encode(&[]).unwrap()).unwrap();
        scribe.wrap(|disk| Box::new(Small { disk, room: Arc::clone(&room), can_cut }));
        let batch = |entries: &[Entry]| Batch { payload: record::encode(entries).unwrap(), fresh: false, leads: false };
        assert_eq!(scribe.write(&batch(&[Entry::Opened(Box::new(opened(1))), tokens(1, 0, 4)])), Synced::Durable);
        let synced = std::iter::from_fn(|| Some(())).enumerate().find_map(|(at, ())| {
            let synced = scribe.write(&batch(&[tokens(1, 4 + at, 1)]));
            assert!(!matches!((&synced, can_cut), (Synced::Failed { .. }, false) | (Synced::Dead { .. }, true)));
            matches!(synced, Synced::Failed { .. } | Synced::Dead { .. }).then_some(4 + at)
        });
        room.store(1_000, Ordering::Relaxed);
        let again = scribe.write(&batch(&[tokens(1, synced.unwrap(), 1)]));
        assert_eq!(matches!(again, Synced::Durable), can_cut, "{again:?}");
        let log = Log::open(&settings, MODEL).unwrap();
        assert_eq!(count_true(&log.sessions), synced.unwrap() + usize::from(can_cut));
    }
}

#[test]
fn the_next_file_says_what_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let settings = LogSettings { keep_bytes: 0, ..LogSettings::new(folder.path().to_owned()) };
    let mut log = Log::open(&settings, MODEL).unwrap();
    let payload = record::encode(&[Entry::View(View(3)), Entry::Opened(Box::new(opened(1))), tokens(1, 0, 9)]).unwrap();
    assert_eq!(log.scribe.write(&Batch { payload, fresh: true, leads: false }), Synced::Durable);
    let names = list(&HostFolder(folder.path().to_owned())).unwrap();
    assert_eq!(names.iter().map(|name| name.part).collect::<Vec<_>>(), [1], "the first file is needless");
    let more = record::encode(&[tokens(1, 9, 1)]).unwrap();
    assert_eq!(log.scribe.write(&Batch { payload: more, fresh: false, leads: false }), Synced::Durable);
    assert_eq!(count_true(&Log::open(&settings, MODEL).unwrap().sessions), 10);
}
