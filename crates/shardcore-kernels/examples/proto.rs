use shardcore_kernels::*;
use std::time::Instant;
fn main() {
    let n: usize = std::env::args().nth(1).map_or(25_000_000, |x| x.parse().unwrap());
    let reps = 25_000_000 / n * 6;
    let mk = |x: f32| vec![x; n];
    let (mut p, g, mut m, mut v) = (mk(0.1), mk(0.01), mk(0.0), mk(0.0));
    let gb = vec![0x3c00u16; n];
    let mut copy = vec![0u16; n];
    let (mut mb, mut vb) = (vec![0u16; n], vec![0u16; n]);
    let opt = rule::AdamOptions { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, decoupled: true };
    for isa in std::iter::once(Isa::best()) {
        for case in ["compact"] {
            let mut best = f64::MAX;
            for step in 1..reps as u64 {
                let rule = opt.at(step as f64);
                let t = Instant::now();
                let st = Stream::new(0, 0, step);
                let u = match case {
                    "fp32" => Update::new(
                        rule,
                        ParamMut::F32 { values: &mut p, copy: None },
                        Values::F32(&g),
                        1.0,
                        [Some(StateMut::F32(&mut m)), Some(StateMut::F32(&mut v))],
                    )
                    .unwrap(),
                    "compact" => Update::new(
                        rule,
                        ParamMut::F32 { values: &mut p, copy: None },
                        Values::F32(&g),
                        1.0,
                        [
                            Some(StateMut::Bf16(&mut mb, Rounding::Nearest)),
                            Some(StateMut::Bf16(&mut vb, Rounding::Stochastic(st))),
                        ],
                    )
                    .unwrap(),
                    "split" => Update::new(
                        rule,
                        ParamMut::Split { high: &mut mb, low: &mut vb },
                        Values::Bf16(&gb),
                        1.0,
                        [Some(StateMut::F32(&mut m)), Some(StateMut::F32(&mut v))],
                    )
                    .unwrap(),
                    _ => Update::new(
                        rule,
                        ParamMut::F32 { values: &mut p, copy: Some(ValuesMut::Bf16(&mut copy)) },
                        Values::Bf16(&gb),
                        1.0,
                        [Some(StateMut::F32(&mut m)), Some(StateMut::F32(&mut v))],
                    )
                    .unwrap()
                    .streaming(case == "copy-nt"),
                };
                update::step_with(vec![u], 1, isa);
                best = best.min(t.elapsed().as_secs_f64());
            }
            println!("{} {case}: {:.3} ns/elem", isa.name(), best * 1e9 / n as f64);
        }
    }
}
