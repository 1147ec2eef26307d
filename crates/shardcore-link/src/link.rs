//! The ranks' common order of exchanges: publish, pull, wait.

use std::fmt::Debug;
use std::fs::{File, read_link, read_to_string};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::Pull;
use crate::block::{Block, GREETING, NUM_SLOTS, Offer};
use crate::error::{LinkError, Result};
use crate::system::{self, Mapped};

/// How long a sleeper sleeps before it looks whether the process that it waits for still lives.
const LOOK: Duration = Duration::from_millis(50);

/// This rank's end of the link between the ranks of one axis, all on one machine.
///
/// Exchanges are numbered in the order in which they are made, which must be the same on all ranks. A thread of the
/// link pulls; it starts with [`Link::connect`].
#[derive(Debug)]
pub struct Link {
    shared: Arc<Shared>,
    own_file: File,
    greeting: Box<u64>,
    pid: u32,
    queue: Mutex<Queue>,
}

#[derive(Debug)]
struct Shared {
    rank: usize,
    own: Mapped<Block>,
    peers: OnceLock<Vec<Option<Peer>>>,
    failure: OnceLock<LinkError>,
    closed: AtomicBool,
}

#[derive(Debug)]
struct Peer {
    pid: i32,
    process: OwnedFd,
    block: Mapped<Block>,
}

#[derive(Debug, Default)]
struct Queue {
    next: u64,
    work: Option<Sender<Work>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Work {
    sequence: u64,
    tag: u64,
    pulls: Vec<Pull>,
}

/// Where a process is and what it shows: a rank's [`Link::card`].
struct Card {
    machine: String,
    pid: i32,
    descriptor: i32,
    greeting: usize,
}

impl Link {
    /// Exchanges that may be under way at once; one more waits for the first of them.
    pub const NUM_SLOTS: usize = NUM_SLOTS;

    /// A link of `rank` that is not connected yet.
    ///
    /// # Errors
    /// [`LinkError::Unavailable`] if the kernel refuses what it needs.
    pub fn new(rank: usize) -> Result<Self> {
        let own_file = system::memory_file(size_of::<Block>()).map_err(unavailable("memfd_create"))?;
        let own = Mapped::new(&own_file).map_err(unavailable("mmap"))?;
        system::allow_readers();
        let shared =
            Shared { rank, own, peers: OnceLock::new(), failure: OnceLock::new(), closed: AtomicBool::new(false) };
        let (greeting, pid) = (Box::new(GREETING), std::process::id());
        Ok(Self { shared: Arc::new(shared), own_file, greeting, pid, queue: Mutex::default() })
    }

    /// What peers need to connect to this rank, as text without spaces at its ends.
    #[must_use]
    pub fn card(&self) -> String {
        let greeting = std::ptr::from_ref(&*self.greeting).addr();
        format!("{} {} {} {greeting}", machine(), std::process::id(), self.own_file.as_raw_fd())
    }

    /// Opens the peers' blocks and reads their memory once, to see that it may. `cards` are those of all ranks, in the
    /// order of ranks. Starts the thread of the link.
    ///
    /// # Errors
    /// [`LinkError::Unavailable`] if a peer is on another machine or may not be read.
    pub fn connect(&self, cards: &[String]) -> Result<()> {
        let peers = cards
            .iter()
            .enumerate()
            .map(|(rank, card)| if rank == self.shared.rank { Ok(None) } else { Peer::open(card).map(Some) });
        let peers = peers.collect::<Result<Vec<_>>>()?;
        if self.shared.peers.set(peers).is_err() {
            return Err(LinkError::Unavailable { reason: "this link is connected already".to_owned() });
        }
        let (sender, receiver) = channel();
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("shardcore-link".to_owned());
        let thread = thread.spawn(move || shared.work(&receiver)).map_err(unavailable("a thread"))?;
        let mut queue = self.queue();
        (queue.work, queue.thread) = (Some(sender), Some(thread));
        Ok(())
    }

    /// Starts an exchange: gives away `nbytes` at `source` and pulls. Returns its number for [`Link::wait`].
    ///
    /// Peers whose exchange of this number carries another `tag` fail, and so does this one: no data are mixed up.
    ///
    /// # Errors
    /// [`LinkError::Closed`], and why an earlier exchange has failed.
    ///
    /// # Safety
    /// Until the exchange is complete, what is given away must not be written to, and what is pulled into must be
    /// writable memory that nothing else reads or writes.
    pub unsafe fn exchange(&self, tag: u64, source: usize, nbytes: usize, pulls: Vec<Pull>) -> Result<u64> {
        let mut queue = self.queue();
        let sequence = queue.next;
        if let Some(before) = sequence.checked_sub(NUM_SLOTS as u64) {
            while !self.wait(before, LOOK)? {}
        }
        let Some(work) = &queue.work else {
            return Err(LinkError::Closed);
        };
        let offer = Offer { tag, address: source as u64, nbytes: nbytes as u64 };
        self.shared.own.get().publish(sequence, offer);
        if work.send(Work { sequence, tag, pulls }).is_err() {
            // The thread is gone, since an exchange under way has failed.
            return Err(self.shared.check().err().unwrap_or(LinkError::Closed));
        }
        queue.next += 1;
        Ok(sequence)
    }

    /// Waits until every rank has pulled what it needs in the exchange; false if that takes longer than `timeout`.
    ///
    /// # Errors
    /// Why this exchange or one before it has failed.
    pub fn wait(&self, sequence: u64, timeout: Duration) -> Result<bool> {
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let Some((rank, bell)) = self.shared.laggard(sequence) else {
                return Ok(true);
            };
            self.shared.check()?;
            let now = Instant::now();
            let rest = deadline.map_or(LOOK, |deadline| deadline.saturating_duration_since(now));
            if rest.is_zero() {
                return Ok(false);
            }
            let block = self.shared.block(rank)?;
            if block.num_pulled() <= sequence {
                system::wait_for_bell(block.bell(), bell, rest.min(LOOK));
            }
            if now.elapsed() >= LOOK {
                self.shared.check_alive(rank, sequence, |block| block.num_pulled() > sequence)?;
            }
        }
    }

    /// Number of exchanges that were started here.
    #[must_use]
    pub fn num_started(&self) -> u64 {
        self.queue().next
    }

    /// Number of exchanges that are complete on all ranks.
    #[must_use]
    pub fn num_complete(&self) -> u64 {
        let blocks = (0..self.shared.world()).filter_map(|rank| self.shared.block(rank).ok());
        blocks.map(Block::num_pulled).min().unwrap_or(0)
    }

    /// Ends the thread of the link. What is under way stays incomplete. A forked child has no such thread: there this
    /// does nothing.
    pub fn close(&self) {
        if std::process::id() != self.pid {
            std::mem::forget(self.queue().thread.take());
            return;
        }
        self.shared.closed.store(true, Ordering::Release);
        let thread = {
            let mut queue = self.queue();
            queue.work = None;
            queue.thread.take()
        };
        system::ring(self.shared.own.get().bell());
        if let Some(thread) = thread {
            let _ = thread.join(); // It does not panic, and if it did nothing could be done here.
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// The thread of the link: pulls one exchange after the other until one fails or the link is closed.
    fn work(&self, queue: &Receiver<Work>) {
        while let Ok(work) = queue.recv() {
            match work.pulls.iter().try_for_each(|pull| self.pull(&work, pull)) {
                Ok(()) => self.own.get().set_num_pulled(work.sequence + 1),
                Err(error) => {
                    let _ = self.failure.set(error); // The first one counts.
                    system::ring(self.own.get().bell());
                    return;
                }
            }
        }
    }

    fn pull(&self, work: &Work, pull: &Pull) -> Result<()> {
        let Pull { peer, offset, into, nbytes } = *pull;
        let sequence = work.sequence;
        let offer = self.await_offer(peer, sequence)?;
        let fits = offset.checked_add(nbytes).is_some_and(|end| end as u64 <= offer.nbytes);
        if offer.tag != work.tag || !fits {
            return Err(LinkError::Mismatch { peer, sequence });
        }
        let from = usize::try_from(offer.address).map_err(|_| LinkError::Mismatch { peer, sequence })?;
        let pid = self.peer(peer)?.pid;
        // SAFETY: whoever made the exchange promised that `into` may be overwritten until it is complete.
        unsafe { system::read_memory(pid, from + offset, into, nbytes) }.map_err(|error| {
            let reason = error.to_string();
            LinkError::ReadFailed { peer, sequence, nbytes, reason }
        })
    }

    fn await_offer(&self, peer: usize, sequence: u64) -> Result<Offer> {
        let block = self.block(peer)?;
        loop {
            let seen = block.bell().load(Ordering::Acquire);
            if let Some(offer) = block.offer(sequence) {
                return Ok(offer);
            }
            if self.closed.load(Ordering::Acquire) {
                return Err(LinkError::Closed);
            }
            let began = Instant::now();
            system::wait_for_bell(block.bell(), seen, LOOK);
            if began.elapsed() >= LOOK {
                self.check_alive(peer, sequence, |block| block.offer(sequence).is_some())?;
            }
        }
    }

    /// A rank that has not pulled all it needs in the exchange, and what its bell showed before that was seen.
    fn laggard(&self, sequence: u64) -> Option<(usize, u32)> {
        (0..self.world()).find_map(|rank| {
            let block = self.block(rank).ok()?;
            let seen = block.bell().load(Ordering::Acquire);
            (block.num_pulled() <= sequence).then_some((rank, seen))
        })
    }

    fn check(&self) -> Result<()> {
        if let Some(failure) = self.failure.get() {
            return Err(failure.clone());
        }
        if self.closed.load(Ordering::Acquire) { Err(LinkError::Closed) } else { Ok(()) }
    }

    /// An error if the process of `rank` has ended before it did what is waited for.
    fn check_alive(&self, rank: usize, sequence: u64, did: impl Fn(&Block) -> bool) -> Result<()> {
        if rank != self.rank && system::has_ended(&self.peer(rank)?.process) && !did(self.block(rank)?) {
            return Err(LinkError::PeerGone { peer: rank, sequence });
        }
        Ok(())
    }

    fn world(&self) -> usize {
        self.peers.get().map_or(0, Vec::len)
    }

    fn peer(&self, rank: usize) -> Result<&Peer> {
        let peers = self.peers.get().ok_or(LinkError::Closed)?;
        peers.get(rank).and_then(Option::as_ref).ok_or(LinkError::Closed)
    }

    fn block(&self, rank: usize) -> Result<&Block> {
        if rank == self.rank { Ok(self.own.get()) } else { Ok(self.peer(rank)?.block.get()) }
    }
}

impl Peer {
    fn open(card: &str) -> Result<Self> {
        let card = Card::parse(card)?;
        if card.machine != machine() {
            let reason = "the ranks are on different machines, or in different process namespaces".to_owned();
            return Err(LinkError::Unavailable { reason });
        }
        let path = format!("/proc/{}/fd/{}", card.pid, card.descriptor);
        let file = File::options().read(true).write(true).open(path).map_err(unavailable("opening a peer's block"))?;
        let peer = Self {
            pid: card.pid,
            process: system::open_process(card.pid).map_err(unavailable("pidfd_open"))?,
            block: Mapped::new(&file).map_err(unavailable("mapping a peer's block"))?,
        };
        let mut greeting = 0_u64;
        // SAFETY: a local number that nothing else sees.
        unsafe { system::read_memory(card.pid, card.greeting, (&raw mut greeting).addr(), size_of::<u64>()) }
            .map_err(unavailable("process_vm_readv"))?;
        if greeting == GREETING {
            Ok(peer)
        } else {
            Err(LinkError::Unavailable { reason: "a peer's memory reads wrong".to_owned() })
        }
    }
}

impl Card {
    fn parse(text: &str) -> Result<Self> {
        let parts: Vec<&str> = text.split(' ').collect();
        let parsed = match parts[..] {
            [machine, pid, descriptor, greeting] => Some((machine, pid, descriptor, greeting)),
            _ => None,
        };
        parsed
            .and_then(|(machine, pid, descriptor, greeting)| {
                Some(Self {
                    machine: machine.to_owned(),
                    pid: pid.parse().ok()?,
                    descriptor: descriptor.parse().ok()?,
                    greeting: greeting.parse().ok()?,
                })
            })
            .ok_or_else(|| LinkError::Unavailable { reason: "a peer cannot be linked".to_owned() })
    }
}

/// Equal for processes that see one another: the kernel's boot, and the process namespace.
fn machine() -> String {
    let boot = read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{}{}", boot.trim(), namespace.display()).replace(' ', "_")
}

fn unavailable<E: Debug + std::fmt::Display>(what: &str) -> impl Fn(E) -> LinkError {
    move |error| LinkError::Unavailable { reason: format!("{what}: {error}") }
}
