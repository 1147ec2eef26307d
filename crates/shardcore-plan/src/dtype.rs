//! Element types: their canonical names, their other spellings and their sizes.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{PlanError, Result};

/// The element type of a parameter.
///
/// The canonical name (`"bf16"`) is what plans store and print. [`Dtype::parse`] also accepts the long name
/// (`"bfloat16"`) and torch's own spelling (`"torch.bfloat16"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "&'static str", try_from = "String")]
#[allow(missing_docs)] // The variants are their names.
pub enum Dtype {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp8E4m3fn,
    Fp8E4m3fnuz,
    Fp8E5m2,
    Fp8E5m2fnuz,
    Fp8E8m0fnu,
    Fp16,
    Bf16,
    Fp32,
    Fp64,
}

/// One row a type: canonical name, size of an element in bytes, other names.
type Row = (Dtype, &'static str, u64, &'static [&'static str]);

const TABLE: [Row; 18] = [
    (Dtype::Bool, "bool", 1, &[]),
    (Dtype::Uint8, "uint8", 1, &[]),
    (Dtype::Uint16, "uint16", 2, &[]),
    (Dtype::Uint32, "uint32", 4, &[]),
    (Dtype::Uint64, "uint64", 8, &[]),
    (Dtype::Int8, "int8", 1, &[]),
    (Dtype::Int16, "int16", 2, &["short"]),
    (Dtype::Int32, "int32", 4, &["int"]),
    (Dtype::Int64, "int64", 8, &["long"]),
    (Dtype::Fp8E4m3fn, "fp8_e4m3fn", 1, &["float8_e4m3fn"]),
    (Dtype::Fp8E4m3fnuz, "fp8_e4m3fnuz", 1, &["float8_e4m3fnuz"]),
    (Dtype::Fp8E5m2, "fp8_e5m2", 1, &["float8_e5m2"]),
    (Dtype::Fp8E5m2fnuz, "fp8_e5m2fnuz", 1, &["float8_e5m2fnuz"]),
    (Dtype::Fp8E8m0fnu, "fp8_e8m0fnu", 1, &["float8_e8m0fnu"]),
    (Dtype::Fp16, "fp16", 2, &["float16", "half"]),
    (Dtype::Bf16, "bf16", 2, &["bfloat16"]),
    (Dtype::Fp32, "fp32", 4, &["float32", "float"]),
    (Dtype::Fp64, "fp64", 8, &["float64", "double"]),
];

const COMPLEX: [&str; 6] = ["complex32", "complex64", "complex128", "chalf", "cfloat", "cdouble"];

impl Dtype {
    /// Reads a dtype by any of its names, with or without torch's `torch.` in front.
    ///
    /// # Errors
    /// [`PlanError::ComplexDtype`] for complex types, which have no shards here; [`PlanError::UnknownDtype`] otherwise.
    pub fn parse(name: &str) -> Result<Self> {
        let short = name.strip_prefix("torch.").unwrap_or(name);
        let known = TABLE.iter().find(|(_, canonical, _, others)| *canonical == short || others.contains(&short));
        match known {
            Some((dtype, ..)) => Ok(*dtype),
            None if COMPLEX.contains(&short) => Err(PlanError::ComplexDtype { dtype: short.to_owned() }),
            None => Err(PlanError::UnknownDtype { dtype: name.to_owned() }),
        }
    }

    /// The canonical name, such as `"bf16"`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        TABLE[self as usize].1
    }

    /// The size of one element in bytes: 1, 2, 4 or 8.
    #[must_use]
    pub const fn itemsize(self) -> u64 {
        TABLE[self as usize].2
    }

    /// Every type, in the order of the table.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|(dtype, ..)| *dtype)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<Dtype> for &'static str {
    fn from(dtype: Dtype) -> Self {
        dtype.name()
    }
}

impl TryFrom<String> for Dtype {
    type Error = PlanError;

    fn try_from(name: String) -> Result<Self> {
        Self::parse(&name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_rows_stand_at_the_discriminant_of_their_type() {
        for (index, (dtype, ..)) in TABLE.iter().enumerate() {
            assert_eq!(*dtype as usize, index);
        }
    }

    #[test]
    fn every_spelling_gives_the_canonical_name() {
        for (spelling, canonical) in [
            ("bf16", "bf16"),
            ("bfloat16", "bf16"),
            ("torch.bfloat16", "bf16"),
            ("float", "fp32"),
            ("torch.float32", "fp32"),
            ("half", "fp16"),
            ("double", "fp64"),
            ("torch.float8_e4m3fn", "fp8_e4m3fn"),
            ("torch.int64", "int64"),
            ("bool", "bool"),
        ] {
            assert_eq!(Dtype::parse(spelling).unwrap().name(), canonical);
        }
        for dtype in Dtype::all() {
            assert_eq!(Dtype::parse(dtype.name()).unwrap(), dtype);
        }
    }

    #[test]
    fn complex_and_unknown_types_are_refused() {
        let complex = Dtype::parse("torch.complex64").unwrap_err();
        assert!(matches!(&complex, PlanError::ComplexDtype { dtype } if dtype == "complex64"));
        assert!(matches!(Dtype::parse("fp23").unwrap_err(), PlanError::UnknownDtype { .. }));
        assert!(matches!(Dtype::parse("").unwrap_err(), PlanError::UnknownDtype { .. }));
    }
}
