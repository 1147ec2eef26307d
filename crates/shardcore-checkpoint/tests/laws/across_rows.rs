//! Tensors that were saved in columns, and are read as a whole or in other columns.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use shardcore_checkpoint::checksum::to_text;
use shardcore_checkpoint::index::{PieceEntry, TensorEntry};
use shardcore_checkpoint::safetensors::Entry;
use shardcore_checkpoint::{Checkpoint, CheckpointError, FileWriter, Result, Runs, Want, folder, verify};

use crate::given::{self, Folder, empty_index, file_entry};

/// Rows of columns; the elements are their own numbers.
#[derive(Clone, Debug)]
struct Table {
    rows: u32,
    widths: Vec<u32>,
}

impl Table {
    fn stride(&self) -> u32 {
        self.widths.iter().sum()
    }

    fn numel(&self) -> u64 {
        u64::from(self.rows * self.stride())
    }

    fn parts(&self) -> Vec<Runs> {
        let stride = u64::from(self.stride());
        let firsts = self.widths.iter().scan(0, |sum, &width| {
            *sum += u64::from(width);
            Some(*sum - u64::from(width))
        });
        firsts.zip(&self.widths).map(|(first, &width)| Runs { first, length: u64::from(width), stride }).collect()
    }
}

/// The bytes of a part's elements `[start, stop)`, one by one.
fn bytes_of(runs: Option<Runs>, start: u64, stop: u64) -> Vec<u8> {
    let place = |i: u64| runs.map_or(i, |r| r.first + i / r.length * r.stride + i % r.length);
    (start..stop).flat_map(|i| u32::try_from(place(i)).unwrap().to_le_bytes()).collect()
}

fn range(numel: u64, (one, other): (u64, u64)) -> (u64, u64) {
    let (one, other) = (one % (numel + 1), other % (numel + 1));
    (one.min(other), one.max(other))
}

/// Writes each part into a file of its own, in two pieces.
fn save(run: &Path, table: &Table, cut: u64) -> Result<PathBuf> {
    let aside = folder::begin(run, "tag")?;
    let mut index = empty_index();
    let shape = vec![u64::from(table.rows), u64::from(table.stride())];
    index.tensors =
        vec![TensorEntry { role: "weight".into(), name: "w".into(), dtype: "U32".into(), shape, pieces: Vec::new() }];
    for (file, &runs) in table.parts().iter().enumerate() {
        let numel = runs.numel(table.numel()).unwrap();
        let bounds = [(0, cut % (numel + 1)), (cut % (numel + 1), numel)];
        let places: Vec<(u64, u64)> = bounds.into_iter().filter(|(start, stop)| start < stop).collect();
        let entry = |&(start, stop): &(u64, u64)| Entry {
            name: format!("w {start}"),
            dtype: "U32".into(),
            shape: vec![stop - start],
        };
        let entries: Vec<Entry> = places.iter().map(entry).collect();
        let name = format!("rank-{file:05}.safetensors");
        let mut writer = FileWriter::create(&aside.join(&name), &entries, &[])?;
        for &(start, stop) in &places {
            writer.put(&bytes_of(Some(runs), start, stop))?;
        }
        let written = writer.finish(true)?;
        for (&(start, stop), (offset, sums)) in places.iter().zip(&written.entries) {
            let crc32 = to_text(sums);
            let piece = PieceEntry { file, offset: *offset, start, stop, crc32, runs: Some(runs) };
            index.tensors[0].pieces.push(piece);
        }
        index.files.push(file_entry(name, &written));
    }
    folder::commit(run, "tag", index)
}

fn widths() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(1_u32..9, 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(given::cases(24, 400)))]

    #[test]
    fn any_part_comes_back_from_any_parts(
        rows in 1_u32..30, saved in widths(), cuts in prop::collection::vec(1_u32..30, 0..4), cut in any::<u64>(),
        wanted in prop::collection::vec((any::<u64>(), any::<u64>()), 8),
    ) {
        let table = Table { rows, widths: saved };
        let mut bounds: Vec<u32> = cuts.iter().map(|cut| cut % table.stride()).filter(|&cut| cut > 0).collect();
        bounds.extend([0, table.stride()]);
        bounds.sort_unstable();
        bounds.dedup();
        let other = Table { rows, widths: bounds.windows(2).map(|pair| pair[1] - pair[0]).collect() };
        let folder = Folder::new();
        let checkpoint = Checkpoint::open(&save(folder.path(), &table, cut).unwrap()).unwrap();
        let parts = other.parts().into_iter().chain(table.parts()).map(Some).chain([None]);
        let ranges: Vec<(Option<Runs>, u64, u64)> = parts.zip(wanted.iter().cycle()).map(|(runs, &pair)| {
            let (start, stop) = range(runs.map_or(table.numel(), |r| r.numel(table.numel()).unwrap()), pair);
            (runs, start, stop)
        }).collect();
        let mut outs: Vec<Vec<u8>> =
            ranges.iter().map(|(_, start, stop)| vec![0xEE; usize::try_from((stop - start) * 4).unwrap()]).collect();
        let wants = ranges.iter().zip(&mut outs);
        let wants = wants.map(|(&(runs, start, stop), out)| Want { tensor: 0, runs, start, stop, out });
        checkpoint.read(wants.collect()).unwrap();
        for (&(runs, start, stop), out) in ranges.iter().zip(&outs) {
            prop_assert_eq!(out, &bytes_of(runs, start, stop));
        }
        prop_assert_eq!(verify::verify(&folder.path().join("tag")).unwrap(), vec![]);
    }
}

#[test]
fn parts_that_do_not_make_up_rows_are_refused() {
    let table = Table { rows: 3, widths: vec![2, 3] };
    for widths in [vec![2, 2], vec![3, 3], vec![2, 3, 1]] {
        let folder = Folder::new();
        let aside = folder::begin(folder.path(), "tag").unwrap();
        let mut index = empty_index();
        let entry =
            Entry { name: "w".into(), dtype: "U32".into(), shape: vec![u64::from(3 * widths.iter().sum::<u32>())] };
        let mut writer = FileWriter::create(&aside.join("rank-00000.safetensors"), &[entry], &[]).unwrap();
        let mut pieces = Vec::new();
        let parts = Table { rows: 3, widths: widths.clone() }.parts();
        let mut sizes = Vec::new();
        for &runs in &parts {
            let stop = 3 * runs.length;
            writer.put(&bytes_of(Some(runs), 0, stop)).unwrap();
            sizes.push((runs, stop));
        }
        let written = writer.finish(false).unwrap();
        let mut offset = written.header_nbytes;
        for (runs, stop) in sizes {
            let runs = Some(Runs { stride: u64::from(table.stride()), ..runs });
            pieces.push(PieceEntry { file: 0, offset, start: 0, stop, crc32: "0".repeat(8), runs });
            offset += stop * 4;
        }
        index.files.push(file_entry("rank-00000.safetensors".to_owned(), &written));
        let shape = vec![3, 5];
        index.tensors =
            vec![TensorEntry { role: "weight".into(), name: "w".into(), dtype: "U32".into(), shape, pieces }];
        let error = folder::commit(folder.path(), "tag", index).unwrap_err();
        assert!(matches!(&error, CheckpointError::BadIndex(text) if text.contains("rows")), "{error}");
    }
}
