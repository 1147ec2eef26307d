//! `shardcore._core.HostLink`: ranks on one machine read each other's tensors.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use shardcore_link::{Link, LinkError, Pull};

use crate::gil;
use crate::tensor::TensorRef;

/// This rank's end of a link between the ranks of one axis, all on one machine.
///
/// Exchanges are numbered in the order in which they are made, the same on all ranks. Tensors are contiguous and on
/// the CPU; the link keeps them alive until their exchange is complete.
#[pyclass(frozen, name = "HostLink", module = "shardcore._core")]
pub(crate) struct PyHostLink {
    link: Link,
    lent: Mutex<VecDeque<(u64, Vec<Py<PyAny>>)>>,
}

#[pymethods]
impl PyHostLink {
    /// A link of the rank at position ``rank``, not connected yet.
    ///
    /// Raises ``StateError`` where the kernel refuses what it needs.
    #[new]
    fn new(py: Python<'_>, rank: usize) -> PyResult<Self> {
        let link = gil::run(py, || Link::new(rank))?;
        Ok(Self { link, lent: Mutex::default() })
    }

    /// How many exchanges may be under way at once.
    #[staticmethod]
    fn num_slots() -> usize {
        Link::NUM_SLOTS
    }

    /// Number of exchanges that were started.
    #[getter]
    fn num_started(&self) -> u64 {
        self.link.num_started()
    }

    /// What peers need to connect to this rank: ASCII text of less than 256 characters.
    fn card(&self) -> String {
        self.link.card()
    }

    /// Connects to the ranks that gave these cards (in rank order, this rank's among them).
    ///
    /// Raises ``StateError`` if a peer is on another machine or may not be read.
    #[expect(clippy::needless_pass_by_value, reason = "a Python list becomes a vector")]
    fn connect(&self, py: Python<'_>, cards: Vec<String>) -> PyResult<()> {
        gil::run(py, || self.link.connect(&cards))
    }

    /// Starts an exchange and returns its number.
    ///
    /// ``source`` is what peers may read until the exchange is complete. ``pulls`` lists ``(peer, offset, into)``: fill
    /// the tensor ``into`` with the bytes from ``offset`` on of what ``peer`` gives. ``tag`` says what is exchanged;
    /// ranks with different tags at one number fail and read nothing. With ``num_slots`` exchanges under way this waits
    /// for the first of them, and looks for no failure of other ranks: wait for it before.
    fn exchange(
        &self,
        py: Python<'_>,
        tag: u64,
        source: TensorRef,
        pulls: Vec<(usize, usize, TensorRef)>,
    ) -> PyResult<u64> {
        let parts = pulls.iter().map(|(peer, offset, tensor)| {
            let (into, nbytes) = tensor.span();
            Pull { peer: *peer, offset: *offset, into, nbytes }
        });
        let parts: Vec<Pull> = parts.collect();
        let (address, nbytes) = source.span();
        // SAFETY: the tensors are kept until the exchange is complete, and what `comm` exchanges is nobody else's then.
        let sequence = gil::run(py, || unsafe { self.link.exchange(tag, address, nbytes, parts) })?;
        let owners = pulls.into_iter().map(|(_, _, into)| into.into_owner()).chain([source.into_owner()]).collect();
        self.lent().push_back((sequence, owners));
        self.give_back(self.link.num_complete());
        Ok(sequence)
    }

    /// Waits until all ranks have what they need from the exchange; False if that takes longer than ``timeout_s``.
    ///
    /// Raises ``RankMismatchError`` if a rank runs another exchange, or its process has ended.
    fn wait(&self, py: Python<'_>, sequence: u64, timeout_s: f64) -> PyResult<bool> {
        let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or(Duration::MAX);
        let is_complete = gil::run(py, || self.link.wait(sequence, timeout))?;
        if is_complete {
            self.give_back(sequence + 1);
        }
        Ok(is_complete)
    }

    /// Ends the link; what is under way stays incomplete.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        gil::run(py, || {
            self.link.close();
            Ok::<(), LinkError>(())
        })
    }
}

impl PyHostLink {
    /// Lets go of the tensors of the first `num_complete` exchanges.
    fn give_back(&self, num_complete: u64) {
        let mut lent = self.lent();
        let number = lent.partition_point(|(sequence, _)| *sequence < num_complete);
        let returned: Vec<_> = lent.drain(..number).collect();
        drop(lent); // What a tensor's end sets off may come back here.
        drop(returned);
    }

    fn lent(&self) -> MutexGuard<'_, VecDeque<(u64, Vec<Py<PyAny>>)>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
