//! What is to be done, shared by the callers and by the threads that do it.
//!
//! Requests are carried out in the order in which they came, many transfers at a time. A request whose bytes in a file
//! meet those of an unfinished earlier one, where either writes, waits for it: what a file holds never depends on luck.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::completion::Completion;
use crate::error::{Result, StorageError};
use crate::memory::HostBuffer;
use crate::request::{Active, Next, Piece, Request};
use crate::seam::Faults;
use crate::target::conflict;

/// Requests that may be unfinished before a caller should wait.
const MAX_ACTIVE: usize = 4096;

/// A wish of a caller that the thread of a ring fulfils.
pub(crate) struct Registration {
    pub(crate) buffer: Arc<HostBuffer>,
    pub(crate) completion: Arc<Completion>,
}

pub(crate) struct Queue {
    state: Mutex<State>,
    /// Signalled when a piece can be taken, or no more will come.
    work: Condvar,
    /// Signalled when a request has ended.
    ended: Condvar,
    /// Wakes the thread of a ring; none where threads wait for `work`.
    waker: Option<Waker>,
    pub(crate) block_nbytes: usize,
    pub(crate) faults: Arc<dyn Faults>,
}

#[derive(Default)]
struct State {
    next_id: u64,
    active: BTreeMap<u64, Active>,
    /// Requests that may have pieces to cut, in order.
    runnable: VecDeque<u64>,
    /// Requests that wait for an earlier one, in order.
    blocked: Vec<u64>,
    /// Rests of transfers that moved fewer bytes than asked.
    rests: VecDeque<Piece>,
    registrations: Vec<Registration>,
    /// Failed requests whose error nobody has been told yet.
    unseen: Vec<Arc<Completion>>,
    idle_threads: usize,
    closing: bool,
    broken: Option<StorageError>,
}

impl Queue {
    pub(crate) fn new(block_nbytes: usize, faults: Arc<dyn Faults>, waker: Option<Waker>) -> Self {
        let (state, work, ended) = (Mutex::default(), Condvar::new(), Condvar::new());
        Self { state, work, ended, waker, block_nbytes, faults }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a request on.
    ///
    /// # Errors
    /// [`StorageError::Closed`], or why the engine cannot work any more.
    pub(crate) fn push(&self, request: Request) -> Result<()> {
        let mut state = self.lock();
        state.check_open()?;
        if request.memory.nbytes() == 0 {
            request.completion.set(Ok(()));
            return Ok(());
        }
        let id = state.next_id;
        state.next_id += 1;
        let later = (request.kind, request.claims.as_slice());
        let blocked = state.active.values().any(|active| conflict(active.claims(), later));
        state.active.insert(id, Active::new(Arc::new(request)));
        if blocked {
            state.blocked.push(id);
            return Ok(());
        }
        state.runnable.push_back(id);
        drop(state);
        self.wake();
        Ok(())
    }

    /// Notes a request that cannot even begin.
    pub(crate) fn push_failed(&self, completion: &Arc<Completion>, error: StorageError) -> Result<()> {
        let mut state = self.lock();
        state.check_open()?;
        state.note_unseen(completion);
        completion.set(Err(error));
        Ok(())
    }

    /// Asks the thread of a ring to register memory.
    pub(crate) fn push_registration(&self, registration: Registration) -> Result<()> {
        let mut state = self.lock();
        state.check_open()?;
        state.registrations.push(registration);
        drop(state);
        self.wake();
        Ok(())
    }

    pub(crate) fn take_registrations(&self) -> Vec<Registration> {
        std::mem::take(&mut self.lock().registrations)
    }

    /// The next piece, if there is one now.
    pub(crate) fn next(&self) -> Option<Piece> {
        self.lock().next(self.block_nbytes)
    }

    /// Waits for the next piece; none once the engine is closed and everything is done.
    pub(crate) fn next_blocking(&self) -> Option<Piece> {
        let mut state = self.lock();
        loop {
            if let Some(piece) = state.next(self.block_nbytes) {
                return Some(piece);
            }
            if state.is_over() {
                return None;
            }
            state.idle_threads += 1;
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle_threads -= 1;
        }
    }

    /// Threads that wait for a piece.
    pub(crate) fn idle_threads(&self) -> usize {
        self.lock().idle_threads
    }

    /// Notes how a piece ended.
    pub(crate) fn finish(&self, piece: Piece, outcome: io::Result<usize>) {
        let id = piece.id;
        // The last owner of a request frees its memory; that happens before anyone is told, and outside the lock.
        let next = piece.advance(outcome);
        let mut state = self.lock();
        let Some(active) = state.active.get_mut(&id) else { return };
        match next {
            Next::Again(rest) if active.wants(&rest) => {
                state.rests.push_back(rest);
                drop(state);
                return self.wake_threads();
            }
            Next::Failed(error) => active.fail(error),
            Next::Done | Next::Again(_) => {}
        }
        if !active.end_piece() {
            return;
        }
        if active.is_finished() {
            let ended = state.end(id);
            drop(state);
            if let Some(ended) = ended {
                ended.announce();
            }
            self.ended.notify_all();
        } else if std::mem::take(&mut active.waits) {
            state.runnable.push_front(id);
            drop(state);
        } else {
            return;
        }
        self.wake_threads();
    }

    /// Ends the engine: no thread can carry anything out any more. Requests fail with `error`; the memory of those that
    /// the kernel may still be writing to is never freed.
    pub(crate) fn break_off(&self, error: &StorageError) {
        let mut state = self.lock();
        state.broken = Some(error.clone());
        let active = std::mem::take(&mut state.active);
        let registrations = std::mem::take(&mut state.registrations);
        state.runnable.clear();
        state.blocked.clear();
        std::mem::take(&mut state.rests).into_iter().for_each(std::mem::forget);
        state.unseen.extend(active.values().map(|active| Arc::clone(&active.request.completion)));
        drop(state);
        for registration in registrations {
            registration.completion.set(Err(error.clone()));
        }
        for (_, active) in active {
            active.request.completion.set(Err(error.clone()));
            std::mem::forget(active);
        }
        self.work.notify_all();
        self.ended.notify_all();
    }

    /// Takes no more requests; those that are there are carried out.
    pub(crate) fn close(&self) {
        self.lock().closing = true;
        self.work.notify_all();
        if let Some(waker) = &self.waker {
            waker.wake();
        }
    }

    /// Whether the threads can end.
    pub(crate) fn is_over(&self) -> bool {
        self.lock().is_over()
    }

    /// Waits until `ready` holds for the number of unfinished requests; false after `timeout`.
    pub(crate) fn wait_until(&self, timeout: Duration, ready: impl Fn(usize) -> bool) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        while !ready(state.active.len()) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            state = self.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Whether another request may come without piling up.
    pub(crate) fn has_room(num_active: usize) -> bool {
        num_active < MAX_ACTIVE
    }

    /// The error of a failed request that nobody has been told.
    pub(crate) fn take_unseen(&self) -> Option<StorageError> {
        let unseen = std::mem::take(&mut self.lock().unseen);
        unseen.iter().filter(|completion| !completion.is_seen()).find_map(|completion| completion.take_note()?.err())
    }

    /// Notes that the thread of a ring is awake.
    pub(crate) fn woken(&self) {
        let mut count = [0_u8; 8];
        if let Some(waker) = &self.waker {
            // SAFETY: the buffer has the eight bytes that an eventfd gives. It never blocks; an error means no wake-up.
            unsafe { libc::read(waker.descriptor(), count.as_mut_ptr().cast(), count.len()) };
        }
    }

    /// Tells whoever carries pieces out that there may be more.
    fn wake(&self) {
        match &self.waker {
            Some(waker) => waker.wake(),
            None => self.work.notify_all(),
        }
    }

    /// The same from the end of a piece: the thread of a ring is awake then, and looks for itself.
    fn wake_threads(&self) {
        if self.waker.is_none() {
            self.work.notify_all();
        }
    }
}

/// A request that has ended, to be announced outside the lock.
struct Ended {
    active: Active,
}

impl Ended {
    fn announce(self) {
        let completion = Arc::clone(&self.active.request.completion);
        let outcome = self.active.error.clone().map_or(Ok(()), Err);
        drop(self); // Frees the memory before the waiter goes on.
        completion.set(outcome);
    }
}

impl State {
    fn check_open(&self) -> Result<()> {
        match &self.broken {
            Some(error) => Err(error.clone()),
            None if self.closing => Err(StorageError::Closed),
            None => Ok(()),
        }
    }

    fn is_over(&self) -> bool {
        self.broken.is_some() || (self.closing && self.active.is_empty() && self.registrations.is_empty())
    }

    fn next(&mut self, block_nbytes: usize) -> Option<Piece> {
        if let Some(rest) = self.rests.pop_front() {
            return Some(rest);
        }
        while let Some(&id) = self.runnable.front() {
            let piece = self.active.get_mut(&id).and_then(|active| active.cut(id, block_nbytes));
            if piece.is_some() {
                return piece;
            }
            self.runnable.pop_front();
        }
        None
    }

    /// Removes an ended request, and lets those start that waited for it alone.
    fn end(&mut self, id: u64) -> Option<Ended> {
        let active = self.active.remove(&id)?;
        if active.error.is_some() {
            self.note_unseen(&active.request.completion);
        }
        let mut still_blocked = Vec::new();
        for id in std::mem::take(&mut self.blocked) {
            if self.is_blocked(id) {
                still_blocked.push(id);
            } else {
                self.runnable.push_back(id);
            }
        }
        self.blocked = still_blocked;
        Some(Ended { active })
    }

    fn note_unseen(&mut self, completion: &Arc<Completion>) {
        self.unseen.retain(|completion| !completion.is_seen());
        self.unseen.push(Arc::clone(completion));
    }

    fn is_blocked(&self, id: u64) -> bool {
        let Some(later) = self.active.get(&id) else { return false };
        self.active.range(..id).any(|(_, earlier)| conflict(earlier.claims(), later.claims()))
    }
}

/// An eventfd on which the thread of a ring sleeps.
pub(crate) struct Waker(OwnedFd);

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: a call without pointers.
        let descriptor = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and belongs to nobody else.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(descriptor) }))
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    fn wake(&self) {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: the buffer has the eight bytes that an eventfd takes. It cannot fail: the count never nears its end.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }
}
