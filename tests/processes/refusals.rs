//! What can't work is refused in words, on stdout as `FATAL {…}` and by the exit status, and
//! strangers are refused by name.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use super::copy::Copy;
use super::rig::{COORDINATOR, CUT, Ended, Keys, Listening, Process, RINGCTL, Ring, STAGE, Stage};

/// The refusal names all of `words`, and comes in this phase.
#[track_caller]
fn refused(ended: &Ended, phase: &str, words: &[&str]) {
    let (error, came) = ended.fatal();
    assert_eq!(came, phase, "{error}");
    for word in words {
        assert!(error.contains(word), "{word:?} is not in {error:?}");
    }
    let ready = ended.out.contains("READY");
    assert_eq!(ready, phase == "serve", "what can't serve does not say that it can: {ended:?}");
}

/// `stage`, `stage --check` and `ringctl stage` all refuse the same.
#[track_caller]
fn stage_refused(args: &[&str], phase: &str, words: &[&str]) {
    let served = Process::run(STAGE, args);
    refused(&served, phase, words);
    let checked = Process::run(STAGE, &[args, &["--check"]].concat());
    refused(&checked, phase, words);
    assert_eq!(served.fatal(), checked.fatal());
    let within = Process::run(RINGCTL, &[&["stage"], args].concat());
    assert_eq!(served.fatal(), within.fatal());
}

/// Whether a library lies in the folders that loaders look in.
fn loadable(name: &str) -> bool {
    let folders =
        ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/nvidia/lib64", "/usr/local/cuda/compat"];
    folders.iter().any(|folder| std::path::Path::new(folder).join(name).exists())
}

#[test]
fn command_lines_that_can_not_be_are_refused() {
    for (range, words) in [
        ("5:5", &["5:5", "LO must be below HI"][..]),
        ("5:3", &["5:3", "LO must be below HI"]),
        ("a:b", &["a:b", "LO:HI"]),
        ("3", &["3", "LO:HI"]),
        ("0:70000", &["0:70000"]),
    ] {
        stage_refused(&["--range", range], "arguments", &[&["--range"], words].concat());
    }
    stage_refused(&["--range", "6:9"], "range", &["6:9", "0:7"]);
    stage_refused(&[], "arguments", &["--range"]);
    stage_refused(&["--range", "0:3", "--shadow"], "arguments", &["--spare"]);
    stage_refused(&["--range", "0:3", "--nonsense"], "arguments", &["--nonsense"]);
    stage_refused(&["--range", "0:3", "--device", "gpu"], "device", &["--device gpu", "cpu or cuda:N"]);
    // With a driver or without: there is no such device, and what was looked for is said.
    let driver = ["libcuda.so", "libcuda.so.1"].iter().any(|name| loadable(name));
    let found = if driver { "device(s)" } else { "looked for libcuda.so" };
    stage_refused(&["--range", "0:3", "--device", "cuda:99"], "device", &["cuda:99", found, "--device cpu"]);
    refused(&Process::run(STAGE, &["--range", "0:3", "--inventory"]), "config", &["--inventory", "--device cpu"]);
    stage_refused(&["--range", "0:3", "--threads", "0"], "config", &["--threads", "0", "1 to"]);
    stage_refused(&["--range", "0:3", "--max-context", "0"], "config", &["max-context", "0", "2048"]);
    stage_refused(&["--range", "0:3", "--max-context", "9000"], "config", &["max-context", "9000", "2048"]);
    stage_refused(&["--range", "0:3", "--max-sessions", "0"], "config", &["--max-sessions", "0", "1 to"]);
    let journal =
        |args: &[&str], phase, words: &[&str]| stage_refused(&[&["--range", "0:3"], args].concat(), phase, words);
    journal(&["--journal-mib", "some"], "arguments", &["--journal-mib", "some"]);
    journal(
        &["--journal-mib", "0", "--journal-dir", "."],
        "config",
        &["--journal-mib 0", "--journal-dir .", "one of the two"],
    );
    // How much memory is free changes from one run to the next.
    let large = Process::run(STAGE, &["--range", "0:3", "--journal-mib", "4000000000"]);
    refused(&large, "memory", &["--journal-mib 4000000000", "free", "give the journal less"]);
    journal(&["--journal-keep", "9", "--journal-keep-mib", "9"], "arguments", &["--journal-dir"]);
    journal(&["--journal-dir", ".", "--journal-keep", "9"], "arguments", &["--journal-keep-mib"]);
    journal(&["--journal-dir", ".", "--journal-keep-mib", "9"], "arguments", &["--journal-keep <SECONDS>"]);
    let kept = |time, mib| ["--journal-dir", ".", "--journal-keep", time, "--journal-keep-mib", mib];
    journal(&kept("0", "9"), "config", &["--journal-keep 0", "0.1 to 86400 seconds"]);
    journal(&kept("9", "0"), "config", &["--journal-keep-mib 0", "at least 1"]);
    journal(&["--journal-dir", "/proc/none"], "config", &["journal folder /proc/none", "--journal-dir"]);
    let bare = "/ip4/127.0.0.1/udp/9/quic-v1";
    refused(&Process::run(STAGE, &["--range", "0:3", "--coordinator", bare]), "config", &[bare, "/p2p/PEERID"]);
    refused(&Process::run(STAGE, &["--range", "0:3", "--allow", "me"]), "arguments", &["--allow", "me"]);
    let tcp = "/ip4/127.0.0.1/tcp/0";
    refused(&Process::run(STAGE, &["--range", "0:3", "--open", "--listen", tcp]), "listen", &[tcp]);
    refused(&Process::run(COORDINATOR, &["--http", "nowhere"]), "arguments", &["--http", "nowhere"]);
    refused(&Process::run(COORDINATOR, &["--stage", bare]), "config", &[bare, "/p2p/PEERID"]);
    refused(&Process::run(COORDINATOR, &["--dead-after", "0"]), "config", &["--dead-after", "0"]);
    let within = Process::run(RINGCTL, &["coordinator", "--in-flight", "0"]);
    refused(&within, "config", &["--in-flight", "0", "1 to 1024"]);
}

/// As root nothing is unwritable by its mode: a file in the way and a file system without files are.
#[test]
fn a_log_that_can_not_be_written_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "no folder").unwrap();
    let (file, below) = (file.to_str().unwrap(), file.join("log"));
    for (log, words) in [
        (file, &[file, "may read and write"][..]),
        (below.to_str().unwrap(), &[below.to_str().unwrap(), "may read and write"]),
        ("/proc/log", &["/proc/log", "may read and write"]),
        ("/proc/self", &["/proc/self", "no file can be begun there", "must be writable"]),
    ] {
        let ended = Process::run(COORDINATOR, &["--open", "--http", "127.0.0.1:0", "--log", log]);
        refused(&ended, "log", words);
        assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    }
    assert_eq!(fs::read(file).unwrap(), b"no folder", "it is left alone");
}

#[test]
fn a_damaged_checkpoint_is_refused_by_name() {
    const SECOND: &str = "model-00002-of-00005.safetensors";
    const NORM: &str = "layers.2.attn_norm.weight";
    const SCALE: &str = "layers.2.attn.wkv.scale";
    type Damage = fn(&Copy);
    let cases: [(Damage, &[&str]); 9] = [
        (|copy| copy.remove(SECOND), &[SECOND, "missing", "--shards"]),
        (
            |copy| {
                let bytes = copy.read(SECOND);
                copy.write(SECOND, &bytes[..bytes.len() - 1000]);
            },
            &[SECOND, "truncated", "2718488", "2717488"],
        ),
        (
            |copy| {
                let mut bytes = copy.read(SECOND);
                bytes[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
                copy.write(SECOND, &bytes);
            },
            &[SECOND, "1152921504606846976"],
        ),
        (|copy| copy.poke(SECOND, SCALE, 1, 255), &[SECOND, SCALE, "255", "254"]),
        (
            |copy| copy.edit_header(SECOND, |header| header[NORM]["dtype"] = json!("F16")),
            &[SECOND, NORM, "F16", "BF16"],
        ),
        (
            |copy| copy.edit_header(SECOND, |header| header[NORM]["shape"] = json!([2, 128])),
            &[SECOND, NORM, "[2, 128]", "[256]"],
        ),
        (
            |copy| copy.edit_json("config.json", |config| config["model_type"] = json!("llama")),
            &["config.json", "model_type", "llama", "deepseek_v4"],
        ),
        (|copy| copy.write("config.json", b"{"), &["config.json"]),
        (|copy| copy.remove("model.safetensors.index.json"), &["model.safetensors.index.json", "missing"]),
    ];
    for (damage, words) in cases {
        let copy = Copy::new();
        damage(&copy);
        stage_refused(&["--range", "2:3", "--model", copy.folder()], "model", words);
    }
    stage_refused(&["--range", "2:3", "--model", "/no/such/folder"], "model", &["/no/such/folder"]);
    // Damage outside the range is no business of this stage.
    let copy = Copy::new();
    copy.remove("model-00005-of-00005.safetensors");
    let checked = Process::run(STAGE, &["--range", "2:3", "--model", copy.folder(), "--check"]);
    assert!(checked.status.success() && checked.out.starts_with("OK {"), "{checked:?}");
}

#[test]
fn shards_are_listed_with_their_sizes() {
    let copy = Copy::new();
    let list = |range: &str| Process::run(STAGE, &["--range", range, "--model", copy.folder(), "--shards"]);
    let listed = list("0:3");
    assert!(listed.status.success(), "{listed:?}");
    let lines: Vec<&str> = listed.out.lines().collect();
    assert_eq!(lines.len(), 2, "{listed:?}");
    assert!(lines[0].starts_with("model-00001-of-00005.safetensors\t3090996 bytes"), "{listed:?}");
    assert!(lines[1].starts_with("model-00002-of-00005.safetensors\t2718488 bytes"), "{listed:?}");
    // What is to be fetched is known before it is there.
    copy.remove("model-00002-of-00005.safetensors");
    let listed = list("0:3");
    assert!(listed.status.success() && listed.out.contains("model-00002-of-00005.safetensors\tmissing"), "{listed:?}");
    let whole = Process::run(STAGE, &["--range", "0:7", "--model", "tiny", "--shards"]);
    assert_eq!(whole.out.lines().count(), 5, "{whole:?}");
}

#[test]
fn too_little_memory_is_refused_before_it_is_taken() {
    // A process that may map as much as the programs need to start, and little more.
    let limited = |args: &str| {
        let script = format!("ulimit -v 2000000; exec '{STAGE}' {args}");
        Process::run("/bin/sh", &["-c", &script])
    };
    for args in ["--range 0:7 --max-sessions 4096", "--range 0:7 --max-sessions 4096 --check"] {
        let ended = limited(args);
        refused(&ended, "memory", &["layers 0:7", "4096 sessions", "free", "fewer"]);
    }
    let ended = limited("--range 0:7 --max-sessions 2 --check");
    assert!(ended.status.success(), "{ended:?}");
    let ok: Value = serde_json::from_str(ended.out.strip_prefix("OK ").unwrap()).unwrap();
    let number = |name: &str| ok[name].as_u64().unwrap();
    assert!(number("free_bytes") < 2_048_000_000, "a limit on the process counts: {ok}");
    assert!(number("needed_bytes") > number("stored_bytes") + 2 * number("session_bytes"), "{ok}");
}

#[test]
fn an_identity_is_private() {
    let keys = Keys::new();
    let file = keys.file("0:3");
    let first = Stage::start(&keys, "0:3", &[]);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o600);
    first.process.notes(&["obeys nobody", "--coordinator", "--allow", "--open"]);
    let again = Stage::start(&keys, "0:3", &["--open"]);
    assert_eq!(first.peer, again.peer, "an identity lasts");
    let nameless =
        || Process::start(STAGE, &["--range", "0:1", "--open", "--parent-pipe"]).says("READY ")["peer"].take();
    assert_ne!(nameless(), nameless(), "without a file it does not");

    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    let words = [file.as_str(), "0644", "0600", "chmod"];
    refused(&Process::run(STAGE, &["--range", "0:3", "--open", "--identity", &file]), "identity", &words);
    refused(&Process::run(COORDINATOR, &["--http", "127.0.0.1:0", "--identity", &file]), "identity", &words);
    let nowhere = keys.path().join("no/such/key");
    let nowhere = nowhere.to_str().unwrap();
    refused(&Process::run(STAGE, &["--range", "0:3", "--open", "--identity", nowhere]), "identity", &[nowhere]);
}

#[test]
fn a_port_that_is_taken_is_said() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let http = taken.local_addr().unwrap().to_string();
    let ended = Process::run(COORDINATOR, &["--open", "--http", &http]);
    refused(&ended, "listen", &["--http", &http, "another port"]);
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let listen = format!("/ip4/127.0.0.1/udp/{}/quic-v1", taken.local_addr().unwrap().port());
    refused(&Process::run(COORDINATOR, &["--http", "127.0.0.1:0", "--listen", &listen]), "listen", &[&listen]);
    refused(&Process::run(STAGE, &["--range", "0:3", "--open", "--listen", &listen]), "listen", &[&listen]);
}

#[test]
fn a_stage_obeys_only_whom_it_was_told_to() {
    let ring = Ring::start(&CUT);
    let dial: Vec<&str> = ring.stages.iter().flat_map(|stage| ["--stage", stage.address.as_str()]).collect();
    let stranger = Listening::start(&Keys::new(), &dial);
    for stage in &ring.stages {
        stranger.process.notes(&[&stage.peer, "does not obey", &stranger.peer, "--allow"]);
    }
    let (status, body) = stranger.health();
    assert_eq!((status, &body["view"]), (503, &json!(0)), "{body}");
    // The ring does not care.
    ring.coordinator.ready();
    assert_eq!(ring.coordinator.ring()["view"], 1);
    let open = Stage::start(&Keys::new(), "0:7", &["--open"]);
    Listening::start(&Keys::new(), &["--stage", &open.address]).ready();
}

#[test]
fn a_coordinator_takes_only_whom_it_was_told_to() {
    let keys = Keys::new();
    let coordinator = Listening::start(&keys, &["--allow", &keys.peer("0:7")]);
    let identity = keys.file("stranger");
    let args = ["--range", "0:7", "--coordinator", &coordinator.address, "--identity", &identity];
    let stranger = Process::run(STAGE, &args);
    let peer = keys.peer("stranger");
    refused(&stranger, "serve", &["refuses this stage", "does not admit", &peer, "--allow"]);
    coordinator.misses(&["layers 0:7"]);
    // A stage is no coordinator.
    let only = Stage::start(&Keys::new(), "0:1", &["--open"]);
    let misled = Process::run(STAGE, &["--range", "1:7", "--coordinator", &only.address]);
    refused(&misled, "serve", &[&only.peer, "expected a coordinator", "a stage answered"]);
    let friend = Stage::start(&keys, "0:7", &["--coordinator", &coordinator.address]);
    coordinator.ready();
    assert_eq!(coordinator.pids(), [friend.pid()]);
}

#[test]
fn another_model_is_refused_with_both_digests() {
    let copy = Copy::new();
    let mut config = copy.read("config.json");
    // One byte that changes nothing else.
    config.push(b'\n');
    copy.write("config.json", &config);
    let keys = Keys::new();
    let coordinator = Listening::start(&keys, &["--open"]);
    let args = ["--range", "0:7", "--coordinator", &coordinator.address, "--model", copy.folder()];
    let (error, phase) = Process::run(STAGE, &args).fatal();
    assert_eq!(phase, "serve", "{error}");
    let digests: Vec<&str> = error.split(|c: char| !c.is_ascii_hexdigit()).filter(|word| word.len() == 12).collect();
    assert!(digests.len() == 2 && digests[0] != digests[1], "both digests are in {error:?}");
    // A coordinator that dials such a stage says the same.
    let stage = Stage::start(&keys, "0:7", &["--open", "--model", copy.folder()]);
    let other = Listening::start(&Keys::new(), &["--stage", &stage.address]);
    other.process.notes(&[digests[0], digests[1]]);
    // The stage does not care: one of its own model takes it.
    let own = Listening::start(&Keys::new(), &["--stage", &stage.address, "--model", copy.folder()]);
    own.ready();
}

#[test]
fn versions_name_protocol_and_numerics() {
    for (program, name) in [(RINGCTL, "ringctl"), (STAGE, "stage"), (COORDINATOR, "coordinator")] {
        let ended = Process::run(program, &["--version"]);
        assert!(ended.status.success(), "{ended:?}");
        let numerics = ringfence::engine::NUMERICS_ID;
        let protocol = ringfence::proto::control::PROTOCOL_VERSION;
        let expected = format!("{name} {} (protocol {protocol}, numerics {numerics})\n", env!("CARGO_PKG_VERSION"));
        assert_eq!(ended.out, expected);
    }
    assert!(Process::run(STAGE, &["--help"]).status.success());
}
