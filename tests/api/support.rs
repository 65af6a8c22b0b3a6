//! A scripted coordinator, and an HTTP client that shows what is on the wire.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use futures::future::BoxFuture;
use ringfence::api::keys::Keys;
use ringfence::api::server::{Api, Settings};
use ringfence::api::speech::{Speech, SpeechFiles};
use ringfence::coordinator::job::{
    AttachError, Attached, Client as Asker, Event, Finish, HopStatus, JOB_EVENTS_MAX, Job, JobError, JobStats,
    MemberStatus, ModelFacts, Request, RingStatus, Serve, SubmitError,
};
use ringfence::ids::{SessionId, TokenId, View, WireEncoding};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};

/// Deadline of everything a test waits for.
const PATIENCE: Duration = Duration::from_secs(10);

/// The coordinator's side of a job.
pub(crate) struct JobSide {
    events: mpsc::Sender<Event>,
    last: mpsc::OwnedPermit<Event>,
    /// `Ok`: the caller has enough. `Err`: it is gone.
    pub(crate) caller: oneshot::Receiver<()>,
}

/// Both sides of a job; a place for the last event is kept.
fn channel(session: SessionId) -> (Job, JobSide) {
    let (sender, events) = mpsc::channel(JOB_EVENTS_MAX);
    let last = sender.clone().try_reserve_owned().unwrap();
    let (alive, caller) = oneshot::channel();
    (Job { session, events, alive }, JobSide { events: sender, last, caller })
}

impl JobSide {
    /// Hands an event over without waiting; a full buffer is the verdict.
    pub(crate) fn send(&self, event: Event) -> Result<(), JobError> {
        let sent = self.events.try_send(event);
        sent.map_err(|_| JobError::SlowReader { events: JOB_EVENTS_MAX })
    }

    /// Says the last event and hangs up.
    pub(crate) fn end(self, event: Event) {
        self.last.send(event);
    }
}

/// A coordinator that says what it is told to.
pub(crate) struct Script {
    says: Option<Vec<Event>>,
    /// Sessions that are still taken, and why others are not.
    refusal: Mutex<Option<(usize, SubmitError)>>,
    ready: Mutex<bool>,
    requests: Mutex<Vec<(Request, Asker)>>,
    /// Tokens that a session is taken to have said before it is read on.
    said: Mutex<usize>,
    opened: mpsc::Sender<JobSide>,
    jobs: tokio::sync::Mutex<mpsc::Receiver<JobSide>>,
}

impl Script {
    fn new(says: Option<Vec<Event>>) -> Arc<Self> {
        let (opened, jobs) = mpsc::channel(16);
        let (refusal, ready, requests) = (Mutex::default(), Mutex::new(true), Mutex::default());
        Arc::new(Self {
            says,
            refusal,
            ready,
            requests,
            said: Mutex::default(),
            opened,
            jobs: tokio::sync::Mutex::new(jobs),
        })
    }

    /// Every session says `events` and hangs up.
    pub(crate) fn saying(events: Vec<Event>) -> Arc<Self> {
        Self::new(Some(events))
    }

    /// The test speaks for every session.
    pub(crate) fn driven() -> Arc<Self> {
        Self::new(None)
    }

    /// The next session that was opened.
    pub(crate) async fn next_job(&self) -> JobSide {
        let mut jobs = self.jobs.lock().await;
        tokio::time::timeout(PATIENCE, jobs.recv()).await.unwrap().unwrap()
    }

    pub(crate) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().iter().map(|(request, _)| request.clone()).collect()
    }

    pub(crate) fn clients(&self) -> Vec<Asker> {
        self.requests.lock().unwrap().iter().map(|(_, client)| client.clone()).collect()
    }

    pub(crate) fn set_said(&self, tokens: usize) {
        *self.said.lock().unwrap() = tokens;
    }

    pub(crate) fn refuse(&self, why: SubmitError) {
        self.refuse_after(0, why);
    }

    pub(crate) fn refuse_after(&self, sessions: usize, why: SubmitError) {
        *self.refusal.lock().unwrap() = Some((sessions, why));
    }

    pub(crate) fn set_ready(&self, ready: bool) {
        *self.ready.lock().unwrap() = ready;
    }
}

impl Serve for Script {
    fn submit(&self, request: Request) -> Result<Job, SubmitError> {
        self.submit_as(request, Asker::default())
    }

    fn submit_as(&self, request: Request, client: Asker) -> Result<Job, SubmitError> {
        if let Some((sessions, why)) = &mut *self.refusal.lock().unwrap() {
            *sessions = sessions.checked_sub(1).ok_or_else(|| why.clone())?;
        }
        let mut requests = self.requests.lock().unwrap();
        requests.push((request, client));
        let (job, side) = channel(SessionId(requests.len() as u64));
        match &self.says {
            Some(events) => events.iter().for_each(|event| side.send(event.clone()).unwrap()),
            None => self.opened.try_send(side).unwrap(),
        }
        Ok(job)
    }

    fn find(&self, name: &str, authorization: Option<[u8; 32]>) -> BoxFuture<'_, Result<SessionId, AttachError>> {
        let requests = self.requests.lock().unwrap();
        let named = |(_, client): &(Request, Asker)| {
            client.name.as_deref() == Some(name) && client.authorization == authorization
        };
        let at = requests.iter().rposition(named);
        Box::pin(std::future::ready(at.map(|at| SessionId(at as u64 + 1)).ok_or(AttachError::Unknown)))
    }

    fn attach(
        &self,
        session: SessionId,
        authorization: Option<[u8; 32]>,
    ) -> BoxFuture<'_, Result<Attached, AttachError>> {
        let at = usize::try_from(session.0).unwrap().checked_sub(1);
        let asked = at.and_then(|at| self.requests.lock().unwrap().get(at).cloned());
        let found = asked.filter(|(_, client)| client.authorization == authorization);
        let attached = found.map(|(request, Asker { form, .. })| {
            let (job, side) = channel(session);
            let events = self.says.clone().unwrap();
            let said = *self.said.lock().unwrap();
            let token = |event: &Event| if let Event::Token { token, .. } = event { Some(*token) } else { None };
            let tokens: Vec<TokenId> = events.iter().take(said).filter_map(token).collect();
            let scores = |event: &Event| if let Event::Token { scores, .. } = event { scores.clone() } else { None };
            let scores = events.iter().take(said).filter_map(scores).collect();
            events.into_iter().skip(said).for_each(|event| side.send(event).unwrap());
            let ended = self.says.as_ref().unwrap().len() == said + 1;
            Attached { job, request, form, tokens, scores, ended }
        });
        Box::pin(std::future::ready(attached.ok_or(AttachError::Unknown)))
    }

    fn status(&self) -> RingStatus {
        let ready = *self.ready.lock().unwrap();
        let hop = HopStatus {
            from: "12D3KooWCoordinator".into(),
            to: "12D3KooWHead".into(),
            rtt_us: Some(310),
            jitter_us: None,
            in_flight: 16_700,
            window: 1 << 20,
            rate: 0,
            queued: 0,
        };
        let member = MemberStatus {
            peer: "12D3KooWHead".into(),
            range: "0:3".into(),
            device: "cpu avx2 x1".into(),
            pid: Some(4711),
            in_ring: true,
            alive: true,
            spare: false,
            shadow_of: None,
            shadowed_by: None,
            addresses: vec!["/ip4/127.0.0.1/udp/4001/quic-v1".into()],
            rtt_us: Some(310),
            service_us: 850,
            passes: 12,
            draft_block: 0,
            sessions: 0,
            loaded_bytes: 4_096,
        };
        RingStatus {
            coordinator: "12D3KooWCoordinator".into(),
            view: View(2),
            ready,
            missing: (!ready).then(|| "layers 3:7 are missing".into()),
            last_round_ms: Some(120),
            members: vec![member],
            hops: vec![hop],
            heals: Vec::new(),
            uptime_ms: 5000,
            rejections: 0,
            settled: 0,
            sessions: 0,
            in_flight: 0,
            encoding: WireEncoding::Fp8,
        }
    }

    fn model(&self) -> ModelFacts {
        ModelFacts { name: "tiny".into(), vocab: 2048, eos: vec![TokenId(1)], context: 2048 }
    }
}

/// A served script.
pub(crate) struct Server {
    pub(crate) script: Arc<Script>,
    address: std::net::SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(script: Arc<Script>) -> Self {
        Self::start_with(script, speech()).await
    }

    /// One that takes requests with one of `keys` alone.
    pub(crate) async fn start_keyed(script: Arc<Script>, keys: Keys) -> Self {
        Self::start_as(script, speech(), Some(keys)).await
    }

    pub(crate) async fn start_with(script: Arc<Script>, speech: Arc<Speech>) -> Self {
        Self::start_as(script, speech, None).await
    }

    async fn start_as(script: Arc<Script>, speech: Arc<Speech>, keys: Option<Keys>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let settings = Settings {
            header_wait: Duration::from_millis(300),
            body_wait: Duration::from_millis(300),
            keep_alive: Duration::from_millis(100),
            ..Settings::default()
        };
        let (stop, stopped) = oneshot::channel();
        let api = Api::new(Arc::clone(&script) as Arc<dyn Serve>, speech, settings).keyed(keys);
        let task = tokio::spawn(api.run(listener, async move { drop(stopped.await) }));
        Self { script, address, stop: Some(stop), task }
    }

    pub(crate) fn shut_down(&mut self) {
        self.stop = None;
    }

    pub(crate) async fn ended(self) {
        tokio::time::timeout(PATIENCE, self.task).await.unwrap().unwrap();
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) async fn connect(&self) -> Client {
        Client(TcpStream::connect(self.address).await.unwrap())
    }

    /// Sends a completion request and leaves the answer unread.
    pub(crate) async fn send(&self, body: &Value) -> Client {
        self.send_as(body, "").await
    }

    /// The same with more headers.
    pub(crate) async fn send_as(&self, body: &Value, headers: &str) -> Client {
        self.send_to("/v1/completions", body, headers).await
    }

    async fn send_to(&self, path: &str, body: &Value, headers: &str) -> Client {
        let mut client = self.connect().await;
        let body = body.to_string();
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
        client.write(&format!("{head}{headers}content-length: {}\r\n\r\n{body}", body.len())).await;
        client
    }

    /// The shown answer to a completion request.
    pub(crate) async fn post(&self, body: &Value) -> String {
        show(&self.send(body).await.read_to_end().await)
    }

    /// The shown answer to a chat.
    pub(crate) async fn chat(&self, body: &Value) -> String {
        show(&self.send_to("/v1/chat/completions", body, "").await.read_to_end().await)
    }

    /// The same with more headers.
    pub(crate) async fn post_as(&self, body: &Value, headers: &str) -> String {
        show(&self.send_as(body, headers).await.read_to_end().await)
    }

    pub(crate) async fn raw(&self, request: &str) -> String {
        let mut client = self.connect().await;
        client.write(request).await;
        show(&client.read_to_end().await)
    }

    pub(crate) async fn get_as(&self, path: &str, headers: &str) -> String {
        self.raw(&format!("GET {path} HTTP/1.1\r\nhost: x\r\n{headers}connection: close\r\n\r\n")).await
    }

    pub(crate) async fn get(&self, path: &str) -> String {
        self.raw(&format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await
    }
}

/// A connection.
pub(crate) struct Client(TcpStream);

impl Client {
    pub(crate) async fn write(&mut self, text: &str) {
        // A server that has answered without reading everything may reset the connection.
        let _ = self.0.write_all(text.as_bytes()).await;
    }

    /// What comes, without the framing of chunks, until the server closes.
    pub(crate) async fn read_to_end(mut self) -> String {
        let mut bytes = Vec::new();
        let read = tokio::time::timeout(PATIENCE, self.0.read_to_end(&mut bytes)).await.expect("the answer ends");
        assert!(read.is_ok() || !bytes.is_empty(), "{read:?}");
        unchunk(&bytes)
    }

    /// What comes until `mark` does.
    pub(crate) async fn read_until(&mut self, mark: &str) -> String {
        let mut seen = String::new();
        while !seen.contains(mark) {
            let mut piece = [0; 4096];
            let n = tokio::time::timeout(PATIENCE, self.0.read(&mut piece)).await.unwrap().unwrap();
            assert!(n > 0, "closed after {seen}");
            seen += std::str::from_utf8(&piece[..n]).unwrap();
        }
        seen
    }
}

/// Takes the chunked framing off a body.
fn unchunk(bytes: &[u8]) -> String {
    let text = std::str::from_utf8(bytes).unwrap();
    let Some((head, mut rest)) = text.split_once("\r\n\r\n") else { return text.to_owned() };
    if !head.contains("transfer-encoding: chunked") {
        return text.to_owned();
    }
    let mut out = format!("{head}\r\n\r\n");
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        out += &after[..size];
        rest = &after[size + 2..];
    }
    out
}

/// The status, the headers that matter, and the body, with the time stamp taken out.
fn show(answer: &str) -> String {
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {answer:?}"));
    let wanted = |line: &&str| {
        ["HTTP", "content-type", "cache-control", "retry-after"].iter().any(|name| line.starts_with(name))
    };
    let head: Vec<&str> = head.lines().filter(wanted).collect();
    let mut parts = body.split("\"created\":");
    let mut shown = parts.next().unwrap().to_owned();
    for part in parts {
        shown += "\"created\":0";
        shown += part.trim_start_matches(|c: char| c.is_ascii_digit());
    }
    format!("{}\n\n{shown}", head.join("\n"))
}

/// The JSON body of a shown answer.
pub(crate) fn json_body(answer: &str) -> Value {
    let (_, body) = answer.split_once("\n\n").unwrap();
    serde_json::from_str(body).unwrap_or_else(|_| panic!("{answer}"))
}

fn tiny_files() -> SpeechFiles {
    SpeechFiles {
        tokenizer: include_bytes!("../../models/tiny-v4-flash/tokenizer.json").to_vec(),
        tokenizer_config: Some(include_bytes!("../../models/tiny-v4-flash/tokenizer_config.json").to_vec()),
        ..SpeechFiles::default()
    }
}

fn speech() -> Arc<Speech> {
    static TINY: OnceLock<Arc<Speech>> = OnceLock::new();
    Arc::clone(TINY.get_or_init(|| Arc::new(Speech::new(&tiny_files(), &[TokenId(1)]).unwrap())))
}

/// Of a model whose vocabulary has the markers of V4, and of V4.1 where it has a system token too.
pub(crate) fn deepseek(system: bool) -> Arc<Speech> {
    let mut files = tiny_files();
    let mut json = String::from_utf8(files.tokenizer).unwrap().replace("<｜dspark▁noise｜>", "｜DSML｜");
    if system {
        json = json.replace("<｜▁pad▁｜>", "<｜System｜>");
    }
    files.tokenizer = json.into_bytes();
    Arc::new(Speech::new(&files, &[TokenId(1)]).unwrap())
}

pub(crate) fn text_ids(text: &str) -> Vec<TokenId> {
    speech().vocabulary.encode(text).unwrap()
}

pub(crate) fn token(at: usize, token: TokenId) -> Event {
    Event::Token { index: u32::try_from(at).unwrap(), token, scores: None }
}

pub(crate) fn done(reason: Finish, committed: usize) -> Event {
    let stats = JobStats {
        heals: 0,
        prompt_tokens: 5,
        committed: u32::try_from(committed).unwrap(),
        ttft_ms: 1.5,
        tokens_per_second: 100.0,
        acceptance_length: Some(2.0),
        accept_by_depth: Some(vec![0.5]),
        frames_per_token: 1.25,
        frames_computed_per_token: vec![1.0],
        max_in_flight: 6,
        wire_bytes_per_position: 1096,
    };
    Event::Finished { reason, stats }
}

pub(crate) fn stage_lost() -> JobError {
    JobError::StageLost { range: "3:6".into(), peer: "12D3KooWMiddle".into(), why: "no heartbeat for 1500 ms".into() }
}
