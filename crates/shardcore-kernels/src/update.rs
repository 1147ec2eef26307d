//! One optimizer step of one tensor: unscale, clip, update and copy out, in one pass over memory.

use crate::batch::{self, Piece};
use crate::error::{KernelError, Result};
use crate::isa::{Isa, Work};
use crate::rule::{Elementwise, Rule};
use crate::values::{Aligned, ParamMut, Rounding, StateMut, TILE, Tile, Values, fence};

/// A step that is ready to be made: everything was checked, so making it cannot fail.
#[derive(Debug)]
pub struct Update<'a> {
    rule: Rule,
    grad: Values<'a>,
    grad_scale: f32,
    param: ParamMut<'a>,
    first: Option<StateMut<'a>>,
    second: Option<StateMut<'a>>,
    /// Place of the first element in the whole tensor: the counter of stochastic rounding.
    start: u64,
    streaming: bool,
}

impl<'a> Update<'a> {
    /// Checks that the slices fit together and that the rule has the states it needs.
    ///
    /// The gradient is multiplied by `grad_scale` first: the inverse of the loss scale, times the clip factor, negative
    /// to maximize.
    ///
    /// # Errors
    /// [`KernelError::LengthMismatch`], [`KernelError::StateCount`], and [`KernelError::NearestRounding`] for a state
    /// that does not bear it.
    pub fn new(
        rule: Rule,
        param: ParamMut<'a>,
        grad: Values<'a>,
        grad_scale: f32,
        states: [Option<StateMut<'a>>; 2],
    ) -> Result<Self> {
        let expected = param.numel();
        check_numel("the gradient", expected, grad.numel())?;
        match &param {
            ParamMut::F32 { copy: Some(copy), .. } => check_numel("the 16-bit copy", expected, copy.numel())?,
            ParamMut::F32 { copy: None, .. } => {}
            ParamMut::Split { low, .. } => check_numel("the remainder", expected, low.len())?,
        }
        let names = rule.states();
        let found = states.iter().flatten().count();
        if found != names.len() || (found == 1 && states[0].is_none()) {
            return Err(KernelError::StateCount { rule: rule.name(), expected: names.len(), found });
        }
        for (place, (state, &what)) in states.iter().flatten().zip(names).enumerate() {
            check_numel(what, expected, state.numel())?;
            if matches!(state, StateMut::Bf16(_, Rounding::Nearest)) && !rule.bears_nearest_rounding(place) {
                return Err(KernelError::NearestRounding { rule: rule.name(), what });
            }
        }
        let [first, second] = states;
        Ok(Self { rule, grad, grad_scale, param, first, second, start: 0, streaming: false })
    }

    /// Sends the 16-bit copy to memory past the caches: right where it is larger than they are.
    #[must_use]
    pub fn streaming(mut self, streaming: bool) -> Self {
        self.streaming = streaming;
        self
    }
}

impl Piece for Update<'_> {
    const QUANTUM: usize = TILE;

    fn numel(&self) -> usize {
        self.grad.numel()
    }

    /// An element's result is the same either way.
    fn split_at(self, mid: usize) -> (Self, Self) {
        let (grad, grad_back) = self.grad.split_at(mid);
        let (param, param_back) = self.param.split_at(mid);
        let (first, first_back) = self.first.map(|state| state.split_at(mid)).unzip();
        let (second, second_back) = self.second.map(|state| state.split_at(mid)).unzip();
        let Self { rule, grad_scale, start, streaming, .. } = self;
        let part =
            |grad, param, first, second, start| Self { rule, grad, grad_scale, param, first, second, start, streaming };
        let back_start = start + mid as u64;
        let front = part(grad, param, first, second, start);
        (front, part(grad_back, param_back, first_back, second_back, back_start))
    }

    fn run(&mut self, isa: Isa) {
        match self.rule {
            Rule::AdamW(rule) => isa.run(Pass { rule, update: self }),
            Rule::Adam(rule) => isa.run(Pass { rule, update: self }),
            Rule::Lion(rule) => isa.run(Pass { rule, update: self }),
            Rule::Adagrad(rule) => isa.run(Pass { rule, update: self }),
            Rule::Sgd(rule) => isa.run(Pass { rule, update: self }),
            Rule::SgdMomentum(rule) => isa.run(Pass { rule, update: self }),
        }
        if self.streaming {
            fence();
        }
    }
}

struct Pass<'p, 'a, R> {
    rule: R,
    update: &'p mut Update<'a>,
}

impl<R: Elementwise> Work for Pass<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { rule, update } = self;
        let numel = update.numel();
        let mut grad = Aligned([0.0; TILE]);
        let [mut param_buffer, mut first_buffer, mut second_buffer] = [const { Aligned([0.0; TILE]) }; 3];
        let mut start = 0;
        while start < numel {
            update.grad.load(start, update.grad_scale, &mut grad.0);
            let param = update.param.open(start, &mut param_buffer.0);
            let first = open(&mut update.first, start, &mut first_buffer.0);
            let second = open(&mut update.second, start, &mut second_buffer.0);
            tile(rule, param, &grad.0, first, second);
            let index = update.start + start as u64;
            update.param.close(start, &mut param_buffer.0, update.streaming);
            close(&mut update.first, start, &first_buffer.0, index);
            close(&mut update.second, start, &second_buffer.0, index);
            start += TILE;
        }
    }
}

/// A function of its own, since the compiler knows of arguments that they do not overlap.
#[inline(always)]
fn tile<R: Elementwise>(rule: R, param: &mut Tile, grad: &Tile, first: &mut Tile, second: &mut Tile) {
    for index in 0..TILE {
        (param[index], first[index], second[index]) =
            rule.update(param[index], grad[index], first[index], second[index]);
    }
}

#[inline(always)]
fn open<'t>(state: &'t mut Option<StateMut<'_>>, start: usize, buffer: &'t mut Tile) -> &'t mut Tile {
    match state {
        Some(state) => state.open(start, buffer),
        None => buffer,
    }
}

#[inline(always)]
fn close(state: &mut Option<StateMut<'_>>, start: usize, buffer: &Tile, index: u64) {
    if let Some(state) = state {
        state.close(start, buffer, index);
    }
}

fn check_numel(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(KernelError::LengthMismatch { what, expected, found }) }
}

/// Makes all steps, on at most `num_threads` threads. The results do not depend on how many there are.
pub fn step(updates: Vec<Update<'_>>, num_threads: usize) {
    step_with(updates, num_threads, Isa::best());
}

/// The same with a given set of instructions.
pub fn step_with(updates: Vec<Update<'_>>, num_threads: usize, isa: Isa) {
    batch::run(updates, num_threads, isa);
}
