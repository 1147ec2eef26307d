//! Preallocated files: exact, striped, and gone when their owner is.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use shardcore_io::{Faults, Place, StorageError, SwapFile, swap};

use crate::given::{BACKENDS, Folder, Pending, Setting, cases, pattern};

fn names(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(24, 500)))]

    #[test]
    fn striped_files_hold_what_was_written(
        backend in prop::sample::select(BACKENDS.to_vec()),
        num_folders in 1_usize..4,
        pages in 1_u64..4,
        ranges in prop::collection::vec((0_usize..60_000, 0_usize..60_000, 0_usize..3), 1..12),
    ) {
        let folder = Folder::new();
        let folders: Vec<_> = (0..num_folders).map(|index| folder.join(&format!("disk{index}"))).collect();
        let engine = Setting::of(backend).engine();
        let file = SwapFile::create(&engine, &folders, 60_000, pages * 4096).unwrap();
        let mut model = vec![0; 60_000];
        let mut pending = Vec::new();
        for ((one, other, misalignment), seed) in ranges.into_iter().zip(1..) {
            let range = one.min(other)..one.max(other);
            let (data, offset) = (pattern(seed, range.len()), range.start as u64);
            pending.push(Pending::write(&engine, Place::Swap(&file), offset, &data, misalignment));
            model[range].copy_from_slice(&data);
        }
        let read = Pending::read(&engine, Place::Swap(&file), 0, 60_000, 0);
        for request in pending {
            request.wait().unwrap();
        }
        prop_assert!(read.wait().unwrap() == model);
        prop_assert!(folders.iter().all(|folder| names(folder).is_empty()));
    }
}

#[test]
fn the_end_of_the_file_is_the_end() {
    for backend in BACKENDS {
        let folder = Folder::new();
        let engine = Setting::of(backend).engine();
        let file = SwapFile::create(&engine, &[folder.path().to_owned()], 1000, 4096).unwrap();
        assert_eq!(file.nbytes(), 1000);
        assert!(Pending::write(&engine, Place::Swap(&file), 500, &[1; 500], 0).wait().is_ok());
        let buffer = shardcore_io::HostBuffer::new("a test", 501, &shardcore_io::HostOptions::now()).unwrap();
        // SAFETY: the request is refused.
        let slice = unsafe { shardcore_io::HostSlice::new(buffer.into(), 0..501) }.unwrap();
        let error = engine.submit(shardcore_io::Kind::Write, Place::Swap(&file), 500, slice).unwrap_err();
        assert!(error.to_string().contains("1000 bytes"), "{error}");
    }
}

#[test]
fn what_a_dead_process_left_is_swept_and_what_a_living_one_has_is_not() {
    let folder = Folder::new();
    let engine = Setting::of(BACKENDS[1]).engine();
    let dead = folder.join("shardcore-4194304-123-0.swap");
    let recycled = folder.join(&format!("shardcore-{}-1-0.swap", std::process::id()));
    let (foreign, folder_of_name) = (folder.join("notes.txt"), folder.join("shardcore-4194304-123-1.swap"));
    for path in [&dead, &recycled, &foreign] {
        fs::write(path, b"left").unwrap();
    }
    fs::create_dir(&folder_of_name).unwrap();
    let file = SwapFile::create(&engine, &[folder.path().to_owned()], 10, 4096).unwrap();
    let mut swept = file.swept().to_vec();
    swept.sort();
    assert_eq!(swept, [dead.min(recycled.clone()), recycled.max(folder.join("shardcore-4194304-123-0.swap"))]);
    assert!(foreign.exists() && folder_of_name.exists());
    // A file whose lock somebody holds, and whose name tells a living process, stays.
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let started = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().to_owned();
    let living = folder.join(&format!("shardcore-{}-{started}-99.swap", std::process::id()));
    let held = fs::File::create(&living).unwrap();
    held.lock().unwrap();
    assert_eq!(swap::sweep(folder.path()).unwrap(), [] as [PathBuf; 0]);
    drop(held);
    assert_eq!(swap::sweep(folder.path()).unwrap(), [living]);
}

/// Each sweeps before it makes its own, and may take the lock of a file that was just made, before its owner does.
#[test]
fn many_make_files_in_one_folder() {
    let folder = Folder::new();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let engine = Setting::of(BACKENDS[1]).engine();
                for _ in 0..1000 {
                    SwapFile::create(&engine, &[folder.path().to_owned()], 10, 4096).unwrap();
                }
            });
        }
    });
    assert!(names(folder.path()).is_empty());
}

#[test]
fn a_disk_that_is_too_small_shows_at_the_start_and_leaves_nothing() {
    let folder = Folder::new();
    let engine = Setting::of(BACKENDS[1]).engine();
    let error = SwapFile::create(&engine, &[folder.path().to_owned()], 1 << 60, 4096).unwrap_err();
    assert!(matches!(error, StorageError::DiskFull { .. }), "{error}");
    assert!(error.to_string().contains("missing"), "{error}");
    assert!(names(folder.path()).is_empty());
}

#[test]
fn arguments_are_checked() {
    let folder = Folder::new();
    let engine = Setting::of(BACKENDS[1]).engine();
    let create = |folders: &[PathBuf], stripe| SwapFile::create(&engine, folders, 10, stripe).unwrap_err().to_string();
    assert!(create(&[], 4096).contains("folders is 0"));
    assert!(create(&[folder.path().to_owned()], 0).contains("stripe_nbytes is 0"));
    assert!(create(&[folder.path().to_owned()], 100).contains("a multiple of"));
    assert!(create(&[PathBuf::from("/proc/none")], 4096).contains("/proc/none"));
}

#[derive(Debug)]
struct NoOpening;

impl Faults for NoOpening {
    fn open(&self, _: &Path, direct: bool) -> io::Result<()> {
        if direct { Err(io::Error::from_raw_os_error(24)) } else { Ok(()) }
    }
}

#[test]
fn a_failure_half_way_leaves_no_name() {
    let folder = Folder::new();
    let engine = Setting::faulty(BACKENDS[1], NoOpening).engine();
    let error = SwapFile::create(&engine, &[folder.path().to_owned()], 10, 4096).unwrap_err();
    assert!(error.to_string().contains("ulimit -n"), "{error}");
    assert!(names(folder.path()).is_empty());
}
