//! Where the kernel has no such calls: a link that never connects.

use std::time::Duration;

use crate::Pull;
use crate::error::{LinkError, Result};

/// Never connects here.
#[derive(Debug)]
pub struct Link;

#[allow(
    missing_docs,
    clippy::missing_errors_doc,
    clippy::missing_safety_doc,
    clippy::unused_self,
    clippy::needless_pass_by_value
)]
impl Link {
    pub const NUM_SLOTS: usize = 1;

    pub fn new(_rank: usize) -> Result<Self> {
        Err(LinkError::Unavailable { reason: "it needs Linux".to_owned() })
    }

    #[must_use]
    pub fn card(&self) -> String {
        String::new()
    }

    pub fn connect(&self, _cards: &[String]) -> Result<()> {
        Err(LinkError::Closed)
    }

    pub unsafe fn exchange(&self, _tag: u64, _source: usize, _nbytes: usize, _pulls: Vec<Pull>) -> Result<u64> {
        Err(LinkError::Closed)
    }

    pub fn wait(&self, _sequence: u64, _timeout: Duration) -> Result<bool> {
        Err(LinkError::Closed)
    }

    #[must_use]
    pub fn num_started(&self) -> u64 {
        0
    }

    #[must_use]
    pub fn num_complete(&self) -> u64 {
        0
    }

    pub fn close(&self) {}
}
