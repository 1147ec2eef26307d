//! Laws of text and JSON: what is written reads back, and nothing else reads.

use proptest::prelude::*;
use shardcore_plan::schedule::{
    Action, ActionKind, CommModel, Gating, Header, Lowering, OptimizerStep, Placement, ReduceTiming, Schedule,
    ScheduleName,
};
use shardcore_plan::{PlanError, first_difference};

use crate::given::{cases, program};
use crate::named::made;
use crate::timed::lowered;

fn schedule() -> impl Strategy<Value = Schedule> {
    let lowered = (program(), prop::option::of(0_u8..4), any::<bool>()).prop_map(|(schedule, zero_stage, tie)| {
        let tied = if tie && schedule.num_stages() > 2 { vec![vec![0, 2], vec![1, 2]] } else { vec![] };
        let optimizer = if tie { OptimizerStep::Barrier } else { OptimizerStep::PostValidation };
        lowered(&schedule, &Lowering { zero_stage, tied, optimizer, ..Lowering::default() })
    });
    prop_oneof![program(), lowered]
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn text_reads_back(schedule in schedule()) {
        let text = schedule.to_text();
        prop_assert_eq!(&Schedule::from_text(&text).unwrap(), &schedule);
        prop_assert!(refused(text.trim_end_matches('\n')).contains("expected a line break behind the last line"));
    }

    #[test]
    fn json_reads_back(schedule in schedule()) {
        prop_assert_eq!(&Schedule::from_json(&schedule.to_json()).unwrap(), &schedule);
    }

    /// One letter more, less or other gives an error or another schedule, never the same one.
    #[test]
    fn a_changed_text_is_never_the_same_schedule(
        schedule in schedule(),
        at in any::<prop::sample::Index>(),
        letter in prop::sample::select("0123456789 \n\t&@_:,FBIWSNDRECVx\u{e9}".chars().collect::<Vec<_>>()),
        action in 0..3,
    ) {
        let text = schedule.to_text();
        let mut letters: Vec<char> = text.chars().collect();
        let at = at.index(letters.len());
        match action {
            0 => letters.insert(at, letter),
            1 => drop(letters.remove(at)),
            _ => letters[at] = letter,
        }
        let changed: String = letters.into_iter().collect();
        if changed != text {
            prop_assert_ne!(Schedule::from_text(&changed), Ok(schedule));
        }
    }

    #[test]
    fn a_cut_text_is_refused(schedule in schedule(), at in any::<prop::sample::Index>()) {
        let text = schedule.to_text();
        let cut = &text[..at.index(text.len())];
        prop_assert_ne!(Schedule::from_text(cut), Ok(schedule));
    }

    #[test]
    fn digests_tell_schedules_apart(first in schedule(), second in schedule()) {
        prop_assert_eq!(first == second, first.digest() == second.digest());
        prop_assert_eq!(first.digest(), Schedule::from_text(&first.to_text()).unwrap().digest());
        let difference = first_difference(&first.to_json(), &second.to_json()).unwrap();
        prop_assert_eq!(first == second, difference.is_none());
    }
}

fn small() -> Schedule {
    made(ScheduleName::OneForwardOneBackward, 2, 2, 1)
}

const SMALL: &str = "shardcore.pipeline_schedule.v1
name 1f1b
num_ranks 2
num_chunks 1
num_microbatches 2
num_slices 1
num_chains 1
placement 0 1
gating all
comm blocking
lowered no
rank 0: 0F0 0F1 0B0 0B1
rank 1: 1F0 1B0 1F1 1B1
";

#[test]
fn text_is_this() {
    assert_eq!(small().to_text(), SMALL);
}

#[test]
fn lowered_text_is_this() {
    let lowering = Lowering {
        zero_stage: Some(3),
        reduce: ReduceTiming::Once,
        optimizer: OptimizerStep::Barrier,
        tied: vec![vec![0, 1]],
        ..Lowering::default()
    };
    let expected = "lowered yes
zero_stage 3
reduce once
optimizer barrier
tied 0+1
receives_ahead 2
max_unsharded 2
rank 0: 0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1@1 0B0 0B1@1 0RESHARD 0TIED_REDUCE 0REDUCE 0OPTIM
rank 1: 1RECV_F0 1RECV_F1@1 1UNSHARD 1F0 1B0 1SEND_B0 1F1@1 1B1 1SEND_B1 1RESHARD 1TIED_REDUCE 1REDUCE 1OPTIM
";
    let text = small().lower(&lowering).unwrap().to_text();
    assert_eq!(text.split_once("comm blocking\n").unwrap().1, expected);
}

#[test]
fn json_is_this() {
    let expected = concat!(
        r#"{"format":"shardcore.pipeline_schedule.v1","name":"1f1b","num_ranks":2,"num_chunks":1,"num_microbatches":2,"#,
        r#""num_slices":1,"num_chains":1,"placement":[0,1],"gating":"all","comm":"blocking","lowering":null,"#,
        r#""programs":[["0F0","0F1","0B0","0B1"],["1F0","1B0","1F1","1B1"]]}"#,
    );
    assert_eq!(small().to_json(), expected);
}

#[test]
fn composites_read_back() {
    let f = Action::forward(0, 1).joined();
    let header = Header { gating: Gating::Own, ..Header::new("mine", Placement::looped(1, 1).unwrap(), 2) };
    let program = vec![Action::forward(0, 0), f, Action::backward(0, 0), Action::backward(0, 1)];
    let schedule = Schedule::new(header, vec![program]).unwrap();
    assert!(schedule.to_text().ends_with("rank 0: 0F0 0F1&0B0 0B1\n"));
    assert!(schedule.to_json().contains(r#"["0F0","0F1&0B0","0B1"]"#));
    assert_eq!(Schedule::from_text(&schedule.to_text()).as_ref(), Ok(&schedule));
    assert_eq!(Schedule::from_json(&schedule.to_json()), Ok(schedule));
}

/// A derived reader takes the values of an object as a list too.
#[test]
fn lists_in_place_of_objects_are_refused() {
    let json = small().lower(&Lowering::default()).unwrap().to_json();
    let start = json.find(r#""lowering":{"#).unwrap() + r#""lowering":"#.len();
    let end = start + json[start..].find('}').unwrap() + 1;
    let list = format!(r#"{}[null,"once","absent",[],2,2]{}"#, &json[..start], &json[end..]);
    let error = Schedule::from_json(&list).unwrap_err().to_string();
    assert!(error.contains("invalid type: sequence, expected an object"), "{error}");
}

/// So many micro-batches that a schedule has none, in the cell that says so.
#[test]
fn micro_batches_out_of_range_are_named_by_line_and_column() {
    for number in ["16777216", "4294967295"] {
        let text = format!("0F0,0F{number},0B0\r\n");
        let error = Schedule::from_torch_csv("mine", &text).unwrap_err().to_string();
        assert!(error.contains("line 1, column 5") && error.contains(number), "{error}");
    }
}

/// A parser elsewhere read "1F2 1B2" as one action and dropped the rest.
#[test]
fn two_actions_are_never_one() {
    assert!("1F2 1B2".parse::<Action>().is_err());
    assert_eq!("1F2".parse(), Ok(Action::forward(1, 2)));
    assert_eq!(Schedule::from_text(SMALL).unwrap().program(1).unwrap().len(), 4);
}

#[test]
fn only_the_one_way_of_writing_an_action_reads() {
    let junk = [
        "",
        "F",
        "2F",
        "F0",
        "2f0",
        "2F0 ",
        " 2F0",
        "2F0x",
        "2F00",
        "02F0",
        "+2F0",
        "2F+0",
        "2F-1",
        "2F0@",
        "2F0@0",
        "2F0@00",
        "2F0@65536",
        "0W0@1",
        "0SEND_F0@1",
        "0SEND_B0@1",
        "0OPTIM@1",
        "2OPTIM0",
        "2X0",
        "2FB0",
        "2SEND0",
        "4294967296F0",
        "2F4294967296",
        "2F0&&",
        "&2F0",
        "\u{ff12}F0",
        "2F0\n",
    ];
    for text in junk {
        assert!(text.parse::<Action>().is_err(), "{text:?}");
    }
    for &kind in ActionKind::ALL {
        let action = Action::new(kind, 7, if kind.has_microbatch() { 11 } else { 0 });
        assert_eq!(action.to_string().parse(), Ok(action));
        assert_eq!(action.joined().to_string().parse(), Ok(action.joined()));
        let in_slot = action.in_slot(3).joined();
        assert_eq!(in_slot.to_string().parse().ok(), kind.has_slot().then_some(in_slot));
    }
}

/// Where and why a text is refused.
fn refused(text: &str) -> String {
    Schedule::from_text(text).unwrap_err().to_string()
}

#[test]
fn errors_name_the_position() {
    let changed = |from: &str, to: &str| refused(&SMALL.replacen(from, to, 1));
    let expected = [
        (changed("1B0", "1Q0"), "line 13, column 13: \"1Q0\": unknown action \"Q\""),
        (changed("0F1", "0F1x"), "line 12, column 13: \"0F1x\": \"x\" is left behind the action"),
        (changed("0F1 ", "0F1  "), "line 12, column 17: expected an action such as 2F0, got \"\""),
        (changed("0F0 0F1", "0F0&1Z 0F1"), "line 12, column 13: \"1Z\": unknown action \"Z\""),
        (changed("placement 0 1", "placement 0 x"), "line 8, column 13: expected a whole number below 2^32, got \"x\""),
        (changed("placement 0 1", "placement 0 2"), "line 8, column 11: bad placement of stages: rank 2 is named"),
        (changed("gating all", "gating any"), "line 9, column 8: unknown gating \"any\": expected one of all, own"),
        (changed("lowered no", "lowered maybe"), "line 11, column 9: expected \"yes\" or \"no\", got \"maybe\""),
        (changed("num_ranks 2", "num_ranks 3"), "the placement has 2 ranks and 1 chunks per rank, not 3 and 1"),
        (changed("v1", "v2"), "line 1, column 1: expected \"shardcore.pipeline_schedule.v1\""),
        (refused(&format!("{SMALL}rank 2: 0F0\n")), "line 14, column 1: expected the end, got \"rank 2: 0F0\""),
        (refused(&format!("{SMALL}\n")), "line 14, column 1: expected the end, got \"\""),
        (refused(SMALL.trim_end_matches("rank 1: 1F0 1B0 1F1 1B1\n")), "line 13, column 1: expected \"rank 1:\""),
        (refused(SMALL.trim_end()), "line 13, column 24: expected a line break behind the last line, got the end"),
        (changed("0F1", "0W1@1"), "line 12, column 13: \"0W1@1\": W has no slot: only receives, F, B and I have one"),
        (refused(""), "line 1, column 1: expected"),
    ];
    for (got, wanted) in expected {
        assert!(got.contains(wanted), "{got}\n{wanted}");
    }
}

#[test]
fn a_header_that_contradicts_itself_is_refused() {
    let document = small().to_json();
    let refused = |from: &str, to: &str| Schedule::from_json(&document.replacen(from, to, 1)).unwrap_err().to_string();
    assert!(refused("\"num_chunks\":1", "\"num_chunks\":2").contains("it states [2, 2] ranks and chunks"));
    assert!(refused("\"1F0\"", "\"1F0 1B0\"").contains("programs[1][0]: \"1F0 1B0\""));
    assert!(refused("\"1F0\"", "\"9F0\"").contains("rank 1, position 0, 9F0: there are stages 0 to 1 only"));
    assert!(refused("]]}", "]]} x").contains("trailing characters"));
    assert!(refused("\"comm\"", "\"extra\":1,\"comm\"").contains("unknown field"));
}

#[test]
fn schedules_of_a_wrong_shape_are_refused() {
    let header = |name: &str| Header::new(name, Placement::looped(2, 1).unwrap(), 2);
    let new = |programs| Schedule::new(header("mine"), programs).unwrap_err().to_string();
    assert!(new(vec![vec![]]).contains("1 programs for 2 ranks"));
    assert!(new(vec![vec![Action::forward(2, 0)], vec![]]).contains("there are stages 0 to 1 only"));
    assert!(new(vec![vec![Action::forward(0, 2)], vec![]]).contains("there are micro-batches 0 to 1 only"));
    assert!(new(vec![vec![Action::forward(0, 0).joined()], vec![]]).contains("a composite joins compute actions"));
    assert!(new(vec![vec![Action::forward(0, 0).in_slot(1)], vec![]]).contains("have a slot"));
    assert!(new(vec![vec![Action::new(ActionKind::SendForward, 0, 0)], vec![]]).contains("only a lowered schedule"));
    let long = "a".repeat(101);
    for (name, told) in [("", ""), ("a b", "a b"), ("a\nb", "a\nb"), (&long, &format!("{}...", &long[..40]))] {
        let refused = Schedule::new(header(name), vec![vec![], vec![]]);
        assert_eq!(refused, Err(PlanError::BadScheduleName { name: told.to_owned() }));
    }
}

#[test]
fn tables_are_this() {
    let expected = "\
1f1b: looped, 2 ranks x 1 chunk, 2 micro-batches
rank  stages  F  B  I  W  messages  held  first
   0  0       2  2  0  0         0     2  0F0 0F1 0B0 0B1
   1  1       2  2  0  0         0     1  1F0 1B0 1F1 1B1";
    assert_eq!(small().explain(), expected);
    assert_eq!(CommModel::PairFifo.to_string(), "pair-fifo");
}
