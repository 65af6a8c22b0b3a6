//! Ten minutes on a machine whose every processor is busy, behind a network with 200 ms of jitter: nobody
//! may be evicted, and the tokens are those of a quiet machine. `cargo bench --bench busy` records it in
//! `receipts/busy.json`; `-- --seconds 60 --report FILE` records less, elsewhere. The tests do it shortly.

#![allow(clippy::unwrap_used, reason = "a bench stops at the first surprise")]

#[path = "../tests/processes"]
#[allow(dead_code, reason = "the tests use all of it")]
mod processes {
    pub(crate) mod busy;
    mod http;
    mod rig;
}

fn main() {
    processes::busy::record();
}
