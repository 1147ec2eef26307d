//! The update rules, element by element, with their coefficients worked out beforehand in fp64.
//!
//! Moving averages are written as steps from one end to the other, `v + (1 - b) * (g - v)`. With two rounded
//! coefficients, `b * v + (1 - b) * g`, the average would settle beside the value: by 1.3e-5 of it in fp32 for `b = 0.999`.
//! Weight decay is a step too, `p - lr * decay * p`: the factor `1 - lr * decay` would lose most digits of a small decay.

#![allow(clippy::cast_possible_truncation, reason = "coefficients are rounded to fp32 once, here")]

use crate::error::{KernelError, Result};

/// How one element of a parameter moves. `a` and `b` are its states; a rule with fewer leaves the others alone.
pub(crate) trait Elementwise: Copy {
    fn update(self, p: f32, g: f32, a: f32, b: f32) -> (f32, f32, f32);
}

/// A moving average: a step from its nearer end, so that the difference of the two ends costs no digits.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Average {
    from_new: bool,
    weight: f32,
}

impl Average {
    fn new(decay: f64) -> Self {
        let from_new = decay < 0.5;
        Self { from_new, weight: (if from_new { -decay } else { 1.0 - decay }) as f32 }
    }

    #[inline(always)]
    fn of(self, old: f32, new: f32) -> f32 {
        (if self.from_new { new } else { old }) + self.weight * (new - old)
    }
}

/// An update rule at one step, ready to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// Adam with decoupled weight decay.
    AdamW(Adam<false>),
    /// Adam with the weight decay in the gradient.
    Adam(Adam<true>),
    /// The sign of an interpolated momentum.
    Lion(Lion),
    /// The sum of all squared gradients as the scale.
    Adagrad(Adagrad),
    /// Gradient descent without momentum.
    Sgd(Sgd),
    /// Gradient descent with momentum.
    SgdMomentum(SgdMomentum),
}

impl Rule {
    /// Its name in messages.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::AdamW(_) => "AdamW",
            Self::Adam(_) => "Adam",
            Self::Lion(_) => "Lion",
            Self::Adagrad(_) => "Adagrad",
            Self::Sgd(_) => "SGD",
            Self::SgdMomentum(_) => "SGD with momentum",
        }
    }

    /// Names of the states, in order.
    #[must_use]
    pub fn states(&self) -> &'static [&'static str] {
        match self {
            Self::AdamW(_) | Self::Adam(_) => &["the first moment", "the second moment"],
            Self::Lion(_) | Self::SgdMomentum(_) => &["the momentum"],
            Self::Adagrad(_) => &["the sum of squares"],
            Self::Sgd(_) => &[],
        }
    }

    /// Whether the state may be kept in bf16 that is rounded to nearest: only one that a step moves by more than the
    /// last place of a bf16, whatever the gradient.
    pub(crate) fn bears_nearest_rounding(&self, state: usize) -> bool {
        matches!(self, Self::AdamW(_) | Self::Adam(_)) && state == 0
    }
}

/// Hyperparameters of any rule.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // The variants are their names.
pub enum Options {
    Adam(AdamOptions),
    Lion(LionOptions),
    Adagrad(AdagradOptions),
    Sgd(SgdOptions),
}

impl Options {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`].
    pub fn check(&self) -> Result<()> {
        match self {
            Self::Adam(options) => options.check(),
            Self::Lion(options) => options.check(),
            Self::Adagrad(options) => options.check(),
            Self::Sgd(options) => options.check(),
        }
    }

    /// The rule at a step; the first step is 1.
    #[must_use]
    pub fn at(&self, step: f64) -> Rule {
        match self {
            Self::Adam(options) => options.at(step),
            Self::Lion(options) => options.rule(),
            Self::Adagrad(options) => options.at(step),
            Self::Sgd(options) => options.at(step),
        }
    }
}

/// Hyperparameters of Adam and `AdamW`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamOptions {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Weight decay.
    pub weight_decay: f64,
    /// Whether weight decay acts on the parameter (`AdamW`) or on the gradient (Adam with L2).
    pub decoupled: bool,
}

impl AdamOptions {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`].
    pub fn check(&self) -> Result<()> {
        at_least_zero("lr", self.lr)?;
        decay("betas[0]", self.beta1)?;
        decay("betas[1]", self.beta2)?;
        at_least_zero("eps", self.eps)?;
        at_least_zero("weight_decay", self.weight_decay)
    }

    /// The rule at a step; the first step is 1 (Kingma & Ba, arXiv 1412.6980, algorithm 1; Loshchilov & Hutter, arXiv
    /// 1711.05101, algorithm 2).
    #[must_use]
    pub fn at(&self, step: f64) -> Rule {
        let correction1 = 1.0 - self.beta1.powf(step);
        let correction2 = 1.0 - self.beta2.powf(step);
        let (decay, l2) = if self.decoupled { (self.lr * self.weight_decay, 0.0) } else { (0.0, self.weight_decay) };
        let lr = (self.lr / correction1) as f32;
        let inverse_root = (1.0 / correction2.sqrt()) as f32;
        let (decay, l2, eps) = (decay as f32, l2 as f32, self.eps as f32);
        let (average1, average2) = (Average::new(self.beta1), Average::new(self.beta2));
        if l2 == 0.0 {
            Rule::AdamW(Adam { lr, decay, average1, average2, inverse_root, eps, l2 })
        } else {
            Rule::Adam(Adam { lr, decay, average1, average2, inverse_root, eps, l2 })
        }
    }
}

/// Coefficients of Adam; `L2` says whether weight decay is part of the gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam<const L2: bool> {
    lr: f32,
    decay: f32,
    average1: Average,
    average2: Average,
    inverse_root: f32,
    eps: f32,
    l2: f32,
}

impl<const L2: bool> Elementwise for Adam<L2> {
    #[inline(always)]
    fn update(self, p: f32, g: f32, m: f32, v: f32) -> (f32, f32, f32) {
        let g = if L2 { g + self.l2 * p } else { g };
        let m = self.average1.of(m, g);
        let v = self.average2.of(v, g * g);
        let denominator = v.sqrt() * self.inverse_root + self.eps;
        let change = self.lr * m / denominator;
        (p - if L2 { change } else { self.decay * p + change }, m, v)
    }
}

/// Hyperparameters of Lion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionOptions {
    /// Learning rate.
    pub lr: f64,
    /// Weight of the momentum in the direction.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl LionOptions {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`].
    pub fn check(&self) -> Result<()> {
        at_least_zero("lr", self.lr)?;
        decay("betas[0]", self.beta1)?;
        decay("betas[1]", self.beta2)?;
        at_least_zero("weight_decay", self.weight_decay)
    }

    /// The rule, the same at each step (Chen et al., arXiv 2302.06675, algorithm 2).
    #[must_use]
    pub fn rule(&self) -> Rule {
        Rule::Lion(Lion {
            lr: self.lr as f32,
            decay: (self.lr * self.weight_decay) as f32,
            average1: Average::new(self.beta1),
            average2: Average::new(self.beta2),
        })
    }
}

/// Coefficients of Lion.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    lr: f32,
    decay: f32,
    average1: Average,
    average2: Average,
}

impl Elementwise for Lion {
    #[inline(always)]
    fn update(self, p: f32, g: f32, m: f32, b: f32) -> (f32, f32, f32) {
        let direction = self.average1.of(m, g);
        // The sign of zero is zero; that of NaN is NaN, so that a bad gradient shows as it does in the other rules.
        let magnitude = if direction == 0.0 { direction } else { 1.0_f32.copysign(direction) };
        let sign = if direction.is_nan() { direction } else { magnitude };
        (p - (self.decay * p + self.lr * sign), self.average2.of(m, g), b)
    }
}

/// Hyperparameters of Adagrad.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdagradOptions {
    /// Learning rate.
    pub lr: f64,
    /// How fast the learning rate falls: it is divided by `1 + (step - 1) * lr_decay`.
    pub lr_decay: f64,
    /// Weight decay, in the gradient.
    pub weight_decay: f64,
    /// Added to the root of the sum.
    pub eps: f64,
}

impl AdagradOptions {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`].
    pub fn check(&self) -> Result<()> {
        at_least_zero("lr", self.lr)?;
        at_least_zero("lr_decay", self.lr_decay)?;
        at_least_zero("weight_decay", self.weight_decay)?;
        at_least_zero("eps", self.eps)
    }

    /// The rule at a step; the first step is 1 (Duchi et al., JMLR 12, 2011, figure 1, the diagonal version).
    #[must_use]
    pub fn at(&self, step: f64) -> Rule {
        Rule::Adagrad(Adagrad {
            lr: (self.lr / (1.0 + (step - 1.0) * self.lr_decay)) as f32,
            l2: self.weight_decay as f32,
            eps: self.eps as f32,
        })
    }
}

/// Coefficients of Adagrad.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    lr: f32,
    l2: f32,
    eps: f32,
}

impl Elementwise for Adagrad {
    #[inline(always)]
    fn update(self, p: f32, g: f32, sum: f32, b: f32) -> (f32, f32, f32) {
        let g = with_l2(p, g, self.l2);
        let sum = sum + g * g;
        (p - self.lr * g / (sum.sqrt() + self.eps), sum, b)
    }
}

/// Hyperparameters of gradient descent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdOptions {
    /// Learning rate.
    pub lr: f64,
    /// Momentum; 0 keeps no state.
    pub momentum: f64,
    /// Damping of the gradient in the momentum.
    pub dampening: f64,
    /// Weight decay, in the gradient.
    pub weight_decay: f64,
    /// Whether to look ahead along the momentum.
    pub nesterov: bool,
}

impl SgdOptions {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`KernelError::OutOfRange`].
    pub fn check(&self) -> Result<()> {
        at_least_zero("lr", self.lr)?;
        at_least_zero("momentum", self.momentum)?;
        at_least_zero("weight_decay", self.weight_decay)?;
        finite("dampening", self.dampening)?;
        if self.nesterov && self.momentum == 0.0 {
            return Err(out_of_range("momentum", self.momentum, "above 0, which nesterov needs"));
        }
        if self.nesterov && self.dampening != 0.0 {
            return Err(out_of_range("dampening", self.dampening, "0, which nesterov needs"));
        }
        Ok(())
    }

    /// The rule at a step; the first step is 1, at which the momentum starts as the gradient, undamped (Sutskever et
    /// al., ICML 2013, section 2, in torch's form: the learning rate multiplies the momentum, not the gradient in it).
    #[must_use]
    pub fn at(&self, step: f64) -> Rule {
        let (lr, l2) = (self.lr as f32, self.weight_decay as f32);
        if self.momentum == 0.0 {
            return Rule::Sgd(Sgd { lr, l2 });
        }
        let is_first = step <= 1.0;
        Rule::SgdMomentum(SgdMomentum {
            lr,
            l2,
            kept: if is_first { 0.0 } else { self.momentum as f32 },
            taken: if is_first { 1.0 } else { (1.0 - self.dampening) as f32 },
            ahead: if self.nesterov { self.momentum as f32 } else { 0.0 },
            nesterov: self.nesterov,
        })
    }
}

/// Coefficients of gradient descent without momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    lr: f32,
    l2: f32,
}

impl Elementwise for Sgd {
    #[inline(always)]
    fn update(self, p: f32, g: f32, a: f32, b: f32) -> (f32, f32, f32) {
        (p - self.lr * with_l2(p, g, self.l2), a, b)
    }
}

/// Coefficients of gradient descent with momentum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdMomentum {
    lr: f32,
    l2: f32,
    kept: f32,
    taken: f32,
    ahead: f32,
    nesterov: bool,
}

impl Elementwise for SgdMomentum {
    #[inline(always)]
    fn update(self, p: f32, g: f32, momentum: f32, b: f32) -> (f32, f32, f32) {
        let g = with_l2(p, g, self.l2);
        let momentum = self.kept * momentum + self.taken * g;
        let direction = if self.nesterov { g + self.ahead * momentum } else { momentum };
        (p - self.lr * direction, momentum, b)
    }
}

/// The gradient with weight decay. Without decay it must stay as it is, also beside an infinite parameter.
#[inline(always)]
fn with_l2(p: f32, g: f32, l2: f32) -> f32 {
    if l2 == 0.0 { g } else { g + l2 * p }
}

fn at_least_zero(what: &'static str, value: f64) -> Result<()> {
    if value >= 0.0 && value.is_finite() {
        Ok(())
    } else {
        Err(out_of_range(what, value, "a finite number, at least 0"))
    }
}

fn decay(what: &'static str, value: f64) -> Result<()> {
    if (0.0..1.0).contains(&value) { Ok(()) } else { Err(out_of_range(what, value, "at least 0 and below 1")) }
}

fn finite(what: &'static str, value: f64) -> Result<()> {
    if value.is_finite() { Ok(()) } else { Err(out_of_range(what, value, "a finite number")) }
}

fn out_of_range(what: &'static str, value: f64, expected: &'static str) -> KernelError {
    KernelError::OutOfRange { what, value, expected }
}
