//! OpenAI's own clients, unchanged, against a real ring: the Python and the Node client see the same, and
//! what they see is true.
//!
//! They are installed below the target folder, once. Where a registry does not have them, or a machine lacks
//! Python or Node, that is said and the other one is run.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::http;
use super::rig::{CUT, Process, Ring};

const PYTHON_CLIENT: &str = "openai==3.57.0";
const NODE_CLIENT: &str = "openai@6.49.0";

/// Runs a command to its end; `Err` with its last words where it fails or is not there.
fn run(program: &Path, args: &[&str], folder: &Path) -> Result<(), String> {
    let mut command = Command::new(program);
    let ended = command.args(args).current_dir(folder).stdin(Stdio::null()).output();
    let ended = ended.map_err(|why| format!("{}: {why}", program.display()))?;
    if ended.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&ended.stderr);
    Err(format!("{} {}: {}", program.display(), args.join(" "), words.lines().last().unwrap_or_default()))
}

/// A folder below the target folder in which `install` has put a client, now or before.
fn installed(name: &str, install: impl FnOnce(&Path) -> Result<(), String>) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name.replace(['=', '@'], "-"));
    let mark = folder.join("installed");
    if mark.exists() {
        return Some(folder);
    }
    // What an earlier attempt has left is of no use; an error means that there was none.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    match install(&folder) {
        Ok(()) => {
            fs::write(mark, name).unwrap();
            Some(folder)
        }
        Err(why) => {
            // Past the capture of the test's output: it is to be seen where all is green.
            let said = format!("NOT RUN: the client {name} can't be installed here: {why}\n");
            std::io::stderr().write_all(said.as_bytes()).unwrap();
            None
        }
    }
}

fn python() -> Option<PathBuf> {
    installed(&format!("python-{PYTHON_CLIENT}"), |folder| {
        run(Path::new("python3"), &["-m", "venv", "venv"], folder)?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", PYTHON_CLIENT];
        run(&folder.join("venv/bin/python"), &pip, folder)
    })
}

fn node() -> Option<PathBuf> {
    installed(&format!("node-{NODE_CLIENT}"), |folder| {
        fs::write(folder.join("package.json"), "{}").map_err(|why| why.to_string())?;
        run(Path::new("npm"), &["install", "--silent", "--no-audit", "--no-fund", NODE_CLIENT], folder)
    })
}

#[track_caller]
fn seen(program: &Path, args: &[&str]) -> Value {
    let ended = Process::run(program.to_str().unwrap(), args);
    assert!(ended.status.success(), "{args:?}: {ended:?}");
    ended.json()
}

#[test]
fn openais_clients_work_unchanged() {
    let (python, node) = (python(), node());
    let ring = Ring::start(&CUT);
    let script = |name: &str| format!("{}/tests/clients/{name}", env!("CARGO_MANIFEST_DIR"));
    let python = python.map(|folder| seen(&folder.join("venv/bin/python"), &[&script("openai_client.py"), ring.url()]));
    let node = node
        .map(|folder| seen(Path::new("node"), &[&script("openai_client.cjs"), ring.url(), folder.to_str().unwrap()]));
    if let (Some(python), Some(node)) = (&python, &node) {
        assert_eq!(python, node, "both clients see the same");
    }
    for seen in python.iter().chain(&node) {
        check(seen, ring.url());
    }
}

/// What the clients saw is what is on the wire.
#[track_caller]
fn check(seen: &Value, url: &str) {
    let (status, models) = http::get(url, "/v1/models");
    let model = &models["data"][0]["id"];
    assert_eq!((status, &seen["model"], &seen["named"]), (200, model, model), "{seen}");
    let prompt = "<｜begin▁of▁sentence｜>Be brief.\n\n<｜User｜>And the LORD spake unto Moses<｜Assistant｜></think>";
    let body = json!({"prompt": prompt, "temperature": 0, "max_tokens": 24});
    let text = http::complete(url, &body).1["choices"][0]["text"].take();
    assert_eq!(seen["chat"], json!(["assistant", text, "length", 24]));
    assert_eq!(seen["chat_stream"], seen["chat"]);
    assert_eq!(seen["stopped_helper"], true, "{seen}");
    assert_eq!(seen["likeliest"], json!([text, 24]));
    assert_eq!(seen["stopped"], json!([false, "stop"]));

    let several = seen["several"].as_array().unwrap();
    assert_eq!((several.len(), &seen["several"]), (3, &seen["several_stream"]));
    assert!(several[0][1] != several[1][1] && several[1][1] != several[2][1], "{seen}");

    let body = json!({"prompt": "And the LORD spake unto Moses", "temperature": 0, "max_tokens": 24});
    let text = http::complete(url, &body).1["choices"][0]["text"].take();
    assert_eq!((&seen["completion"], &seen["completion_stream"]), (&text, &text));

    let refused: Vec<Value> =
        seen["refused"].as_array().unwrap().iter().map(|error| json!(error.as_array().unwrap()[..3])).collect();
    let expected = json!([
        [400, "temperature", "invalid_value"],
        [400, "max_tokens", "context_length_exceeded"],
        [400, "response_format", "unsupported_field"],
        [400, "messages", "invalid_value"],
        [404, "model", "model_not_found"],
    ]);
    assert_eq!(json!(refused), expected, "{seen}");
}
