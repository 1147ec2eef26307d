//! Random tensors, rules and formats for the property tests.

use proptest::prelude::*;
use shardcore_kernels::half::{bf16_to_f32, f32_to_bf16, f32_to_f16, split};
use shardcore_kernels::rule::{AdagradOptions, AdamOptions, LionOptions, SgdOptions};
use shardcore_kernels::{Isa, Options, ParamMut, Rounding, Rule, StateMut, Stream, Update, Values, ValuesMut, update};

/// The number of cases: `full` under `SHARDCORE_FULL=1`, else `usual`.
pub(crate) fn count(usual: u32, full: u32) -> u32 {
    if std::env::var("SHARDCORE_FULL").is_ok_and(|value| value == "1") { full } else { usual }
}

pub(crate) fn config(usual: u32, full: u32) -> ProptestConfig {
    ProptestConfig { cases: count(usual, full), failure_persistence: None, ..ProptestConfig::default() }
}

pub(crate) fn options() -> impl Strategy<Value = Options> {
    let lr = prop_oneof![Just(1e-3), 1e-5..0.1];
    let decay = prop_oneof![Just(0.0), 1e-4..0.3];
    let beta = prop_oneof![Just(0.9), Just(0.999), 0.0..0.9999];
    let eps = prop_oneof![Just(1e-8), 1e-10..1e-3];
    let adam = (lr.clone(), beta.clone(), beta.clone(), eps.clone(), decay.clone(), any::<bool>()).prop_map(
        |(lr, beta1, beta2, eps, weight_decay, decoupled)| {
            Options::Adam(AdamOptions { lr, beta1, beta2, eps, weight_decay, decoupled })
        },
    );
    let lion = (lr.clone(), beta.clone(), beta, decay.clone())
        .prop_map(|(lr, beta1, beta2, weight_decay)| Options::Lion(LionOptions { lr, beta1, beta2, weight_decay }));
    let adagrad = (lr.clone(), prop_oneof![Just(0.0), 0.0..0.1], decay.clone(), eps).prop_map(
        |(lr, lr_decay, weight_decay, eps)| Options::Adagrad(AdagradOptions { lr, lr_decay, weight_decay, eps }),
    );
    let sgd = (lr, prop_oneof![Just(0.0), 0.1..0.99], decay, any::<bool>(), 0.0..0.5).prop_map(
        |(lr, momentum, weight_decay, nesterov, dampening)| {
            let nesterov = nesterov && momentum > 0.0;
            let dampening = if nesterov { 0.0 } else { dampening };
            Options::Sgd(SgdOptions { lr, momentum, dampening, weight_decay, nesterov })
        },
    );
    prop_oneof![3 => adam, 1 => lion, 1 => adagrad, 2 => sgd]
}

/// In which formats the tensors of an update are kept.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Formats {
    pub(crate) grad: Format,
    /// Format of the 16-bit copy, or none for fp32.
    pub(crate) copy: Format,
    pub(crate) is_split: bool,
    pub(crate) is_compact: bool,
    pub(crate) streaming: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Format {
    F32,
    Bf16,
    F16,
}

pub(crate) fn formats() -> impl Strategy<Value = Formats> {
    let format = || prop::sample::select(vec![Format::F32, Format::Bf16, Format::F16]);
    (format(), format(), any::<bool>(), any::<bool>(), any::<bool>()).prop_map(
        |(grad, copy, is_split, is_compact, streaming)| Formats { grad, copy, is_split, is_compact, streaming },
    )
}

/// Everything in fp32.
pub(crate) const PLAIN: Formats =
    Formats { grad: Format::F32, copy: Format::F32, is_split: false, is_compact: false, streaming: false };

/// Lengths around the tile, and some that are cut for several threads.
pub(crate) fn numel() -> impl Strategy<Value = usize> {
    prop_oneof![prop::sample::select(vec![0_usize, 1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 4096]), 0_usize..600,]
}

/// A number as trainings have them: of any sign and of many magnitudes, sometimes zero.
pub(crate) fn number() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => (-1.0_f32..1.0, -20_i32..4).prop_map(|(x, exponent)| x * 2.0_f32.powi(exponent)),
        1 => Just(0.0),
    ]
}

/// Any fp32 at all, infinities, NaN and subnormals among them.
pub(crate) fn bits() -> impl Strategy<Value = f32> {
    prop_oneof![
        6 => number(),
        2 => any::<u32>().prop_map(f32::from_bits),
        1 => prop::sample::select(vec![f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE, 1e-45, -0.0]),
    ]
}

/// The memory of one update.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Memory {
    pub(crate) grad: Vec<f32>,
    grad_bits: Vec<u16>,
    pub(crate) param: Vec<f32>,
    pub(crate) copy: Vec<u16>,
    pub(crate) high: Vec<u16>,
    low: Vec<u16>,
    pub(crate) states: [Vec<f32>; 2],
    pub(crate) state_bits: [Vec<u16>; 2],
}

impl Memory {
    /// From fp32 numbers: parameter, gradient and states. What the formats cannot hold is rounded.
    pub(crate) fn new(formats: Formats, param: &[f32], grad: &[f32], states: [&[f32]; 2]) -> Self {
        let halves = |values: &[f32], encode: fn(f32) -> u16| values.iter().map(|&x| encode(x)).collect::<Vec<_>>();
        let grad_bits = halves(grad, if formats.grad == Format::F16 { f32_to_f16 } else { f32_to_bf16 });
        let (high, low) = param.iter().map(|&x| split(x)).unzip();
        Self {
            grad: grad.to_vec(),
            grad_bits,
            param: param.to_vec(),
            copy: vec![0; param.len()],
            high,
            low,
            states: states.map(<[f32]>::to_vec),
            state_bits: states.map(|state| halves(state, f32_to_bf16)),
        }
    }

    pub(crate) fn zeros(formats: Formats, param: &[f32]) -> Self {
        let zeros = vec![0.0; param.len()];
        Self::new(formats, param, &zeros, [&zeros, &zeros])
    }

    pub(crate) fn set_grad(&mut self, grad: &[f32]) {
        self.grad.copy_from_slice(grad);
    }

    /// The step on this memory; the states are those that the rule has.
    pub(crate) fn update(&mut self, rule: Rule, formats: Formats, scale: f32, stream: Stream) -> Update<'_> {
        let grad = match formats.grad {
            Format::F32 => Values::F32(&self.grad),
            Format::Bf16 => Values::Bf16(&self.grad_bits),
            Format::F16 => Values::F16(&self.grad_bits),
        };
        let param = if formats.is_split {
            ParamMut::Split { high: &mut self.high, low: &mut self.low }
        } else {
            let copy = match formats.copy {
                Format::F32 => None,
                Format::Bf16 => Some(ValuesMut::Bf16(&mut self.copy)),
                Format::F16 => Some(ValuesMut::F16(&mut self.copy)),
            };
            ParamMut::F32 { values: &mut self.param, copy }
        };
        let [first, second] = &mut self.states;
        let [first_bits, second_bits] = &mut self.state_bits;
        let is_adam = matches!(rule, Rule::AdamW(_) | Rule::Adam(_));
        let first_rounding = if is_adam { Rounding::Nearest } else { Rounding::Stochastic(stream) };
        let (first, second) = if formats.is_compact {
            (StateMut::Bf16(first_bits, first_rounding), StateMut::Bf16(second_bits, Rounding::Stochastic(stream)))
        } else {
            (StateMut::F32(first), StateMut::F32(second))
        };
        let states = match rule.states().len() {
            0 => [None, None],
            1 => [Some(first), None],
            _ => [Some(first), Some(second)],
        };
        Update::new(rule, param, grad, scale, states).unwrap().streaming(formats.streaming)
    }

    /// One step on this memory alone.
    pub(crate) fn step(&mut self, rule: Rule, formats: Formats, scale: f32, stream: Stream, isa: Isa) {
        update::step_with(vec![self.update(rule, formats, scale, stream)], 1, isa);
    }

    /// All bits, to be compared: NaN is equal to NaN of the same bits.
    pub(crate) fn bits(&self) -> Vec<u32> {
        let halves = [&self.copy, &self.high, &self.low, &self.state_bits[0], &self.state_bits[1]];
        let singles = [&self.param, &self.states[0], &self.states[1]];
        let narrow = halves.into_iter().flatten().map(|&bits| u32::from(bits));
        narrow.chain(singles.into_iter().flatten().map(|value| value.to_bits())).collect()
    }

    /// The second state in bf16, as numbers.
    pub(crate) fn second_bf16(&self) -> impl Iterator<Item = f32> {
        self.state_bits[1].iter().map(|&bits| bf16_to_f32(bits))
    }

    /// The parameter in full precision, from bf16 and remainder.
    pub(crate) fn joined(&self) -> Vec<f32> {
        self.high.iter().zip(&self.low).map(|(&high, &low)| shardcore_kernels::half::join(high, low)).collect()
    }
}

/// Parameter, gradient, a state of any sign and one that is not negative: rows of equal length.
pub(crate) fn rows(
    numel: impl Strategy<Value = usize>,
    value: impl Strategy<Value = f32> + 'static,
) -> impl Strategy<Value = Vec<[f32; 4]>> {
    let value = value.boxed();
    let row = [value.clone(), value.clone(), value.clone(), value].prop_map(|[p, g, m, v]| [p, g, m, v.abs()]);
    let row = row.boxed();
    numel.prop_flat_map(move |numel| prop::collection::vec(row.clone(), numel))
}

pub(crate) fn column<const N: usize>(rows: &[[f32; N]], index: usize) -> Vec<f32> {
    rows.iter().map(|row| row[index]).collect()
}

/// The first state of Adagrad is a sum of squares.
pub(crate) fn fitting(options: &Options, mut rows: Vec<[f32; 4]>) -> Vec<[f32; 4]> {
    if matches!(options, Options::Adagrad(_)) {
        for row in &mut rows {
            row[2] = row[2].abs();
        }
    }
    rows
}

pub(crate) fn memory(formats: Formats, rows: &[[f32; 4]]) -> Memory {
    let [param, grad, first, second] = [0, 1, 2, 3].map(|index| column(rows, index));
    Memory::new(formats, &param, &grad, [&first, &second])
}
