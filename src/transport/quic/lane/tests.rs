//! Lanes as bytes, read however they come.

use futures::io::Cursor;
use proptest::prelude::*;
use tokio::sync::mpsc;

use super::super::control::{ControlWriter, Outgoing};
use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

/// Gives its bytes a few at a time, with a pause before each.
struct Drip {
    bytes: Vec<u8>,
    at: usize,
    step: usize,
    paused: bool,
}

impl AsyncRead for Drip {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        self.paused = !self.paused;
        if self.paused {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let bytes = into.len().min(self.step).min(self.bytes.len() - self.at);
        into[..bytes].copy_from_slice(&self.bytes[self.at..self.at + bytes]);
        self.at += bytes;
        Poll::Ready(Ok(bytes))
    }
}

/// Gives its bytes, then nothing, and does not end.
struct Silent(Vec<u8>);

impl AsyncRead for Silent {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        let bytes = into.len().min(self.0.len());
        if bytes == 0 {
            return Poll::Pending;
        }
        into[..bytes].copy_from_slice(&self.0[..bytes]);
        self.0.drain(..bytes);
        Poll::Ready(Ok(bytes))
    }
}

async fn written(outgoing: Vec<Outgoing>) -> Vec<u8> {
    let (sender, mut queue) = mpsc::channel(outgoing.len().max(1));
    for item in outgoing {
        sender.try_send(item).unwrap();
    }
    drop(sender);
    let mut writer = ControlWriter::new(Cursor::new(Vec::new()));
    writer.run(&mut queue, &Inflow::new(0)).await.unwrap();
    writer.into_inner().into_inner()
}

async fn all(mut reader: LaneReader<impl AsyncRead + Unpin>) -> (Vec<Incoming>, LaneError) {
    let mut heard = Vec::new();
    loop {
        match reader.next().await {
            Ok(incoming) => heard.push(incoming),
            Err(error) => return (heard, error),
        }
    }
}

fn reading<S: AsyncRead + Unpin>(place: Place, stream: S) -> LaneReader<S> {
    LaneReader::new(place, stream, PATIENCE)
}

fn announced(place: Place, prefix: u32) -> LaneReader<Cursor<Vec<u8>>> {
    reading(place, Cursor::new(prefix.to_le_bytes().to_vec()))
}

fn body(size: usize) -> Bytes {
    Bytes::from((0..size).map(|i| (i * 7 % 256) as u8).collect::<Vec<_>>())
}

#[tokio::test]
async fn bodies_of_every_size_come_back_however_the_bytes_come() {
    let coalesce = 64 << 10;
    let sizes = [0, 1, 3, COPY_MAX, COPY_MAX + 1, READ_STEP - 4, READ_STEP, coalesce - 4, coalesce, coalesce + 1];
    let sizes = [&sizes[..], &[300_000, 2, 0, 70_000]].concat();
    let bytes = written(sizes.iter().map(|&size| Outgoing::Body(body(size))).collect()).await;
    for step in [1_000_000, 4096, 1000, 7] {
        let drip = Drip { bytes: bytes.clone(), at: 0, step, paused: false };
        let (heard, end) = all(reading(Place::Control, drip)).await;
        assert_eq!(end, LaneError::Ended { place: Place::Control });
        assert_eq!(heard.len(), sizes.len());
        for (incoming, &size) in heard.iter().zip(&sizes) {
            let expected = Incoming::Body { lane: Lane::Control, asked: false, body: body(size) };
            assert!(*incoming == expected, "a body of {size} bytes in steps of {step}");
        }
    }
}

#[tokio::test]
async fn the_prefix_says_what_a_body_is() {
    let bytes = [0, 3, ASKED, ASKED | 3, REPLY, REPLY | 3].map(|prefix: u32| {
        let mut bytes = prefix.to_le_bytes().to_vec();
        bytes.resize(PREFIX + (prefix & 3) as usize, 7);
        bytes
    });
    let (heard, _) = all(reading(Place::Data(0), Cursor::new(bytes.concat()))).await;
    let sevens = |n| Bytes::from(vec![7; n]);
    let expected = [(Lane::Data, false), (Lane::Data, true), (Lane::Reply, false)]
        .map(|(lane, asked)| [0, 3].map(|n| Incoming::Body { lane, asked, body: sevens(n) }));
    assert_eq!(heard, expected.into_iter().flatten().collect::<Vec<_>>());
}

#[tokio::test]
async fn lengths_are_refused_before_anything_is_allocated() {
    for (place, lane, flags) in [
        (Place::Control, Lane::Control, 0),
        (Place::Data(3), Lane::Data, 0),
        (Place::Data(3), Lane::Data, ASKED),
        (Place::Data(3), Lane::Reply, REPLY),
    ] {
        let limit = lane.bytes_max();
        let mut reader = announced(place, flags | (limit + 1));
        assert_eq!(reader.next().await, Err(LaneError::TooLong { place, got: limit + 1, limit }));
        assert!(reader.buffer.capacity() <= 2 * READ_STEP);
        // A length that is allowed takes no memory until the bytes come.
        let mut reader = announced(place, flags | limit);
        assert_eq!(reader.next().await, Err(LaneError::Ended { place }));
        assert!(reader.buffer.capacity() <= 2 * READ_STEP);
    }
    // No flag but a note's has a meaning on control, nor a frame's on a reply.
    for (place, prefix) in [(Place::Control, REPLY), (Place::Control, ASKED), (Place::Data(0), REPLY | ASKED)] {
        assert!(matches!(announced(place, prefix).next().await, Err(LaneError::TooLong { .. })), "{prefix:x}");
    }
    let place = Place::Nameless;
    let mut reader = announced(place, NOTE | (NOTE_BYTES_MAX + 1));
    let refused = LaneError::NoteTooLong { place, got: NOTE_BYTES_MAX + 1, limit: NOTE_BYTES_MAX };
    assert_eq!(reader.next().await, Err(refused));
}

#[tokio::test]
async fn a_frame_without_credit_is_refused_before_its_bytes_come() {
    let inflow = Arc::new(Inflow::new(1000));
    let frame = |bytes: u32| bytes.to_le_bytes().to_vec();
    let mut bytes = [frame(600), vec![0; 600]].concat();
    bytes.extend([frame(604), vec![0; 604], frame(10)].concat());
    let mut reader = reading(Place::Nameless, Cursor::new(bytes));
    reader.name(5, inflow);
    assert!(reader.next().await.is_ok() && reader.next().await.is_ok());
    let error = reader.next().await.unwrap_err().to_string();
    assert_eq!(error, "data lane 5: 1226 bytes of frames sent without credit: 1216 at most may be under way");
}

#[tokio::test]
async fn a_farewell_ends_the_lane() {
    let bodies = |n| Outgoing::Body(Bytes::from(vec![n]));
    let bytes = written(vec![bodies(1), Outgoing::Farewell("done".to_owned()), bodies(2)]).await;
    let (heard, _) = all(reading(Place::Control, Cursor::new(bytes))).await;
    let farewell = Note::Farewell { reason: "done".to_owned() };
    let first = Incoming::Body { lane: Lane::Control, asked: false, body: Bytes::from_static(&[1]) };
    assert_eq!(heard, [first, Incoming::Note(farewell)]);
}

#[tokio::test]
async fn a_pause_in_the_middle_of_a_body_has_an_end_and_one_between_bodies_has_none() {
    let patience = Duration::from_millis(30);
    let place = Place::Data(1);
    for bytes in [vec![9], 100_u32.to_le_bytes().to_vec(), [100_u32.to_le_bytes().to_vec(), vec![0; 99]].concat()] {
        let got = bytes.len();
        let need = if got < PREFIX { PREFIX } else { PREFIX + 100 };
        let mut reader = LaneReader::new(place, Silent(bytes), patience);
        let begun = clock::now();
        assert_eq!(reader.next().await, Err(LaneError::Stalled { place, waited_ms: 30, got, need }));
        assert!(begun.elapsed() >= patience);
    }
    let whole = [3_u32.to_le_bytes().to_vec(), vec![0; 3]].concat();
    let mut reader = LaneReader::new(place, Silent(whole), patience);
    assert!(reader.next().await.is_ok());
    let waited = tokio::time::timeout(patience * 4, reader.next()).await;
    assert!(waited.is_err(), "{waited:?}");
}

#[tokio::test]
async fn a_wait_that_is_dropped_loses_nothing() {
    let bytes = [5_000_u32.to_le_bytes().to_vec(), body(5_000).to_vec()].concat();
    let inflow = Arc::new(Inflow::new(6_000));
    let mut reader = reading(Place::Nameless, Drip { bytes, at: 0, step: 3, paused: false });
    reader.name(0, inflow);
    let incoming = loop {
        // One poll, then the wait is dropped.
        if let Some(incoming) = futures::FutureExt::now_or_never(reader.next()) {
            break incoming.unwrap();
        }
    };
    assert_eq!(incoming, Incoming::Body { lane: Lane::Data, asked: false, body: body(5_000) });
}

proptest! {
    #[test]
    fn no_input_panics_or_takes_more_memory_than_it_is_long(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            for place in [Place::Control, Place::Nameless] {
                let mut reader = reading(place, Cursor::new(bytes.clone()));
                while reader.next().await.is_ok() {}
                assert!(reader.buffer.capacity() <= 2 * READ_STEP);
            }
        });
    }
}
