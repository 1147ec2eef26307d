//! The memory curves below the grid of a picture.

use std::fmt::Write as _;

use super::svg::{Frame, axis, byte, ticks};
use super::{number, settled};
use crate::schedule::simulate::{MemoryPoint, Simulation};

/// Points closer than this are drawn as one.
const VISIBLE: f64 = 1.0;

/// One step curve per rank, dark for the first and light for the last.
pub(super) fn panel(out: &mut String, frame: &Frame, run: &Simulation, top: f64, height: f64) {
    let highest = run.peak.iter().copied().fold(0.0, f64::max);
    let peak_rank = run.peak.iter().position(|peak| peak.total_cmp(&highest).is_eq()).unwrap_or(0);
    let last = run.memory.len().saturating_sub(1);
    let which = if last > 0 { format!(" (dark: rank 0, light: rank {last})") } else { String::new() };
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"12\" fill=\"#52606d\">memory held by each rank{which}: peak {} on rank {peak_rank}</text>",
        frame.left,
        top - 12.0,
        number(highest)
    );
    let bottom = top + height;
    let y = |held: f64| bottom - if highest > 0.0 { held / highest * (height - 6.0) } else { 0.0 };
    for tick in ticks(highest, 4) {
        let _ = writeln!(
            out,
            "<path d=\"M{:.1} {:.1}h{:.1}\" stroke=\"#e4e7eb\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" font-size=\"11\" fill=\"#52606d\">{}</text>",
            frame.left,
            y(tick),
            frame.width,
            frame.left - 8.0,
            y(tick) + 4.0,
            number(tick)
        );
    }
    for (rank, points) in run.memory.iter().enumerate().rev() {
        curve(out, frame, points, &shade(rank, last), &y);
    }
    axis(out, frame, bottom, "time");
}

fn curve(out: &mut String, frame: &Frame, points: &[MemoryPoint], stroke: &str, y: &dyn Fn(f64) -> f64) {
    let mut path = format!("M{:.1} {:.1}", frame.left, y(0.0));
    let mut drawn = f64::NEG_INFINITY;
    for point in settled(points) {
        let x = frame.x(point.time);
        if x - drawn >= VISIBLE {
            let _ = write!(path, "H{x:.1}V{:.1}", y(point.held));
            drawn = x;
        }
    }
    let end = frame.x(frame.makespan);
    let _ = writeln!(
        out,
        "<path d=\"{path}H{end:.1}\" fill=\"none\" stroke=\"{stroke}\" stroke-width=\"1.6\" stroke-linejoin=\"round\"/>"
    );
}

/// From dark violet over rose to light orange.
fn shade(rank: usize, last: usize) -> String {
    const STOPS: [[f64; 3]; 3] = [[59.0, 15.0, 112.0], [190.0, 56.0, 100.0], [251.0, 175.0, 96.0]];
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 ranks")]
    let place = if last > 0 { 2.0 * rank as f64 / last as f64 } else { 0.0 };
    let (low, part) = if place < 1.0 { (0, place) } else { (1, place - 1.0) };
    let mix = |channel: usize| byte(STOPS[low][channel] * (1.0 - part) + STOPS[low + 1][channel] * part);
    format!("#{:02x}{:02x}{:02x}", mix(0), mix(1), mix(2))
}
