//! The rows, and what is printed of them.

use std::fmt;

use serde::Serialize;

use super::pair::Turn;
use crate::nccl_tests::number;

/// What one row transfers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Shape {
    number: usize,
    operation: &'static str,
    pages: u64,
    /// Of a page.
    bytes: u64,
}

impl Shape {
    /// Every row: single pages, and lists as of a KV cache.
    pub fn all() -> Vec<Shape> {
        let shapes = [(1, 8), (1, 64 << 10), (1, 1 << 20), (1, 64 << 20), (1024, 32 << 10), (2048, 16 << 10)];
        let rows = ["WRITE", "READ"].into_iter().flat_map(|operation| shapes.map(|shape| (operation, shape)));
        rows.enumerate()
            .map(|(number, (operation, (pages, bytes)))| Shape { number, operation, pages, bytes })
            .collect()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} x {} bytes", self.operation, self.pages, self.bytes)
    }
}

/// A row of one backend: the median of its turns.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    #[serde(flatten)]
    shape: Shape,
    pub backend: String,
    /// Microseconds of a transfer.
    us: f64,
    /// GB/s, 10^9 bytes a second.
    gbs: f64,
    /// Wrong bytes of all turns.
    pub wrong: u64,
    /// The time of the last backend by this one's; none in the last one's rows, or where it did not run.
    ratio: Option<f64>,
    beside: Option<String>,
}

/// Rows of all turns, by shape and backend.
pub fn rows(backends: &[String], turns: &[(usize, Turn)]) -> Vec<Row> {
    let mut rows = Vec::new();
    for shape in Shape::all() {
        let first = rows.len();
        for (number, backend) in backends.iter().enumerate() {
            let of = turns.iter().filter(|(of, _)| *of == number).map(|(_, turn)| turn.rows[shape.number]);
            let mut times: Vec<f64> = of.clone().map(|(seconds, _)| seconds).collect();
            times.sort_unstable_by(f64::total_cmp);
            let Some(seconds) = times.get(times.len() / 2) else { continue };
            rows.push(Row {
                us: seconds * 1e6,
                gbs: (shape.pages * shape.bytes) as f64 / seconds / 1e9,
                wrong: of.map(|(_, wrong)| wrong).sum(),
                shape: shape.clone(),
                backend: backend.clone(),
                ratio: None,
                beside: None,
            });
        }
        if let [others @ .., last] = &mut rows[first..]
            && backends.last() == Some(&last.backend)
        {
            for row in others {
                (row.ratio, row.beside) = (Some(last.us / row.us), Some(last.backend.clone()));
            }
        }
    }
    rows
}

/// The table: a block for each operation.
pub fn text(rows: &[Row]) -> String {
    let mut text = String::new();
    let mut operation = "";
    for row in rows {
        let shape = &row.shape;
        if shape.operation != operation {
            operation = shape.operation;
            text += &format!("#\n# {operation}, by the first process\n");
            text += "#  pages      bytes      time    GB/s   wrong  backend     ratio\n";
            text += "#             (each)      (us)\n";
        }
        let ratio = match (row.ratio, &row.beside) {
            (Some(ratio), Some(beside)) => format!("  {ratio:.2} of {beside}"),
            _ => String::new(),
        };
        let (time, gbs) = (number(row.us, 8), number(row.gbs, 6));
        let line = format!(
            "{:>8}  {:>9}  {time}  {gbs}  {:>6}  {:<10}{ratio}",
            shape.pages, shape.bytes, row.wrong, row.backend
        );
        text += line.trim_end();
        text += "\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(seconds: f64, wrong: u64) -> Turn {
        Turn { rows: vec![(seconds, wrong); Shape::all().len()], way: String::new(), devices: None }
    }

    fn names() -> Vec<String> {
        vec!["A".into(), "UCX".into()]
    }

    #[test]
    fn the_median_of_the_turns_counts_and_wrong_bytes_add_up() {
        let turns = [(0, turn(2e-6, 0)), (1, turn(6e-6, 1)), (0, turn(9e-6, 3)), (0, turn(3e-6, 2))];
        let rows = rows(&names(), &turns);
        assert_eq!(rows.len(), 2 * 6 * 2);
        assert!((rows[0].us - 3.0).abs() < 1e-9 && rows[0].wrong == 5, "{:?}", rows[0]);
        assert!((rows[0].ratio.unwrap() - 2.0).abs() < 1e-9 && rows[0].beside.as_deref() == Some("UCX"));
        assert_eq!((rows[1].wrong, rows[1].ratio), (1, None));
        let page = 1024.0 * 32768.0 / 3e-6 / 1e9;
        assert!((rows[8].gbs - page).abs() < 1e-6, "{:?}", rows[8]);
    }

    #[test]
    fn without_the_last_backend_there_is_no_ratio() {
        let rows = rows(&names(), &[(0, turn(2e-6, 0))]);
        assert!(rows.len() == 12 && rows.iter().all(|row| row.ratio.is_none()));
        assert_eq!(super::rows(&names(), &[]), []);
    }

    #[test]
    fn the_table_has_a_block_for_each_operation() {
        let text = text(&rows(&names(), &[(0, turn(2e-6, 0)), (1, turn(4e-6, 0))]));
        assert_eq!(text.matches(", by the first process\n").count(), 2);
        let words: Vec<_> = text.lines().nth(4).unwrap().split_whitespace().collect();
        assert_eq!(words, ["1", "8", "2.00", "0.00", "0", "A", "2.00", "of", "UCX"]);
        let words: Vec<_> = text.lines().nth(5).unwrap().split_whitespace().collect();
        assert_eq!(words, ["1", "8", "4.00", "0.00", "0", "UCX"]);
    }
}
