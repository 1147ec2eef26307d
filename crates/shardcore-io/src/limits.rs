//! How much host memory this process may take and lock, and the arithmetic when that is too little.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Result, StorageError};

/// Linux's number of the capability that lifts the limit on locked memory.
const CAP_IPC_LOCK: u32 = 14;

/// What the machine and the limits of this process leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostLimits {
    /// What the kernel can give without swapping (`MemAvailable`); none if unknown.
    pub available_nbytes: Option<u64>,
    /// What the tightest control group above this process leaves; none without a limit.
    pub group_nbytes: Option<u64>,
    /// What `ulimit -l` leaves to lock: (limit, locked already); none without a limit.
    pub lockable: Option<(u64, u64)>,
}

impl HostLimits {
    /// Reads the limits as they are now. What cannot be read limits nothing.
    #[must_use]
    pub fn now() -> Self {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self {
            available_nbytes: kibibytes(&meminfo, "MemAvailable:"),
            group_nbytes: group_nbytes(),
            lockable: lockable(&status),
        }
    }

    /// Checks that `nbytes` more of memory can be had, and locked if `lock`. `what` names who asks.
    ///
    /// # Errors
    /// [`StorageError::Memory`] with the arithmetic.
    pub fn check(&self, what: &str, nbytes: u64, lock: bool) -> Result<()> {
        let mut lines = String::new();
        if let Some(free) = self.available_nbytes.filter(|&free| free < nbytes) {
            let _ = write!(
                lines,
                "; the machine has {} available: {} missing. Use fewer processes on this machine, or a disk (\"nvme\")",
                amount(free),
                amount(nbytes - free)
            );
        }
        if let Some(free) = self.group_nbytes.filter(|&free| free < nbytes) {
            let _ = write!(
                lines,
                "; the control group of this process (container) leaves {}: {} missing. Raise its memory limit",
                amount(free),
                amount(nbytes - free)
            );
        }
        if let Some((limit, locked)) = self.lockable.filter(|(limit, locked)| lock && limit - locked < nbytes) {
            let _ = write!(
                lines,
                "; `ulimit -l` allows {} of locked memory, of which {} are taken: {} - {} = {} missing. Raise it, or \
                 do without locking",
                amount(limit),
                amount(locked),
                amount(nbytes),
                amount(limit - locked),
                amount(nbytes - (limit - locked))
            );
        }
        if lines.is_empty() {
            return Ok(());
        }
        Err(StorageError::Memory(format!("{what} needs {} of host memory{lines}", amount(nbytes))))
    }
}

/// Bytes for people and for checking sums: `1.50 GiB (1610612736 bytes)`.
#[must_use]
pub fn amount(nbytes: u64) -> String {
    const UNITS: [(&str, u32); 3] = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match UNITS.iter().find(|(_, bits)| nbytes >> bits > 0) {
        // Hundredths of a unit in integers: exact enough to read, and no rounding up to a whole that is not there.
        Some((unit, bits)) => {
            let hundredths = (u128::from(nbytes) * 100) >> bits;
            format!("{}.{:02} {unit} ({nbytes} bytes)", hundredths / 100, hundredths % 100)
        }
        None => format!("{nbytes} bytes"),
    }
}

fn kibibytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

fn lockable(status: &str) -> Option<(u64, u64)> {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let capabilities = u64::from_str_radix(effective.trim(), 16).ok()?;
    if capabilities >> CAP_IPC_LOCK & 1 == 1 {
        return None;
    }
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid rlimit that the call fills.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0;
    if failed || limit.rlim_cur == libc::RLIM_INFINITY {
        return None;
    }
    let locked = kibibytes(status, "VmLck:").unwrap_or(0);
    Some((limit.rlim_cur, locked.min(limit.rlim_cur)))
}

/// What the control groups of version 1 or 2 leave; page cache that can be dropped counts as free.
fn group_nbytes() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    groups.lines().filter_map(group_folder).filter_map(|(folder, version)| tightest(&folder, version)).min()
}

/// Where a line `id:controllers:/path` of `/proc/self/cgroup` finds its memory files, and which version they are.
fn group_folder(line: &str) -> Option<(PathBuf, u8)> {
    let mut fields = line.splitn(3, ':');
    let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let path = path.trim_start_matches('/');
    if controllers.is_empty() {
        return Some((Path::new("/sys/fs/cgroup").join(path), 2));
    }
    let memory = controllers.split(',').any(|controller| controller == "memory");
    memory.then(|| (Path::new("/sys/fs/cgroup/memory").join(path), 1))
}

fn tightest(folder: &Path, version: u8) -> Option<u64> {
    let (limit, usage, reclaimable) = match version {
        2 => ("memory.max", "memory.current", "inactive_file "),
        _ => ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
    };
    let number = |file: &Path| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let levels = folder.ancestors().take_while(|level| level.starts_with("/sys/fs/cgroup"));
    let left = levels.filter_map(|level| {
        let limit = number(&level.join(limit))?;
        let stat = fs::read_to_string(level.join("memory.stat")).unwrap_or_default();
        let droppable = stat.lines().find_map(|line| line.strip_prefix(reclaimable)?.trim().parse().ok()).unwrap_or(0);
        let used = number(&level.join(usage))?.saturating_sub(droppable);
        Some(limit.saturating_sub(used))
    });
    left.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_read_well_and_never_round_up() {
        assert_eq!(amount(1023), "1023 bytes");
        assert_eq!(amount(1 << 30), "1.00 GiB (1073741824 bytes)");
        assert_eq!(amount((1 << 30) - 1), "1023.99 MiB (1073741823 bytes)");
        assert_eq!(amount(u64::MAX), "17179869183.99 GiB (18446744073709551615 bytes)");
    }

    #[test]
    fn every_limit_that_is_too_small_is_named_with_its_sum() {
        let limits = HostLimits { available_nbytes: Some(100), group_nbytes: Some(80), lockable: Some((64, 14)) };
        let text = limits.check("a pool", 120, true).unwrap_err().to_string();
        assert!(text.starts_with("a pool needs 120 bytes of host memory"), "{text}");
        assert!(text.contains("100 bytes available: 20 bytes missing"), "{text}");
        assert!(text.contains("leaves 80 bytes: 40 bytes missing"), "{text}");
        assert!(text.contains("120 bytes - 50 bytes = 70 bytes missing"), "{text}");
        assert!(limits.check("a pool", 80, false).is_ok());
        assert!(limits.check("a pool", 50, true).is_ok());
        assert!(HostLimits::default().check("a pool", u64::MAX, true).is_ok());
    }

    #[test]
    fn limits_of_this_machine_can_be_read() {
        assert!(HostLimits::now().available_nbytes.is_some_and(|nbytes| nbytes > 0));
        assert_eq!(kibibytes("A: 1 kB\nVmLck:\t  12 kB\n", "VmLck:"), Some(12 << 10));
    }
}
