//! Why arithmetic cannot be done. A message says what, where, expected and found, and what to do instead.

use thiserror::Error;

/// The result of preparing arithmetic; the arithmetic itself cannot fail.
pub type Result<T> = std::result::Result<T, KernelError>;

/// Slices or numbers that do not fit together.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs)] // The messages document the fields.
pub enum KernelError {
    #[error("{what} is {value}: expected {expected}")]
    OutOfRange { what: &'static str, value: f64, expected: &'static str },

    #[error("{what} has {found} elements, the parameter {expected}: all tensors of one update have the same number")]
    LengthMismatch { what: &'static str, expected: usize, found: usize },

    #[error("{what} have {found} elements: this many numbers need {expected}")]
    QuantizedLength { what: &'static str, expected: usize, found: usize },

    #[error("{rule} keeps {expected} states for each element, got {found}")]
    StateCount { rule: &'static str, expected: usize, found: usize },

    #[error(
        "{rule} cannot keep {what} in bf16 rounded to nearest: one step changes it by less than half of its last place, so it would stop following the gradients (it ends several times too large); round stochastically, or keep it in fp32"
    )]
    NearestRounding { rule: &'static str, what: &'static str },
}
