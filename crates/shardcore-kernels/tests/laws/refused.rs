//! What cannot be computed is refused, with the reason.

use shardcore_kernels::rule::{AdagradOptions, AdamOptions, SgdOptions};
use shardcore_kernels::{Cast, KernelError, ParamMut, Rounding, StateMut, Stream, Update, Values, ValuesMut};

use crate::accuracy::ADAMW;

fn update(second: Rounding, numel: usize) -> Result<(), KernelError> {
    let (mut p, g) = ([0.0; 4], vec![0.0; numel]);
    let (mut m, mut v) = ([0_u16; 4], [0_u16; 4]);
    let states = [Some(StateMut::Bf16(&mut m, Rounding::Nearest)), Some(StateMut::Bf16(&mut v, second))];
    Update::new(ADAMW.at(1.0), ParamMut::F32 { values: &mut p, copy: None }, Values::F32(&g), 1.0, states).map(drop)
}

#[test]
fn a_second_moment_rounded_to_nearest() {
    update(Rounding::Stochastic(Stream::new(0, 0, 0)), 4).unwrap();
    let error = update(Rounding::Nearest, 4).unwrap_err();
    assert_eq!(error, KernelError::NearestRounding { rule: "AdamW", what: "the second moment" });
    assert!(error.to_string().contains("round stochastically"));
}

#[test]
fn a_sum_of_squares_rounded_to_nearest() {
    let rule = AdagradOptions { lr: 0.1, lr_decay: 0.0, weight_decay: 0.0, eps: 1e-10 }.at(1.0);
    let (mut p, mut sum) = ([0.0; 2], [0_u16; 2]);
    let states = [Some(StateMut::Bf16(&mut sum, Rounding::Nearest)), None];
    let error = Update::new(rule, ParamMut::F32 { values: &mut p, copy: None }, Values::F32(&[1.0; 2]), 1.0, states);
    assert!(matches!(error.unwrap_err(), KernelError::NearestRounding { rule: "Adagrad", .. }));
}

#[test]
fn tensors_of_different_lengths() {
    let error = update(Rounding::Stochastic(Stream::new(0, 0, 0)), 3).unwrap_err();
    assert_eq!(error, KernelError::LengthMismatch { what: "the gradient", expected: 4, found: 3 });
    let error = Cast::new(Values::F32(&[0.0; 2]), ValuesMut::Bf16(&mut [0; 3]), 1.0).unwrap_err();
    assert!(matches!(error, KernelError::LengthMismatch { expected: 2, found: 3, .. }));
}

#[test]
fn missing_states() {
    let (mut p, mut m) = ([0.0; 1], [0.0; 1]);
    for states in [[None, None], [None, Some(StateMut::F32(&mut m))]] {
        let param = ParamMut::F32 { values: &mut p, copy: None };
        let error = Update::new(ADAMW.at(1.0), param, Values::F32(&[0.0]), 1.0, states).unwrap_err();
        assert!(matches!(error, KernelError::StateCount { rule: "AdamW", expected: 2, .. }));
    }
}

#[test]
fn hyperparameters_out_of_range() {
    for options in [
        AdamOptions { lr: -1.0, ..ADAMW },
        AdamOptions { lr: f64::NAN, ..ADAMW },
        AdamOptions { beta1: 1.0, ..ADAMW },
        AdamOptions { beta2: -0.1, ..ADAMW },
        AdamOptions { eps: f64::INFINITY, ..ADAMW },
        AdamOptions { weight_decay: -0.1, ..ADAMW },
    ] {
        assert!(matches!(options.check().unwrap_err(), KernelError::OutOfRange { .. }), "{options:?}");
    }
    let sgd = SgdOptions { lr: 0.1, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: true };
    assert!(sgd.check().unwrap_err().to_string().contains("nesterov"));
    assert!(SgdOptions { momentum: 0.9, dampening: 0.1, ..sgd }.check().is_err());
    SgdOptions { momentum: 0.9, ..sgd }.check().unwrap();
}
