//! Enums whose values have a name in text.

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
                found.ok_or_else(|| $crate::PlanError::UnknownName {
                    what: $what,
                    name: name.to_owned(),
                    known: [$($name),+].join(", "),
                })
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
