//! `ringctl wan` and `ringctl demo --wan` as processes.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, UdpSocket};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(20);

fn ringctl(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringctl"));
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// `ringctl wan` under way; it ends with its stdin.
struct Wan {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Wan {
    fn start(args: &[&str]) -> Self {
        let mut child = ringctl(&[&["wan", "--parent-pipe"], args].concat()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, stdin, stdout }
    }

    /// The object on the next line, which begins with a word.
    fn hear(&mut self, word: &str) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        let (first, object) = line.split_once(' ').unwrap_or((&line, ""));
        assert_eq!(first, word, "{line}");
        serde_json::from_str(object).unwrap()
    }

    fn say(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }
}

#[test]
fn an_operator_changes_a_network_while_it_is_used() {
    let (client, target) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
    target.set_read_timeout(Some(PATIENCE)).unwrap();
    let to = target.local_addr().unwrap().to_string();
    let mut wan = Wan::start(&["--to", &to, "--to", &to, "--set", "rtt=2ms", "--set", "none"]);
    let ready = wan.hear("READY");
    assert_eq!((&ready["proxies"][0]["set"], &ready["proxies"][1]["set"]), (&json!("rtt=2ms"), &json!("none")));
    assert_eq!((&ready["proxies"][0]["to"], &ready["pid"]), (&json!(to), &json!(wan.child.id())));
    let address: SocketAddr = ready["proxies"][0]["listen"].as_str().unwrap().parse().unwrap();
    client.send_to(b"one", address).unwrap();
    let mut buffer = [0; 16];
    assert_eq!(target.recv(&mut buffer).unwrap(), 3);

    wan.say("0 set rtt=4ms, loss=100%");
    assert_eq!(wan.hear("OK")["proxies"][0]["set"], "rtt=4ms,loss=100%");
    wan.say("0 cut in");
    assert_eq!(wan.hear("OK")["proxies"][0]["cut"], json!(["in"]));
    wan.say("heal");
    assert_eq!(wan.hear("OK")["proxies"][0]["cut"], json!([]));
    wan.say("1 set rtt=4");
    let error = wan.hear("ERROR")["error"].to_string();
    assert!(error.contains("rtt=4: expected a time"), "{error}");
    wan.say("stats");
    let (first, second) = (wan.hear("STATS"), wan.hear("STATS"));
    assert_eq!((&first["proxy"], &first["in"]["forwarded"]), (&json!(0), &json!(1)));
    assert_eq!(first["clients"][0]["client"], json!(client.local_addr().unwrap()));
    assert_eq!((&second["proxy"], &second["in"]["entered"]), (&json!(1), &json!(0)));

    drop(wan.stdin.take());
    assert!(wan.child.wait().unwrap().success());
}

#[test]
fn a_wrong_option_is_fatal_and_says_why() {
    let mut wan = Wan::start(&["--to", "127.0.0.1:9", "--listen", "127.0.0.1:0", "--listen", "127.0.0.1:0"]);
    let fatal = wan.hear("FATAL");
    assert_eq!(fatal["error"], "2 --listen for 1 --to: expected one for each, or none");
    assert!(!wan.child.wait().unwrap().success());
    let out = ringctl(&["wan", "--to", "127.0.0.1:9", "--set", "rtt=40"]).output().unwrap();
    assert!(!out.status.success());
    assert!(String::from_utf8_lossy(&out.stderr).contains("rtt=40: expected a time"), "{out:?}");
}

#[test]
fn a_ring_behind_a_network_gives_the_same_ids() {
    let wan = "rtt=20ms,jitter=2ms,loss=1%,reorder=1%,rate=50mbit";
    let out = ringctl(&["demo", "--stages", "3", "--max-new", "12", "--json", "--wan", wan]).output().unwrap();
    let stdout = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{stdout}\n{}", String::from_utf8_lossy(&out.stderr));
    assert!(stdout.contains("emulated path of every hop"), "{stdout}");
    let answer: Value = serde_json::from_str(stdout.lines().last().unwrap()).unwrap();
    assert_eq!((&answer["reference_equal"], &answer["wan"]), (&json!(true), &json!(wan)));
    // The first token went from the coordinator through three stages and back: four times 10 ms, less jitter.
    let first = answer["ringfence"]["ttft_ms"].as_f64().or(answer["ttft_ms"].as_f64()).unwrap();
    assert!(first >= 4.0 * 8.0, "{first} ms");
    for (at, stage) in answer["stages"].as_array().unwrap().iter().enumerate() {
        // The head hears the coordinator alone, the others their neighbour too.
        assert_eq!(stage["wan"]["clients"].as_array().unwrap().len(), 1 + usize::from(at > 0), "{stage}");
        assert_ne!(stage["wan"]["in"]["forwarded"], json!(0));
    }
}
