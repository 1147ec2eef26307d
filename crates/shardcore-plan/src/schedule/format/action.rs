//! Actions as text, and back. Reading is strict: exactly what writing gives.

use std::fmt;
use std::str::FromStr;

use crate::error::{PlanError, Result, shortened};
use crate::schedule::action::{Action, ActionKind};

/// `2F0` is the forward of stage 2 for micro-batch 0; `0F3@1` uses receive slot 1; `4OPTIM` has no micro-batch; `0F3&`
/// is joined with the action behind it, so that a composite reads `0F3&1B2`.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.stage, self.kind)?;
        if self.kind.has_microbatch() {
            write!(f, "{}", self.microbatch)?;
        }
        if self.slot != 0 {
            write!(f, "@{}", self.slot)?;
        }
        f.write_str(if self.with_next { "&" } else { "" })
    }
}

/// Reads what `Display` writes.
impl FromStr for Action {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self> {
        let (bare, joined) = text.strip_suffix('&').map_or((text, false), |bare| (bare, true));
        let refused = |reason| PlanError::BadScheduleText { line: 1, column: 1, reason };
        parse(bare).map(|action| Self { with_next: joined, ..action }).map_err(refused)
    }
}

/// The text of a composite (or of a single action), without a gap.
#[must_use]
pub fn composite_text(parts: &[Action]) -> String {
    parts.iter().map(Action::to_string).collect()
}

/// Reads a composite such as `0F3&1B2`, or a single action.
///
/// # Errors
/// The number of letters before the part that is no action, and why it is none.
pub(super) fn parse_composite(text: &str, program: &mut Vec<Action>) -> Result<(), (usize, String)> {
    let mut start = 0;
    for part in text.split('&') {
        let action = parse(part).map_err(|reason| (start, reason))?;
        start += part.len() + 1;
        program.push(Action { with_next: start <= text.len(), ..action });
    }
    Ok(())
}

/// Reads one action without its `&`.
fn parse(text: &str) -> Result<Action, String> {
    let whole = || shortened(text);
    let expected = || format!("expected an action such as 2F0, got {:?}", whole());
    let (stage, rest) = split_number(text).ok_or_else(expected)?;
    let letters = rest.find(|letter: char| !(letter.is_ascii_alphabetic() || letter == '_')).unwrap_or(rest.len());
    let (name, mut rest) = rest.split_at(letters);
    let kind = ActionKind::from_name(name).map_err(|error| format!("{:?}: {error}", whole()))?;
    let mut action = Action::new(kind, stage, 0);
    if kind.has_microbatch() {
        let missing = || format!("{:?}: expected a micro-batch behind {kind}, without leading zeros", whole());
        (action.microbatch, rest) = split_number(rest).ok_or_else(missing)?;
    }
    if let Some(slot) = rest.strip_prefix('@') {
        if !kind.has_slot() {
            return Err(format!("{:?}: {kind} has no slot: only receives, F, B and I have one", whole()));
        }
        let (number, end) = split_number(slot).ok_or_else(|| format!("{:?}: expected a slot behind @", whole()))?;
        let slot = u16::try_from(number).ok().filter(|&slot| slot != 0);
        action.slot = slot.ok_or_else(|| format!("{:?}: a slot behind @ is 1 to 65535, got {number}", whole()))?;
        rest = end;
    }
    if rest.is_empty() {
        return Ok(action);
    }
    Err(format!("{:?}: {:?} is left behind the action", whole(), shortened(rest)))
}

/// The number at the start of a text, in its one way of writing, and what follows.
pub(in crate::schedule) fn split_number(text: &str) -> Option<(u32, &str)> {
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    let canonical = digits == "0" || !digits.starts_with('0');
    canonical.then(|| digits.parse().ok()).flatten().map(|number| (number, rest))
}
