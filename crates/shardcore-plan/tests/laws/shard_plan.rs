//! Laws of a whole plan: order of reduction, digest, JSON, text.

use std::num::NonZeroU64;

use crate::given::{mixed_params, sharding};
use proptest::prelude::*;
use shardcore_plan::{Dtype, FlatLayout, Param, PlanError, ShardPlan, Sharding, Unit, first_difference, groups};

fn param(name: &str, numel: u64, trainable: bool) -> Param {
    Param { name: name.to_owned(), numel, dtype: Dtype::Fp32, trainable }
}

fn unit(name: &str, params: Vec<Param>) -> Unit {
    Unit { name: name.to_owned(), params }
}

fn two_shards() -> Sharding {
    Sharding::new(2, 16).unwrap()
}

fn small_plan() -> ShardPlan {
    let first = unit("layers.0", vec![param("layers.0.w", 8, true), param("layers.0.b", 2, false)]);
    let second = unit("layers.1", vec![param("layers.1.w", 8, true)]);
    ShardPlan::new(vec![first, second], two_shards(), None).unwrap()
}

/// A few units whose parameter names are unique over all of them.
fn units() -> impl Strategy<Value = Vec<Unit>> {
    prop::collection::vec(mixed_params(8), 0..5).prop_map(|all| {
        let named = |index: usize, params: Vec<Param>| Unit {
            name: format!("layers.{index}"),
            params: params
                .into_iter()
                .map(|param| Param { name: format!("layers.{index}.{}", param.name), ..param })
                .collect(),
        };
        all.into_iter().enumerate().map(|(index, params)| named(index, params)).collect()
    })
}

fn limit() -> impl Strategy<Value = Option<NonZeroU64>> {
    prop::option::of(1_u64..5_000).prop_map(|limit| limit.and_then(NonZeroU64::new))
}

proptest! {
    #[test]
    fn a_plan_is_its_units_grouped_one_by_one(units in units(), sharding in sharding(), limit in limit()) {
        let plan = ShardPlan::new(units.clone(), sharding, limit).unwrap();
        let mut planned = plan.groups().iter();
        for (index, unit) in units.into_iter().enumerate() {
            for layout in groups::split(unit.params, sharding, limit).unwrap() {
                let group = planned.next().unwrap();
                prop_assert_eq!((group.unit, group.layout.as_ref()), (index, &layout));
            }
        }
        prop_assert!(planned.next().is_none());
    }

    #[test]
    fn trainable_groups_are_reduced_from_the_last_to_the_first(units in units(), sharding in sharding()) {
        let plan = ShardPlan::new(units, sharding, None).unwrap();
        let order = plan.reduce_order();
        prop_assert!(order.windows(2).all(|pair| pair[0] > pair[1]));
        let trainable = plan.groups().iter().filter(|group| group.layout.trainable()).count();
        prop_assert_eq!(order.len(), trainable);
        prop_assert!(order.iter().all(|&index| plan.groups()[index].layout.trainable()));
    }

    #[test]
    fn documents_read_back_as_the_same_plan(units in units(), sharding in sharding(), limit in limit()) {
        let plan = ShardPlan::new(units, sharding, limit).unwrap();
        prop_assert_eq!(&ShardPlan::from_json(&plan.to_json()).unwrap(), &plan);
        for group in plan.groups() {
            prop_assert_eq!(&FlatLayout::from_json(&group.layout.to_json()).unwrap(), group.layout.as_ref());
        }
    }

    /// Drawn from so small a set that equal pairs are common: the digest and the document tell apart what differs,
    /// and only that.
    #[test]
    fn digests_and_documents_agree_with_equality(a in tiny_plan(), b in tiny_plan()) {
        prop_assert_eq!(a == b, a.digest() == b.digest());
        prop_assert_eq!(a == b, first_difference(&a.to_json(), &b.to_json()).unwrap().is_none());
        let (a, b) = (&a.groups()[0].layout, &b.groups()[0].layout);
        prop_assert_eq!(a == b, a.digest() == b.digest());
        prop_assert_eq!(a == b, first_difference(&a.to_json(), &b.to_json()).unwrap().is_none());
    }

    #[test]
    fn text_is_aligned_and_bounded(units in units(), sharding in sharding(), limit in limit()) {
        let plan = ShardPlan::new(units, sharding, limit).unwrap();
        let text = plan.explain();
        prop_assert!(text.lines().count() <= 2 + plan.groups().len().min(41));
        let widths: Vec<usize> = text.lines().skip(1).map(str::len).collect();
        prop_assert!(widths.windows(2).all(|pair| pair[0] == pair[1]), "the last column is flush right\n{text}");
    }
}

fn tiny_plan() -> impl Strategy<Value = ShardPlan> {
    let dtype = prop::sample::select(vec![Dtype::Bf16, Dtype::Fp16]);
    let fields = (0_u64..2, dtype, any::<bool>(), 1_u64..3, prop::sample::select(vec![16_u64, 32]));
    let names = (prop::sample::select(vec!["u", "v"]), prop::sample::select(vec!["w", "x"]));
    (fields, names, limit_of_two()).prop_map(|((numel, dtype, trainable, num_shards, alignment), (u, w), limit)| {
        let params = vec![Param { name: w.to_owned(), numel, dtype, trainable }];
        ShardPlan::new(vec![unit(u, params)], Sharding::new(num_shards, alignment).unwrap(), limit).unwrap()
    })
}

fn limit_of_two() -> impl Strategy<Value = Option<NonZeroU64>> {
    prop::sample::select(vec![None, NonZeroU64::new(64)])
}

/// The digest is a promise between ranks of different machines: it may change only with the format's version.
#[test]
fn digests_are_pinned() {
    assert_eq!(small_plan().digest(), "f3fef59607b0a1e5298d27e20bd32d6d1d3fbbe6e694ca3888728c6d9ff709da");
    assert_eq!(
        small_plan().groups()[0].layout.digest(),
        "1c0cd75a0afba2698a72236e92b2e7184580edb94c1af264bd247ebdba0e91a8"
    );
}

#[test]
fn the_document_is_pinned() {
    let layout = &small_plan().groups()[0].layout.to_json();
    assert_eq!(
        layout,
        r#"{"format":"shardcore.shard_layout.v1","num_shards":2,"alignment":16,"dtype":"fp32","trainable":true,"entries":[{"name":"layers.0.w","numel":8,"offset":0}],"padded_numel":8}"#
    );
}

#[test]
fn the_text_of_a_small_plan() {
    let expected = "\
2 units, 3 groups, 96 B in 2 shards of 48 B
group  unit      kind            parameters  numel  padding  bytes  shard  reduced
    0  layers.0  trainable fp32           1      8     0.0%   32 B   16 B        1
    1  layers.0  frozen fp32              1      2    75.0%   32 B   16 B        -
    2  layers.1  trainable fp32           1      8     0.0%   32 B   16 B        0";
    assert_eq!(small_plan().explain(), expected);
    let layout = FlatLayout::new(vec![param("w", 6, true), param("e", 0, true), param("b", 3, true)], two_shards());
    let expected = "\
trainable fp32: 3 parameters, 16 elements (64 B) with 43.7% padding, in 2 shards of 8 elements (32 B)
parameter  numel  offset  bytes  ranks
w              6       0   24 B      0
e              0       8    0 B      -
b              3       8   12 B      1";
    assert_eq!(layout.unwrap().explain(), expected);
}

#[test]
fn a_parameter_in_two_units_is_refused_with_both_names() {
    let units = vec![unit("a", vec![param("w", 1, true)]), unit("b", vec![param("v", 1, true), param("w", 1, true)])];
    let error = ShardPlan::new(units, two_shards(), None).unwrap_err();
    let expected = PlanError::DuplicateAcrossUnits {
        name: "w".to_owned(),
        first_unit: "a".to_owned(),
        second_unit: "b".to_owned(),
    };
    assert_eq!(error, expected);
}

#[test]
fn a_parameter_twice_in_one_unit_is_refused_with_its_positions_there() {
    let twice = vec![param("v", 1, true), param("w", 1, true), param("w", 1, true)];
    let units = vec![unit("a", vec![param("u", 1, true)]), unit("b", twice)];
    let expected = PlanError::DuplicateParameter { name: "w".to_owned(), first: 1, second: 2 };
    assert_eq!(ShardPlan::new(units, two_shards(), None), Err(expected));
}

#[test]
fn documents_that_contradict_themselves_are_refused() {
    let text = small_plan().to_json();
    let edits = [
        (r#""offset":0"#, r#""offset":4"#, "offset"),
        (r#""padded_numel":8"#, r#""padded_numel":16"#, "padded_numel"),
        (r#""reduce_order":[2,0]"#, r#""reduce_order":[0,2]"#, "reduce_order 0"),
        (r#""num_shards":2"#, r#""num_shards":2,"extra":1"#, "extra"),
        (r#""dtype":"fp32""#, r#""dtype":"fp31""#, "unknown dtype"),
        (r#""format":"shardcore.shard_plan.v1""#, r#""format":"shardcore.shard_plan.v9""#, "v9"),
    ];
    for (from, to, named) in edits {
        assert!(text.contains(from), "{from} is not in {text}");
        let error = ShardPlan::from_json(&text.replacen(from, to, 1)).unwrap_err();
        assert!(matches!(error, PlanError::BadDocument { .. }) && error.to_string().contains(named), "{error}");
    }
    assert!(matches!(FlatLayout::from_json(&text), Err(PlanError::BadDocument { .. })));
}

/// Ten billion elements in 1,000 groups over 16,384 ranks, counted in entries rather than in time: the plan is no
/// larger than for one rank, and a rank's view touches only what the rank holds.
#[test]
fn work_follows_what_a_rank_holds_and_not_how_many_ranks_there_are() {
    let units: Vec<Unit> = (0..1_000)
        .map(|index| {
            let params = (0..10).map(|other| param(&format!("{index}.{other}"), 1_000_000, true));
            unit(&index.to_string(), params.collect())
        })
        .collect();
    let plan = |num_shards| ShardPlan::new(units.clone(), Sharding::new(num_shards, 256).unwrap(), None).unwrap();
    let (wide, narrow) = (plan(16_384), plan(1));
    let num_entries = |plan: &ShardPlan| plan.groups().iter().map(|group| group.layout.entries().len()).sum::<usize>();
    assert_eq!((num_entries(&wide), num_entries(&narrow)), (10_000, 10_000));
    assert!(wide.to_json().len() < narrow.to_json().len() + 16_384, "nothing is stored per rank");

    for rank in [0, 1, 8_191, 16_383] {
        for group in wide.groups() {
            let held: u64 = group.layout.ranges(rank).unwrap().map(|range| range.stop - range.start).sum();
            assert!(group.layout.ranges(rank).unwrap().count() <= 2, "a shard is far smaller than a parameter");
            assert!(held <= group.layout.shard_numel());
        }
    }
}
