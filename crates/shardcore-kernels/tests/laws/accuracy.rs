//! Against the textbook formulas in fp64.

use proptest::prelude::*;
use shardcore_kernels::rule::AdamOptions;
use shardcore_kernels::{Isa, Options, Stream};

use crate::given::{self, Memory, PLAIN};

pub(crate) const ADAMW: AdamOptions =
    AdamOptions { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, decoupled: true };

/// What one step makes of an element, and how large its operands are: what rounding errors are relative to.
struct Expected {
    param: (f64, f64),
    states: [(f64, f64); 2],
}

#[allow(clippy::many_single_char_names, reason = "the papers' names")]
/// One step from the papers, in fp64; `p`, `g`, and the states `a` and `b`.
fn reference(options: &Options, step: u64, [p, g, a, b]: [f64; 4]) -> Expected {
    let unused = [(a, 0.0), (b, 0.0)];
    match *options {
        Options::Adam(o) => {
            let (p_decayed, g, size) = if o.decoupled {
                (p * (1.0 - o.lr * o.weight_decay), g, g.abs())
            } else {
                (p, g + o.weight_decay * p, g.abs() + (o.weight_decay * p).abs())
            };
            let m = o.beta1 * a + (1.0 - o.beta1) * g;
            let v = o.beta2 * b + (1.0 - o.beta2) * g * g;
            let correction = |beta: f64| 1.0 - beta.powi(step as i32);
            let lr = o.lr / correction(o.beta1) / ((v / correction(o.beta2)).sqrt() + o.eps);
            let m_size = a.abs() + size;
            Expected {
                param: (p_decayed - lr * m, p.abs() + lr * m_size * (1.0 + size * size / (v + 1e-300))),
                states: [(m, m_size), (v, b + size * size)],
            }
        }
        Options::Lion(o) => {
            let direction = o.beta1 * a + (1.0 - o.beta1) * g;
            let sign = if direction == 0.0 { 0.0 } else { direction.signum() };
            // Where rounding alone decides the sign, either is right.
            let doubt = if direction.abs() < 1e-6 * (a.abs() + g.abs()) { 2.0 * o.lr * 1e6 } else { 0.0 };
            Expected {
                param: (p * (1.0 - o.lr * o.weight_decay) - o.lr * sign, p.abs() + o.lr + doubt),
                states: [(o.beta2 * a + (1.0 - o.beta2) * g, a.abs() + g.abs()), unused[1]],
            }
        }
        Options::Adagrad(o) => {
            let size = g.abs() + (o.weight_decay * p).abs();
            let g = g + o.weight_decay * p;
            let sum = a.abs() + g * g;
            let lr = o.lr / (1.0 + (step - 1) as f64 * o.lr_decay) / (sum.sqrt() + o.eps);
            let update_size = lr * size * (1.0 + size * size / (sum + 1e-300));
            Expected { param: (p - lr * g, p.abs() + update_size), states: [(sum, a.abs() + size * size), unused[1]] }
        }
        Options::Sgd(o) => {
            let size = g.abs() + (o.weight_decay * p).abs();
            let g = g + o.weight_decay * p;
            if o.momentum == 0.0 {
                return Expected { param: (p - o.lr * g, p.abs() + o.lr * size), states: unused };
            }
            let momentum = if step == 1 { g } else { o.momentum * a + (1.0 - o.dampening) * g };
            let direction = if o.nesterov { g + o.momentum * momentum } else { momentum };
            let m_size = a.abs() + size;
            Expected {
                param: (p - o.lr * direction, p.abs() + o.lr * (size + m_size)),
                states: [(momentum, m_size), unused[1]],
            }
        }
    }
}

fn agree(found: f32, (expected, size): (f64, f64), tolerance: f64) -> bool {
    // Below the smallest normal number there are fewer digits.
    (f64::from(found) - expected).abs() <= tolerance * size + f64::from(f32::MIN_POSITIVE)
}

proptest! {
    #![proptest_config(given::config(1_000, 10_000))]

    #[test]
    fn one_step_is_the_formula_within_1e_6_of_its_operands(
        row in given::rows(Just(1_usize), given::number()),
        options in given::options(),
        step in prop_oneof![Just(1_u64), 2_u64..1_000],
        scale in prop_oneof![Just(1.0_f32), 0.01_f32..2.0],
    ) {
        let row = given::fitting(&options, row);
        let mut memory = given::memory(PLAIN, &row);
        memory.step(options.at(step as f64), PLAIN, scale, Stream::new(0, 0, 0), Isa::best());
        let [p, g, a, b] = row[0].map(f64::from);
        let expected = reference(&options, step, [p, g * f64::from(scale), a, b]);
        let num_states = options.at(step as f64).states().len();
        for index in 0..num_states {
            prop_assert!(agree(memory.states[index][0], expected.states[index], 1e-6), "state {index}: {memory:?}");
        }
        prop_assert!(agree(memory.param[0], expected.param, 1e-6), "{} against {:?}", memory.param[0], expected.param);
    }
}

/// Relative distance of the parameters, in L2, after many steps of a noisy descent.
fn distance_after(options: &Options, num_steps: u64) -> f64 {
    let numel = 64;
    let value = |index: usize, step: u64| {
        let phase = index as f64 * 12.9898 + step as f64 * 78.233;
        (phase.sin() * 43_758.547).fract()
    };
    let param: Vec<f32> = (0..numel).map(|index| value(index, 0) as f32).collect();
    let mut memory = Memory::zeros(PLAIN, &param);
    let mut twin: Vec<[f64; 3]> = param.iter().map(|&p| [f64::from(p), 0.0, 0.0]).collect();
    for step in 1..=num_steps {
        // A gradient that does not depend on the parameter, so that the arithmetic alone is compared.
        let grad: Vec<f32> = (0..numel).map(|index| (value(index, step) + 0.3 * (index as f64).sin()) as f32).collect();
        memory.set_grad(&grad);
        memory.step(options.at(step as f64), PLAIN, 1.0, Stream::new(0, 0, step), Isa::best());
        for (row, &g) in twin.iter_mut().zip(&grad) {
            let expected = reference(options, step, [row[0], f64::from(g), row[1], row[2]]);
            *row = [expected.param.0, expected.states[0].0, expected.states[1].0];
        }
    }
    let squares = |values: Vec<f64>| values.iter().map(|x| x * x).sum::<f64>().sqrt();
    let difference = memory.param.iter().zip(&twin).map(|(&found, row)| f64::from(found) - row[0]).collect();
    squares(difference) / squares(twin.iter().map(|row| row[0]).collect())
}

#[test]
fn many_steps_stay_within_1e_5_of_the_formulas() {
    let num_steps = u64::from(given::count(500, 2_000));
    let adam = Options::Adam(AdamOptions { decoupled: false, ..ADAMW });
    for options in [Options::Adam(ADAMW), adam, lion(), adagrad(), sgd(0.0), sgd(0.9)] {
        let distance = distance_after(&options, num_steps);
        assert!(distance < 1e-5, "{options:?}: {distance:e}");
    }
}

fn lion() -> Options {
    Options::Lion(shardcore_kernels::rule::LionOptions { lr: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 })
}

fn adagrad() -> Options {
    let options = shardcore_kernels::rule::AdagradOptions { lr: 0.01, lr_decay: 1e-3, weight_decay: 0.01, eps: 1e-10 };
    Options::Adagrad(options)
}

fn sgd(momentum: f64) -> Options {
    let nesterov = momentum > 0.0;
    let options =
        shardcore_kernels::rule::SgdOptions { lr: 0.01, momentum, dampening: 0.0, weight_decay: 1e-3, nesterov };
    Options::Sgd(options)
}
