//! Plans as text for people.

use std::fmt;

use crate::layout::{Entry, FlatLayout};
use crate::shard_plan::ShardPlan;
use crate::table::{Align, Table, bytes, count, counted, percent};

impl FlatLayout {
    /// The layout as an aligned table: one line a parameter with its elements, offset, bytes and the ranks that hold
    /// it. Long layouts show both ends.
    #[must_use]
    pub fn explain(&self) -> String {
        let columns = [
            ("parameter", Align::Left),
            ("numel", Align::Right),
            ("offset", Align::Right),
            ("bytes", Align::Right),
            ("ranks", Align::Right),
        ];
        let table = Table::new(columns, self.entries().len(), |index| {
            let entry = &self.entries()[index];
            let nbytes = entry.numel * self.dtype().itemsize();
            [entry.name.clone(), count(entry.numel), count(entry.offset), bytes(nbytes), self.ranks(entry)]
        });
        format!("{self}\n{table}")
    }

    /// The ranks whose shards hold a piece of the parameter.
    fn ranks(&self, entry: &Entry) -> String {
        if entry.numel == 0 {
            return "-".to_owned();
        }
        let (first, last) = (entry.offset / self.shard_numel(), (entry.end() - 1) / self.shard_numel());
        if first == last { first.to_string() } else { format!("{first}-{last}") }
    }

    /// Elements of padding, between parameters and at the end.
    pub(crate) fn padding_numel(&self) -> u64 {
        self.padded_numel() - self.numel()
    }
}

/// The layout on one line.
impl fmt::Display for FlatLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {}, {} ({}) with {} padding, in {} of {} ({})",
            self.kind(),
            counted(self.entries().len() as u64, "parameter"),
            counted(self.padded_numel(), "element"),
            bytes(self.padded_nbytes()),
            percent(self.padding_numel(), self.padded_numel()),
            counted(self.num_shards(), "shard"),
            counted(self.shard_numel(), "element"),
            bytes(self.shard_nbytes()),
        )
    }
}

impl ShardPlan {
    /// The plan as an aligned table: one line a group with its unit, kind, elements, padding, bytes of one shard and
    /// place in the order of reduction. Long plans show both ends.
    #[must_use]
    pub fn explain(&self) -> String {
        let columns = [
            ("group", Align::Right),
            ("unit", Align::Left),
            ("kind", Align::Left),
            ("parameters", Align::Right),
            ("numel", Align::Right),
            ("padding", Align::Right),
            ("bytes", Align::Right),
            ("shard", Align::Right),
            ("reduced", Align::Right),
        ];
        let mut turns = vec![None; self.groups().len()];
        self.reduce_order().iter().enumerate().for_each(|(turn, &index)| turns[index] = Some(turn));
        let table = Table::new(columns, self.groups().len(), |index| self.row(index, turns[index]));
        format!("{self}\n{table}")
    }

    fn row(&self, index: usize, turn: Option<usize>) -> [String; 9] {
        let group = &self.groups()[index];
        let layout = &group.layout;
        let unit = self.units()[group.unit].as_str();
        [
            index.to_string(),
            if unit.is_empty() { "(root)".to_owned() } else { unit.to_owned() },
            layout.kind().to_string(),
            count(layout.entries().len() as u64),
            count(layout.numel()),
            percent(layout.padding_numel(), layout.padded_numel()),
            bytes(layout.padded_nbytes()),
            bytes(layout.shard_nbytes()),
            turn.map_or_else(|| "-".to_owned(), |turn| turn.to_string()),
        ]
    }
}

/// The plan on one line.
impl fmt::Display for ShardPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nbytes: u128 = self.groups().iter().map(|group| u128::from(group.layout.padded_nbytes())).sum();
        let num_shards = self.sharding().num_shards();
        let total = |nbytes: u128| bytes(u64::try_from(nbytes).unwrap_or(u64::MAX));
        write!(
            f,
            "{}, {}, {} in {} of {}",
            counted(self.units().len() as u64, "unit"),
            counted(self.groups().len() as u64, "group"),
            total(nbytes),
            counted(num_shards, "shard"),
            total(nbytes / u128::from(num_shards)),
        )
    }
}
