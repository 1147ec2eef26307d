//! The first place where two plan documents disagree: what to tell the user when ranks have different plans.

use std::fmt;

use serde_json::{Map, Value};

use crate::error::{PlanError, Result};

/// Names the first difference between two plan documents, as written by `to_json`; `None` when they are equal.
///
/// The result reads like `unit 3 "layers.3", group 0, entry 1 "mlp.weight", numel: 4096 in the first, 4100 in the
/// second`. Documents are walked in the order in which the first one was written.
///
/// # Errors
/// [`PlanError::BadDocument`] if a text is not JSON.
pub fn first_difference(first: &str, second: &str) -> Result<Option<String>> {
    let (first, second) = (parse("first", first)?, parse("second", second)?);
    Ok(difference("document", Some(&first), Some(&second)).map(|found| found.to_string()))
}

fn parse(which: &str, text: &str) -> Result<Value> {
    serde_json::from_str(text)
        .map_err(|error| PlanError::BadDocument { reason: format!("the {which} text is not JSON: {error}") })
}

/// Where two documents part, and how. The path grows from the inside outwards.
struct Difference {
    path: Vec<String>,
    what: String,
}

impl Difference {
    fn inside(mut self, place: String) -> Self {
        self.path.push(place);
        self
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, place) in self.path.iter().rev().enumerate() {
            write!(f, "{}{place}", if index == 0 { "" } else { ", " })?;
        }
        write!(f, "{}{}", if self.path.is_empty() { "" } else { ": " }, self.what)
    }
}

/// Compares what stands under `key` in both documents, of which one may have nothing there.
fn difference(key: &str, first: Option<&Value>, second: Option<&Value>) -> Option<Difference> {
    let what = match (first, second) {
        (Some(Value::Object(first)), Some(Value::Object(second))) => return in_objects(first, second),
        (Some(Value::Array(first)), Some(Value::Array(second))) => return in_lists(key, first, second),
        (Some(first), Some(second)) if first != second => {
            format!("{} in the first, {} in the second", brief(first), brief(second))
        }
        (Some(_), None) => "only in the first".to_owned(),
        (None, Some(_)) => "only in the second".to_owned(),
        _ => return None,
    };
    Some(Difference { path: Vec::new(), what })
}

fn in_objects(first: &Map<String, Value>, second: &Map<String, Value>) -> Option<Difference> {
    let keys = first.keys().chain(second.keys().filter(|key| !first.contains_key(*key)));
    let mut pairs = keys.map(|key| (key, first.get(key), second.get(key)));
    pairs.find_map(|(key, first, second)| {
        let found = difference(key, first, second)?;
        // The elements of a list are named after its key, so the key itself would say it twice.
        let in_list = first.is_some_and(Value::is_array) && second.is_some_and(Value::is_array);
        Some(if in_list { found } else { found.inside(key.clone()) })
    })
}

fn in_lists(key: &str, first: &[Value], second: &[Value]) -> Option<Difference> {
    let mut pairs = (0..first.len().max(second.len())).map(|index| (index, first.get(index), second.get(index)));
    pairs.find_map(|(index, first, second)| {
        // Lists within a list have no name of their own.
        let found = difference("position", first, second)?;
        Some(found.inside(element(key, index, first, second)))
    })
}

/// `unit 3 "layers.3"`: the name stands there unless the two elements have different ones.
fn element(key: &str, index: usize, first: Option<&Value>, second: Option<&Value>) -> String {
    let mut names = [first, second].into_iter().flatten().map(|value| value.get("name").and_then(Value::as_str));
    let noun = singular(key);
    match (names.next().flatten(), names.next()) {
        (Some(name), None) => format!("{noun} {index} {name:?}"),
        (Some(name), Some(other)) if other == Some(name) => format!("{noun} {index} {name:?}"),
        _ => format!("{noun} {index}"),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn found(first: &str, second: &str) -> String {
        first_difference(first, second).unwrap().unwrap()
    }

    #[test]
    fn equal_documents_have_none() {
        assert_eq!(first_difference(r#"{"a": [1, {"b": null}]}"#, r#"{"a":[1,{"b":null}]}"#), Ok(None));
    }

    #[test]
    fn the_path_names_each_element_once() {
        let document = |numel: u32| {
            format!(r#"{{"units": [{{"name": "u", "groups": [{{"entries": [{{"name": "w", "numel": {numel}}}]}}]}}]}}"#)
        };
        assert_eq!(
            found(&document(4096), &document(4100)),
            r#"unit 0 "u", group 0, entry 0 "w", numel: 4096 in the first, 4100 in the second"#
        );
    }

    #[test]
    fn missing_elements_and_keys_are_named() {
        let two = r#"{"units": [{"name": "a"}, {"name": "b"}]}"#;
        let one = r#"{"units": [{"name": "a"}]}"#;
        assert_eq!(found(two, one), r#"unit 1 "b": only in the first"#);
        assert_eq!(found(one, two), r#"unit 1 "b": only in the second"#);
        assert_eq!(found("{}", one), "units: only in the second");
        assert_eq!(found(one, r#"{"units": [{"name": "c"}]}"#), r#"unit 0, name: "a" in the first, "c" in the second"#);
    }

    #[test]
    fn leaves_and_kinds_are_compared() {
        assert_eq!(found("1", "2"), "1 in the first, 2 in the second");
        assert_eq!(found(r#"{"order": [3, 4]}"#, r#"{"order": [3, 5]}"#), "order 1: 4 in the first, 5 in the second");
        assert_eq!(
            found(r#"{"programs": [["0F0", "0B0"]]}"#, r#"{"programs": [["0F0", "0F1"]]}"#),
            r#"program 0, position 1: "0B0" in the first, "0F1" in the second"#
        );
        assert_eq!(found(r#"{"a": [1]}"#, r#"{"a": {}}"#), "a: a list of 1 in the first, an object in the second");
    }

    #[test]
    fn the_first_documents_order_decides() {
        assert_eq!(found(r#"{"z": 1, "a": 1}"#, r#"{"a": 2, "z": 2}"#), "z: 1 in the first, 2 in the second");
    }

    #[test]
    fn text_that_is_not_json_is_refused() {
        let error = first_difference("{}", "nope").unwrap_err();
        assert!(error.to_string().contains("the second text is not JSON"), "{error}");
    }
}
