//! Any byte of any file that is flipped or cut off is found, and the place is told.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use shardcore_checkpoint::verify::verify;
use shardcore_checkpoint::{Checkpoint, CheckpointError, Want};

use crate::given::{self, Folder, save, tensors};

fn files_of(folder: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

/// Reads everything; the error, if there is one.
fn load(folder: &Path) -> Option<CheckpointError> {
    let checkpoint = match Checkpoint::open(folder) {
        Ok(checkpoint) => checkpoint,
        Err(error) => return Some(error),
    };
    for file in 0..checkpoint.index().files.len() {
        if let Err(error) = checkpoint.check_header(file) {
            return Some(error);
        }
    }
    for (tensor, entry) in checkpoint.index().tensors.iter().enumerate() {
        let mut out = vec![0; usize::try_from(entry.numel() * entry.itemsize()).unwrap()];
        let want = Want { tensor, runs: None, start: 0, stop: entry.numel(), out: &mut out };
        if let Err(error) = checkpoint.read(vec![want]) {
            return Some(error);
        }
    }
    None
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(given::cases(32, 600)))]

    #[test]
    fn a_flipped_byte_is_located(
        tensors in tensors(), num_files in 1_usize..3, file in any::<prop::sample::Index>(),
        byte in any::<prop::sample::Index>(), flip in 1_u8..=255,
    ) {
        let run = Folder::new();
        let folder = save(run.path(), "step1", &tensors, num_files).unwrap();
        prop_assert_eq!(verify(&folder).unwrap(), vec![]);
        let path = file.get(&files_of(&folder)).clone();
        let mut bytes = fs::read(&path).unwrap();
        let at = byte.index(bytes.len());
        bytes[at] ^= flip;
        fs::write(&path, &bytes).unwrap();
        let found = verify(&folder).unwrap();
        prop_assert_eq!(found.len(), 1, "{:?}", found);
        prop_assert_eq!(&found[0].path, &path);
        prop_assert!(found[0].start <= at as u64 && (at as u64) < found[0].stop, "{:?} for byte {at}", found);
        let damaged = load(&folder);
        prop_assert!(matches!(damaged, Some(CheckpointError::Damaged { .. })), "{:?}", damaged);
    }

    #[test]
    fn a_file_that_is_cut_off_or_gone_is_named(
        tensors in tensors(), file in any::<prop::sample::Index>(), length in any::<prop::sample::Index>(), gone in any::<bool>(),
    ) {
        let run = Folder::new();
        let folder = save(run.path(), "step1", &tensors, 2).unwrap();
        let path = file.get(&files_of(&folder)).clone();
        if gone {
            fs::remove_file(&path).unwrap();
        } else {
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, &bytes[..length.index(bytes.len())]).unwrap();
        }
        let refused = load(&folder).unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        prop_assert!(refused.to_string().contains(&name), "{}", refused);
        match verify(&folder) {
            Ok(found) => prop_assert!(!found.is_empty() && found.iter().all(|damage| damage.path == path), "{:?}", found),
            Err(error) => prop_assert!(matches!(error, CheckpointError::Incomplete { .. }), "{}", error),
        }
    }
}
