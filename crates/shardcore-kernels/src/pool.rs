//! Threads that sleep until there is work.
//!
//! They are started by the first call that wants them and never more than the machine has cores. Idle threads wait on a
//! channel without spinning, which leaves the cores to torch between two calls.

use std::any::Any;
use std::mem;
use std::panic::{self, AssertUnwindSafe};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, TryLockError};
use std::thread;

type Task<'a> = &'a (dyn Fn() + Sync);
type Panic = Box<dyn Any + Send>;

static POOL: Mutex<Option<Pool>> = Mutex::new(None);

/// Runs `task` on `num_threads` threads at once, this one among them, and returns when all have ended.
///
/// There may be fewer: when the machine has fewer cores or starts no more threads, and when another caller uses the pool
/// at this moment. A task must therefore take what it does from a common queue.
pub(crate) fn on_each_thread(num_threads: usize, task: Task<'_>) {
    // Waiting for another caller would be no faster, and could be for ever in a process that was forked meanwhile.
    let mut pool = match POOL.try_lock() {
        Ok(pool) => pool,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return task(),
    };
    let pool = Pool::of_this_process(&mut pool);
    pool.grow(num_threads.min(num_cores()) - 1);
    pool.run(num_threads - 1, task);
}

/// Cores that this process may use.
fn num_cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

struct Pool {
    process: u32,
    workers: Vec<Sender<Job>>,
}

/// What a worker is sent: the task, and where to say that it has ended.
struct Job {
    task: Task<'static>,
    ended: Sender<Result<(), Panic>>,
}

impl Pool {
    /// The pool, made anew in a forked process, which has the memory of its parent but not the threads.
    fn of_this_process(slot: &mut Option<Self>) -> &mut Self {
        let process = std::process::id();
        if slot.as_ref().is_some_and(|pool| pool.process != process) {
            // Not dropped: a thread that is no more may have held the channels' locks.
            mem::forget(slot.take());
        }
        slot.get_or_insert_with(|| Self { process, workers: Vec::new() })
    }

    fn grow(&mut self, num_workers: usize) {
        while self.workers.len() < num_workers {
            let (sender, receiver) = channel();
            let name = format!("shardcore-{}", self.workers.len());
            if thread::Builder::new().name(name).spawn(move || work(&receiver)).is_err() {
                return; // The system starts no more threads; those that are there do the work.
            }
            self.workers.push(sender);
        }
    }

    fn run(&self, num_workers: usize, task: Task<'_>) {
        // SAFETY: the workers use the task until they have said that it ended, or until they are gone and their `ended`
        // with them. This function waits for that before it returns, also when the task panics here.
        let task: Task<'static> = unsafe { mem::transmute::<Task<'_>, Task<'static>>(task) };
        let (ended, all_ended) = channel();
        for worker in self.workers.iter().take(num_workers) {
            // A worker that is gone does nothing.
            let _ = worker.send(Job { task, ended: ended.clone() });
        }
        drop(ended);
        let here = panic::catch_unwind(AssertUnwindSafe(task));
        let there: Vec<Result<(), Panic>> = all_ended.iter().collect();
        if let Some(payload) = there.into_iter().chain([here]).find_map(Result::err) {
            panic::resume_unwind(payload);
        }
    }
}

/// A worker's life: until the pool is dropped, which never happens.
fn work(jobs: &Receiver<Job>) {
    for Job { task, ended } in jobs {
        let outcome = panic::catch_unwind(AssertUnwindSafe(task));
        let _ = ended.send(outcome);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_task_runs_at_least_here_and_at_most_on_the_cores() {
        for num_threads in [2, 3, 64] {
            let count = AtomicUsize::new(0);
            on_each_thread(num_threads, &|| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert!((1..=num_threads.min(num_cores())).contains(&count.into_inner()));
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let caught = panic::catch_unwind(|| on_each_thread(2, &|| panic!("from a task")));
        assert_eq!(caught.unwrap_err().downcast_ref(), Some(&"from a task"));
        on_each_thread(2, &|| {});
    }

    #[test]
    fn callers_at_the_same_time_all_get_their_work_done() {
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let left = AtomicUsize::new(100);
                        on_each_thread(2, &|| {
                            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok()
                            {
                            }
                        });
                        assert_eq!(left.into_inner(), 0);
                    }
                });
            }
        });
    }
}
