//! Aligned text tables, and numbers for people.

/// Rows shown in full at each end of a long table.
const ROWS_AT_EACH_END: usize = 20;

/// On which side the text of a column stands.
#[derive(Clone, Copy)]
pub(crate) enum Align {
    Left,
    Right,
}

/// A table that is built from the rows it shows: rows in the middle of a long one are never rendered.
pub(crate) struct Table<'a, const N: usize> {
    columns: [(&'a str, Align); N],
    rows: Vec<[String; N]>,
    /// How many rows are left out, and behind which row.
    omitted: Option<(usize, usize)>,
}

impl<'a, const N: usize> Table<'a, N> {
    /// A table of `len` rows, of which `row` renders the one at an index.
    pub(crate) fn new(columns: [(&'a str, Align); N], len: usize, row: impl Fn(usize) -> [String; N]) -> Self {
        let omitted = len.saturating_sub(2 * ROWS_AT_EACH_END + 1);
        if omitted == 0 {
            return Self { columns, rows: (0..len).map(row).collect(), omitted: None };
        }
        let shown = (0..ROWS_AT_EACH_END).chain(len - ROWS_AT_EACH_END - 1..len);
        let omitted = Some((omitted, ROWS_AT_EACH_END));
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
        writeln!(f, "{}", line(&header))?;
        for (index, row) in self.rows.iter().enumerate() {
            if let Some((omitted, _)) = self.omitted.filter(|(_, behind)| *behind == index) {
                writeln!(f, "... {} more ...", count(omitted as u64))?;
            }
            writeln!(f, "{}", line(row))?;
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

/// A number of bytes in binary units, with one decimal: `1.5 MiB`.
pub(crate) fn bytes(nbytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (nbytes.max(1).ilog2() / 10) as usize;
    if unit == 0 {
        return format!("{nbytes} B");
    }
    let tenths = (u128::from(nbytes) * 10) >> (10 * unit);
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
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
    }

    #[test]
    fn long_tables_keep_both_ends() {
        let table = |len| Table::new([("row", Align::Right)], len, |index| [index.to_string()]).to_string();
        assert_eq!(table(41).lines().count(), 42);
        let long = table(1041);
        assert_eq!(long.lines().count(), 43);
        assert!(long.contains("\n  19\n... 1,000 more ...\n1020\n"), "{long}");
        assert!(long.ends_with("\n1040\n"));
    }
}
