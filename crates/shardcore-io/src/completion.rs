//! How the end of a request reaches the one who waits for it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::error::{Result, StorageError};

/// The outcome of a request, set once.
#[derive(Debug, Default)]
pub(crate) struct Completion {
    outcome: Mutex<Option<Result<()>>>,
    done: Condvar,
    /// Somebody was told the outcome.
    seen: AtomicBool,
}

impl Completion {
    pub(crate) fn set(&self, outcome: Result<()>) {
        let mut slot = self.lock();
        slot.get_or_insert(outcome);
        self.done.notify_all();
    }

    pub(crate) fn is_seen(&self) -> bool {
        self.seen.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Result<()>>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The outcome in a forked child, where nobody would ever give back a lock that was held at the fork.
    fn after_fork(&self) -> Option<Result<()>> {
        match self.outcome.try_lock() {
            Ok(outcome) => outcome.clone(),
            Err(TryLockError::Poisoned(error)) => error.into_inner().clone(),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The outcome, and marks it as seen.
    pub(crate) fn take_note(&self) -> Option<Result<()>> {
        let outcome = self.lock().clone();
        self.seen.fetch_or(outcome.is_some(), Ordering::AcqRel);
        outcome
    }
}

/// A request under way. Dropping it neither cancels nor waits: the engine finishes the request, and keeps its memory
/// until then.
#[derive(Clone, Debug)]
pub struct Handle {
    completion: Arc<Completion>,
    owner: u32,
}

impl Handle {
    pub(crate) fn new(completion: Arc<Completion>, owner: u32) -> Self {
        Self { completion, owner }
    }

    /// Whether the request has ended, well or badly.
    #[must_use]
    pub fn done(&self) -> bool {
        if self.is_forked() {
            return self.completion.after_fork().is_some();
        }
        self.completion.lock().is_some()
    }

    /// Waits for the end of the request. Later calls give the same outcome.
    ///
    /// # Errors
    /// What went wrong with the request; [`StorageError::Forked`] in a child of the process that made the request.
    pub fn wait(&self) -> Result<()> {
        loop {
            if let Some(outcome) = self.wait_timeout(Duration::from_secs(3600)) {
                return outcome;
            }
        }
    }

    /// Waits so long at most; none if the request is still under way.
    #[must_use]
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<()>> {
        if self.is_forked() {
            let here = std::process::id();
            let forked = Err(StorageError::Forked { owner: self.owner, here });
            return Some(self.completion.after_fork().unwrap_or(forked));
        }
        let deadline = Instant::now() + timeout;
        let mut outcome = self.completion.lock();
        while outcome.is_none() {
            let left = deadline.checked_duration_since(Instant::now())?;
            outcome = self.completion.done.wait_timeout(outcome, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(outcome);
        self.completion.take_note()
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.owner
    }
}
