//! What an action takes and what it holds.

use super::placement::Placement;
use crate::error::{PlanError, Result};

/// A cost or a size as the caller gives it.
#[derive(Clone, Debug, PartialEq)]
pub enum Amount {
    /// For one micro-batch on one rank; each of the rank's chunks takes an equal part.
    PerRank(f64),
    /// For one micro-batch on each stage, over all chains.
    PerStage(Vec<f64>),
}

impl From<f64> for Amount {
    fn from(value: f64) -> Self {
        Self::PerRank(value)
    }
}

impl From<Vec<f64>> for Amount {
    fn from(values: Vec<f64>) -> Self {
        Self::PerStage(values)
    }
}

/// Costs and sizes as the caller gives them, before any placement is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct CostSpec {
    /// Time of a forward.
    pub forward: Amount,
    /// Time of an input gradient.
    pub input_grad: Amount,
    /// Time of a weight gradient.
    pub weight_grad: Amount,
    /// Time of a fused backward; `None`: input and weight gradient in a row.
    pub fused_backward: Option<Amount>,
    /// Latency of one hop between two different ranks.
    pub hop: f64,
    /// Memory held from the forward to the input gradient (or the fused backward).
    pub activation: Amount,
    /// Memory held from the input gradient on to the weight gradient; `None`: the same.
    pub stash: Option<Amount>,
}

impl CostSpec {
    /// Times per rank and micro-batch, no latency, and one unit of memory for a micro-batch on a rank.
    #[must_use]
    pub fn uniform(forward: f64, input_grad: f64, weight_grad: f64) -> Self {
        Self {
            forward: forward.into(),
            input_grad: input_grad.into(),
            weight_grad: weight_grad.into(),
            fused_backward: None,
            hop: 0.0,
            activation: 1.0.into(),
            stash: None,
        }
    }

    /// Checks the numbers, and the lengths of lists against a placement.
    ///
    /// # Errors
    /// [`PlanError::BadCost`] as for [`Costs::new`].
    pub fn check(&self, placement: &Placement) -> Result<()> {
        let amounts = [
            ("activation", Some(&self.activation)),
            ("forward", Some(&self.forward)),
            ("input_grad", Some(&self.input_grad)),
            ("weight_grad", Some(&self.weight_grad)),
            ("fused_backward", self.fused_backward.as_ref()),
            ("stash", self.stash.as_ref()),
        ];
        for (what, amount) in amounts {
            amount.map_or(Ok(()), |amount| check_amount(what, amount, placement))?;
        }
        check_number("hop", None, self.hop)
    }

    /// The same costs with a latency for one hop between two different ranks.
    #[must_use]
    pub fn with_hop(self, hop: f64) -> Self {
        Self { hop, ..self }
    }
}

/// One unit of time for each of the three computations.
impl Default for CostSpec {
    fn default() -> Self {
        Self::uniform(1.0, 1.0, 1.0)
    }
}

/// Costs of one action on each stage, in any unit of time and of memory: what goes in comes out.
///
/// Every list has one entry per stage, finite and not negative. A slice of a sequence has taken its part already.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    /// Time of a forward.
    pub forward: Vec<f64>,
    /// Time of an input gradient.
    pub input_grad: Vec<f64>,
    /// Time of a weight gradient.
    pub weight_grad: Vec<f64>,
    /// Time of a fused backward; `None`: input and weight gradient in a row.
    pub fused_backward: Option<Vec<f64>>,
    /// Latency of one hop between two different ranks.
    pub hop: f64,
    /// Memory held from the forward to the input gradient (or the fused backward).
    pub activation: Vec<f64>,
    /// Memory held from the input gradient on to the weight gradient.
    pub stash: Vec<f64>,
}

impl Costs {
    /// The costs on the stages of a placement, each micro-batch cut into `num_slices` equal slices.
    ///
    /// # Errors
    /// [`PlanError::BadCost`] for a number that is negative or not finite, or for a list that has not one entry per
    /// stage; [`PlanError::OutOfRange`] for no slices.
    pub fn new(spec: &CostSpec, placement: &Placement, num_slices: u32) -> Result<Self> {
        if num_slices == 0 {
            return Err(PlanError::num_slices(num_slices));
        }
        spec.check(placement)?;
        let resolve = |amount| resolve(amount, placement, num_slices);
        let activation = resolve(&spec.activation);
        Ok(Self {
            forward: resolve(&spec.forward),
            input_grad: resolve(&spec.input_grad),
            weight_grad: resolve(&spec.weight_grad),
            fused_backward: spec.fused_backward.as_ref().map(resolve),
            hop: spec.hop + 0.0, // No negative zero.
            stash: spec.stash.as_ref().map_or_else(|| activation.clone(), resolve),
            activation,
        })
    }

    /// Time of a whole backward of a stage.
    #[must_use]
    pub fn backward(&self, stage: u32) -> f64 {
        let stage = stage as usize;
        self.fused_backward.as_ref().map_or(self.input_grad[stage] + self.weight_grad[stage], |fused| fused[stage])
    }
}

/// The part of every stage in an amount that has been checked.
fn resolve(amount: &Amount, placement: &Placement, num_slices: u32) -> Vec<f64> {
    let slices = f64::from(num_slices);
    let of_slice = |value: f64| (value + 0.0) / slices; // No negative zero.
    match amount {
        Amount::PerRank(value) => {
            let chunk = |stage| of_slice(*value) / f64::from(placement.num_chunks_beside(stage));
            (0..placement.num_stages()).map(chunk).collect()
        }
        Amount::PerStage(values) => values.iter().map(|&value| of_slice(value)).collect(),
    }
}

fn check_amount(what: &'static str, amount: &Amount, placement: &Placement) -> Result<()> {
    match amount {
        Amount::PerRank(value) => check_number(what, None, *value),
        Amount::PerStage(values) if values.len() != placement.num_stages() as usize => Err(PlanError::BadCost {
            what: format!("{what} (a list of {})", values.len()),
            expected: format!("a number, or one entry for each of the {} stages", placement.num_stages()),
        }),
        Amount::PerStage(values) => {
            values.iter().enumerate().try_for_each(|(stage, &value)| check_number(what, Some(stage), value))
        }
    }
}

fn check_number(what: &'static str, stage: Option<usize>, value: f64) -> Result<()> {
    if value.is_finite() && value >= 0.0 {
        return Ok(());
    }
    let place = stage.map_or_else(String::new, |stage| format!(" of stage {stage}"));
    let expected = "a finite number of at least 0".to_owned();
    Err(PlanError::BadCost { what: format!("{what}{place} = {value}"), expected })
}
