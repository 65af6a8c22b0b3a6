//! Files: when they come and go, what others leave behind, what hostile ones do.

use std::fs::{self, File};
use std::time::SystemTime;

use proptest::prelude::*;

use super::*;

const A: SessionId = SessionId(0x1_0000_0001);
const B: SessionId = SessionId(0x1_0000_0002);

/// Journals with `A` open, 10 of its positions in memory at most.
fn spilling(folder: &Path, keep: Option<Retention>) -> Journals {
    let mut journals = journals(10 * COST, Some(folder), keep);
    journals.open(A, EACH, 2);
    journals
}

fn put_settled(journals: &mut Journals, session: SessionId, positions: u32) {
    for pos in 0..positions {
        journals.settle(session, Position(pos));
        put(journals, session, pos, 1);
    }
}

#[test]
fn a_session_has_a_file_as_long_as_it_is_open() {
    let folder = tempfile::tempdir().unwrap();
    let mut journals = spilling(folder.path(), None);
    put_settled(&mut journals, A, 10);
    assert_eq!(names(folder.path()).len(), 0, "nothing spills while there is room");
    put_settled(&mut journals, A, 100);
    assert_eq!(names(folder.path()).len(), 1);
    assert_eq!(span(&journals, A), (0, 100));
    let stats = journals.stats();
    assert_eq!((stats.memory_bytes, stats.file_bytes), (10 * COST, 256 + 90 * (EACH as u64 + 4)));
    journals.close(A);
    assert_eq!((names(folder.path()).len(), journals.stats().memory_bytes), (0, 0));
    journals.open(B, EACH, 2);
    put_settled(&mut journals, B, 50);
    journals.open(B, EACH, 2);
    assert_eq!((names(folder.path()).len(), span(&journals, B)), (0, (0, 0)), "a session opened anew has nothing");
    put_settled(&mut journals, B, 50);
    assert_eq!(names(folder.path()).len(), 1);
    drop(journals);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing stays, no lock either");
}

#[test]
fn files_are_for_their_owner_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("deep/er");
    let mut journals = spilling(&inner, None);
    put_settled(&mut journals, A, 50);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&inner), mode(&inner.join(&names(&inner)[0]))), (0o700, 0o600));
}

#[test]
fn the_session_that_holds_most_spills_first() {
    let folder = tempfile::tempdir().unwrap();
    let mut journals = spilling(folder.path(), None);
    journals.open(B, EACH, 2);
    put(&mut journals, A, 0, 6);
    put(&mut journals, B, 0, 4);
    journals.settle(A, Position(6));
    journals.settle(B, Position(4));
    put(&mut journals, B, 4, 1);
    assert!(names(folder.path())[0].contains("0000000100000001"), "{:?}", names(folder.path()));
    assert_eq!((span(&journals, A), span(&journals, B)), ((0, 6), (0, 5)));
}

#[test]
fn of_a_frame_that_is_settled_in_part_only_that_part_spills() {
    let folder = tempfile::tempdir().unwrap();
    let mut journals = spilling(folder.path(), None);
    put(&mut journals, A, 0, 8);
    journals.settle(A, Position(3));
    put(&mut journals, A, 8, 3);
    assert_eq!((span(&journals, A), journals.stats().file_bytes), ((0, 11), 256 + 3 * (EACH as u64 + 4)));
    // Nothing else may go to the file, so what is too much is forgotten, and with it what is in front.
    put(&mut journals, A, 11, 4);
    assert_eq!((span(&journals, A), journals.stats().file_bytes), ((5, 15), 0));
}

#[test]
fn a_session_that_can_t_spill_forgets_only_what_is_too_much() {
    let mut journals = journals(10 * COST, None, None);
    journals.open(A, EACH, 2);
    journals.settle(A, Position(1_000));
    put(&mut journals, A, 0, 8);
    put(&mut journals, A, 8, 5);
    assert_eq!((span(&journals, A), journals.stats().evicted_positions), ((3, 13), 3));
    put(&mut journals, A, 13, 64);
    assert_eq!(span(&journals, A), (67, 77), "of a frame that is larger than memory the end stays");
}

#[test]
fn a_disk_that_is_full_costs_the_oldest_positions_and_is_told_of_once() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::none();
    let mut journals = journals(10 * COST, Some(folder.path()), None).wrapped(faults.wrap());
    journals.open(A, EACH, 2);
    put_settled(&mut journals, A, 50);
    assert!(!journals.told);
    faults.set(|limits| limits.bytes = 10);
    for pos in 50..60 {
        journals.settle(A, Position(pos));
        put(&mut journals, A, pos, 1);
    }
    assert_eq!((span(&journals, A), journals.stats().evicted_positions), ((50, 60), 50));
    assert!(journals.told);
    assert_eq!(names(folder.path()).len(), 0, "the disk has its room back");
    // Another session tries again.
    faults.set(|limits| limits.bytes = u64::MAX);
    journals.open(B, EACH, 2);
    put_settled(&mut journals, B, 50);
    assert_eq!(span(&journals, B), (0, 50));
}

#[test]
fn a_folder_that_is_gone_is_no_more_than_a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("journal");
    let mut journals = spilling(&inner, Some(forever()));
    fs::remove_dir_all(&inner).unwrap();
    put_settled(&mut journals, A, 50);
    assert_eq!(span(&journals, A), (40, 50));
    journals.close(A);
    drop(journals);
    assert!(!inner.exists());
}

#[test]
fn a_file_that_can_t_be_read_is_given_up() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::none();
    let mut journals = journals(10 * COST, Some(folder.path()), None).wrapped(faults.wrap());
    journals.open(A, EACH, 2);
    put_settled(&mut journals, A, 50);
    faults.set(|limits| limits.reads = 0);
    let error = journals.read(A, Position(5), Position(8), 8).unwrap_err().to_string();
    let name = format!("{}/", folder.path().display());
    assert!(error.contains(&name) && error.contains("unreadable"), "{error}");
    assert_eq!((span(&journals, A), journals.stats().evicted_positions), ((40, 50), 40));
    assert_eq!(journals.read(A, Position(40), Position(50), 8).unwrap().len(), 2);
}

#[test]
fn a_file_that_was_cut_behind_our_back_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut journals = spilling(folder.path(), None);
    put_settled(&mut journals, A, 50);
    let path = folder.path().join(&names(folder.path())[0]);
    File::options().write(true).open(path).unwrap().set_len(300).unwrap();
    assert!(matches!(journals.digests(A, Position(0), Position(50)), Err(JournalError::File { .. })));
    assert_eq!(span(&journals, A), (40, 50));
}

#[test]
fn a_slow_disk_is_not_waited_for_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut journals = spilling(folder.path(), None);
    journals.slow = Duration::ZERO;
    put_settled(&mut journals, A, 11);
    assert_eq!(span(&journals, A), (0, 11), "what is written is written");
    put_settled(&mut journals, A, 12);
    assert_eq!(names(folder.path()).len(), 0);
}

#[test]
fn what_is_no_position_clears_the_journal() {
    let mut journals = journals(100 * COST, None, None);
    journals.open(A, EACH, 2);
    put(&mut journals, A, 0, 8);
    let (ids, payload) = frame(8, 3, 0, EACH);
    journals.record(A, Position(8), &ids, payload.slice(1..));
    assert_eq!(span(&journals, A), (0, 0));
    put(&mut journals, A, 8, 8);
    journals.record(A, Position(u32::MAX - 1), &ids, payload);
    assert_eq!((span(&journals, A), journals.stats().memory_bytes), ((0, 0), 0));
}

#[test]
fn folders_that_can_t_be_used_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    File::create(&file).unwrap();
    let inside = file.join("inside");
    let Err(error) = Journals::new(config(0, Some(&inside), None), "0:3") else { panic!("it was taken") };
    let expected = format!("journal folder {}: ", inside.display());
    assert!(error.to_string().starts_with(&expected) && error.to_string().contains("--journal-dir"), "{error}");
    assert!(Journals::check(&config(0, Some(&inside), None)).is_err());
    assert!(Journals::check(&config(0, Some(folder.path()), None)).is_ok());
    let label = "x".repeat(129);
    assert!(matches!(Journals::new(config(0, None, None), &label), Err(JournalError::Label { got: 129 })));
}

/// The file of a session of a process that is gone: that of a living one under another number.
fn leave_behind(folder: &Path, start: &str, cut: impl FnOnce(&File)) {
    let other = tempfile::tempdir().unwrap();
    let mut journals = spilling(other.path(), None);
    put_settled(&mut journals, A, 50);
    let name = &names(other.path())[0];
    let path = folder.join(format!("{start}{}", &name[16..]));
    fs::copy(other.path().join(name), &path).unwrap();
    cut(&File::options().write(true).open(path).unwrap());
    File::create(folder.join(format!("{start}.lock"))).unwrap();
}

#[test]
fn what_a_dead_process_left_is_cleared_away_and_nothing_else_is() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("notes.part"), "mine").unwrap();
    let mut living = spilling(folder.path(), None);
    put_settled(&mut living, A, 50);
    let before = names(folder.path());
    leave_behind(folder.path(), "00000000000000aa", |_| ());
    // Without a lock file, as after one that was cleared away by half.
    fs::write(folder.path().join("00000000000000bb-00000001-0000000000000001.part"), "x").unwrap();
    fs::write(folder.path().join("00000000000000cc-00000001-0000000000000001.journal"), "kept").unwrap();
    assert_eq!(names(folder.path()).len(), before.len() + 3);
    let second = spilling(folder.path(), None);
    let kept = "00000000000000cc-00000001-0000000000000001.journal".to_owned();
    let mut expected = [before, vec![kept]].concat();
    expected.sort();
    assert_eq!(names(folder.path()), expected, "the living one's, the notes and the kept one stay");
    assert!(!folder.path().join("00000000000000aa.lock").exists());
    assert_eq!(span(&living, A), (0, 50));
    assert_eq!(living.read(A, Position(0), Position(50), 64).unwrap()[0].ids.len(), 50);
    drop(second);
}

#[test]
fn with_a_retention_what_a_dead_process_wrote_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    // It was killed while it wrote: the header does not know of the last bytes.
    leave_behind(folder.path(), "00000000000000aa", |file| {
        file.set_len(file.metadata().unwrap().len() + 11).unwrap();
    });
    leave_behind(folder.path(), "00000000000000bb", |file| file.set_len(300).unwrap());
    leave_behind(folder.path(), "00000000000000dd", |file| file.set_len(20).unwrap());
    let _journals = spilling(folder.path(), Some(forever()));
    let names = names(folder.path());
    assert!(
        names.len() == 1 && names[0].starts_with("00000000000000aa") && names[0].ends_with(".journal"),
        "{names:?}"
    );
    let mut kept = KeptJournal::open(&folder.path().join(&names[0])).unwrap();
    assert_eq!((kept.header().first, kept.header().count, kept.header().closed), (Position(0), 40, 0));
    let piece = &kept.read(Position(38), Position(40), 8).unwrap()[0];
    assert_eq!((piece.ids[1], piece.payload[EACH..].to_vec()), row(39, 0, EACH));
}

/// Closes sessions of 20 positions, one after the other, and waits for each.
fn close_all(journals: &mut Journals, sessions: std::ops::Range<u64>) {
    for session in sessions.map(SessionId) {
        journals.open(session, EACH, 2);
        put_settled(journals, session, 20);
        journals.close(session);
        let until = crate::clock::now() + Duration::from_secs(60);
        while journals.stats().memory_bytes > 0 {
            assert!(crate::clock::now() < until, "session {session} is written in time");
            std::thread::yield_now();
        }
    }
}

fn sessions(folder: &Path) -> Vec<u64> {
    let id = |name: &String| u64::from_str_radix(&name[26..42], 16).unwrap();
    let mut all: Vec<u64> = names(folder).iter().map(id).collect();
    all.sort_unstable();
    all
}

#[test]
fn kept_files_above_the_limit_go_oldest_first() {
    let folder = tempfile::tempdir().unwrap();
    let one = 256 + 20 * (EACH as u64 + 4);
    let keep = Retention { bytes: 3 * one, ..forever() };
    let mut journals = journals(10 * COST, Some(folder.path()), Some(keep));
    close_all(&mut journals, 1..9);
    drop(journals);
    assert_eq!(sessions(folder.path()), [6, 7, 8]);
    let keep = Retention { bytes: one - 1, ..forever() };
    let _journals = super::journals(COST, Some(folder.path()), Some(keep));
    assert_eq!(sessions(folder.path()).len(), 0);
}

#[test]
fn kept_files_go_when_they_are_old() {
    let folder = tempfile::tempdir().unwrap();
    let mut journals = journals(10 * COST, Some(folder.path()), Some(forever()));
    close_all(&mut journals, 1..4);
    drop(journals);
    let names = names(folder.path());
    let age = |name: &String, seconds| {
        let file = File::options().write(true).open(folder.path().join(name)).unwrap();
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(crate::clock::unix_seconds());
        file.set_modified(now - Duration::from_secs(seconds)).unwrap();
    };
    age(&names[0], 86_000);
    age(&names[1], 86_500);
    age(&names[2], 90_000);
    let without = super::journals(COST, Some(folder.path()), None);
    assert_eq!(sessions(folder.path()), [1, 2, 3], "who has no retention leaves others' files alone");
    let _journals = super::journals(COST, Some(folder.path()), Some(forever()));
    assert_eq!(sessions(folder.path()), [1]);
    drop(without);
}

#[test]
fn a_session_that_is_closed_twice_is_kept_twice() {
    let folder = tempfile::tempdir().unwrap();
    let mut journals = journals(10 * COST, Some(folder.path()), Some(forever()));
    close_all(&mut journals, 5..6);
    close_all(&mut journals, 5..6);
    journals.open(A, EACH, 2);
    journals.close(A);
    drop(journals);
    assert_eq!(sessions(folder.path()), [5, 5], "one without positions is not");
}

#[test]
fn a_session_that_is_open_at_the_end_is_kept_too() {
    let folder = tempfile::tempdir().unwrap();
    let mut journals = spilling(folder.path(), Some(forever()));
    put_settled(&mut journals, A, 30);
    drop(journals);
    let kept = KeptJournal::open(&folder.path().join(&names(folder.path())[0])).unwrap();
    assert_eq!((kept.header().session, kept.header().count, kept.header().settled), (A, 30, Position(29)));
}

/// A kept file of 20 positions.
fn one_kept(folder: &Path) -> std::path::PathBuf {
    let mut journals = journals(10 * COST, Some(folder), Some(forever()));
    close_all(&mut journals, 1..2);
    drop(journals);
    folder.join(&names(folder)[0])
}

#[test]
fn what_is_no_kept_journal_is_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let path = one_kept(folder.path());
    let refused = |path: &Path| KeptJournal::open(path).map(|_| ()).unwrap_err().to_string();
    let mut kept = KeptJournal::open(&path).unwrap();
    let error = kept.read(Position(19), Position(21), 4).unwrap_err().to_string();
    assert!(error.ends_with("positions 19 to 21 are not in it: it holds 0 to 20"), "{error}");
    assert!(kept.digests(Position(5), Position(4)).is_err());
    let bytes = fs::read(&path).unwrap();
    for (len, what) in [(bytes.len() - 1, "815 bytes, but its header says 816"), (200, "200 bytes, a header has 256")] {
        fs::write(&path, &bytes[..len]).unwrap();
        assert!(refused(&path).contains(what), "{}", refused(&path));
    }
    assert!(refused(folder.path()).ends_with("it is not a regular file"));
    assert!(refused(&folder.path().join("none")).contains("No such file"));
    // Cut while it is read.
    fs::write(&path, &bytes).unwrap();
    let mut kept = KeptJournal::open(&path).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(500).unwrap();
    assert!(matches!(kept.read(Position(0), Position(20), 64), Err(KeptError::File { .. })));
}

proptest! {
    #[test]
    fn no_bytes_make_a_reader_panic(
        random in prop::collection::vec(any::<u8>(), 0..600),
        fields in (any::<u32>(), any::<u32>(), any::<u32>(), any::<u32>()),
        (from, len) in (any::<u32>(), 0..9u32),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kept");
        fs::write(&path, &random).unwrap();
        prop_assert!(KeptJournal::open(&path).is_err());
        // A header that is well-formed, whatever it claims.
        let header = Header {
            tag: 2,
            session: A,
            start: 1,
            position_bytes: fields.0 >> (fields.3 % 32),
            first: Position(fields.1),
            count: fields.2 >> (fields.3 / 32 % 32),
            settled: Position(fields.3),
            closed: 0,
            label: String::new(),
        };
        let bytes = [&header.encode()[..], &random].concat();
        fs::write(&path, &bytes).unwrap();
        let header = Header::decode(&bytes);
        prop_assert_eq!(KeptJournal::open(&path).is_ok(), header.is_ok_and(|h| h.file_bytes() == bytes.len() as u64));
        // As long as it says, without a byte on the disk.
        if let Ok(header) = Header::decode(&bytes)
            && File::options().write(true).open(&path).unwrap().set_len(header.file_bytes()).is_ok()
        {
            let mut kept = KeptJournal::open(&path).unwrap();
            let from = header.first.0.saturating_add(from % header.count.max(1));
            let to = from.saturating_add(len.min(1 + (1 << 20) / header.record_bytes() as u32));
            let read = kept.read(Position(from), Position(to), 4);
            prop_assert_eq!(read.is_ok(), to <= header.end().0);
            prop_assert_eq!(kept.digests(Position(from), Position(to)).is_ok(), to <= header.end().0);
        }
    }
}
