//! States in fewer bytes: what they keep exactly, and what they keep on average.

use proptest::prelude::*;
use shardcore_kernels::half::{f32_to_bf16, f32_to_f16, join, split};
use shardcore_kernels::{Isa, Options, Stream};

use crate::accuracy::ADAMW;
use crate::given::{self, Format, Formats, Memory, PLAIN};

proptest! {
    #![proptest_config(given::config(60, 10_000))]

    #[test]
    fn a_split_number_is_the_number(value in any::<u32>().prop_map(f32::from_bits)) {
        let (high, low) = split(value);
        if value.is_nan() {
            prop_assert!(join(high, low).is_nan());
        } else {
            prop_assert_eq!(join(high, low).to_bits(), value.to_bits());
            let is_tie = value.to_bits() & 0xffff == 0x8000;
            prop_assert!(is_tie || high == f32_to_bf16(value), "off a tie it is rounded to nearest");
        }
    }

    #[test]
    fn split_masters_are_fp32_masters_bit_for_bit(
        rows in given::rows(given::numel(), given::number()),
        options in given::options(),
        scale in -2.0_f32..2.0,
    ) {
        let split = Formats { is_split: true, ..PLAIN };
        let rows = given::fitting(&options, rows);
        let (mut whole, mut parts) = (given::memory(PLAIN, &rows), given::memory(split, &rows));
        for step in 1..4 {
            whole.step(options.at(step as f64), PLAIN, scale, Stream::new(0, 0, step), Isa::best());
            parts.step(options.at(step as f64), split, scale, Stream::new(0, 0, step), Isa::best());
        }
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&parts.joined()), bits(&whole.param));
        prop_assert_eq!(&parts.states, &whole.states);
    }

    #[test]
    fn the_copy_is_the_rounded_parameter(
        rows in given::rows(given::numel(), given::number()),
        streaming in any::<bool>(),
    ) {
        for (copy, encode) in [(Format::Bf16, f32_to_bf16 as fn(f32) -> u16), (Format::F16, f32_to_f16)] {
            let formats = Formats { copy, streaming, ..PLAIN };
            let mut memory = given::memory(formats, &rows);
            memory.step(ADAMW.at(1.0), formats, 1.0, Stream::new(0, 0, 0), Isa::best());
            let expected: Vec<u16> = memory.param.iter().map(|&x| encode(x)).collect();
            prop_assert_eq!(memory.copy, expected);
        }
    }
}

const COMPACT: Formats = Formats { is_compact: true, ..PLAIN };

/// Gradients of a falling size, as in a training: the second moment has to follow them down.
fn grad(step: u64, numel: usize) -> Vec<f32> {
    let size = 1.0 / (1.0 + step as f32 / 50.0);
    (0..numel).map(|index| size * (1.0 + 0.5 * ((index as f32) * 1.7 + (step as f32) * 0.9).sin())).collect()
}

/// fp32 and compact states after the same steps.
fn both_after(num_steps: u64, numel: usize) -> [Memory; 2] {
    let start = vec![0.0; numel];
    let (mut whole, mut compact) = (Memory::zeros(PLAIN, &start), Memory::zeros(COMPACT, &start));
    let options = Options::Adam(ADAMW);
    for step in 1..=num_steps {
        for (memory, formats) in [(&mut whole, PLAIN), (&mut compact, COMPACT)] {
            memory.set_grad(&grad(step, numel));
            memory.step(options.at(step as f64), formats, 1.0, Stream::new(7, 0, step), Isa::best());
        }
    }
    [whole, compact]
}

#[test]
fn a_stochastically_rounded_second_moment_is_right_on_average() {
    let numel = 4_096;
    let [whole, compact] = both_after(u64::from(given::count(1_000, 4_000)), numel);
    let ratios: Vec<f64> =
        compact.second_bf16().zip(&whole.states[1]).map(|(found, &right)| f64::from(found / right)).collect();
    let mean = ratios.iter().sum::<f64>() / numel as f64;
    // An element's error has a deviation of about 4%; the mean of 4096 of them one of 0.07%.
    assert!((mean - 1.0).abs() < 0.005, "the second moment is {mean} times too large");
    assert!(ratios.iter().all(|ratio| (0.5..2.0).contains(ratio)), "some element went astray");
}

#[test]
fn parameters_follow_those_of_fp32_states() {
    let [whole, compact] = both_after(1_000, 4_096);
    let squares = |values: &mut dyn Iterator<Item = f32>| values.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
    let moved = squares(&mut whole.param.iter().copied());
    let off = squares(&mut whole.param.iter().zip(&compact.param).map(|(a, b)| a - b));
    assert!(off < 0.05 * moved, "off by {} of the update", off / moved);
}

/// What the refusal of round-to-nearest saves from: here it is done by hand.
#[test]
fn a_second_moment_rounded_to_nearest_would_stop_following() {
    let (mut nearest, mut right) = (0.0_f32, 0.0_f32);
    for step in 1..=4_000 {
        let square = grad(step, 1)[0].powi(2);
        right += 0.001 * (square - right);
        nearest = f32::from_bits(u32::from(f32_to_bf16(nearest + 0.001 * (square - nearest))) << 16);
    }
    assert!(nearest > 3.0 * right, "{nearest} against {right}");
}
