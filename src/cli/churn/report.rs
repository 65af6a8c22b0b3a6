//! What runs gave: rows, a table, a JSON report, and a picture of tokens over time.

use std::fmt::Write as _;
use std::time::Instant;

use serde::Serialize;
use serde_json::{Value, json};

use super::watch::{Seen, Stream};
use crate::cli::receipt;

/// One run, as it is reported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Row {
    pub(crate) fault: String,
    pub(crate) place: String,
    pub(crate) moment: String,
    /// From the fault until it was seen; for a slow stage, until it was suspected. 0: never.
    pub(crate) detect_ms: u64,
    /// From there until every session had its state again; 0 where nothing was rebuilt.
    pub(crate) rebuild_ms: u64,
    /// Token ids and hidden states that were sent for it.
    pub(crate) rebuild_bytes: u64,
    /// The longest time between two events of the stream, the request being the first.
    pub(crate) stall_ms: u64,
    pub(crate) ids_equal: bool,
}

/// Tokens over time of one run; all times in milliseconds since its request, which a fault may precede.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Trace {
    /// Time and number of each token.
    tokens: Vec<(f64, f64)>,
    /// The same without a fault.
    unbroken: Vec<(f64, f64)>,
    fault: f64,
    detected: Option<f64>,
    rebuilt: Option<f64>,
}

impl Trace {
    /// Of a stream and its unbroken twin.
    pub(crate) fn new(
        (stream, unbroken): (&Stream, &Stream),
        fault: Instant,
        detected: Option<Instant>,
        rebuilt: Option<Instant>,
    ) -> Self {
        let begun = stream.begun;
        Self {
            tokens: points(&stream.seen(), begun),
            unbroken: points(&unbroken.seen(), unbroken.begun),
            fault: signed(fault, begun),
            detected: detected.map(|at| signed(at, begun)),
            rebuilt: rebuilt.map(|at| signed(at, begun)),
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "tokens of one stream stay far below 2^52")]
fn points(seen: &[Seen], begun: Instant) -> Vec<(f64, f64)> {
    seen.iter().map(|seen| (signed(seen.at, begun), seen.tokens as f64)).collect()
}

fn signed(at: Instant, zero: Instant) -> f64 {
    let after = at.saturating_duration_since(zero).as_secs_f64();
    (after - zero.saturating_duration_since(at).as_secs_f64()) * 1e3
}

/// The rows for a terminal.
pub(crate) fn table(rows: &[Row]) -> String {
    let head = ["fault", "place", "moment", "detect ms", "rebuild ms", "rebuild bytes", "stall ms", "ids equal"];
    let mut text = line(head.map(str::to_owned));
    for row in rows {
        text += &line([
            row.fault.clone(),
            row.place.clone(),
            row.moment.clone(),
            row.detect_ms.to_string(),
            row.rebuild_ms.to_string(),
            row.rebuild_bytes.to_string(),
            row.stall_ms.to_string(),
            if row.ids_equal { "yes" } else { "NO" }.to_owned(),
        ]);
    }
    text
}

fn line([fault, place, moment, detect, rebuild, bytes, stall, equal]: [String; 8]) -> String {
    format!("{fault:<11} {place:<7} {moment:<10} {detect:>9} {rebuild:>10} {bytes:>13} {stall:>8}  {equal}\n")
}

/// The object of `--json`.
pub(crate) fn runs(rows: &[Row]) -> Value {
    json!({ "runs": rows })
}

/// The object of `--report`: the runs, and where and how they were made.
pub(crate) fn report(rows: &[Row]) -> Value {
    receipt::stamped(runs(rows))
}

/// Width of a picture.
const WIDTH: f64 = 900.0;
/// Height of one run in it.
const HEIGHT: f64 = 190.0;
/// Left of the plot.
const LEFT: f64 = 56.0;
/// Right of it.
const RIGHT: f64 = 20.0;
/// Above it: a line of text.
const ABOVE: f64 = 34.0;
/// Below it: the axis.
const BELOW: f64 = 26.0;

/// A picture: tokens over time, one plot a run, with the fault marked.
pub(crate) fn svg(runs: &[(Row, Trace)]) -> String {
    #[allow(clippy::cast_precision_loss, reason = "runs of one command stay far below 2^52")]
    let height = HEIGHT * runs.len().max(1) as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let mut top = 0.0;
    for (row, trace) in runs {
        plot(&mut out, top, row, trace);
        top += HEIGHT;
    }
    out + "</svg>\n"
}

fn plot(out: &mut String, top: f64, row: &Row, trace: &Trace) {
    let last = |points: &[(f64, f64)]| points.last().copied().unwrap_or((0.0, 0.0));
    let (end, count) = last(&trace.tokens);
    let (calm_end, calm_count) = last(&trace.unbroken);
    let marks = [Some(trace.fault), trace.detected, trace.rebuilt].into_iter().flatten();
    let from = marks.clone().fold(0.0, f64::min);
    let to = marks.fold(end.max(calm_end), f64::max).max(from + 1.0);
    let most = count.max(calm_count).max(1.0);
    let x = |ms: f64| LEFT + (ms - from) / (to - from) * (WIDTH - LEFT - RIGHT);
    let bottom = top + HEIGHT - BELOW;
    let y = |tokens: f64| bottom - tokens / most * (HEIGHT - ABOVE - BELOW);
    let verdict = if row.ids_equal { "ids equal" } else { "IDS DIFFER" };
    // A text in memory takes every write.
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{:.0}\" font-size=\"13\">{} {} during {}: seen after {} ms, rebuilt in {} ms, longest stall {} ms, {verdict}</text>",
        top + 20.0,
        row.fault,
        row.place,
        row.moment,
        row.detect_ms,
        row.rebuild_ms,
        row.stall_ms,
    );
    let _ = writeln!(
        out,
        "<path d=\"M{LEFT} {:.1}V{bottom:.1}H{:.1}\" fill=\"none\" stroke=\"#888\"/>",
        top + ABOVE,
        WIDTH - RIGHT
    );
    for (value, text) in [(0.0, "0".to_owned()), (most, format!("{most:.0} tokens"))] {
        let _ = writeln!(out, "<text x=\"4\" y=\"{:.1}\">{text}</text>", y(value) + 4.0);
    }
    for (ms, anchor) in [(from, "start"), (to, "end")] {
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{:.2} s</text>",
            x(ms),
            bottom + 14.0,
            ms / 1e3
        );
    }
    for (points, colour) in [(&trace.unbroken, "#bbb"), (&trace.tokens, "#1565c0")] {
        let path: String = points.iter().map(|(ms, tokens)| format!(" {:.1},{:.1}", x(*ms), y(*tokens))).collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{:.1},{bottom:.1}{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
            x(0.0)
        );
    }
    let marks = [
        (Some(trace.fault), "#c62828", row.fault.as_str()),
        (trace.detected, "#ef6c00", "seen"),
        (trace.rebuilt, "#2e7d32", "rebuilt"),
    ];
    for (at, (ms, colour, name)) in
        (1_u8..).zip(marks).filter_map(|(at, (ms, colour, name))| Some((at, (ms?, colour, name))))
    {
        let (x, label) = (x(ms), top + ABOVE + 12.0 * f64::from(at));
        let _ = writeln!(
            out,
            "<path d=\"M{x:.1} {:.1}V{bottom:.1}\" stroke=\"{colour}\" stroke-dasharray=\"4 2\"/>\
             <text x=\"{:.1}\" y=\"{label:.1}\" fill=\"{colour}\">{name}</text>",
            top + ABOVE,
            x + 3.0
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Row {
            fault: "kill".into(),
            place: "tail".into(),
            moment: "decode".into(),
            detect_ms: 12,
            rebuild_ms: 340,
            rebuild_bytes: 5_600,
            stall_ms: 400,
            ids_equal: true,
        }
    }

    #[test]
    fn the_report_has_the_fields_that_programs_read() {
        let row_text = r#"{"detect_ms":12,"fault":"kill","ids_equal":true,"moment":"decode","place":"tail","rebuild_bytes":5600,"rebuild_ms":340,"stall_ms":400}"#;
        let value = runs(&[row()]);
        assert_eq!(value, serde_json::from_str::<Value>(&format!("{{\"runs\":[{row_text}]}}")).unwrap());
        let report = report(&[row()]);
        let mut names: Vec<&String> = report.as_object().unwrap().keys().collect();
        names.sort();
        assert_eq!(names, ["command", "machine", "runs", "versions"]);
    }

    #[test]
    fn a_table_has_a_line_a_run_and_says_when_ids_differ() {
        let table = table(&[row(), Row { ids_equal: false, ..row() }]);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[1].ends_with("400  yes") && lines[2].ends_with("400  NO"), "{table}");
    }

    #[test]
    fn the_picture_marks_the_fault_inside_its_frame() {
        let line = |to: f64| (0..10).map(|at| (f64::from(at) * to, f64::from(at))).collect::<Vec<_>>();
        let trace =
            Trace { tokens: line(100.0), unbroken: line(50.0), fault: -300.0, detected: Some(1.0), rebuilt: None };
        let picture = svg(&[(row(), trace.clone()), (row(), trace)]);
        assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
        assert_eq!(picture.matches("<polyline").count(), 4);
        assert_eq!(picture.matches(">kill</text>").count(), 2);
        assert_eq!(picture.matches("NaN").count(), 0);
        assert!(picture.contains(&format!("M{LEFT:.1} {ABOVE:.1}V")), "the fault is the first thing: {picture}");
        assert!(!svg(&[]).is_empty());
    }
}
