//! The columns of `pushgate top`, and which of them a terminal has room for. A number is never cut: half of a process's
//! number names another process. Where there is no room, whole columns are left out, and said to be.

/// A column.
pub struct Column {
    pub name: &'static str,
    /// Cells stand at the right, as numbers do.
    pub right: bool,
    /// The width where there is room.
    usual: usize,
    /// The width to which a text may be cut. `None`: cells are never cut.
    least: Option<usize>,
}

const fn number(name: &'static str, usual: usize) -> Column {
    Column { name, right: true, usual, least: None }
}

const fn text(name: &'static str, usual: usize, least: usize) -> Column {
    Column { name, right: false, usual, least: Some(least) }
}

/// All columns, from left to right.
pub const COLUMNS: [Column; 12] = [
    number("PID", 8),
    text("NAME", 15, 9),
    number("QP", 5),
    number("RANK", 5),
    number("PEER", 5),
    text("LINK", 6, 5),
    text("STATE", 9, 8),
    number("OUT GB/s", 9),
    number("IN GB/s", 9),
    number("MSG/s", 10),
    number("STALLS/s", 9),
    text("WAITS FOR", 24, 12),
];

/// The order in which columns are left out: the number of the process is the last to stand.
const LEFT_OUT: [&str; COLUMNS.len()] = [
    "STALLS/s",
    "LINK",
    "PEER",
    "MSG/s",
    "QP",
    "RANK",
    "IN GB/s",
    "OUT GB/s",
    "WAITS FOR",
    "STATE",
    "NAME",
    "PID",
];

/// The cells of a row.
pub type Cells = [String; COLUMNS.len()];

/// The columns that a screen of some width shows.
pub struct Fitted {
    /// Their places in [`COLUMNS`], each with its width.
    pub shown: Vec<(usize, usize)>,
    /// The names of the others.
    pub left_out: Vec<&'static str>,
}

/// The widest text of a column.
fn natural(rows: &[Cells], at: usize) -> usize {
    rows.iter().map(|cells| cells[at].chars().count()).fold(COLUMNS[at].name.len(), usize::max)
}

/// Chooses the columns for a screen of `width`, with one space between two columns.
pub fn fit(rows: &[Cells], width: usize) -> Fitted {
    let needs = |at: usize| match COLUMNS[at].least {
        Some(least) => natural(rows, at).min(least.max(COLUMNS[at].name.len())),
        None => natural(rows, at),
    };
    let mut shown: Vec<(usize, usize)> = (0..COLUMNS.len()).map(|at| (at, needs(at))).collect();
    let all =
        |shown: &[(usize, usize)]| shown.iter().map(|(_, width)| width + 1).sum::<usize>().saturating_sub(1);
    let mut left_out = Vec::new();
    for name in LEFT_OUT {
        if all(&shown) <= width {
            break;
        }
        shown.retain(|(at, _)| COLUMNS[*at].name != name);
        left_out.push(name);
    }
    let mut room = width.saturating_sub(all(&shown));
    for (at, has) in &mut shown {
        let more = COLUMNS[*at].usual.max(natural(rows, *at)).saturating_sub(*has).min(room);
        (*has, room) = (*has + more, room - more);
    }
    Fitted { shown, left_out }
}

/// A text of at most `width` characters; one that was cut ends in a mark.
pub fn cut(text: &str, width: usize) -> String {
    match text.chars().count() <= width {
        true => text.into(),
        false => text.chars().take(width.saturating_sub(1)).chain(['…']).take(width).collect(),
    }
}

/// At most `most` lines of a text that breaks between words; a line that was cut ends in a mark.
pub fn wrap(text: &str, width: usize, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let last = lines.len() == most;
        match lines.last_mut() {
            Some(line) if last || line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.into()),
        }
    }
    lines.iter_mut().for_each(|line| *line = cut(line, width));
    lines
}

/// The rows as a plain table, as wide as it needs to be.
pub fn table(rows: &[Cells]) -> String {
    let widths: [usize; COLUMNS.len()] = std::array::from_fn(|at| natural(rows, at));
    let line = |cells: [&str; COLUMNS.len()]| {
        let columns =
            COLUMNS.iter().zip(widths).zip(cells).map(|((column, width), text)| match column.right {
                true => format!("{text:>width$}"),
                false => format!("{text:<width$}"),
            });
        Vec::from_iter(columns).join("  ").trim_end().to_string() + "\n"
    };
    let head = line(COLUMNS.map(|column| column.name));
    rows.iter().fold(head, |text, cells| text + &line(cells.each_ref().map(String::as_str)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(pid: &str) -> Cells {
        let cells = [
            pid,
            "a-long-name-of-a-program",
            "0",
            "10",
            "3",
            "local",
            "live",
            "12.345",
            "0.001",
            "1550000",
            "0",
        ];
        std::array::from_fn(|at| cells.get(at).copied().unwrap_or("rank 3 12s, receive 50%").into())
    }

    #[test]
    fn no_number_is_cut_and_columns_that_have_no_room_are_named_at_any_width() {
        for pid in ["7", "29568", "4194304", "4294967295"] {
            for width in 0..200 {
                let rows = [cells("1"), cells(pid)];
                let Fitted { shown, left_out } = fit(&rows, width);
                let total: usize = shown.iter().map(|(_, width)| width + 1).sum();
                assert!(total <= width + 1, "{width}: {shown:?}");
                assert_eq!(shown.len() + left_out.len(), COLUMNS.len());
                for (at, has) in shown {
                    let Column { name, right, .. } = COLUMNS[at];
                    assert!(has >= name.len() && !left_out.contains(&name), "{width}: {name}");
                    assert!(!right || has >= rows[1][at].len(), "{width}: {name}");
                }
            }
        }
    }

    #[test]
    fn columns_are_left_out_in_the_order_of_least_use_and_the_process_stays_last() {
        let left_out = |width| fit(&[cells("29568")], width).left_out;
        assert_eq!(left_out(140), [""; 0]);
        assert_eq!(left_out(80), ["STALLS/s"]);
        assert_eq!(left_out(75), ["STALLS/s", "LINK"]);
        assert_eq!(left_out(5).len(), COLUMNS.len() - 1);
        assert_eq!(left_out(4).len(), COLUMNS.len());
    }

    #[test]
    fn texts_that_are_cut_end_in_a_mark() {
        assert_eq!([cut("abcdef", 6), cut("abcdef", 4), cut("ab", 0)], ["abcdef", "abc…", ""]);
        assert_eq!(wrap("one two three four", 7, 9), ["one two", "three", "four"]);
        assert_eq!(wrap("one two three four", 7, 2), ["one two", "three …"]);
    }

    #[test]
    fn columns_of_a_table_stand_below_each_other() {
        let text = table(&[cells("1"), cells("29568")]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        let at = lines[0].find("LINK").unwrap();
        assert!(lines[1..].iter().all(|line| line[at..].starts_with("local")), "{text}");
    }
}
