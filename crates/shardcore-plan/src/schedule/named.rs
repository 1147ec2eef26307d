//! Enums whose values have a name in text, and what a name that is none was meant to be.

/// Gives an enum `ALL`, `name`, `from_name` and `Display` from one list.
macro_rules! named {
    ($type:ident, $what:literal, [$($variant:ident = $name:literal),+ $(,)?]) => {
        impl $type {
            #[doc = concat!("Every ", $what, ", in the order of the table.")]
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            #[doc = concat!("The name of this ", $what, " in text.")]
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),+
                }
            }

            #[doc = concat!("The ", $what, " of that name, written exactly so.")]
            ///
            /// # Errors
            /// [`PlanError::UnknownName`](crate::PlanError::UnknownName).
            pub fn from_name(name: &str) -> $crate::Result<Self> {
                let found = Self::ALL.iter().copied().find(|value| value.name() == name);
                found.ok_or_else(|| $crate::PlanError::unknown_name($what, name, &[$($name),+]))
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

pub(crate) use named;

/// The known name that is most like one that is not known: in other case, without its separators, cut off, with more
/// behind it, or with a few letters missing, added or changed. Torch's names of schedules are read as such:
/// `ScheduleZBVZeroBubble` begins with `zb-v`.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |name: &str| -> Vec<char> {
        name.chars().filter(|letter| letter.is_alphanumeric()).map(|letter| letter.to_ascii_lowercase()).collect()
    };
    let bare = name.strip_prefix("Schedule").unwrap_or(name).replace("ZeroBubble", "ZB");
    let wanted = plain(&bare);
    let close = |known: &'a str| {
        let letters = plain(known);
        let distance = distance(&wanted, &letters);
        let is_start = wanted.len() >= 3 && letters.starts_with(&wanted);
        let goes_on = letters.len() >= 3 && wanted.starts_with(&letters);
        let is_close = is_start || goes_on || distance <= wanted.len().min(letters.len()) / 3;
        is_close.then_some((distance, known, goes_on))
    };
    // Of those of which the name is more, the longest: it is the nearest.
    let found = known.into_iter().filter_map(close);
    found.min_by_key(|&(distance, _, goes_on)| (!goes_on, distance)).map(|(_, known, _)| known)
}

/// How many letters must be added, left out or changed to make one of the other (Wagner and Fischer, "The
/// string-to-string correction problem", 1974).
fn distance(one: &[char], other: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (at, letter) in one.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, wanted) in other.iter().enumerate() {
            let changed = diagonal + usize::from(letter != wanted);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row[other.len()]
}
