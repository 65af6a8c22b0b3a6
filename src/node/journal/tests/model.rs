//! Random orders of everything against a plain list of positions.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::node::journal::digest::position_digest;
use crate::node::journal::runs::cost;

const SESSIONS: u64 = 3;

/// Bytes of a position of each session.
const SIZES: [usize; 3] = [24, 7, 0];

#[derive(Debug, Clone)]
enum At {
    End,
    /// So many positions back, but not below what is settled.
    Back(u32),
    /// So many positions back, whatever is settled.
    Below(u32),
    /// So many positions on.
    Hole(u32),
}

#[derive(Debug, Clone)]
enum Op {
    Open,
    Record(At, u32),
    Settle(u32),
    Read(u32, u32, u32),
    Close,
}

fn op() -> impl Strategy<Value = Op> {
    let at = prop_oneof![
        12 => Just(At::End),
        5 => (0..9u32).prop_map(At::Back),
        1 => (0..30u32).prop_map(At::Below),
        1 => (1..5u32).prop_map(At::Hole),
    ];
    prop_oneof![
        1 => Just(Op::Open),
        14 => (at, prop_oneof![3 => Just(1), 2 => 0..12u32]).prop_map(|(at, len)| Op::Record(at, len)),
        8 => (0..6u32).prop_map(Op::Settle),
        4 => (0..40u32, 0..40u32, 0..9u32).prop_map(|(from, len, chunk)| Op::Read(from, len, chunk)),
        1 => Just(Op::Close),
    ]
}

fn ops() -> impl Strategy<Value = Vec<(u64, Op)>> {
    prop::collection::vec((0..SESSIONS, op()), 1..120)
}

/// One session as it should be.
#[derive(Debug, Default, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Plain {
    session: u64,
    first: u32,
    rows: Vec<(TokenId, Vec<u8>)>,
    settled: u32,
}

impl Plain {
    fn end(&self) -> u32 {
        self.first + self.rows.len() as u32
    }

    fn record(&mut self, pos: u32, rows: Vec<(TokenId, Vec<u8>)>) {
        if pos < self.first || pos > self.end() || self.rows.is_empty() {
            self.rows.clear();
            self.first = pos;
        }
        self.rows.truncate((pos - self.first) as usize);
        self.rows.extend(rows);
    }

    /// Bytes of what can't spill, or of all.
    fn cost(&self, spills: bool) -> u64 {
        let stays =
            if spills { self.end().saturating_sub(self.settled.max(self.first)) } else { self.rows.len() as u32 };
        u64::from(stays) * cost(SIZES[self.session as usize])
    }
}

/// Journals and what should be in them.
struct Rig {
    journals: Journals,
    plain: BTreeMap<u64, Plain>,
    closed: Vec<Plain>,
    budget: u64,
    spills: bool,
    /// The disk fails at times: what is missing is no fault, what is there must be right.
    faulty: bool,
    evicted: u64,
    round: u32,
}

impl Rig {
    fn new(journals: Journals, budget: u64, spills: bool, faulty: bool) -> Self {
        let (plain, closed) = (BTreeMap::new(), Vec::new());
        Self { journals, plain, closed, budget, spills, faulty, evicted: 0, round: 0 }
    }

    fn run(&mut self, ops: Vec<(u64, Op)>) {
        for session in 0..SESSIONS {
            self.apply(session, Op::Open);
        }
        for (session, op) in ops {
            self.apply(session, op);
            self.check();
        }
    }

    fn apply(&mut self, id: u64, op: Op) {
        let session = SessionId(id);
        let each = SIZES[id as usize];
        match op {
            Op::Open => {
                self.journals.open(session, each, id as u8);
                self.plain.insert(id, Plain { session: id, ..Plain::default() });
            }
            Op::Close => {
                self.journals.close(session);
                self.closed.extend(self.plain.remove(&id).filter(|plain| !plain.rows.is_empty()));
            }
            Op::Record(at, len) => {
                let plain = self.plain.get(&id).cloned().unwrap_or_default();
                let pos = match at {
                    At::End => plain.end(),
                    At::Back(back) => plain.end().saturating_sub(back).max(plain.settled),
                    At::Below(back) => plain.end().saturating_sub(back),
                    At::Hole(on) => plain.end() + on,
                };
                self.round += 1;
                let (ids, payload) = frame(pos, len, self.round, each);
                self.journals.record(session, Position(pos), &ids, payload);
                if let Some(plain) = self.plain.get_mut(&id) {
                    plain.record(pos, (pos..pos + len).map(|pos| row(pos, self.round, each)).collect());
                }
            }
            Op::Settle(back) => {
                let Some(plain) = self.plain.get_mut(&id) else { return };
                let settled = plain.end().saturating_sub(back);
                plain.settled = plain.settled.max(settled);
                self.journals.settle(session, Position(settled));
            }
            Op::Read(from, len, chunk) => self.read(id, from, from + len, chunk),
        }
    }

    fn read(&mut self, id: u64, from: u32, to: u32, chunk: u32) {
        let (session, each) = (SessionId(id), SIZES[id as usize]);
        let (first, end) = span(&self.journals, session);
        let read = self.journals.read(session, Position(from), Position(to), chunk);
        let Some(plain) = self.plain.get(&id) else {
            return assert!(matches!(read, Err(JournalError::Unknown { .. })));
        };
        if from < first || to > end {
            return assert!(matches!(read, Err(JournalError::NotCovered { .. })), "{from}..{to} of {first}..{end}");
        }
        if from == to {
            return assert!(read.unwrap().is_empty(), "of no positions there is nothing");
        }
        let pieces = match read {
            Err(JournalError::File { .. }) if self.faulty => {
                self.forget();
                return;
            }
            read => read.unwrap(),
        };
        let mut pos = from;
        for piece in pieces {
            assert!((1..=chunk.max(1) as usize).contains(&piece.ids.len()));
            assert_eq!((piece.pos, piece.payload.len()), (Position(pos), piece.ids.len() * each));
            for (at, id) in piece.ids.iter().enumerate() {
                let (expected, bytes) = &plain.rows[(pos - plain.first) as usize];
                assert_eq!((id, &piece.payload[at * each..(at + 1) * each]), (expected, &bytes[..]), "position {pos}");
                pos += 1;
            }
        }
        assert_eq!(pos, to);
        let digests = match self.journals.digests(session, Position(from), Position(to)) {
            Err(JournalError::File { .. }) if self.faulty => {
                self.forget();
                return;
            }
            digests => digests.unwrap(),
        };
        let expected = plain.rows[(from - plain.first) as usize..(to - plain.first) as usize].iter().zip(from..);
        let expected = expected.map(|((token, bytes), pos)| position_digest(Position(pos), *token, id as u8, bytes));
        assert!(digests.into_iter().eq(expected), "digests of {from}..{to}");
    }

    fn check(&mut self) {
        let stats = self.journals.stats();
        assert_eq!(stats.sessions, self.plain.len());
        assert!(self.journals.memory <= self.budget, "{} bytes of {}", self.journals.memory, self.budget);
        let held: u64 = self.journals.sessions.values().map(Journal::held).sum();
        assert_eq!(self.journals.memory, held, "what is counted is what is there");
        let folder = self.journals.folder.as_ref().map(folder::Folder::path);
        let names = folder.map_or_else(Vec::new, names).into_iter().filter(|name| name.ends_with(".part"));
        let lengths = names.map(|name| std::fs::metadata(folder.unwrap().join(name)).unwrap().len());
        if self.journals.keeper.is_none() && !self.faulty {
            assert_eq!(stats.file_bytes, lengths.sum::<u64>(), "the files are as long as they should be");
        }
        let wanted: u64 = self.plain.values().map(|plain| plain.cost(self.spills)).sum();
        let (forgotten, most) = self.forget();
        if forgotten > 0 && !self.faulty {
            assert!(wanted > self.budget, "{forgotten} positions forgotten though there was room");
            assert!(held + most > self.budget, "{held} bytes stay of {}: too many were forgotten", self.budget);
        }
        for id in 0..SESSIONS {
            let (first, end) = span(&self.journals, SessionId(id));
            if first < end {
                self.read(id, first, end, 5);
            }
        }
    }

    /// Forgets what the journals forgot, which is the oldest: how many positions, and what one of them costs.
    fn forget(&mut self) -> (u64, u64) {
        let mut forgotten = 0;
        let mut most = 0;
        for (id, plain) in &mut self.plain {
            let (first, end) = span(&self.journals, SessionId(*id));
            if first < end {
                assert_eq!(end, plain.end(), "session {id} has its newest position");
                assert!(first >= plain.first);
            }
            let gone = if first < end { first - plain.first } else { plain.rows.len() as u32 };
            if gone > 0 {
                forgotten += u64::from(gone);
                most = most.max(cost(SIZES[*id as usize]));
                plain.first += gone;
                plain.rows.drain(..gone as usize);
            }
        }
        self.evicted += forgotten;
        assert_eq!(self.journals.stats().evicted_positions, self.evicted);
        (forgotten, most)
    }
}

fn kept(folder: &Path) -> Vec<Plain> {
    let mut all = Vec::new();
    for name in names(folder) {
        assert!(name.ends_with(".journal"), "{name} stayed");
        let mut journal = KeptJournal::open(&folder.join(name)).unwrap();
        let header = journal.header().clone();
        assert_eq!((u64::from(header.tag), header.label.as_str()), (header.session.0, "0:3"));
        assert_ne!(header.closed, 0);
        let each = header.position_bytes as usize;
        let mut rows = Vec::new();
        for piece in journal.read(header.first, header.end(), 3).unwrap() {
            let bytes = |at: usize| piece.payload[at * each..(at + 1) * each].to_vec();
            rows.extend(piece.ids.iter().enumerate().map(|(at, id)| (*id, bytes(at))));
        }
        let digests = journal.digests(header.first, header.end()).unwrap();
        let expected = rows.iter().zip(header.first.0..);
        let expected = expected.map(|((id, bytes), pos)| position_digest(Position(pos), *id, header.tag, bytes));
        assert!(digests.into_iter().eq(expected));
        all.push(Plain { session: header.session.0, first: header.first.0, rows, settled: header.settled.0 });
    }
    all.sort();
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn memory_alone_holds_the_newest_positions_that_it_has_room_for(ops in ops(), budget in 0..40u64) {
        let budget = budget * COST;
        Rig::new(journals(budget, None, None), budget, false, false).run(ops);
    }

    #[test]
    fn with_a_file_only_positions_that_are_not_settled_are_ever_forgotten(ops in ops(), budget in 0..40u64) {
        let folder = tempfile::tempdir().unwrap();
        let budget = budget * COST;
        let mut rig = Rig::new(journals(budget, Some(folder.path()), None), budget, true, false);
        rig.run(ops);
        drop(rig);
        prop_assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_is_kept_is_what_was_held_at_the_end(ops in ops(), budget in 0..40u64) {
        let folder = tempfile::tempdir().unwrap();
        let budget = budget * COST;
        let mut rig = Rig::new(journals(budget, Some(folder.path()), Some(forever())), budget, true, false);
        // A session that waits to be written while another closes is refused at such budgets.
        for op in ops {
            let before = rig.closed.len();
            rig.apply(op.0, op.1);
            rig.check();
            let until = crate::clock::now() + Duration::from_secs(60);
            while rig.closed.len() > before && rig.journals.stats().memory_bytes > rig.journals.memory {
                prop_assert!(crate::clock::now() < until, "what is closed is written in time");
                std::thread::yield_now();
            }
        }
        let Rig { journals, plain, mut closed, .. } = rig;
        drop(journals);
        let last = closed.len();
        closed.extend(plain.into_values().filter(|plain| !plain.rows.is_empty()));
        // At the end they are closed at once: some may be refused, but none may be wrong.
        let kept = kept(folder.path());
        for plain in &kept {
            prop_assert!(closed.contains(plain), "kept: {plain:?}");
        }
        for plain in &closed[..last] {
            prop_assert!(kept.contains(plain), "not kept: {plain:?}");
        }
    }

    #[test]
    fn a_failing_disk_loses_positions_and_never_changes_one(
        ops in ops(),
        budget in 0..30u64,
        (files, bytes, reads, cuts) in (0..6u32, 0..6_000u64, 0..60u32, 0..6u32),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let budget = budget * COST;
        let faults = Faults::none();
        faults.set(|limits| *limits = Limits { files, bytes, reads, cuts });
        let journals = journals(budget, Some(folder.path()), None).wrapped(faults.wrap());
        let mut rig = Rig::new(journals, budget, true, true);
        rig.run(ops);
        drop(rig);
        prop_assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
