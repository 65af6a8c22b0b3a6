//! `ringctl generate` and `ringctl score` against a scripted coordinator.

use expect_test::expect;
use ringfence::cli::client::ClientError;
use ringfence::cli::generate::{self, GenerateArgs, GenerateError};
use ringfence::cli::score::{self, ScoreArgs, ScoreFailure, score_over_http};
use ringfence::coordinator::job::{Event, Finish, Mode, SubmitError};
use ringfence::ids::{TokenId, WireEncoding};
use ringfence::proto::frame::{Answer, Scores};

use super::support::{Script, Server, done, stage_lost, text_ids, token};

#[derive(Debug, clap::Parser)]
struct Command {
    #[command(flatten)]
    args: GenerateArgs,
}

fn parse(args: &[&str]) -> Result<GenerateArgs, clap::Error> {
    use clap::Parser;
    Command::try_parse_from([&["generate"], args].concat()).map(|command| command.args)
}

/// Runs the command against `server`; gives back what it wrote.
async fn generate(server: &Server, args: &[&str]) -> (String, Result<(), GenerateError>) {
    let url = server.url();
    let args = parse(&[&["--url", url.as_str()], args].concat()).unwrap();
    let run = move || {
        let mut out = Vec::new();
        let result = generate::run(&args, &mut out);
        (String::from_utf8(out).unwrap(), result)
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

fn says(text: &str) -> Vec<Event> {
    let ids = text_ids(text);
    let count = ids.len();
    ids.into_iter().enumerate().map(|(at, id)| token(at, id)).chain([done(Finish::Length, count)]).collect()
}

#[tokio::test]
async fn text_is_streamed_and_json_comes_on_the_last_line() {
    let server = Server::start(Script::saying(says(" unto\nMoses"))).await;
    let (out, result) = generate(&server, &["--prompt", "And"]).await;
    result.unwrap();
    assert_eq!(out, " unto\nMoses\n");
    let all = ["--prompt", "And", "--json", "--seed", "5", "--mode", "plain", "--wire", "bf16", "--max-new", "9"];
    let (out, result) = generate(&server, &[&all[..], &["--stop", "never", "--temperature", "0.5"]].concat()).await;
    result.unwrap();
    expect![[r#"
         unto
        Moses
        {"seed":5,"prompt_tokens":1,"committed":4,"ttft_ms":1.5,"tokens_per_second":100.0,"acceptance_length":2.0,"accept_by_depth":[0.5],"frames_per_token":1.25,"frames_computed_per_token":[1.0],"max_in_flight":6,"wire_bytes_per_position":1096,"heals":0,"id":"cmpl-2","token_ids":[563,206,52,1675],"text":" unto\nMoses","finish_reason":"length","completion_tokens":4}
    "#]].assert_eq(&out);
    let request = server.script.requests().pop().unwrap();
    assert_eq!((request.max_new, request.sampling.seed, request.sampling.temperature), (9, 5, 0.5));
    assert_eq!((request.mode, request.encoding), (Some(Mode::Plain), Some(WireEncoding::Bf16)));
}

#[tokio::test]
async fn ids_come_from_a_file() {
    let server = Server::start(Script::saying(says("x"))).await;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ids.json");
    std::fs::write(&path, "[0, 300]").unwrap();
    let path = path.to_str().unwrap();
    generate(&server, &["--prompt-ids", path]).await.1.unwrap();
    assert_eq!(server.script.requests()[0].prompt, [TokenId(0), TokenId(300)]);
    assert!(parse(&["--prompt-ids", path, "--prompt", "both"]).is_err() && parse(&[]).is_err());
}

#[tokio::test]
async fn failures_are_errors_in_words_and_what_came_before_is_shown() {
    let mut events = says(" unto Moses");
    events.truncate(1);
    events.push(Event::Failed(stage_lost()));
    let server = Server::start(Script::saying(events)).await;
    let (out, result) = generate(&server, &["--prompt", "And"]).await;
    assert_eq!(out, " unto\n");
    let error = result.unwrap_err().to_string();
    assert!(error.contains("broke off") && error.contains("stage 3:6"), "{error}");

    server.script.refuse(SubmitError::NotReady { why: "layers 3:6 are missing".into() });
    let error = generate(&server, &["--prompt", "And"]).await.1.unwrap_err().to_string();
    assert_eq!(error, "the coordinator answered 503: the ring is not ready: layers 3:6 are missing");

    let nobody = parse(&["--url", "http://127.0.0.1:9", "--prompt", "And"]).unwrap();
    let error = tokio::task::spawn_blocking(move || generate::run(&nobody, &mut Vec::new())).await.unwrap();
    assert!(error.unwrap_err().to_string().contains("is a coordinator running there?"));
}

#[tokio::test]
async fn a_stream_that_ends_early_is_no_success() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = stream.read(&mut [0; 4096]).await;
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
        let event = r#"data: {"id":"cmpl-1","choices":[{"text":"half","finish_reason":null}]}"#;
        stream.write_all(format!("{head}{event}\n\n").as_bytes()).await.unwrap();
    });
    let args = parse(&["--url", &url, "--prompt", "And"]).unwrap();
    let result = tokio::task::spawn_blocking(move || generate::run(&args, &mut Vec::new())).await.unwrap();
    assert!(matches!(result, Err(GenerateError::Client(ClientError::Broken { .. }))), "{result:?}");
}

fn scored(pos: u32, fed: Option<f32>) -> Event {
    let scores =
        Scores { fed, picked: None, top: (0..5).map(|id| (TokenId(300 + id), -0.1 - 0.7 * id as f32)).collect() };
    Event::Scored { pos, answer: Answer { token: TokenId(9), scores: Some(scores) } }
}

#[tokio::test]
async fn scores_come_over_http_bit_for_bit() {
    let events = vec![scored(0, None), scored(1, Some(-0.1)), scored(2, Some(-12.3456)), done(Finish::Length, 0)];
    let server = Server::start(Script::saying(events)).await;
    let url = server.url();
    let ids = [0, 300, 20].map(TokenId);
    let ask = move || score_over_http(&url, &ids, 5, Some(WireEncoding::Bf16));
    let report = tokio::task::spawn_blocking(ask).await.unwrap().unwrap();
    assert_eq!(report.logprobs, [-0.1, -12.3456]);
    assert_eq!(report.argmax, [TokenId(300); 3]);
    assert_eq!(report.top[2][4], (TokenId(304), -0.1 - 0.7 * 4.0));
    let request = server.script.requests().remove(0);
    assert_eq!((request.score, request.max_new, request.encoding), (Some(5), 0, Some(WireEncoding::Bf16)));
}

#[tokio::test]
async fn a_ring_is_started_for_scores_without_a_url() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ids.json");
    std::fs::write(&path, "[0, 300]").unwrap();
    let args = ScoreArgs { ids: path, url: None, model: "tiny".into(), stages: 3, wire: None, json: true };
    let mut out = Vec::new();
    let mut local = |_: &ScoreArgs, ids: &[TokenId]| {
        let mut report = ringfence::api::score::ScoreReport::default();
        for (at, fed) in [None, Some(-0.25)].into_iter().take(ids.len()).enumerate() {
            let Event::Scored { pos, answer } = scored(u32::try_from(at)?, fed) else { unreachable!() };
            report.push(pos, &answer, 1)?;
        }
        Ok(report)
    };
    score::run(&args, &mut out, &mut local).unwrap();
    let text = String::from_utf8(out.clone()).unwrap();
    expect![[r#"
        {"argmax":[300,300],"logprobs":[-0.25],"top":[[[300,-0.1]],[[300,-0.1]]],"mean_nll":0.25}
    "#]]
    .assert_eq(&text);
    out.clear();
    score::run(&ScoreArgs { json: false, ..args.clone() }, &mut out, &mut local).unwrap();
    expect![[r#"
        position    token   argmax       next  top
               0        0      300    -0.2500  300:-0.100
               1      300      300          -  300:-0.100
        mean negative log-likelihood: 0.250000
    "#]]
    .assert_eq(&String::from_utf8(out).unwrap());
    let failed = score::run(&args, &mut Vec::new(), &mut |_, _| Err("no stage started".into()));
    assert!(matches!(&failed, Err(ScoreFailure::Local(why)) if why.to_string() == "no stage started"));
}
