//! Megatron's layout strings: what is read, what is written, what is refused and where.

use proptest::prelude::*;
use shardcore_plan::PlanError;
use shardcore_plan::schedule::megatron::{LayerKind, LayerLayout};

/// The stages of a layout string, letter by letter.
fn stages(text: &str) -> Vec<String> {
    let layout = LayerLayout::parse(text).unwrap();
    layout.stages().map(|stage| stage.iter().map(|kind| kind.letter()).collect()).collect()
}

fn refused(text: &str) -> String {
    LayerLayout::parse(text).unwrap_err().to_string()
}

fn layout() -> impl Strategy<Value = LayerLayout> {
    (0_usize..40, 0_usize..4, prop::collection::vec(any::<prop::sample::Index>(), 0..12)).prop_map(|(t, m, cuts)| {
        let middle = [vec![LayerKind::Decoder; t], vec![LayerKind::Mtp; m]].concat();
        let layers = [vec![LayerKind::Embedding], middle, vec![LayerKind::Loss]].concat();
        let mut boundaries: Vec<usize> = cuts.iter().map(|cut| cut.index(layers.len() - 1) + 1).collect();
        boundaries.extend([0, layers.len()]);
        boundaries.sort_unstable();
        boundaries.dedup();
        LayerLayout::new(layers, boundaries).unwrap()
    })
}

proptest! {
    #[test]
    fn what_is_written_reads_back(layout in layout()) {
        prop_assert_eq!(LayerLayout::parse(&layout.to_string()).unwrap(), layout);
    }

    /// A layout spelt out, without any repeat, is the same one.
    #[test]
    fn repeats_are_only_short_for_what_they_repeat(layout in layout()) {
        let stages = layout.stages().map(|stage| stage.iter().map(|kind| kind.letter()).collect::<String>());
        let spelt = stages.collect::<Vec<_>>().join("|");
        prop_assert_eq!(LayerLayout::parse(&spelt).unwrap(), layout);
    }

    #[test]
    fn no_text_panics(text in "[EtmL|*(),0-9 x]{0,12}") {
        if let Ok(layout) = LayerLayout::parse(&text) {
            prop_assert_eq!(LayerLayout::parse(&layout.to_string()).unwrap(), layout);
        }
    }
}

#[test]
fn the_documented_example() {
    let found = stages("Et*3|(tt|)*29,m|L");
    assert_eq!(found.len(), 32);
    assert_eq!((found[0].as_str(), found[30].as_str(), found[31].as_str()), ("Ettt", "m", "L"));
    assert!(found[1..30].iter().all(|stage| stage == "tt"));
    assert_eq!(LayerLayout::parse("Et*3|(tt|)*29,m|L").unwrap().to_string(), "Et*3|(tt|)*29m|L");
}

#[test]
fn repeats_and_bars_mix_freely() {
    assert_eq!(stages("Et|(t|)*3tL"), ["Et", "t", "t", "t", "tL"]);
    assert_eq!(stages("E(t|t)*2,L"), ["Et", "tt", "tL"]);
    assert_eq!(stages("Et(|tt)*2|L"), ["Et", "tt", "tt", "L"]);
    assert_eq!(stages("E,t,|,t*2,m*2|L"), ["Et", "ttmm", "L"]);
    assert_eq!(stages("(Et*2|)*1L"), ["Ett", "L"]);
}

#[test]
fn what_is_wrong_is_named_with_its_place() {
    for (text, expected) in [
        ("", "character 1: stage 0 has no layer"),
        ("E||t|L", "character 3: stage 1 has no layer"),
        ("Et|L|", "character 6: stage 2 has no layer"),
        ("Et tL", "character 3: unexpected ' '"),
        ("ExL", "character 2: unexpected 'x': expected E, t, m or L"),
        ("E*L", "character 3: expected the number of repeats behind *"),
        ("*3EL", "character 1: nothing stands before *"),
        ("Et*2*3L", "character 5: nothing stands before *"),
        ("Et*0L", "character 4: 0 repeats"),
        ("Et*99999999999999999999999L", "repeats make more than 1048576 layers"),
        ("E(t|L", "character 2: this parenthesis is never closed"),
        ("Et)*2L", "character 3: a closing parenthesis without an opening one"),
        ("E((t)*2)*2L", "character 3: parentheses do not nest"),
        ("E(tt)L", "character 5: a closing parenthesis is followed by *n"),
        ("E()*2L", "character 3: the parentheses hold nothing"),
        ("tL", "character 1: the first layer must be the embedding (E), not decoder"),
        ("Ett", "character 3: the last layer must be the loss (L), not decoder"),
        ("EtE|L", "character 3: a second embedding"),
        ("EtL|L", "character 3: a loss (L) that is not the last layer"),
        ("Emt|L", "character 3: a decoder layer (t) behind one of multi-token prediction"),
    ] {
        let found = refused(text);
        assert!(found.starts_with("not a pipeline layout: ") && found.contains(expected), "{text:?}: {found}");
    }
}

#[test]
fn layers_and_boundaries_are_checked() {
    let layers = vec![LayerKind::Embedding, LayerKind::Loss];
    assert!(matches!(LayerLayout::new(layers.clone(), vec![0, 1]), Err(PlanError::BadPartition { .. })));
    assert_eq!(LayerLayout::new(layers, vec![0, 1, 2]).unwrap().to_string(), "E|L");
    let reversed = LayerLayout::new(vec![LayerKind::Loss, LayerKind::Embedding], vec![0, 2]).unwrap_err();
    assert!(reversed.to_string().contains("layer 0: the first layer must be the embedding (E), not loss"));
    assert!(LayerLayout::new(vec![], vec![0]).unwrap_err().to_string().contains("there is no layer"));
    assert_eq!(LayerKind::parse("mtp"), Ok(LayerKind::Mtp));
    assert!(LayerKind::parse("attention").unwrap_err().to_string().contains("unknown layer \"attention\""));
}
