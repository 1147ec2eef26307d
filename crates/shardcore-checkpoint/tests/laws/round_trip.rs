//! What is read is what was written, whatever is asked for and however it was cut.

use proptest::prelude::*;
use shardcore_checkpoint::checksum::{Sums, from_text, sum, to_text};
use shardcore_checkpoint::safetensors::{Entry, header};
use shardcore_checkpoint::{Checkpoint, CheckpointError, FileWriter, Want};

use crate::given::{self, Folder, save, tensors};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(given::cases(24, 400)))]

    #[test]
    fn any_range_of_any_tensor_comes_back(
        tensors in tensors(), num_files in 1_usize..4, ranges in prop::collection::vec((any::<u64>(), any::<u64>()), 6),
    ) {
        let folder = Folder::new();
        let path = save(folder.path(), "step1", &tensors, num_files).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        prop_assert_eq!(checkpoint.index().training.get(), r#"{"big":123456789012345678901234567890}"#);
        let ranges: Vec<(u64, u64)> = tensors.iter().zip(&ranges).map(|(tensor, &(a, b))| {
            let (a, b) = (a % (tensor.numel() + 1), b % (tensor.numel() + 1));
            (a.min(b), a.max(b))
        }).collect();
        let nbytes = |i: usize, element: u64| usize::try_from(element * tensors[i].itemsize()).unwrap();
        let mut outs: Vec<Vec<u8>> =
            ranges.iter().enumerate().map(|(i, &(start, stop))| vec![0xEE; nbytes(i, stop - start)]).collect();
        let wants = outs.iter_mut().enumerate().map(|(i, out)| Want {
            tensor: checkpoint.find("weight", &tensors[i].name).unwrap(), runs: None, start: ranges[i].0, stop: ranges[i].1, out,
        });
        checkpoint.read(wants.collect()).unwrap();
        for (i, out) in outs.iter().enumerate() {
            prop_assert_eq!(&out[..], &tensors[i].bytes[nbytes(i, ranges[i].0)..nbytes(i, ranges[i].1)]);
        }
    }

    #[test]
    fn sums_do_not_depend_on_how_the_bytes_come(
        bytes in prop::collection::vec(any::<u8>(), 0..500), block in 1_u64..100, cut in 1_usize..50,
    ) {
        let mut sums = Sums::new(block);
        bytes.chunks(cut).for_each(|chunk| sums.update(chunk));
        let expected: Vec<u32> = bytes.chunks(usize::try_from(block).unwrap()).map(sum).collect();
        let text = to_text(&expected);
        prop_assert_eq!(sums.finish(), expected.clone());
        for (number, expected) in expected.into_iter().enumerate() {
            prop_assert_eq!(from_text(&text, number as u64), Some(expected));
        }
    }
}

#[test]
fn the_checksum_is_that_of_zlib() {
    assert_eq!(sum(b"123456789"), 0xcbf4_3926);
}

#[test]
fn a_piece_of_several_blocks_is_read_in_the_middle() {
    let folder = Folder::new();
    let bytes: Vec<u8> = (0..9_u32 << 20).map(|at| (at % 251) as u8).collect();
    let tensor = given::Tensor { name: "large".to_owned(), dtype: "U8", bytes: bytes.clone(), cuts: vec![17] };
    let path = save(folder.path(), "step1", &[tensor], 1).unwrap();
    let mut out = vec![0; 5 << 20];
    let start = 3_u64 << 20;
    Checkpoint::open(&path)
        .unwrap()
        .read(vec![Want { tensor: 0, runs: None, start, stop: start + out.len() as u64, out: &mut out }])
        .unwrap();
    assert!(out == bytes[3 << 20..8 << 20]);
}

#[test]
fn headers_are_aligned_and_name_each_tensor_once() {
    let entry = |name: &str| Entry { name: name.to_owned(), dtype: "F32".to_owned(), shape: vec![2, 3] };
    let (bytes, starts) = header(&[entry("a"), entry("b")], &[]).unwrap();
    assert_eq!(bytes.len() % 64, 0);
    assert_eq!(starts, [bytes.len() as u64, bytes.len() as u64 + 24]);
    let text = std::str::from_utf8(&bytes[8..]).unwrap();
    assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), text.len() as u64);
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(text).unwrap()["b"]["data_offsets"],
        serde_json::json!([24, 48])
    );
    assert!(matches!(header(&[entry("a"), entry("a")], &[]), Err(CheckpointError::BadIndex(_))));
}

#[test]
fn too_many_or_too_few_bytes_are_refused() {
    let folder = Folder::new();
    let entries = [Entry { name: "a".to_owned(), dtype: "U8".to_owned(), shape: vec![3] }];
    let mut writer = FileWriter::create(&folder.path().join("many"), &entries, &[]).unwrap();
    assert!(matches!(writer.put(&[0; 4]), Err(CheckpointError::Internal(_))));
    let writer = FileWriter::create(&folder.path().join("few"), &entries, &[]).unwrap();
    assert!(matches!(writer.finish(false), Err(CheckpointError::Internal(_))));
    let again = FileWriter::create(&folder.path().join("few"), &entries, &[]);
    assert!(matches!(again.err(), Some(CheckpointError::Storage(_))), "an existing file is never overwritten");
}
