//! bf16 and fp16 numbers, kept as their bits in `u16`, by integer arithmetic: the same bits on every machine.
//!
//! Each function has no branch, so that loops over it become vector code.

#![allow(clippy::cast_possible_truncation, reason = "the upper half of the bits is meant to go, or is zero")]

/// The bits of a NaN where a 16-bit number must say so.
const BF16_NAN: u32 = 0x7fc0;
const F16_NAN: u32 = 0x7e00;

/// The value of a bf16, exactly.
#[inline(always)]
#[must_use]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The nearest bf16, ties to even; a NaN becomes the NaN that torch writes.
#[inline(always)]
#[must_use]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    (if value.is_nan() { BF16_NAN } else { rounded }) as u16
}

/// One of the two bf16 around `value`, the nearer one with the higher probability, so that the mean is `value`.
///
/// `random` is below 2^16, each number as likely. It is added to the bits that are cut off, and carries into those that
/// stay as often as the value's share of the gap says.
#[inline(always)]
#[must_use]
pub fn f32_to_bf16_stochastic(value: f32, random: u32) -> u16 {
    let rounded = value.to_bits().wrapping_add(random) >> 16;
    (if value.is_nan() { BF16_NAN } else { rounded }) as u16
}

/// The value of an fp16, exactly.
#[inline(always)]
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "a magnitude below 2^15 is exact")]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    // The exponent moves from bias 15 to bias 127; of infinity and NaN it stays all ones.
    let shift = if magnitude < 0x7c00 { 112 << 23 } else { 224 << 23 };
    let normal = (magnitude << 13) + shift;
    let subnormal = (magnitude as f32 * f32::from_bits(103 << 23)).to_bits(); // times 2^-24
    f32::from_bits(sign | if magnitude < 0x400 { subnormal } else { normal })
}

/// The nearest fp16, ties to even; infinity from 65520 on.
#[inline(always)]
#[must_use]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    let rebiased = magnitude.wrapping_sub(112 << 23);
    let normal = rebiased.wrapping_add(0xfff + ((rebiased >> 13) & 1)) >> 13;
    // Below 2^-14 the last place of an fp16 is 2^-24, which is the last place of an fp32 in [0.5, 1).
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let bounded = if magnitude >= 0x477f_f000 { 0x7c00 } else { finite };
    (sign | if magnitude > 0x7f80_0000 { F16_NAN } else { bounded }) as u16
}

/// An fp32 as a bf16 and the 16 bits that it lacks.
///
/// The bf16 is the nearest one, ties away from zero: the even neighbour of a tie could not be told apart from the one
/// below it, since it would have 2^16 + 1 numbers around it. [`join`] gives the fp32 back bit for bit, a NaN as a NaN.
#[inline(always)]
#[must_use]
pub fn split(value: f32) -> (u16, u16) {
    let bits = value.to_bits();
    let high = if value.is_nan() { BF16_NAN } else { bits.wrapping_add(0x8000) >> 16 };
    (high as u16, bits as u16)
}

/// The fp32 of which [`split`] made these.
#[inline(always)]
#[must_use]
#[allow(clippy::cast_possible_wrap, clippy::cast_sign_loss, reason = "the remainder is a signed number")]
pub fn join(high: u16, low: u16) -> f32 {
    f32::from_bits((u32::from(high) << 16).wrapping_add(i32::from(low as i16) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bf16_survives_the_way_to_fp32_and_back() {
        for bits in 0..=u16::MAX {
            let value = bf16_to_f32(bits);
            let expected = if value.is_nan() { 0x7fc0 } else { bits };
            assert_eq!(f32_to_bf16(value), expected);
            assert_eq!(f32_to_bf16_stochastic(value, 0xffff), expected, "a bf16 has no neighbour to be rounded to");
        }
    }

    #[test]
    fn every_fp16_survives_the_way_to_fp32_and_back() {
        for bits in 0..=u16::MAX {
            let value = f16_to_f32(bits);
            if value.is_nan() {
                assert!(bits & 0x7fff > 0x7c00);
                assert_eq!(f32_to_f16(value) & 0x7fff, 0x7e00);
            } else {
                assert_eq!(f32_to_f16(value), bits);
            }
        }
    }

    #[test]
    fn fp16_rounds_ties_to_even_and_overflows_where_the_standard_says() {
        for (value, bits) in [
            (1.0, 0x3c00),
            (-2.0, 0xc000),
            (65_504.0, 0x7bff),
            (65_519.996, 0x7bff),
            (65_520.0, 0x7c00),
            (f32::INFINITY, 0x7c00),
            (2_049.0, 0x6800),        // a tie between 2048 and 2050
            (2_051.0, 0x6802),        // a tie between 2050 and 2052
            (5.960_464_5e-8, 0x0001), // 2^-24, the smallest
            (2.980_232_2e-8, 0x0000), // 2^-25: a tie between 0 and the smallest
            (8.940_697e-8, 0x0002),   // 1.5 * 2^-24: a tie between 1 and 2
            (6.103_515_6e-5, 0x0400), // 2^-14, the smallest normal
            (6.097_555e-5, 0x03ff),   // the largest subnormal
            (6.100_535_4e-5, 0x0400), // half way between the two
        ] {
            assert_eq!(f32_to_f16(value), bits, "{value:e}");
        }
    }

    #[test]
    fn bf16_rounds_ties_to_even() {
        for (bits, expected) in
            [(0x3f80_8000, 0x3f80), (0x3f81_8000, 0x3f82), (0x3f80_8001, 0x3f81), (0x7f7f_ffff, 0x7f80)]
        {
            assert_eq!(f32_to_bf16(f32::from_bits(bits)), expected);
        }
    }
}
