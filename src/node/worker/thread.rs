//! The thread that drives a worker: its channel, its waiting, and its sends.
//!
//! One loop: take in what has come, compute one pass, take in again, send on. Results go to the link
//! from here, without another hop between tasks.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::clock;
use crate::engine::Engine;
use crate::ids::Node;
use crate::node::counters::Counters;
use crate::node::journal::Journals;
use crate::node::worker::{INPUTS_MAX, Input, Pass, Worker};
use crate::transport::{Lane, Link, LinkError};

/// What the worker is made of.
pub struct WorkerParts {
    /// The engine, owned by the worker from here on.
    pub engine: Box<dyn Engine>,
    /// What it sends is kept here, too.
    pub journals: Journals,
    /// Where results go.
    pub link: Arc<dyn Link>,
    /// Runtime on which a full send queue is waited for.
    pub runtime: tokio::runtime::Handle,
    /// Shared with the shell.
    pub counters: Arc<Counters>,
    /// Sessions held at once.
    pub max_sessions: u32,
}

/// A worker under way.
pub struct Started {
    /// What the shell tells it.
    pub inputs: SyncSender<Input>,
    /// Resolves when the thread has ended, for whatever reason.
    pub ended: oneshot::Receiver<()>,
    /// The thread.
    pub thread: std::thread::JoinHandle<()>,
}

/// Starts the worker's thread.
///
/// # Errors
/// The system's error where no thread can be started.
pub fn start(parts: WorkerParts) -> std::io::Result<Started> {
    let (inputs, receiver) = sync_channel(INPUTS_MAX);
    let (alive, ended) = oneshot::channel::<()>();
    let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        // Dropped however the thread ends, also by a panic.
        let _alive = alive;
        let WorkerParts { engine, journals, link, runtime, counters, max_sessions } = parts;
        // Links use the runtime's timers.
        let _entered = runtime.enter();
        let worker = Worker::new(engine, journals, counters, max_sessions);
        Driver { worker, link, runtime: runtime.clone(), inputs: receiver }.run();
    })?;
    Ok(Started { inputs, ended, thread })
}

struct Driver {
    worker: Worker,
    link: Arc<dyn Link>,
    runtime: tokio::runtime::Handle,
    inputs: Receiver<Input>,
}

impl Driver {
    fn run(&mut self) {
        loop {
            if !self.take_in() {
                return;
            }
            self.worker.handle_timeout(clock::now());
            self.tell();
            self.send_on();
            // One at a time, so that no result waits behind them.
            let copied = self.copy();
            let goes_on = match self.worker.poll_work() {
                Some(pass) => self.pass(pass),
                None => copied || self.wait(),
            };
            if !goes_on {
                return;
            }
        }
    }

    /// Takes in everything that has come; `false` to end.
    fn take_in(&mut self) -> bool {
        loop {
            match self.inputs.try_recv() {
                Ok(input) => {
                    if !self.handle(input) {
                        return false;
                    }
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn handle(&mut self, input: Input) -> bool {
        let goes_on = self.worker.handle_input(input, clock::now());
        self.tell();
        goes_on
    }

    /// Waits for one input or the next deadline; `false` to end.
    fn wait(&mut self) -> bool {
        let input = match self.worker.poll_timeout() {
            None => self.inputs.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(at) => self.inputs.recv_timeout(at.saturating_duration_since(clock::now())),
        };
        match input {
            Ok(input) => self.handle(input),
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => false,
        }
    }

    /// Computes and sends on; `false` to end.
    fn pass(&mut self, pass: Pass) -> bool {
        let begun = clock::now();
        self.worker.compute(pass);
        let us = u64::try_from(clock::now().duration_since(begun).as_micros()).unwrap_or(u64::MAX);
        if !self.take_in() {
            return false;
        }
        self.worker.handle_computed(us, clock::now());
        self.tell();
        self.send_on();
        true
    }

    fn tell(&mut self) {
        while let Some(tell) = self.worker.poll_tell() {
            if let Err(error) = self.send(tell.to, Lane::Control, tell.body) {
                tracing::warn!(%error, "a peer can't be told");
            }
        }
    }

    fn send_on(&mut self) {
        while let Some(send) = self.worker.poll_send(clock::now()) {
            let sent = self.send(send.to, send.lane, send.body);
            self.worker.handle_sent(sent, clock::now());
            self.tell();
        }
    }

    /// Sends a copy to a shadow, if there is one and room for it at once.
    fn copy(&mut self) -> bool {
        let Some(copy) = self.worker.poll_copy() else { return false };
        let sent = self.link.try_send(copy.to, copy.lane, copy.body);
        self.worker.handle_copied(sent.is_ok());
        true
    }

    /// Sends, waiting for room in the queue only where it is full.
    fn send(&self, to: Node, lane: Lane, body: Bytes) -> Result<(), LinkError> {
        match self.link.try_send(to, lane, body.clone()) {
            Err(LinkError::Stalled { .. }) => self.runtime.block_on(self.link.send(to, lane, body)),
            sent => sent,
        }
    }
}
