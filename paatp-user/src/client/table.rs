//! Columns of text for people.

use std::fmt::Write as _;

/// Rows under a header, each column as wide as its widest cell.
#[must_use]
pub fn columns<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let mut widths = header.map(str::len);
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let header = header.map(str::to_owned);
    for row in std::iter::once(&header).chain(rows) {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            let _ = write!(line, "{cell:<width$}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [["train".to_owned(), "4".to_owned()], ["a".to_owned(), "64".to_owned()]];
        assert_eq!(columns(["NAME", "WORLD"], &rows), "NAME   WORLD\ntrain  4\na      64\n");
    }
}
