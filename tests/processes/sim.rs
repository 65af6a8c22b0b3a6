//! `ringctl sim` as an operator runs it: names, exit statuses, what a failure says, the report.

use serde_json::Value;

use super::rig::{Process, RINGCTL};

#[test]
fn plants_are_listed_by_name_and_an_unknown_one_is_refused() {
    let listed = Process::run(RINGCTL, &["sim", "--plant", "list"]);
    assert_eq!(listed.status.code(), Some(0), "{listed:?}");
    let names: Vec<&str> = listed.out.lines().collect();
    assert!(names.contains(&"zombie-accepted"), "{listed:?}");
    let bare = |name: &&str| name.chars().all(|letter| letter.is_ascii_lowercase() || letter == '-');
    assert!(names.iter().all(bare), "names and nothing else: {listed:?}");
    let refused = Process::run(RINGCTL, &["sim", "--plant", "nonsense"]);
    assert_eq!((refused.status.code(), refused.out.as_str()), (Some(2), ""), "{refused:?}");
    assert!(refused.err.contains("nonsense") && names.iter().all(|name| refused.err.contains(name)), "{refused:?}");
    let most = u64::MAX.to_string();
    let beyond = Process::run(RINGCTL, &["sim", "--first-seed", &most, "--seeds", "2"]);
    assert_eq!(beyond.status.code(), Some(2), "{beyond:?}");
}

#[test]
fn a_bug_that_is_found_is_said_with_its_seed_and_the_command_for_it() {
    for (plant, invariant) in [("zombie-accepted", "view"), ("panic-at-rebuild", "process")] {
        let found = Process::run(RINGCTL, &["sim", "--seeds", "2000", "--plant", plant]);
        assert_eq!(found.status.code(), Some(1), "{found:?}");
        let seed = found.out.strip_prefix("seed ").and_then(|rest| rest.split(':').next()).unwrap();
        assert!(found.out.contains(&format!("seed {seed}: {invariant} does not hold: ")), "{found:?}");
        let command = format!("run it again: ringctl sim --seeds 1 --first-seed {seed} --plant {plant}\n");
        assert!(found.out.contains(&command), "{found:?}");
        // The command that it says finds the same again.
        let again = Process::run(RINGCTL, &["sim", "--seeds", "1", "--first-seed", seed, "--plant", plant, "--json"]);
        assert_eq!(again.status.code(), Some(1), "{again:?}");
        let failure = &again.json()["failure"];
        assert_eq!((&failure["seed"].to_string(), &failure["invariant"]), (&seed.to_owned(), &Value::from(invariant)));
        assert_eq!(format!("run it again: {}\n", failure["command"].as_str().unwrap()), command);
    }
}

#[test]
fn green_seeds_are_status_0_and_a_report_says_on_what() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("sim.json");
    let file = file.to_str().unwrap();
    let green = Process::run(RINGCTL, &["sim", "--seeds", "20", "--report", file]);
    assert_eq!(green.status.code(), Some(0), "{green:?}");
    assert!(green.out.contains("20 schedules in ") && green.out.contains("every invariant held"), "{green:?}");
    let report: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!((&report["schedules"], &report["failure"]), (&Value::from(20), &Value::Null), "{report}");
    let command: Vec<&str> = report["command"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(command[1..], ["sim", "--seeds", "20", "--report", file]);
    for part in ["machine", "versions"] {
        assert!(report[part].as_object().is_some_and(|part| !part.is_empty()), "{part}: {report}");
    }
    let nowhere = Process::run(RINGCTL, &["sim", "--seeds", "1", "--report", "/no/such/folder/sim.json"]);
    assert_eq!(nowhere.status.code(), Some(2), "{nowhere:?}");
    assert!(nowhere.err.contains("/no/such/folder/sim.json"), "{nowhere:?}");
}
