//! What a hop costs: a frame there and a one-byte echo back, over our link, over raw quinn and over
//! TCP in one run, on loopback and behind an emulated network.
//!
//! `cargo bench --bench hop` runs every case; `-- --help` lists what narrows it down, such as
//! `-- --case matrix --rtt 40 --loss 0.1 --in-flight 16 --frame 33000 --seconds 3 --stack ours`.
//! The stacks of a cell take turns, so that a busy machine slows all alike: ratios are what to trust.
//! A bar is printed with PASS or MISS; a miss doesn't fail the run.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a bench prints, and stops at the first error")]

mod cases;
mod matrix;
mod ours;
mod raw;
mod stack;
mod table;
mod tcp;

use clap::{Parser, ValueEnum};

use stack::Kind;
use table::Bars;

/// Measures a hop.
#[derive(Debug, Parser)]
#[command(name = "hop")]
struct Args {
    /// What to measure
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Case::Loopback, Case::Matrix, Case::Cancel, Case::Idle])]
    case: Vec<Case>,
    /// Round trips of the matrix, in ms; 0 is bare loopback. The other cases take the first one, or 40
    #[arg(long, value_name = "MS", value_delimiter = ',')]
    rtt: Vec<u64>,
    /// Packets lost in either direction, in percent
    #[arg(long, value_name = "PERCENT", value_delimiter = ',', default_values_t = [0.0, 0.1, 1.0])]
    loss: Vec<f64>,
    /// Bytes of a frame: one position of the full-size model over the fp8 wire, and over bf16
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_values_t = [16_700, 33_000])]
    frame: Vec<usize>,
    /// Frames under way, 1 to 16
    #[arg(long, value_name = "FRAMES", value_delimiter = ',', default_values_t = [1, 16], value_parser = clap::value_parser!(u8).range(1..=16))]
    in_flight: Vec<u8>,
    /// Stacks to compare
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Kind::Ours, Kind::Raw, Kind::Tuned, Kind::Tcp])]
    stack: Vec<Kind>,
    /// Time of each stack in a cell of the matrix; the other cases take some times more
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0)]
    seconds: f64,
    /// Turns that this time is taken in
    #[arg(long, default_value_t = 3)]
    turns: u32,
    /// Silence before a frame in the idle case
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0)]
    idle: f64,
    /// How often
    #[arg(long, default_value_t = 7)]
    idles: u32,
    /// Rate of the hop in the cancel case, as the emulated network takes it; the matrix has none
    #[arg(long, default_value = "50mbit")]
    rate: String,
    /// Queues before that rate: about what such a path holds, and one that is far too long
    #[arg(long, value_delimiter = ',', default_values = ["256kb", "2mb"])]
    queue: Vec<String>,
    /// What `cargo bench` adds
    #[arg(long, hide = true)]
    bench: bool,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Case {
    /// Time and CPU of a frame on bare loopback, against raw quinn
    Loopback,
    /// Frames and echoes by size, round trip, loss and number under way
    Matrix,
    /// A control body while all data lanes are full
    Cancel,
    /// One frame after silence
    Idle,
}

#[tokio::main(flavor = "multi_thread")]
async fn main() {
    let args = Args::parse();
    let mut bars = Bars::default();
    for case in &args.case {
        match case {
            Case::Loopback => cases::loopback(&args, &mut bars).await,
            Case::Matrix => matrix::run(&args, &mut bars).await,
            Case::Cancel => cases::cancel(&args, &mut bars).await,
            Case::Idle => cases::idle(&args, &mut bars).await,
        }
    }
    bars.print();
}
