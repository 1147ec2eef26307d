//! Random requests, many at a time, against a model in memory.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use shardcore_io::seam::{Transfer, Verdict};
use shardcore_io::{Direct, Faults, Kind, Place};

use crate::given::{BACKENDS, Folder, Pending, Setting, cases, pattern};

/// Bytes of the file that requests meet in.
const FILE_NBYTES: usize = 50_000;

#[derive(Clone, Debug)]
struct Op {
    kind: Kind,
    offset: usize,
    nbytes: usize,
    misalignment: usize,
    /// Wait for all requests before this one.
    settle: bool,
}

/// Offsets and sizes around pages, blocks and sectors, and any others.
fn place() -> impl Strategy<Value = usize> {
    let near =
        (0_usize..12, prop::sample::select(vec![0_usize, 1, 511, 512, 4095])).prop_map(|(page, by)| page * 4096 + by);
    prop_oneof![near, 0..FILE_NBYTES]
}

fn op() -> impl Strategy<Value = Op> {
    let kind = prop::sample::select(vec![Kind::Read, Kind::Write]);
    let misalignment = prop::sample::select(vec![0_usize, 0, 1, 4, 64, 512, 4095]);
    (kind, place(), place(), misalignment, prop::bool::weighted(0.1)).prop_map(
        |(kind, one, other, misalignment, settle)| {
            let (start, end) = (one.min(other).min(FILE_NBYTES), one.max(other).min(FILE_NBYTES));
            Op { kind, offset: start, nbytes: end - start, misalignment, settle }
        },
    )
}

fn setting() -> impl Strategy<Value = Setting> {
    let direct = prop::sample::select(vec![Direct::Auto, Direct::On, Direct::Off]);
    let block = prop::sample::select(vec![4096_usize, 8192, 1 << 20]);
    let backend = prop::sample::select(BACKENDS.to_vec());
    (backend, direct, 1_usize..9, block).prop_map(|(backend, direct, queue_depth, block_nbytes)| Setting {
        direct,
        queue_depth,
        block_nbytes,
        ..Setting::of(backend)
    })
}

/// Carries the requests out and in a model: every read gives what the earlier writes left, and so does the file.
fn check(setting: &Setting, ops: &[Op]) {
    let folder = Folder::new();
    let path = folder.join("data");
    let mut model = pattern(0, FILE_NBYTES);
    fs::write(&path, &model).unwrap();
    let engine = setting.engine();
    let mut pending = Vec::new();
    for (op, seed) in ops.iter().zip(1..) {
        if op.settle {
            settle(&mut pending);
        }
        let (place, range) = (Place::Path(&path), op.offset..op.offset + op.nbytes);
        match op.kind {
            Kind::Read => {
                let read = Pending::read(&engine, place, op.offset as u64, op.nbytes, op.misalignment);
                pending.push((read, model[range].to_vec()));
            }
            Kind::Write => {
                let data = pattern(seed, op.nbytes);
                model[range].copy_from_slice(&data);
                pending.push((Pending::write(&engine, place, op.offset as u64, &data, op.misalignment), data));
            }
        }
    }
    settle(&mut pending);
    engine.close().unwrap();
    assert!(fs::read(&path).unwrap() == model, "the file differs from the model");
}

fn settle(pending: &mut Vec<(Pending, Vec<u8>)>) {
    for (request, expected) in pending.drain(..) {
        assert!(request.wait().unwrap() == expected, "memory differs from the model");
    }
}

/// Shortens, interrupts and refuses transfers by a fixed rule, none of which a caller may notice.
#[derive(Debug)]
struct Hiccups {
    count: AtomicU64,
    /// Direct transfers are refused late, as some file systems do.
    late_refusal: bool,
}

impl Faults for Hiccups {
    fn transfer(&self, transfer: &Transfer<'_>) -> Verdict {
        let turn = self.count.fetch_add(1, Ordering::Relaxed);
        match turn.wrapping_mul(0x9E37_79B9) % 7 {
            0 => Verdict::Fail(libc_errno::EINTR),
            1 => Verdict::Fail(libc_errno::EAGAIN),
            2 if transfer.nbytes > 1 => Verdict::Short(transfer.nbytes / 2),
            3 if transfer.nbytes > 4096 => Verdict::Short(4096),
            _ if transfer.direct && self.late_refusal => Verdict::Fail(libc_errno::EINVAL),
            _ => Verdict::Whole,
        }
    }
}

/// Error numbers of Linux that these tests name.
pub(crate) mod libc_errno {
    pub(crate) const EINTR: i32 = 4;
    pub(crate) const EIO: i32 = 5;
    pub(crate) const EBADF: i32 = 9;
    pub(crate) const EAGAIN: i32 = 11;
    pub(crate) const ENOMEM: i32 = 12;
    pub(crate) const EINVAL: i32 = 22;
    pub(crate) const ENOSPC: i32 = 28;
}

/// A file system without `O_DIRECT`.
#[derive(Debug)]
struct NoDirectHere;

impl Faults for NoDirectHere {
    fn open(&self, _: &Path, direct: bool) -> io::Result<()> {
        if direct { Err(io::Error::from_raw_os_error(libc_errno::EINVAL)) } else { Ok(()) }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(48, 2_000)))]

    #[test]
    fn requests_in_flight_equal_requests_one_by_one(
        setting in setting(), ops in prop::collection::vec(op(), 1..24)
    ) {
        check(&setting, &ops);
    }

    #[test]
    fn short_and_interrupted_transfers_do_not_show(
        setting in setting(), ops in prop::collection::vec(op(), 1..12), late_refusal: bool
    ) {
        // With `direct="on"` a refusal is an error: that is another law.
        let direct = if setting.direct == Direct::On { Direct::Auto } else { setting.direct };
        let faults = Hiccups { count: AtomicU64::new(0), late_refusal };
        check(&Setting { direct, faults: Some(std::sync::Arc::new(faults)), ..setting }, &ops);
    }

    #[test]
    fn a_new_file_has_exactly_the_bytes_written(
        setting in setting(), ops in prop::collection::vec(op(), 1..8)
    ) {
        let folder = Folder::new();
        let path = folder.join("new");
        let engine = setting.engine();
        let mut model = Vec::new();
        let mut pending = Vec::new();
        for (op, seed) in ops.iter().zip(1..) {
            let (data, end) = (pattern(seed, op.nbytes), op.offset + op.nbytes);
            if op.nbytes > 0 {
                model.resize(model.len().max(end), 0);
                model[op.offset..end].copy_from_slice(&data);
            }
            pending.push((Pending::write(&engine, Place::Path(&path), op.offset as u64, &data, op.misalignment), data));
        }
        settle(&mut pending);
        prop_assert!(fs::read(&path).unwrap() == model);
    }

    #[test]
    fn a_read_past_the_end_is_an_error_that_says_where(
        setting in setting(), size in 0_usize..20_000, offset in 0_usize..30_000, nbytes in 1_usize..20_000
    ) {
        let folder = Folder::new();
        let path = folder.join("short");
        let data = pattern(1, size);
        fs::write(&path, &data).unwrap();
        let outcome = Pending::read(&setting.engine(), Place::Path(&path), offset as u64, nbytes, 0).wait();
        if offset + nbytes <= size {
            prop_assert_eq!(outcome.unwrap(), &data[offset..offset + nbytes]);
        } else {
            let error = outcome.unwrap_err();
            prop_assert_eq!(error.path(), Some(path.as_path()));
            prop_assert_eq!(error.offset(), Some(size.max(offset) as u64), "{}", error);
            prop_assert!(error.to_string().contains("the file ends"), "{}", error);
        }
    }
}

#[test]
fn a_file_system_without_direct_transfers_is_used_through_its_cache() {
    let ops: Vec<Op> = (0..6)
        .map(|index| Op { kind: Kind::Write, offset: index * 5000, nbytes: 9000, misalignment: index, settle: false })
        .collect();
    for backend in BACKENDS {
        check(&Setting::faulty(backend, NoDirectHere), &ops);
    }
}

#[test]
fn requests_of_no_bytes_end_at_once() {
    for backend in BACKENDS {
        let folder = Folder::new();
        let (path, engine) = (folder.join("empty"), Setting::of(backend).engine());
        assert_eq!(Pending::write(&engine, Place::Path(&path), 77, &[], 0).wait(), Ok(Vec::new()));
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
        assert_eq!(Pending::read(&engine, Place::Path(&path), 99, 0, 0).wait(), Ok(Vec::new()));
    }
}
