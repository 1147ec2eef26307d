//! Whatever fails: an error that names file, byte and number, from the handle of the request that failed.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use shardcore_io::seam::{Transfer, Verdict};
use shardcore_io::{Backend, Direct, Faults, HostBuffer, HostOptions, IoEngine, Kind, Options, Place, StorageError};

use crate::given::{BACKENDS, Folder, Pending, Setting, pattern};
use crate::model::libc_errno::{EBADF, EINVAL, EIO, ENOMEM, ENOSPC};

/// Transfers that touch `byte` of a file called `bad` fail.
#[derive(Debug)]
struct BadSpot {
    byte: u64,
    errno: i32,
}

impl Faults for BadSpot {
    fn transfer(&self, transfer: &Transfer<'_>) -> Verdict {
        let hit = (transfer.offset..transfer.offset + transfer.nbytes as u64).contains(&self.byte);
        if hit && transfer.path.ends_with("bad") { Verdict::Fail(self.errno) } else { Verdict::Whole }
    }
}

#[test]
fn a_failed_transfer_fails_its_request_alone() {
    for backend in BACKENDS {
        for errno in [EIO, ENOSPC, EBADF] {
            for kind in [Kind::Read, Kind::Write] {
                fails_alone(backend, errno, kind);
            }
        }
    }
}

fn fails_alone(backend: Backend, errno: i32, kind: Kind) {
    let folder = Folder::new();
    let (good, bad) = (folder.join("good"), folder.join("bad"));
    let data = pattern(3, 100_001);
    fs::write(&good, &data).unwrap();
    fs::write(&bad, &data).unwrap();
    let engine = Setting::faulty(backend, BadSpot { byte: 50_000, errno }).engine();
    let submit = |path: &Path| match kind {
        Kind::Read => Pending::read(&engine, Place::Path(path), 0, data.len(), 0),
        Kind::Write => Pending::write(&engine, Place::Path(path), 0, &data, 0),
    };
    let requests = [submit(&good), submit(&bad), submit(&good)];
    let [first, error, last] = requests.map(Pending::wait);
    assert!(first.unwrap() == data && last.unwrap() == data);
    let error = error.unwrap_err();
    assert_eq!((error.path(), error.errno()), (Some(bad.as_path()), Some(errno)));
    // The block that holds the byte starts at byte 6 x 8192.
    assert_eq!(error.offset(), Some(49_152));
    assert!(error.to_string().contains("at byte 49152"), "{error}");
    // Told once, an error is not told again by `close`.
    engine.close().unwrap();
}

#[test]
fn an_error_that_nobody_waited_for_shows_when_the_engine_is_closed() {
    for backend in BACKENDS {
        let folder = Folder::new();
        let engine = Setting::faulty(backend, BadSpot { byte: 0, errno: EIO }).engine();
        drop(Pending::write(&engine, Place::Path(&folder.join("bad")), 0, &[1; 10], 0));
        assert_eq!(engine.close().unwrap_err().errno(), Some(EIO));
        engine.close().unwrap();
    }
}

#[test]
fn what_is_no_file_is_refused_by_name() {
    let folder = Folder::new();
    let cases: [(PathBuf, &str); 3] = [
        (folder.path().to_owned(), "a folder"),
        (PathBuf::from("/dev/null"), "a device"),
        (folder.join("no/such/file"), "No such file"),
    ];
    for backend in BACKENDS {
        let engine = Setting::of(backend).engine();
        for (path, expected) in &cases {
            let read = Pending::read(&engine, Place::Path(path), 0, 8, 0).wait().unwrap_err();
            let write = Pending::write(&engine, Place::Path(path), 0, &[0; 8], 0).wait().unwrap_err();
            for error in [read, write] {
                assert!(error.to_string().contains(expected), "{error}");
                assert_eq!(error.path(), Some(path.as_path()));
            }
        }
    }
}

/// Refuses what its fields say.
#[derive(Debug)]
struct Refusals {
    ring: bool,
    register: bool,
    direct: bool,
}

impl Faults for Refusals {
    fn ring(&self) -> io::Result<()> {
        if self.ring { Err(io::Error::from_raw_os_error(1)) } else { Ok(()) }
    }

    fn register(&self) -> io::Result<()> {
        if self.register { Err(io::Error::from_raw_os_error(ENOMEM)) } else { Ok(()) }
    }

    fn open(&self, _: &Path, direct: bool) -> io::Result<()> {
        if self.direct && direct { Err(io::Error::from_raw_os_error(EINVAL)) } else { Ok(()) }
    }
}

const NOTHING: Refusals = Refusals { ring: false, register: false, direct: false };

#[test]
fn without_a_ring_threads_do_it_unless_a_ring_is_asked_for() {
    let faults = Refusals { ring: true, ..NOTHING };
    let mut setting = Setting { backend: None, ..Setting::faulty(Backend::IoUring, faults) };
    assert_eq!(setting.engine().backend(), Backend::Threads);
    setting.backend = Some(Backend::IoUring);
    let error = IoEngine::new(setting.options()).err().unwrap();
    assert!(error.to_string().contains("Operation not permitted"), "{error}");
    setting = Setting { backend: None, ..Setting::of(Backend::IoUring) };
    assert_eq!(setting.engine().backend(), Backend::IoUring);
}

#[test]
fn refused_registration_changes_nothing_but_speed() {
    let folder = Folder::new();
    let (path, data) = (folder.join("data"), pattern(5, 30_000));
    for register in [false, true] {
        let engine = Setting::faulty(Backend::IoUring, Refusals { register, ..NOTHING }).engine();
        let buffer = Arc::new(HostBuffer::new("a test", 1 << 16, &HostOptions::now()).unwrap());
        let outcome = engine.register(&buffer);
        assert_eq!(outcome.is_err(), register, "{outcome:?}");
        if let Err(error) = outcome {
            assert_eq!(error.errno(), Some(ENOMEM));
        }
        // Misaligned memory goes through blocks of the engine's own, which it registers too.
        for misalignment in [0, 3] {
            Pending::write(&engine, Place::Path(&path), 0, &data, misalignment).wait().unwrap();
            assert!(Pending::read(&engine, Place::Path(&path), 0, data.len(), misalignment).wait().unwrap() == data);
        }
    }
    assert!(
        Setting::of(Backend::Threads)
            .engine()
            .register(&Arc::new(HostBuffer::new("a test", 10, &HostOptions::now()).unwrap()))
            .is_err()
    );
}

#[test]
fn registered_memory_moves_the_same_bytes() {
    let folder = Folder::new();
    let (path, data) = (folder.join("data"), pattern(6, 60_000));
    let engine = Setting::of(Backend::IoUring).engine();
    let buffer = Arc::new(HostBuffer::new("a test", data.len(), &HostOptions::now()).unwrap());
    engine.register(&buffer).unwrap();
    engine.register(&buffer).unwrap();
    // SAFETY: the buffer is this test's, which touches it between requests only.
    unsafe { buffer.start().copy_from_nonoverlapping(data.as_ptr(), data.len()) };
    // SAFETY: as above.
    let slice = |range| unsafe { shardcore_io::HostSlice::new(Arc::clone(&buffer), range) }.unwrap();
    engine.submit(Kind::Write, Place::Path(&path), 0, slice(0..data.len())).unwrap().wait().unwrap();
    assert!(fs::read(&path).unwrap() == data);
    engine.submit(Kind::Read, Place::Path(&path), 0, slice(4096..data.len())).unwrap().wait().unwrap();
    // SAFETY: as above.
    let bytes = unsafe { buffer.bytes() };
    assert!(bytes[4096..] == data[..data.len() - 4096]);
}

#[test]
fn insisting_on_direct_transfers_is_an_error_where_there_are_none() {
    for backend in BACKENDS {
        let folder = Folder::new();
        let faults = Refusals { direct: true, ..NOTHING };
        let engine = Setting { direct: Direct::On, ..Setting::faulty(backend, faults) }.engine();
        let error = Pending::write(&engine, Place::Path(&folder.join("data")), 0, &[0; 8], 0).wait().unwrap_err();
        assert!(matches!(error, StorageError::NoDirect { .. }), "{error}");
    }
}

#[test]
fn a_file_cut_under_a_read_gives_an_error_or_the_data() {
    for backend in BACKENDS {
        let folder = Folder::new();
        let (path, data) = (folder.join("data"), pattern(7, 1 << 20));
        let engine = Setting::of(backend).engine();
        for round in 0..10 {
            fs::write(&path, &data).unwrap();
            let read = Pending::read(&engine, Place::Path(&path), 0, data.len(), 0);
            fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(round * 100_000).unwrap();
            match read.wait() {
                Ok(bytes) => assert!(bytes == data),
                Err(error) => assert!(matches!(error, StorageError::EndOfFile { .. }), "{error}"),
            }
        }
    }
}

#[test]
fn numbers_out_of_range_are_refused_at_once() {
    let text = |queue_depth, block_nbytes| Options::new(queue_depth, block_nbytes).err().unwrap().to_string();
    assert!(text(0, 1 << 20).contains("queue_depth is 0: expected 1 to 4096"));
    assert!(text(4097, 1 << 20).contains("4097"));
    assert!(text(1, 0).contains("block_nbytes is 0"));
    assert!(text(1, 1000).contains("a multiple of"));
    assert!(text(1, 2 << 30).contains("block_nbytes is 2147483648"));
    let folder = Folder::new();
    let engine = Setting::of(Backend::Threads).engine();
    let buffer = Arc::new(HostBuffer::new("a test", 10, &HostOptions::now()).unwrap());
    // SAFETY: the request is refused.
    let slice = unsafe { shardcore_io::HostSlice::new(buffer, 0..10) }.unwrap();
    let path = folder.join("data");
    let outcome = engine.submit(Kind::Write, Place::Path(&path), i64::MAX.unsigned_abs() - 9, slice);
    assert!(outcome.unwrap_err().to_string().contains("offset + 10 bytes"));
}

#[derive(Debug)]
struct Panics;

impl Faults for Panics {
    fn transfer(&self, transfer: &Transfer<'_>) -> Verdict {
        assert!(transfer.offset < 8192, "as a fault of ours would");
        Verdict::Whole
    }
}

#[test]
fn a_panic_in_the_engine_ends_every_request_with_an_error() {
    for backend in BACKENDS {
        let folder = Folder::new();
        let engine = Setting { queue_depth: 1, ..Setting::faulty(backend, Panics) }.engine();
        let path = folder.join("data");
        let first = Pending::write(&engine, Place::Path(&path), 0, &pattern(1, 20_000), 0);
        assert!(matches!(first.wait(), Err(StorageError::Internal(_))));
        let later = HostBuffer::new("a test", 10, &HostOptions::now()).unwrap();
        // SAFETY: the request is refused.
        let slice = unsafe { shardcore_io::HostSlice::new(Arc::new(later), 0..10) }.unwrap();
        assert!(matches!(engine.submit(Kind::Write, Place::Path(&path), 0, slice), Err(StorageError::Internal(_))));
    }
}
