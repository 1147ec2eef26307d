//! A schedule as a picture: ranks are rows, micro-batches are numbers in cells, memory is a curve below.

use std::fmt::Write as _;

use super::{cells, composites, kinds, number, stages_a_rank, summary, svg_memory};
use crate::schedule::action::{Action, ActionKind};
use crate::schedule::program::Schedule;
use crate::schedule::simulate::{Interval, Simulation};

const LEFT: f64 = 64.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 92.0;
const ROW: f64 = 26.0;
const GAP: f64 = 4.0;
const MEMORY_HEIGHT: f64 = 120.0;
/// Pixels that the shortest computation should have, for its number to be read.
const CELL: f64 = 22.0;
const WIDTHS: (f64, f64) = (620.0, 1800.0);
/// Nothing is drawn narrower than this.
const VISIBLE: f64 = 0.6;
/// Cells narrower than this are drawn in blocks.
const NARROW: f64 = 2.0;

/// Sizes and the scale of time of one picture.
pub(super) struct Frame {
    pub(super) left: f64,
    pub(super) width: f64,
    pub(super) makespan: f64,
}

impl Frame {
    pub(super) fn x(&self, time: f64) -> f64 {
        self.left + if self.makespan > 0.0 { time / self.makespan * self.width } else { 0.0 }
    }
}

/// A self-contained picture of a simulated schedule.
#[must_use]
pub fn svg(schedule: &Schedule, run: &Simulation) -> String {
    let rows = schedule.programs().len();
    #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 ranks")]
    let grid_height = rows as f64 * (ROW + GAP);
    let frame = Frame { left: LEFT, width: width(schedule, run), makespan: run.makespan };
    let memory_top = TOP + grid_height + 64.0;
    let (width, height) = (LEFT + frame.width + RIGHT, memory_top + MEMORY_HEIGHT + 44.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#1f2933\">\n"
    );
    let _ = writeln!(out, "<title>{schedule}: {}</title>", summary(run));
    let _ = writeln!(out, "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>");
    heading(&mut out, schedule, run);
    legend(&mut out, schedule);
    for rank in 0..rows {
        #[expect(clippy::cast_precision_loss, reason = "far fewer than 2^52 ranks")]
        let y = TOP + rank as f64 * (ROW + GAP);
        row(&mut out, &frame, schedule, run, rank, y);
    }
    axis(&mut out, &frame, TOP + grid_height, "time");
    svg_memory::panel(&mut out, &frame, run, memory_top, MEMORY_HEIGHT);
    out.push_str("</svg>\n");
    out
}

/// Wide enough for the numbers of the shortest cells, within limits.
fn width(schedule: &Schedule, run: &Simulation) -> f64 {
    let all = (0..schedule.programs().len()).flat_map(|rank| cells(schedule, run, rank));
    let times = all.map(|(_, interval)| interval.end - interval.start).filter(|time| *time > 0.0);
    let shortest = times.fold(f64::INFINITY, f64::min);
    let wanted = if shortest.is_finite() { run.makespan / shortest * CELL } else { 0.0 };
    wanted.clamp(WIDTHS.0, WIDTHS.1)
}

fn heading(out: &mut String, schedule: &Schedule, run: &Simulation) {
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"26\" font-size=\"17\" font-weight=\"bold\">{schedule}</text>");
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"47\" font-size=\"13\" fill=\"#52606d\">{}</text>", summary(run));
}

fn legend(out: &mut String, schedule: &Schedule) {
    let mut x = LEFT;
    let mut entry = |colour: &str, text: &str| {
        let _ = write!(out, "<rect x=\"{x:.1}\" y=\"62\" width=\"13\" height=\"13\" rx=\"2\" fill=\"{colour}\"/>");
        let _ = writeln!(out, "<text x=\"{:.1}\" y=\"73\">{text}</text>", x + 19.0);
        #[expect(clippy::cast_precision_loss, reason = "a short text")]
        let length = text.len() as f64;
        x += 19.0 + 6.6 * length + 14.0;
    };
    for kind in kinds(schedule) {
        let text = match kind {
            ActionKind::Forward => "forward",
            ActionKind::Backward => "backward",
            ActionKind::InputGrad => "input gradient",
            _ => "weight gradient",
        };
        entry(&colour(kind, 0.0), text);
    }
    entry(IDLE, "idle");
    if stages_a_rank(schedule) > 1 {
        let paler = if schedule.placement().num_chains() > 1 { "paler: second copy" } else { "paler: later stage" };
        entry(&colour(ActionKind::Forward, 0.55), paler);
    }
}

const IDLE: &str = "#e8ecf0";

fn row(out: &mut String, frame: &Frame, schedule: &Schedule, run: &Simulation, rank: usize, y: f64) {
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">rank {rank}</text><rect x=\"{LEFT}\" y=\"{y:.1}\" width=\"{:.2}\" height=\"{ROW}\" fill=\"{IDLE}\"/>",
        LEFT - 8.0,
        y + ROW / 2.0 + 4.0,
        frame.width
    );
    let mut block: Option<Block> = None;
    for (parts, interval) in composites(schedule, run, rank) {
        let (start, end) = (frame.x(interval.start), frame.x(interval.end));
        // Parts that run together share the height of the row.
        #[expect(clippy::cast_precision_loss, reason = "a composite has a few parts")]
        let height = ROW / parts.len() as f64;
        let mut top = y;
        for action in parts {
            let pale = paleness(schedule, action);
            let next = Block { kind: action.kind, pale, start, end, top, height };
            top += height;
            match &mut block {
                Some(block) if end - start < NARROW && block.continues_in(&next) => {
                    block.end = end;
                    continue;
                }
                _ => {}
            }
            if let Some(block) = block.take() {
                block.draw(out);
            }
            if end - start < NARROW {
                block = Some(next);
            } else {
                cell(out, action, interval, &next);
            }
        }
    }
    if let Some(block) = block {
        block.draw(out);
    }
}

/// One computation, or several narrow ones of one kind and stage in a row.
struct Block {
    kind: ActionKind,
    pale: f64,
    start: f64,
    end: f64,
    top: f64,
    height: f64,
}

impl Block {
    fn continues_in(&self, next: &Self) -> bool {
        let look = |block: &Self| (block.kind, block.pale.to_bits(), block.top.to_bits());
        let touches = next.start - self.end < VISIBLE;
        touches && (next.end - self.start < VISIBLE || look(self) == look(next))
    }

    fn draw(&self, out: &mut String) {
        let _ = writeln!(
            out,
            "<rect x=\"{:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{:.1}\" fill=\"{}\"/>",
            self.start,
            self.top,
            (self.end - self.start).max(VISIBLE),
            self.height,
            colour(self.kind, self.pale)
        );
    }
}

/// How pale the cells of a stage are: the later it is among those of its rank, the paler.
fn paleness(schedule: &Schedule, action: Action) -> f64 {
    let stages = schedule.placement().stages_of(schedule.placement().rank_of(action.stage));
    let place = stages.iter().position(|&stage| stage == action.stage).unwrap_or(0);
    #[expect(clippy::cast_precision_loss, reason = "a rank has few stages")]
    let pale = if stages.len() > 1 { 0.55 * place as f64 / (stages.len() - 1) as f64 } else { 0.0 };
    pale
}

fn cell(out: &mut String, action: Action, interval: Interval, block: &Block) {
    let width = block.end - block.start;
    // A hair of white between neighbours, where there is room for it.
    let hair = if width > 4.0 { 0.6 } else { 0.0 };
    let _ = write!(
        out,
        "<rect x=\"{:.2}\" y=\"{:.1}\" width=\"{:.2}\" height=\"{:.1}\" fill=\"{}\"><title>{}{}{}: {} to {}</title></rect>",
        block.start + hair / 2.0,
        block.top,
        width - hair,
        block.height,
        colour(block.kind, block.pale),
        action.stage,
        action.kind,
        action.microbatch,
        number(interval.start),
        number(interval.end),
    );
    let name = action.microbatch.to_string();
    #[expect(clippy::cast_precision_loss, reason = "a few digits")]
    let needed = 6.4 * name.len() as f64 + 4.0;
    if needed <= width {
        let light = block.pale > 0.3 || block.kind == ActionKind::WeightGrad;
        let ink = if light { "#1f2933" } else { "#ffffff" };
        let (x, y) = (f64::midpoint(block.start, block.end), block.top + block.height / 2.0 + 4.0);
        let _ = write!(
            out,
            "<text x=\"{x:.2}\" y=\"{y:.1}\" text-anchor=\"middle\" font-size=\"11\" fill=\"{ink}\">{name}</text>"
        );
    }
    out.push('\n');
}

/// The colour of a kind, mixed with white: 0 is full, 1 is white. The four differ in lightness as well as in hue.
fn colour(kind: ActionKind, pale: f64) -> String {
    let full: [f64; 3] = match kind {
        ActionKind::Forward => [38.0, 99.0, 168.0],
        ActionKind::Backward => [46.0, 139.0, 87.0],
        ActionKind::InputGrad => [20.0, 130.0, 130.0],
        _ => [244.0, 176.0, 60.0],
    };
    let [red, green, blue] = full.map(|part| part + (255.0 - part) * pale);
    format!("#{:02x}{:02x}{:02x}", byte(red), byte(green), byte(blue))
}

pub(super) fn byte(value: f64) -> u8 {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
    let byte = value.round().clamp(0.0, 255.0) as u8;
    byte
}

/// A line with ticks at round times.
pub(super) fn axis(out: &mut String, frame: &Frame, y: f64, name: &str) {
    let end = LEFT + frame.width;
    let _ = writeln!(out, "<path d=\"M{LEFT} {y:.1}H{end:.1}\" stroke=\"#9aa5b1\" fill=\"none\"/>");
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a picture has a few thousand pixels")]
    let most = (frame.width / 70.0) as u32;
    for time in ticks(frame.makespan, most) {
        let x = frame.x(time);
        let _ = writeln!(
            out,
            "<path d=\"M{x:.1} {y:.1}v5\" stroke=\"#9aa5b1\"/><text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\" font-size=\"11\" fill=\"#52606d\">{}</text>",
            y + 17.0,
            number(time)
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\" font-size=\"11\" fill=\"#52606d\">{name}</text>",
        LEFT - 8.0,
        y + 17.0
    );
}

/// At most about so many round values from 0 to `end`: steps of 1, 2 or 5 times a power of ten.
pub(super) fn ticks(end: f64, most: u32) -> Vec<f64> {
    if end <= 0.0 || !end.is_finite() {
        return vec![0.0];
    }
    let rough = end / f64::from(most.max(1));
    let power = 10.0_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= rough);
    let step = step.unwrap_or(10.0 * power);
    (0..=most.max(1)).map(|index| f64::from(index) * step).take_while(|tick| *tick <= end * (1.0 + 1e-9)).collect()
}
