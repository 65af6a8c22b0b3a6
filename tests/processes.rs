//! The real programs as real processes on this machine: the demo, rings by hand, faults, refusals.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod processes {
    mod busy;
    mod churn;
    mod clients;
    mod copy;
    mod demo;
    mod detect;
    mod faults;
    mod heal;
    mod http;
    #[path = "../clients/install.rs"]
    mod install;
    mod live;
    mod matrix;
    mod refusals;
    mod restart;
    mod rig;
    mod ring;
    mod sim;
    mod waits;
}
