//! The first place where two plan documents disagree: what to tell the user when ranks have different plans.

use serde_json::{Map, Value};

use crate::error::{PlanError, Result};

/// Names the first difference between two plan documents, as written by `to_json`; `None` when they are equal.
///
/// The result reads like `unit 3 "layers.3", group 0, entry 1 "mlp.weight": numel is 4096 in the first and 4100 in
/// the second`. Documents are walked in the order in which the first one was written.
///
/// # Errors
/// [`PlanError::BadDocument`] if a text is not JSON.
pub fn first_difference(first: &str, second: &str) -> Result<Option<String>> {
    let parse = |which: &str, text: &str| {
        serde_json::from_str::<Value>(text)
            .map_err(|error| PlanError::BadDocument { reason: format!("the {which} text is not JSON: {error}") })
    };
    let (first, second) = (parse("first", first)?, parse("second", second)?);
    Ok(difference("the document", &first, &second).map(|found| found.to_string()))
}

/// Where two documents part, from the outermost element inwards, and how.
struct Difference {
    path: Vec<String>,
    what: String,
}

impl Difference {
    fn here(what: String) -> Option<Self> {
        Some(Self { path: Vec::new(), what })
    }

    fn inside(mut self, element: String) -> Self {
        self.path.insert(0, element);
        self
    }
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path.join(", "))?;
        }
        f.write_str(&self.what)
    }
}

fn difference(label: &str, first: &Value, second: &Value) -> Option<Difference> {
    match (first, second) {
        (Value::Object(first), Value::Object(second)) => in_objects(first, second),
        (Value::Array(first), Value::Array(second)) => in_arrays(label, first, second),
        _ if first == second => None,
        _ => Difference::here(format!("{label} is {} in the first and {} in the second", brief(first), brief(second))),
    }
}

fn in_objects(first: &Map<String, Value>, second: &Map<String, Value>) -> Option<Difference> {
    let only_in = |which: &str, key: &String| Difference::here(format!("only the {which} has {key}"));
    let in_first = first.iter().find_map(|(key, value)| match second.get(key) {
        Some(other) => difference(key, value, other),
        None => only_in("first", key),
    });
    in_first.or_else(|| second.keys().find(|key| !first.contains_key(*key)).and_then(|key| only_in("second", key)))
}

fn in_arrays(label: &str, first: &[Value], second: &[Value]) -> Option<Difference> {
    let singular = singular(label);
    let mut pairs = first.iter().zip(second).enumerate();
    let in_both = pairs.find_map(|(index, (a, b))| {
        let place = element_label(singular, index, a, b);
        let leaf = !a.is_object() && !a.is_array() || std::mem::discriminant(a) != std::mem::discriminant(b);
        if leaf { difference(&place, a, b) } else { difference(label, a, b).map(|found| found.inside(place)) }
    });
    in_both.or_else(|| {
        let (which, longer, shorter) = match first.len().cmp(&second.len()) {
            std::cmp::Ordering::Equal => return None,
            std::cmp::Ordering::Greater => ("first", first, second),
            std::cmp::Ordering::Less => ("second", second, first),
        };
        let extra = &longer[shorter.len()];
        let place = element_label(singular, shorter.len(), extra, extra);
        Difference::here(format!("only the {which} has {place} ({label}: {} and {})", first.len(), second.len()))
    })
}

/// `unit 3 "layers.3"`: the name stands there if both elements have the same one.
fn element_label(singular: &str, index: usize, first: &Value, second: &Value) -> String {
    let name = |value: &Value| value.get("name").and_then(Value::as_str).map(str::to_owned);
    match name(first) {
        Some(shared) if name(second).as_ref() == Some(&shared) => format!("{singular} {index} {shared:?}"),
        _ => format!("{singular} {index}"),
    }
}

/// The noun for one element of a list.
fn singular(key: &str) -> &str {
    match key {
        "entries" => "entry",
        _ => key.strip_suffix('s').unwrap_or(key),
    }
}

/// A value on one short line.
fn brief(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".to_owned(),
        Value::Array(items) => format!("a list of {}", items.len()),
        leaf => leaf.to_string(),
    }
}
