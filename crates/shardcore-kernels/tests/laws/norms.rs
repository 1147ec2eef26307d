//! Sums of squares.

use proptest::prelude::*;
use shardcore_kernels::half::bf16_to_f32;
use shardcore_kernels::{Isa, Values, norm};

use crate::given::{self, column};

proptest! {
    #![proptest_config(given::config(40, 2_000))]

    #[test]
    fn sums_are_those_of_fp64(rows in given::rows(given::numel(), given::number())) {
        let values = column(&rows, 0);
        let expected: f64 = values.iter().map(|&x| f64::from(x).powi(2)).sum();
        let found = norm::sums_of_squares(&[Values::F32(&values)], 1)[0];
        prop_assert!((found - expected).abs() <= 1e-12 * expected, "{found} against {expected}");
    }

    #[test]
    fn a_sum_is_finite_when_all_elements_are(
        rows in given::rows(1_usize..400, given::bits()),
        bad in prop::option::of((any::<prop::sample::Index>(), prop::sample::select(vec![f32::INFINITY, f32::NAN]))),
    ) {
        let mut values = column(&rows, 0);
        for value in &mut values {
            *value = if value.is_finite() { *value } else { f32::MAX };
        }
        if let Some((index, value)) = &bad {
            *index.get_mut(&mut values) = *value;
        }
        let found = norm::sums_of_squares(&[Values::F32(&values)], 1)[0];
        prop_assert_eq!(found.is_finite(), bad.is_none());
    }
}

#[test]
fn threads_and_instructions_change_no_bit() {
    let values: Vec<f32> = (0..500_000).map(|index| (index as f32 * 0.37).sin() * 1e3).collect();
    let bits: Vec<u16> = (0..30_000).cycle().take(100_001).collect();
    let slices = [Values::F32(&values), Values::F32(&values[..77]), Values::Bf16(&bits), Values::F32(&[])];
    let all =
        |num_threads, isa| norm::sums_with(&slices, num_threads, isa).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    let expected = all(1, Isa::portable());
    for isa in Isa::available() {
        for num_threads in [1, 2, 5] {
            assert_eq!(all(num_threads, isa), expected, "{}, {num_threads} threads", isa.name());
        }
    }
    let of_bf16: f64 = bits.iter().map(|&x| f64::from(bf16_to_f32(x)).powi(2)).sum();
    assert!((f64::from_bits(expected[2]) / of_bf16 - 1.0).abs() < 1e-12);
    assert_eq!(expected[3] << 1, 0, "a zero of either sign");
}
