//! `ringctl churn` on a ring that an operator started by hand, a part of it behind `ringctl wan`: hops are
//! cut there through its control socket, and only there.

use std::io::{BufRead, BufReader, Write};
use std::net::UdpSocket;
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::{Value, json};

use super::churn::{number, on, one, refused};
use super::rig::{CUT, Keys, Listening, Process, RINGCTL, Stage, until};

/// A stage that others reach at another port; what holds the port until the network takes it.
#[track_caller]
fn announced(keys: &Keys, name: &str, more: &[&str]) -> (Stage, UdpSocket) {
    let held = UdpSocket::bind("127.0.0.1:0").unwrap();
    let announce = format!("/ip4/127.0.0.1/udp/{}/quic-v1", held.local_addr().unwrap().port());
    (Stage::start_as(keys, name, CUT[1], &[&["--announce", &announce], more].concat()), held)
}

/// Starts the network in front of these stages.
#[track_caller]
fn network(control: &str, stages: [(&Stage, UdpSocket); 2]) -> Process {
    let mut args = vec!["wan".to_owned(), "--parent-pipe".to_owned(), "--control".to_owned(), control.to_owned()];
    args.extend(["--set", "rtt=4ms"].map(str::to_owned));
    for (stage, held) in stages {
        let port = stage.address.split('/').nth(4).unwrap();
        let listen = held.local_addr().unwrap().to_string();
        args.extend(["--listen".to_owned(), listen, "--to".to_owned(), format!("127.0.0.1:{port}")]);
    }
    let mut network = Process::start(RINGCTL, &args.iter().map(String::as_str).collect::<Vec<_>>());
    network.says("READY ");
    network
}

/// What the network says of its proxies.
#[track_caller]
fn stats(control: &str) -> [Value; 2] {
    [0, 1].map(|proxy| {
        let mut stream = UnixStream::connect(Path::new(control)).unwrap();
        stream.write_all(format!("{proxy} stats\n").as_bytes()).unwrap();
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        serde_json::from_str(line.strip_prefix("STATS ").unwrap()).unwrap()
    })
}

#[test]
fn hops_of_a_running_ring_are_cut_through_the_network_in_front_of_them() {
    let (keys, folder) = (Keys::new(), tempfile::tempdir().unwrap());
    let control = folder.path().join("wan.sock").to_str().unwrap().to_owned();
    let coordinator = Listening::start(&keys, &["--open", "--heal-wait", "60"]);
    let dial = ["--coordinator", coordinator.address.as_str()];
    let spare = [&dial[..], &["--spare"]].concat();
    let head = Stage::start(&keys, CUT[0], &dial);
    let (middle, port) = announced(&keys, "middle", &dial);
    let tail = Stage::start(&keys, CUT[2], &dial);
    let (other, other_port) = announced(&keys, "other", &spare);
    let waits = Stage::start_as(&keys, "waits", CUT[2], &spare);
    let _network = network(&control, [(&middle, port), (&other, other_port)]);
    coordinator.ready();
    until("everybody is there", || (coordinator.ring()["members"].as_array().unwrap().len() == 5).then_some(()));
    let url = coordinator.url.as_str();
    let through = ["--wan-control", control.as_str()];

    // The tail has a spare, and no network in front of it.
    let cut = ["--fault", "cut", "--place", "tail"];
    refused(&on(url, &[&cut[..], &through].concat()), &["can't be cut", "no proxy of", &tail.address]);
    refused(&on(url, &cut), &["can't be cut", "ringctl wan --control"]);
    let nowhere = folder.path().join("nowhere").to_str().unwrap().to_owned();
    let elsewhere = ["--fault", "cut", "--place", "middle", "--wan-control", &nowhere];
    refused(&on(url, &elsewhere), &["nowhere", "is `ringctl wan --control` running there?"]);
    assert_eq!(coordinator.ring()["heals"], json!([]), "nothing was done yet");

    // The two take turns: whoever is cut off loses its place to the other.
    let turns = [&other, &middle];
    for (at, (way, (inward, outward))) in [("in", (true, false)), ("both", (true, true))].into_iter().enumerate() {
        let before = stats(&control);
        let struck = ["--fault", "cut", "--place", "middle", "--way", way];
        let run = one(&on(url, &[&struck[..], &through].concat()));
        assert_eq!((&run["fault"], &run["place"]), (&json!("cut"), &json!("middle")));
        assert!(number(&run, "detect_ms") > 0 && number(&run, "stall_ms") > 0, "{run}");
        assert!(number(&run, "rebuild_bytes") > 0, "{run}");
        let after = stats(&control);
        let swallowed = |proxy: usize, way: &str| after[proxy][way]["cut"] != before[proxy][way]["cut"];
        let (struck, spared) = (at, 1 - at);
        assert_eq!((swallowed(struck, "in"), swallowed(struck, "out")), (inward, outward), "{after:?}");
        assert_eq!((swallowed(spared, "in"), swallowed(spared, "out")), (false, false), "{after:?}");
        assert!(after.iter().all(|proxy| proxy["cut"] == json!([])), "the network is whole again: {after:?}");
        assert_eq!(coordinator.ring()["heals"].as_array().unwrap().len(), at + 1);
        assert_eq!(coordinator.pids(), [head.pid(), turns[at].pid(), tail.pid()], "nobody else moved");
    }

    // One that is slow keeps its place.
    let run = one(&on(url, &[&["--fault", "slow", "--place", "middle"], &through[..]].concat()));
    assert!(number(&run, "detect_ms") > 0 && number(&run, "rebuild_bytes") == 0, "{run}");
    assert_eq!(coordinator.pids(), [head.pid(), middle.pid(), tail.pid()]);
    drop(waits);
}
