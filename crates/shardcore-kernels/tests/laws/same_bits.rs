//! The same bits whatever the instructions, the number of threads, and the way in which tensors are cut.

use proptest::prelude::*;
use shardcore_kernels::half::{f32_to_bf16, f32_to_f16};
use shardcore_kernels::{Cast, Isa, Options, Stream, Values, ValuesMut, cast, update};

use crate::given::{self, Format, Formats, Memory, column};

proptest! {
    #![proptest_config(given::config(60, 10_000))]

    #[test]
    fn every_set_of_instructions_gives_the_same_bits(
        rows in given::rows(given::numel(), given::bits()),
        options in given::options(),
        formats in given::formats(),
        step in 1_u64..3,
        scale in prop_oneof![Just(1.0_f32), Just(-1.0), -4.0_f32..4.0],
    ) {
        let start = given::memory(formats, &rows);
        let after = |isa| {
            let mut memory = start.clone();
            memory.step(options.at(step as f64), formats, scale, Stream::new(1, 2, step), isa);
            memory.bits()
        };
        let expected = after(Isa::portable());
        for isa in Isa::available() {
            prop_assert!(after(isa) == expected, "{} differs", isa.name());
        }
    }

    #[test]
    fn casts_are_those_of_single_numbers(rows in given::rows(given::numel(), given::bits()), scale in -2.0_f32..2.0) {
        let values = column(&rows, 0);
        for isa in Isa::available() {
            for encode in [f32_to_bf16, f32_to_f16] {
                let mut found = vec![0; values.len()];
                let is_bf16 = encode(1.0) == f32_to_bf16(1.0);
                let to = if is_bf16 { ValuesMut::Bf16(&mut found) } else { ValuesMut::F16(&mut found) };
                cast::cast_with(vec![Cast::new(Values::F32(&values), to, scale).unwrap()], 1, isa);
                let expected: Vec<u16> = values.iter().map(|&x| encode(x * scale)).collect();
                prop_assert_eq!(&found, &expected);
            }
        }
    }
}

/// Deterministic numbers in [-1, 1).
fn noise(numel: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..numel).map(|_| next()).collect()
}

fn tensors(formats: Formats) -> Vec<Memory> {
    let numels = [0, 1, 100_001, 5, 128, 33_333, 64, 40_000].into_iter().chain((0..50).map(|n| n * 37));
    numels
        .enumerate()
        .map(|(index, numel)| {
            let [p, g, m, v] = [0, 1, 2, 3].map(|part| noise(numel, 4 * index as u32 + part));
            let v: Vec<f32> = v.iter().map(|x| x.abs()).collect();
            Memory::new(formats, &p, &g, [&m, &v])
        })
        .collect()
}

fn after(formats: Formats, num_threads: usize, one_by_one: bool) -> Vec<Vec<u32>> {
    let options = Options::Adam(crate::accuracy::ADAMW);
    let mut memories = tensors(formats);
    let numbered = memories.iter_mut().zip(0..);
    let updates =
        numbered.map(|(memory, index)| memory.update(options.at(3.0), formats, 0.5, Stream::new(0, index, 3)));
    if one_by_one {
        updates.for_each(|single| update::step(vec![single], num_threads));
    } else {
        update::step(updates.collect(), num_threads);
    }
    memories.iter().map(Memory::bits).collect()
}

#[test]
fn the_number_of_threads_changes_nothing() {
    for is_compact in [false, true] {
        for (is_split, copy) in [(false, Format::F32), (false, Format::Bf16), (true, Format::F32)] {
            let formats = Formats { grad: Format::Bf16, copy, is_split, is_compact, streaming: true };
            let expected = after(formats, 1, true);
            for num_threads in [1, 2, 3, 7] {
                assert!(after(formats, num_threads, false) == expected, "{formats:?}, {num_threads} threads");
            }
        }
    }
}

#[test]
fn the_place_in_memory_changes_nothing() {
    let numel = 1_000;
    let values = noise(numel + 16, 1);
    let expected: Vec<u16> = values[..numel].iter().map(|&x| f32_to_bf16(x)).collect();
    for offset in 0..16 {
        let mut source = vec![0.0; offset];
        source.extend_from_slice(&values[..numel]);
        let mut target = vec![0; numel + offset];
        let to = ValuesMut::Bf16(&mut target[offset..]);
        cast::cast(vec![Cast::new(Values::F32(&source[offset..]), to, 1.0).unwrap()], 1);
        assert_eq!(target[offset..], expected);
    }
}
