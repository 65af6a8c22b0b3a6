//! Control goes before data that was queued earlier.

use std::num::NonZeroU64;
use std::time::Duration;

use futures::{AsyncReadExt, AsyncWriteExt};
use ringfence::transport::endpoint::{Congestion, PathSettings};
use ringfence::wan::{Proxy, ProxySettings, WanSettings};

use super::rig::{Host, PATIENCE, accept, address_of, connect, open, socket_of};

/// Bytes of data that wait before control is written: less than a stream takes unread.
const DATA: usize = 768 << 10;

/// How libp2p begins a stream of a protocol.
fn begin(protocol: &str) -> Vec<u8> {
    let mut bytes = b"\x13/multistream/1.0.0\n".to_vec();
    bytes.push(protocol.len() as u8 + 1);
    bytes.extend(protocol.as_bytes());
    bytes.push(b'\n');
    bytes
}

/// Fills a slow path with data, then says something on control; the bytes of data that the other
/// side has read when it hears it.
async fn data_before_control(priorities: Vec<(String, i32)>) -> usize {
    let settings = PathSettings {
        // Little is in flight, so most of the data waits where priorities count.
        congestion: Congestion::CubicWithFloor { floor_bytes: 16 << 10 },
        initial_window: 16 << 10,
        share_fairly: false,
        priorities,
        ..PathSettings::default()
    };
    let (dialler, (mut host, address)) = (Host::new(settings.clone()), Host::listening(settings).await);
    let mut wan = WanSettings::default();
    wan.inward.rate = NonZeroU64::new(20_000_000);
    wan.inward.delay = Duration::from_millis(2);
    wan.inward.queue = 64_000;
    let proxy = Proxy::bind(([127, 0, 0, 1], 0).into()).unwrap();
    let proxy = proxy.start(socket_of(&address), ProxySettings { wan, ..ProxySettings::default() }).unwrap();
    let (mut near, mut far) = connect(&dialler, &mut host, &address_of(proxy.address())).await;
    let [of_data, of_control] = [begin("/ringfence/data/1"), begin("/ringfence/control/1")];
    let (mut data, mut data_read) = tokio::join!(open(&mut near, &of_data), accept(&mut far));
    let (mut control, mut control_read) = tokio::join!(open(&mut near, &of_control), accept(&mut far));
    control_read.read_exact(&mut vec![0; of_control.len()]).await.unwrap();

    data.write_all(&vec![7; DATA]).await.unwrap();
    control.write_all(b"stop").await.unwrap();
    let mut word = [0; 4];
    let mut heard = std::pin::pin!(control_read.read_exact(&mut word));
    let (mut read, mut buffer) = (0, vec![0; 4 << 10]);
    let counted = tokio::time::timeout(PATIENCE, async {
        loop {
            tokio::select! {
                biased;
                done = &mut heard => break done.unwrap(),
                bytes = data_read.read(&mut buffer) => read += bytes.unwrap(),
            }
        }
    });
    counted.await.expect("control is heard");
    assert_eq!(&word, b"stop");
    read
}

#[tokio::test]
async fn control_overtakes_data_that_waits_before_it() {
    let with = data_before_control(PathSettings::default().priorities).await;
    assert!(with < DATA / 2, "{with} bytes of data came first");
    let without = data_before_control(Vec::new()).await;
    assert!(without > DATA * 3 / 4, "without a priority it waits for its turn: {without}");
}
