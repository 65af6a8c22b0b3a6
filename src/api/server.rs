//! The HTTP service: routes, and connections with limits on time, size and number.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures::StreamExt;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::api::answer::Label;
use crate::api::ask::{self, Ask};
use crate::api::error::ApiError;
use crate::api::keys::{self, Keys};
use crate::api::resume;
use crate::api::session::Session;
use crate::api::speech::Speech;
use crate::api::stall::Stall;
use crate::api::stream::Answer;
use crate::clock;
use crate::coordinator::job::{AttachError, ModelFacts, Serve};

/// Bytes of a body that hold no prompt: other fields, white space.
const BODY_BYTES_BASE: usize = 256 << 10;
/// Bytes of a body per position of the context: a long token in JSON escapes, or an id.
const BODY_BYTES_PER_POSITION: usize = 32;
/// How long a listener that can't accept (no file descriptors left) waits before it tries again.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// Limits of the HTTP service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// For the head of a request, also the next one on a kept connection; default 30 s. More
    /// lets idle clients hold connections longer.
    pub header_wait: Duration,
    /// For the body of a request; default 30 s. More lets slow clients hold connections longer.
    pub body_wait: Duration,
    /// For a client to read something of what is written; default 60 s. More lets a client that
    /// has stopped reading hold its connection longer.
    pub write_stall: Duration,
    /// Between two comments on a stream that has nothing to say; default 10 s. More lets proxies
    /// take the stream for dead.
    pub keep_alive: Duration,
    /// Open connections; default 1024. Others wait in the listener's backlog.
    pub connections: usize,
    /// For open requests to end when the service stops; default 5 s.
    pub drain: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            header_wait: Duration::from_secs(30),
            body_wait: Duration::from_secs(30),
            write_stall: Duration::from_secs(60),
            keep_alive: Duration::from_secs(10),
            connections: 1024,
            drain: Duration::from_secs(5),
        }
    }
}

/// The HTTP API of a coordinator.
#[derive(Clone)]
pub struct Api {
    serve: Arc<dyn Serve>,
    speech: Arc<Speech>,
    settings: Settings,
    keys: Option<Keys>,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Api").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Api {
    /// An API in front of `serve`, whose text is that of `speech`.
    #[must_use]
    pub fn new(serve: Arc<dyn Serve>, speech: Arc<Speech>, settings: Settings) -> Self {
        Self { serve, speech, settings, keys: None }
    }

    /// The same for clients with one of `keys` alone; `/health` stays open to all.
    #[must_use]
    pub fn keyed(self, keys: Option<Keys>) -> Self {
        Self { keys, ..self }
    }

    /// Serves connections of `listener` until `shutdown` resolves; then lets open requests end for
    /// [`Settings::drain`] and drops the rest, which cancels their sessions.
    pub async fn run(self, listener: TcpListener, shutdown: impl Future<Output = ()>) {
        let (stop, stopped) = watch::channel(false);
        let settings = self.settings;
        let router = self.router();
        let mut open = JoinSet::new();
        let mut shutdown = std::pin::pin!(shutdown);
        loop {
            tokio::select! {
                () = &mut shutdown => break,
                Some(_) = open.join_next() => {}
                accepted = listener.accept(), if open.len() < settings.connections => match accepted {
                    Ok((stream, from)) => {
                        open.spawn(connection(stream, from, router.clone(), settings, stopped.clone()));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "can't accept an HTTP connection");
                        tokio::time::sleep(ACCEPT_RETRY).await;
                    }
                },
            }
        }
        drop(listener);
        // An error means that no connection is open.
        let _ = stop.send(true);
        let all = async { while open.join_next().await.is_some() {} };
        if timeout(settings.drain, all).await.is_err() {
            open.abort_all();
        }
    }

    fn router(self) -> Router {
        Router::new()
            .route("/v1/completions", post(completions))
            .route("/v1/chat/completions", post(chat_completions))
            .route("/v1/streams/{request}", get(streams))
            .route("/v1/models", get(models))
            .route("/v1/models/{*name}", get(model))
            .route("/ring", get(ring))
            .route_layer(middleware::from_fn_with_state(self.keys.clone(), keys::guard))
            // Without a key: what a supervisor asks.
            .route("/health", get(health))
            .fallback(no_route)
            .method_not_allowed_fallback(wrong_method)
            .with_state(self)
    }
}

/// Serves one connection to its end.
async fn connection(
    stream: TcpStream,
    from: SocketAddr,
    router: Router,
    settings: Settings,
    mut stopped: watch::Receiver<bool>,
) {
    // Events are small and wanted at once; a socket that refuses is slower, not wrong.
    let _ = stream.set_nodelay(true);
    let io = TokioIo::new(Stall::new(stream, settings.write_stall));
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(settings.header_wait);
    let served = http.serve_connection(io, TowerToHyperService::new(router));
    let mut served = std::pin::pin!(served);
    let stop = async { drop(stopped.wait_for(|&stop| stop).await) };
    let result = tokio::select! {
        result = served.as_mut() => result,
        () = stop => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%from, %error, "HTTP connection closed");
    }
}

async fn completions(State(api): State<Api>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    api.answer(&headers, body, ask::read).await
}

async fn chat_completions(State(api): State<Api>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    api.answer(&headers, body, ask::read_chat).await
}

/// Reads a body of one of the routes.
type Read = fn(&[u8], &ModelFacts, &Speech) -> Result<Ask, ApiError>;

impl Api {
    /// Answers a request.
    async fn answer(self, headers: &HeaderMap, body: Body, read: Read) -> Result<Response, ApiError> {
        let model = self.serve.model();
        let positions = usize::try_from(model.context).unwrap_or(usize::MAX);
        let limit = positions.saturating_mul(BODY_BYTES_PER_POSITION).saturating_add(BODY_BYTES_BASE);
        let wait = self.settings.body_wait;
        let body = timeout(wait, read_body(body, limit))
            .await
            .map_err(|_| ApiError::BodyTimeout { seconds: wait.as_secs() })??;
        // A long prompt takes a while to tokenize: not on a thread that drives connections.
        let speech = Arc::clone(&self.speech);
        let read = tokio::task::spawn_blocking(move || read(&body, &model, &speech).map(|ask| (ask, model)));
        let (ask, model) = read.await.map_err(|why| ApiError::Internal { why: why.to_string() })??;
        let created = clock::unix_seconds();
        let client = resume::client(&ask, created, headers)?;
        let mut sessions = Vec::new();
        for choice in 0..ask.choices {
            let mut request = ask.request.clone();
            request.sampling.seed = ask.seed_of(choice);
            // Where one is refused, those before it are dropped, which cancels them.
            let job = self.serve.submit_as(request, client.clone())?;
            sessions.push(Session::new(job, &ask, choice, Arc::clone(&self.speech.vocabulary)));
        }
        let Some(first) = sessions.first() else { return Err(ApiError::NoVerdict) };
        let label = Label::new(&ask, created, &model, first.session);
        let answer = Answer { sessions, label, include_usage: ask.include_usage };
        if ask.stream { answer.stream(self.settings.keep_alive).await } else { answer.whole().await }
    }
}

async fn streams(
    State(api): State<Api>,
    Path(request): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let authorization = resume::authorization(&headers);
    let refused = |why| match why {
        AttachError::Unknown => resume::no_stream(&request),
        AttachError::Elsewhere => ApiError::StreamElsewhere { request: request.clone() },
    };
    let session = match resume::session(&request)? {
        Some(session) => session,
        None => api.serve.find(&request, authorization).await.map_err(refused)?,
    };
    let read = resume::read(session, &headers)?;
    let attached = api.serve.attach(session, authorization).await.map_err(refused)?;
    resume::check(&attached, session, read)?;
    let (ask, created) = resume::ask(&attached)?;
    let label = Label::new(&ask, created, &api.serve.model(), session);
    let sessions = vec![Session::resumed(attached, &ask, Arc::clone(&api.speech.vocabulary))];
    let answer = Answer { sessions, label, include_usage: ask.include_usage };
    Ok(answer.resume(read, api.settings.keep_alive))
}

async fn read_body(body: Body, limit: usize) -> Result<Vec<u8>, ApiError> {
    let mut stream = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(piece) = stream.next().await {
        let piece = piece.map_err(|why| ApiError::BodyBroken { why: why.to_string() })?;
        if bytes.len() + piece.len() > limit {
            return Err(ApiError::BodyTooLarge { limit });
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(bytes)
}

async fn models(State(api): State<Api>) -> Response {
    Json(json!({"object": "list", "data": [model_entry(&api)]})).into_response()
}

async fn model(State(api): State<Api>, Path(name): Path<String>) -> Result<Response, ApiError> {
    if name == api.serve.model().name {
        return Ok(Json(model_entry(&api)).into_response());
    }
    Err(ApiError::NoModel { served: api.serve.model().name })
}

fn model_entry(api: &Api) -> Value {
    let model = api.serve.model();
    json!({
        "id": model.name, "object": "model", "created": 0, "owned_by": "ringfence",
        "context": model.context, "vocab": model.vocab, "eos": model.eos,
    })
}

async fn health(State(api): State<Api>) -> Response {
    let ring = api.serve.status();
    if ring.ready {
        return Json(json!({"ready": true, "view": ring.view, "last_round_ms": ring.last_round_ms})).into_response();
    }
    let reason = ring.missing.unwrap_or_else(|| "no token went round the ring lately".to_owned());
    let body = json!({"ready": false, "view": ring.view, "last_round_ms": ring.last_round_ms, "reason": reason});
    (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
}

async fn ring(State(api): State<Api>) -> Response {
    Json(api.serve.status()).into_response()
}

async fn no_route(method: Method, uri: Uri) -> ApiError {
    ApiError::NoRoute { method: method.to_string(), path: uri.path().to_owned() }
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    ApiError::Method { method: method.to_string(), path: uri.path().to_owned() }
}

/// Binds the API's address.
///
/// # Errors
/// That of the system, with the address in front.
pub async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address).await;
    listener.map_err(|error| io::Error::new(error.kind(), format!("can't listen on http://{address}: {error}")))
}
