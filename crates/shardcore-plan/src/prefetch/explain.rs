//! Prefetch plans as text for people.

use std::fmt;

use crate::prefetch::plan::PrefetchPlan;
use crate::prefetch::trace::Seconds;
use crate::table::{Align, Table, bytes, counted, seconds};

/// Names of units listed in one cell.
const NAMES_SHOWN: usize = 3;

impl PrefetchPlan {
    /// The plan as an aligned table: one line a use with its unit, the gathers that start with it, the bytes that are
    /// live, how long it waits and what becomes of its unit. Long plans show both ends.
    #[must_use]
    pub fn explain(&self) -> String {
        let columns = [
            ("use", Align::Right),
            ("unit", Align::Left),
            ("phase", Align::Left),
            ("starts gathering", Align::Left),
            ("live", Align::Right),
            ("waits", Align::Right),
            ("then", Align::Right),
        ];
        let table = Table::new(columns, self.trace().uses().len(), |index| self.row(index));
        format!("{self}\n{table}")
    }

    fn row(&self, index: usize) -> [String; 7] {
        let used = self.trace().uses()[index];
        [
            index.to_string(),
            self.unit_name(used.unit).to_owned(),
            used.phase.to_string(),
            self.starts(index),
            bytes(self.live_nbytes()[index]),
            self.wait(index),
            if self.kept()[index] { "keep" } else { "release" }.to_owned(),
        ]
    }

    /// The units whose gathers start with a use.
    fn starts(&self, index: usize) -> String {
        let first = self.gathers().partition_point(|gather| gather.start < index);
        let count = self.gathers()[first..].partition_point(|gather| gather.start == index);
        let units = self.gathers()[first..first + count].iter().map(|gather| self.unit_name(gather.unit));
        let names: Vec<&str> = units.take(NAMES_SHOWN).collect();
        let more = if count > NAMES_SHOWN { format!(", {} more", count - NAMES_SHOWN) } else { String::new() };
        if names.is_empty() { "-".to_owned() } else { names.join(", ") + &more }
    }

    fn wait(&self, index: usize) -> String {
        let stall = self.simulation().stalls[index];
        if stall == Seconds::ZERO { "-".to_owned() } else { seconds(stall.get()) }
    }

    fn unit_name(&self, unit: usize) -> &str {
        let name = self.trace().units()[unit].name.as_str();
        if name.is_empty() { "(root)" } else { name }
    }
}

/// The plan on one line.
impl fmt::Display for PrefetchPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {}, {} of {} (on demand {}), at most {} at once of {}, {} exposed (on demand {})",
            counted(self.trace().uses().len() as u64, "use"),
            counted(self.trace().units().len() as u64, "unit"),
            counted(self.gathers().len() as u64, "gather"),
            bytes(self.gathered_nbytes()),
            bytes(self.on_demand_nbytes()),
            bytes(self.peak_nbytes()),
            self.limits().budget.map_or_else(|| "no budget".to_owned(), bytes),
            seconds(self.simulation().exposed()),
            seconds(self.on_demand().exposed()),
        )
    }
}
