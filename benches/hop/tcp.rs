//! A hop over one TCP connection, and a relay that delays it.
//!
//! The relay ends TCP on both sides and holds bytes back for the one-way delay: there is no loss, no
//! slow start and no window to wait for, so its times are the least that TCP could do.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener as Listener, TcpStream as Stream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use ringfence::clock::now;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::stack::{ECHO, Load, Places, Wan};

/// Bytes that the relay reads at once.
const READ_MAX: usize = 64 << 10;

/// Reads that the relay holds in a direction.
const HELD_MAX: usize = 4_096;

/// Both ends.
pub(crate) struct Tcp {
    stream: TcpStream,
    _echo: JoinSet<()>,
}

impl Tcp {
    pub(crate) async fn connect(wan: &Wan) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut target = listener.local_addr().unwrap();
        if !wan.is_bare() {
            assert!(wan.loss == 0.0 && wan.rate.is_none(), "the relay only delays");
            target = relay(target, wan.rtt / 2);
        }
        let mut echo = JoinSet::new();
        echo.spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            answer(stream).await;
        });
        let stream = TcpStream::connect(target).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, _echo: echo }
    }

    pub(crate) async fn turn(&mut self, load: &Load) -> Vec<Duration> {
        let mut places = Places::new(load);
        let mut scratch = Vec::new();
        for body in &load.bodies {
            send(&mut self.stream, body, &mut scratch).await;
        }
        while !places.is_over() {
            let place = self.stream.read_u8().await.unwrap();
            if places.heard(place) {
                send(&mut self.stream, &load.bodies[usize::from(place)], &mut scratch).await;
            }
        }
        places.taken()
    }
}

async fn send(stream: &mut TcpStream, body: &[u8], scratch: &mut Vec<u8>) {
    scratch.clear();
    scratch.extend_from_slice(&u32::try_from(body.len()).unwrap().to_le_bytes());
    scratch.extend_from_slice(body);
    stream.write_all(scratch).await.unwrap();
}

async fn answer(mut stream: TcpStream) {
    stream.set_nodelay(true).unwrap();
    let mut body = Vec::new();
    while let Ok(length) = stream.read_u32_le().await {
        body.resize(length as usize, 0);
        if stream.read_exact(&mut body).await.is_err() {
            return;
        }
        if body[1] == ECHO && stream.write_all(&body[..1]).await.is_err() {
            return;
        }
    }
}

/// Listens for one connection and carries it on to `target`, both ways late by `delay`. Its threads
/// end with the connection.
fn relay(target: SocketAddr, delay: Duration) -> SocketAddr {
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let near = listener.accept().unwrap().0;
        let far = Stream::connect(target).unwrap();
        for stream in [&near, &far] {
            stream.set_nodelay(true).unwrap();
        }
        carry(near.try_clone().unwrap(), far.try_clone().unwrap(), delay);
        carry(far, near, delay);
    });
    address
}

fn carry(from: Stream, to: Stream, delay: Duration) {
    let (held, due) = sync_channel(HELD_MAX);
    thread::spawn(move || take(from, delay, &held));
    thread::spawn(move || give(to, &due));
}

fn take(mut from: Stream, delay: Duration, held: &SyncSender<(Instant, Vec<u8>)>) {
    let mut buffer = vec![0; READ_MAX];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        if held.send((now() + delay, buffer[..bytes].to_vec())).is_err() {
            return;
        }
    }
}

fn give(mut to: Stream, due: &Receiver<(Instant, Vec<u8>)>) {
    // The system's timers are some 50 µs late otherwise.
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZero::new(1));
    while let Ok((at, bytes)) = due.recv() {
        thread::sleep(at.saturating_duration_since(now()));
        if to.write_all(&bytes).is_err() {
            return;
        }
    }
    // The other side may be gone already.
    let _ = to.shutdown(Shutdown::Both);
}
