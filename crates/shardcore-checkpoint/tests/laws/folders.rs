//! At every moment of a save, the checkpoints before it are whole and found.

use std::fs;
use std::path::Path;

use shardcore_checkpoint::folder::{Keep, begin, choose, commit, latest, list, point_latest, prune};
use shardcore_checkpoint::index::{FileEntry, PieceEntry, TensorEntry};
use shardcore_checkpoint::{CheckpointError, Index};

use crate::given::{Folder, Tensor, empty_index, save};

fn tensors(value: u8) -> Vec<Tensor> {
    vec![Tensor { name: "a".to_owned(), dtype: "U8", bytes: vec![value; 100], cuts: vec![40] }]
}

fn chosen(run: &Path) -> String {
    choose(run, None).unwrap().path.file_name().unwrap().to_string_lossy().into_owned()
}

#[test]
fn latest_is_followed_and_what_was_cut_off_is_skipped_with_a_note() {
    let run = Folder::new();
    assert!(matches!(choose(run.path(), None), Err(CheckpointError::NoneComplete { .. })));
    save(run.path(), "step1", &tensors(1), 2).unwrap();
    assert_eq!(chosen(run.path()), "step1");
    point_latest(run.path(), "step1").unwrap();
    save(run.path(), "step2", &tensors(2), 2).unwrap();
    let followed = choose(run.path(), None).unwrap();
    assert!(followed.path.ends_with("step1") && followed.notes[0].contains("step2"), "{followed:?}");
    point_latest(run.path(), "step2").unwrap();
    assert!(choose(run.path(), None).unwrap().notes.is_empty());
    fs::remove_file(run.path().join("step2/complete")).unwrap();
    let skipped = choose(run.path(), None).unwrap();
    assert!(
        skipped.path.ends_with("step1") && skipped.notes[0].contains("step2 (saving it was cut off)"),
        "{skipped:?}"
    );
    assert!(matches!(choose(run.path(), Some("step2")), Err(CheckpointError::Incomplete { .. })));
    assert!(matches!(choose(&run.path().join("step2"), None), Err(CheckpointError::Incomplete { .. })));
    fs::write(run.path().join("latest"), "").unwrap();
    assert_eq!(latest(run.path()).unwrap(), None);
    assert_eq!(chosen(run.path()), "step1");
}

#[test]
fn a_tag_is_replaced_wholly_or_not_at_all() {
    let run = Folder::new();
    save(run.path(), "best", &tensors(1), 1).unwrap();
    let path = save(run.path(), "best", &tensors(2), 1).unwrap();
    assert_eq!(list(run.path()).unwrap().len(), 1);
    // Killed between the two renames, and before the mark.
    let old = run.path().join(".replaced-best");
    fs::rename(&path, &old).unwrap();
    assert!(choose(run.path(), None).unwrap().path.ends_with(".replaced-best"));
    fs::create_dir(&path).unwrap();
    fs::write(path.join("index.json"), "{}").unwrap();
    assert!(choose(run.path(), Some("best")).unwrap().path.ends_with(".replaced-best"));
    begin(run.path(), "other").unwrap();
    assert!(!old.exists() && choose(run.path(), Some("best")).unwrap().path.ends_with("best"));
}

#[test]
fn what_a_killed_save_left_aside_is_listed_and_removed_by_the_next() {
    let run = Folder::new();
    let aside = begin(run.path(), "step1").unwrap();
    fs::write(aside.join("rank-00000.safetensors"), "half").unwrap();
    let found = list(run.path()).unwrap();
    assert_eq!((found[0].tag.as_str(), found[0].sequence), ("step1", None));
    assert!(
        matches!(choose(run.path(), None), Err(CheckpointError::NoneComplete { skipped, .. }) if skipped.len() == 1)
    );
    let again = begin(run.path(), "step1").unwrap();
    assert_eq!(fs::read_dir(again).unwrap().count(), 0);
}

#[test]
fn old_ones_are_removed_and_some_are_kept_for_good() {
    let run = Folder::new();
    for step in 1..=7_u8 {
        save(run.path(), &format!("step{step}"), &tensors(step), 1).unwrap();
    }
    point_latest(run.path(), "step1").unwrap();
    assert!(prune(run.path(), Keep::default()).unwrap().is_empty());
    let removed = prune(run.path(), Keep { last: Some(2), every: Some(3) }).unwrap();
    assert_eq!(removed, ["step2", "step4", "step5"]);
    let left: Vec<String> = list(run.path()).unwrap().into_iter().map(|found| found.tag).collect();
    assert_eq!(left, ["step1", "step3", "step6", "step7"]);
    assert_eq!(prune(run.path(), Keep { last: Some(0), every: None }).unwrap(), ["step3", "step6"]);
}

#[test]
fn tags_that_are_no_names_of_folders_are_refused() {
    let run = Folder::new();
    for tag in ["", "latest", "a/b", "..", ".hidden", " x", "x\n"] {
        assert!(matches!(begin(run.path(), tag), Err(CheckpointError::BadTag { .. })), "{tag:?}");
    }
}

#[test]
fn an_index_that_does_not_cover_its_tensors_is_refused() {
    let file = FileEntry { name: "f".to_owned(), nbytes: 12, header_nbytes: 8, header_crc32: String::new() };
    let piece = |start, stop, offset| PieceEntry { file: 0, offset, start, stop, crc32: "0".repeat(8), runs: None };
    let index = |pieces: Vec<PieceEntry>| {
        let (role, name, dtype) = ("weight".to_owned(), "a".to_owned(), "U8".to_owned());
        let tensors = vec![TensorEntry { role, name, dtype, shape: vec![4], pieces }];
        Index { files: vec![file.clone()], tensors, ..empty_index() }
    };
    index(vec![piece(0, 2, 8), piece(2, 4, 10)]).check().unwrap();
    for (pieces, says) in [
        (vec![piece(0, 2, 8)], "its pieces take 10"),
        (vec![piece(0, 2, 8), piece(1, 3, 10)], "elements from 2 on are expected"),
        (vec![piece(0, 4, 9)], "outside the data"),
        (vec![piece(0, 5, 8)], "its pieces take 13"),
        (vec![PieceEntry { crc32: String::new(), ..piece(0, 4, 8) }], "lacks checksums"),
    ] {
        let refused = index(pieces).check().unwrap_err().to_string();
        assert!(refused.contains(says), "{refused}");
    }
    let run = Folder::new();
    begin(run.path(), "step1").unwrap();
    let missing = commit(run.path(), "step1", index(vec![piece(0, 4, 8)]));
    assert!(matches!(missing, Err(CheckpointError::Damaged { .. })), "a file of the index that was never written");
    assert!(!run.path().join("step1").exists());
}
