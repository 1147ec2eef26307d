//! Aligned text tables, and numbers for people.

/// Rows shown in full at each end of a long table.
const ROWS_AT_EACH_END: usize = 20;

/// On which side the text of a column stands.
#[derive(Clone, Copy)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A table of text cells, without a line break at its end. The middle of a long one is left out and never rendered.
pub(crate) struct Table<'a, const N: usize> {
    columns: [(&'a str, Align); N],
    rows: Vec<[String; N]>,
    omitted: usize,
}

impl<'a, const N: usize> Table<'a, N> {
    /// A table of `len` rows, of which `row` renders the one at an index.
    pub(crate) fn new(columns: [(&'a str, Align); N], len: usize, row: impl Fn(usize) -> [String; N]) -> Self {
        // One row more than at both ends is shown as well: a line that says "1 more" would take the same place.
        let omitted = if len > 2 * ROWS_AT_EACH_END + 1 { len - 2 * ROWS_AT_EACH_END } else { 0 };
        let shown = (0..len).filter(|&index| index < ROWS_AT_EACH_END || index >= ROWS_AT_EACH_END + omitted);
        Self { columns, rows: shown.map(row).collect(), omitted }
    }
}

impl<const N: usize> std::fmt::Display for Table<'_, N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let header = self.columns.map(|(title, _)| title.to_owned());
        let widths: [usize; N] = std::array::from_fn(|column| {
            std::iter::once(&header).chain(&self.rows).map(|row| row[column].chars().count()).max().unwrap_or(0)
        });
        let line = |row: &[String; N]| {
            let cells = row.iter().zip(widths).zip(self.columns).map(|((cell, width), (_, align))| match align {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        f.write_str(&line(&header))?;
        for (index, row) in self.rows.iter().enumerate() {
            if self.omitted > 0 && index == ROWS_AT_EACH_END {
                write!(f, "\n... {} more ...", count(self.omitted as u64))?;
            }
            write!(f, "\n{}", line(row))?;
        }
        Ok(())
    }
}

/// `1234567` as `1,234,567`.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of bytes in binary units, rounded down to one decimal: `1.5 MiB`.
pub(crate) fn bytes(nbytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (nbytes.max(1).ilog2() / 10) as usize;
    if unit == 0 {
        return format!("{nbytes} B");
    }
    let tenths = (u128::from(nbytes) * 10) >> (10 * unit);
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

/// A duration in its largest unit below it, with one decimal: `1.5 ms`.
pub(crate) fn seconds(value: f64) -> String {
    const UNITS: [(f64, &str); 3] = [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")];
    let (scale, name) = UNITS.into_iter().find(|(scale, _)| value >= *scale).unwrap_or((1e-9, "ns"));
    if value == 0.0 { "0 s".to_owned() } else { format!("{:.1} {name}", value / scale) }
}

/// `1 shard`, `2 shards`.
pub(crate) fn counted(value: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(value), if value == 1 { "" } else { "s" })
}

/// `part` of `whole` in per cent with one decimal: `12.5%`; `0.0%` of nothing.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    let tenths = u128::from(part) * 1000 / u128::from(whole.max(1));
    format!("{}.{}%", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([count(0), count(999), count(1000), count(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([bytes(0), bytes(1023), bytes(1024), bytes(1536)], ["0 B", "1023 B", "1.0 KiB", "1.5 KiB"]);
        assert_eq!([bytes(10 << 30), bytes(u64::MAX)], ["10.0 GiB", "15.9 EiB"]);
        assert_eq!([percent(1, 8), percent(0, 0), percent(7, 7)], ["12.5%", "0.0%", "100.0%"]);
        assert_eq!(
            [seconds(0.0), seconds(90.0), seconds(0.8), seconds(2.5e-5)],
            ["0 s", "90.0 s", "800.0 ms", "25.0 us"]
        );
        assert_eq!([seconds(3e-9), seconds(4e-10)], ["3.0 ns", "0.4 ns"]);
        assert_eq!([counted(1, "shard"), counted(2000, "shard")], ["1 shard", "2,000 shards"]);
    }

    #[test]
    fn long_tables_keep_both_ends() {
        let table = |len| Table::new([("row", Align::Right)], len, |index| [index.to_string()]).to_string();
        assert_eq!(table(41).lines().count(), 42);
        let long = table(1040);
        assert_eq!(long.lines().count(), 42);
        assert!(long.contains("\n  19\n... 1,000 more ...\n1020\n"), "{long}");
        assert!(long.ends_with("\n1039"));
    }

    #[test]
    fn columns_are_aligned() {
        let columns = [("name", Align::Left), ("numel", Align::Right)];
        let table = Table::new(columns, 2, |index| ["ab".repeat(index * 3), (10 * index).to_string()]);
        assert_eq!(table.to_string(), "name    numel\n            0\nababab     10");
    }
}
