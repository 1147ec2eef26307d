//! Memory outlives the transfers that use it, whoever drops what and when.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use shardcore_io::seam::{Transfer, Verdict};
use shardcore_io::{Faults, IoMemory, Kind, Place, StorageError};

use crate::given::{BACKENDS, Folder, Pending, Setting, pattern};

/// Memory that counts how much of it is alive.
struct Counted {
    bytes: Box<[u8]>,
    alive: Arc<AtomicUsize>,
}

impl Counted {
    fn new(bytes: &[u8], alive: &Arc<AtomicUsize>) -> Self {
        alive.fetch_add(1, Ordering::SeqCst);
        Self { bytes: bytes.into(), alive: Arc::clone(alive) }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

// SAFETY: the box belongs to the value alone, and only writes to disk, which read it, use it here.
unsafe impl IoMemory for Counted {
    fn start(&self) -> *mut u8 {
        self.bytes.as_ptr().cast_mut()
    }

    fn nbytes(&self) -> usize {
        self.bytes.len()
    }
}

/// Makes every transfer slow, so that requests are surely unfinished when a test drops things.
#[derive(Debug)]
struct Slow;

impl Faults for Slow {
    fn transfer(&self, _: &Transfer<'_>) -> Verdict {
        thread::sleep(Duration::from_millis(1));
        Verdict::Whole
    }
}

#[test]
fn dropping_handles_and_engine_finishes_the_requests() {
    for backend in BACKENDS {
        let folder = Folder::new();
        let alive = Arc::new(AtomicUsize::new(0));
        let data = pattern(1, 100_000);
        let engine = Setting::faulty(backend, Slow).engine();
        for index in 0..5 {
            let path = folder.join(&format!("file{index}"));
            drop(engine.submit(Kind::Write, Place::Path(&path), 0, Counted::new(&data, &alive)).unwrap());
        }
        assert!(alive.load(Ordering::SeqCst) > 0, "unfinished requests own their memory");
        drop(engine);
        assert_eq!(alive.load(Ordering::SeqCst), 0);
        for index in 0..5 {
            assert!(fs::read(folder.join(&format!("file{index}"))).unwrap() == data);
        }
    }
}

#[test]
fn memory_is_free_before_the_waiter_goes_on() {
    for backend in BACKENDS {
        let folder = Folder::new();
        let alive = Arc::new(AtomicUsize::new(0));
        let engine = Setting::of(backend).engine();
        for _ in 0..50 {
            let memory = Counted::new(&pattern(2, 20_000), &alive);
            let handle = engine.submit(Kind::Write, Place::Path(&folder.join("data")), 0, memory).unwrap();
            handle.wait().unwrap();
            assert!(handle.done());
            assert_eq!(alive.load(Ordering::SeqCst), 0);
        }
    }
}

#[test]
fn a_closed_engine_takes_no_requests() {
    for backend in BACKENDS {
        let folder = Folder::new();
        let alive = Arc::new(AtomicUsize::new(0));
        let engine = Setting::of(backend).engine();
        engine.close().unwrap();
        let memory = Counted::new(&[1], &alive);
        let outcome = engine.submit(Kind::Write, Place::Path(&folder.join("data")), 0, memory);
        assert_eq!(outcome.unwrap_err(), StorageError::Closed);
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    }
}

#[test]
fn waiting_can_end_early() {
    for backend in BACKENDS {
        let folder = Folder::new();
        let engine = Setting::faulty(backend, Slow).engine();
        let alive = Arc::new(AtomicUsize::new(0));
        let memory = Counted::new(&pattern(3, 1 << 20), &alive);
        let handle = engine.submit(Kind::Write, Place::Path(&folder.join("data")), 0, memory).unwrap();
        assert_eq!(handle.wait_timeout(Duration::ZERO), None);
        assert!(!engine.wait_idle(Duration::from_millis(1)));
        assert!(engine.wait_for_room(Duration::ZERO));
        assert_eq!(handle.wait(), Ok(()));
        assert!(engine.wait_idle(Duration::ZERO));
    }
}

#[test]
fn many_threads_submit_to_one_engine() {
    for backend in BACKENDS {
        let folder = Folder::new();
        let engine = Setting::of(backend).engine();
        thread::scope(|scope| {
            for worker in 0..8 {
                let (engine, path) = (&engine, folder.join("shared"));
                scope.spawn(move || {
                    for round in 0..20 {
                        let data = pattern(worker * 100 + round, 9_999);
                        // Neighbours share pages, and often a page is shared by three.
                        let offset = worker * 9_999;
                        Pending::write(engine, Place::Path(&path), offset, &data, 0).wait().unwrap();
                        let read = Pending::read(engine, Place::Path(&path), offset, data.len(), 1);
                        assert!(read.wait().unwrap() == data);
                    }
                });
            }
        });
        let all: Vec<u8> = (0..8).flat_map(|worker| pattern(worker * 100 + 19, 9_999)).collect();
        assert!(fs::read(folder.join("shared")).unwrap() == all);
    }
}

#[test]
fn files_beyond_the_limit_on_open_files_wait_their_turn() {
    for backend in BACKENDS {
        let folder = Folder::new();
        let engine = Setting::of(backend).engine();
        let pending: Vec<_> = (0..1500_u64)
            .map(|index| {
                assert!(engine.wait_for_room(Duration::from_secs(60)));
                let path = folder.join(&index.to_string());
                Pending::write(&engine, Place::Path(&path), 0, &index.to_le_bytes(), 0)
            })
            .collect();
        for (request, index) in pending.into_iter().zip(0_u64..) {
            request.wait().unwrap();
            assert_eq!(fs::read(folder.join(&index.to_string())).unwrap(), index.to_le_bytes());
        }
    }
}
