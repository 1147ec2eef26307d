//! Codes and scales.

use proptest::prelude::*;
use shardcore_kernels::half::{bf16_to_f32, f32_to_bf16};
use shardcore_kernels::quantize::{BLOCK, dequantize_with, num_scales, quantize_with};
use shardcore_kernels::{Bits, Dequantize, Isa, KernelError, Quantize, Values, ValuesMut};

use crate::given::{self, column};

/// What quantising gave.
#[derive(Clone, Debug, PartialEq)]
struct Found {
    codes: Vec<u8>,
    scales: Vec<u32>,
    residual: Vec<u16>,
}

fn quantized(values: Values<'_>, residual: &[u16], bits: Bits, num_threads: usize, isa: Isa) -> Found {
    let numel = values.numel();
    let mut residual = residual.to_vec();
    let (mut codes, mut scales) = (vec![0; bits.code_nbytes(numel)], vec![0.0; num_scales(numel)]);
    let rest = (!residual.is_empty()).then_some(residual.as_mut_slice());
    quantize_with(vec![Quantize::new(values, bits, &mut codes, &mut scales, rest).unwrap()], num_threads, isa);
    Found { codes, scales: scales.iter().map(|scale| scale.to_bits()).collect(), residual }
}

fn read_back(found: &Found, bits: Bits, start: &[f32], num_threads: usize, isa: Isa) -> Vec<f32> {
    let scales: Vec<f32> = found.scales.iter().map(|&bits| f32::from_bits(bits)).collect();
    let mut values = start.to_vec();
    let work = Dequantize::new(bits, &found.codes, &scales, ValuesMut::F32(&mut values)).unwrap().adding(true);
    dequantize_with(vec![work], num_threads, isa);
    values
}

/// The definition, one number at a time.
fn by_definition(values: &[f32], residual: &[u16], bits: Bits) -> (Vec<i8>, Vec<u32>, Vec<u16>) {
    let largest_code = if bits == Bits::Four { 7.0_f32 } else { 127.0 };
    let (mut codes, mut scales, mut rests) = (Vec::new(), Vec::new(), Vec::new());
    for (index, block) in values.chunks(BLOCK).enumerate() {
        let rest = |at: usize| residual.get(index * BLOCK + at).map_or(0.0, |&bits| bf16_to_f32(bits));
        let block: Vec<f32> = block.iter().enumerate().map(|(at, value)| value + rest(at)).collect();
        let is_finite = block.iter().all(|value| value.is_finite());
        let largest = block.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        let scale = if is_finite { largest / largest_code } else { f32::NAN };
        scales.push(scale.to_bits());
        for value in block {
            let exact = value * (largest_code / largest).min(f32::MAX);
            // A whole number has no negative zero.
            let code = if is_finite { exact.round_ties_even() as i8 } else { 0 };
            codes.push(code);
            rests.push(f32_to_bf16(if is_finite { value - f32::from(code) * scale } else { 0.0 }));
        }
    }
    (codes, scales, if residual.is_empty() { Vec::new() } else { rests })
}

fn unpacked(codes: &[u8], bits: Bits, numel: usize) -> Vec<i8> {
    let pair = |&byte: &u8| [(byte << 4).cast_signed() >> 4, byte.cast_signed() >> 4];
    match bits {
        Bits::Eight => codes.iter().map(|&byte| byte.cast_signed()).collect(),
        Bits::Four => codes.iter().flat_map(pair).take(numel).collect(),
    }
}

fn bits() -> impl Strategy<Value = Bits> {
    prop::sample::select(vec![Bits::Four, Bits::Eight])
}

proptest! {
    #![proptest_config(given::config(80, 5_000))]

    #[test]
    fn codes_are_those_of_the_definition(
        rows in given::rows(given::numel(), given::bits()),
        bits in bits(),
        has_residual in any::<bool>(),
    ) {
        let values = column(&rows, 0);
        let small = |x: &f32| f32_to_bf16(if x.is_finite() { x.clamp(-1.0, 1.0) } else { 0.5 });
        let residual: Vec<u16> = if has_residual { column(&rows, 1).iter().map(small).collect() } else { Vec::new() };
        let (codes, scales, rests) = by_definition(&values, &residual, bits);
        for isa in Isa::available() {
            let found = quantized(Values::F32(&values), &residual, bits, 1, isa);
            prop_assert_eq!(&unpacked(&found.codes, bits, values.len()), &codes, "{}", isa.name());
            prop_assert_eq!(&found.scales, &scales);
            prop_assert_eq!(&found.residual, &rests);
        }
    }

    #[test]
    fn numbers_come_back_within_half_a_step(rows in given::rows(given::numel(), given::number()), bits in bits()) {
        let values = column(&rows, 0);
        let found = quantized(Values::F32(&values), &[], bits, 1, Isa::best());
        let back = read_back(&found, bits, &vec![0.0; values.len()], 1, Isa::best());
        for (index, (value, back)) in values.iter().zip(&back).enumerate() {
            let scale = f32::from_bits(found.scales[index / BLOCK]);
            prop_assert!((value - back).abs() <= scale * 0.500_01, "{value} came back as {back}, scale {scale}");
        }
    }

    #[test]
    fn a_block_that_is_not_finite_comes_back_as_nan(
        rows in given::rows(1_usize..600, given::number()),
        at in any::<prop::sample::Index>(),
        value in prop::sample::select(vec![f32::INFINITY, f32::NEG_INFINITY, f32::NAN]),
        bits in bits(),
    ) {
        let mut values = column(&rows, 0);
        let at = at.index(values.len());
        values[at] = value;
        let found = quantized(Values::F32(&values), &[], bits, 1, Isa::best());
        let back = read_back(&found, bits, &vec![1.0; values.len()], 1, Isa::best());
        for (index, back) in back.iter().enumerate() {
            prop_assert_eq!(back.is_nan(), index / BLOCK == at / BLOCK, "element {}", index);
        }
    }
}

#[test]
fn threads_and_instructions_change_no_bit() {
    let numel = 100_001;
    let values: Vec<f32> = (0..numel).map(|index| (index as f32 * 0.37).sin() * 1e3).collect();
    let half: Vec<u16> = values.iter().map(|&x| f32_to_bf16(x)).collect();
    let residual: Vec<u16> = values.iter().map(|&x| f32_to_bf16(x * 1e-3)).collect();
    for bits in [Bits::Four, Bits::Eight] {
        for source in [Values::F32(&values), Values::Bf16(&half)] {
            let expected = quantized(source, &residual, bits, 1, Isa::portable());
            let back = read_back(&expected, bits, &values, 1, Isa::portable());
            for isa in Isa::available() {
                for num_threads in [1, 2, 5] {
                    assert_eq!(quantized(source, &residual, bits, num_threads, isa), expected, "{}", isa.name());
                    assert_eq!(read_back(&expected, bits, &values, num_threads, isa), back, "{}", isa.name());
                }
            }
        }
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused() {
    let values = [0.0; 300];
    let error = |codes: usize, scales: usize| {
        let (mut codes, mut scales) = (vec![0; codes], vec![0.0; scales]);
        Quantize::new(Values::F32(&values), Bits::Four, &mut codes, &mut scales, None).map(drop)
    };
    error(150, 2).unwrap();
    assert_eq!(error(300, 2), Err(KernelError::QuantizedLength { what: "the codes", expected: 150, found: 300 }));
    assert_eq!(error(150, 1), Err(KernelError::QuantizedLength { what: "the scales", expected: 2, found: 1 }));
}
