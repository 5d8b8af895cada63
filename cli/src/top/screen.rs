//! The terminal of `pushgate top`: keys, and a screen for each look.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use pushgate_engine::recorder::report::Process;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Text;
use ratatui::widgets::{HighlightSpacing, Paragraph, Row as Line, Table, TableState};
use ratatui::{DefaultTerminal, Frame};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::columns::{self, COLUMNS, Fitted};
use super::rows::{self, Before, Order, Row};
use super::{FIRST, View, look};
use crate::signals;

/// Between two looks whether a signal asks to end.
const SIGNAL: Duration = Duration::from_millis(100);
/// Lines of the screen for the sentence about the chosen queue pair.
const SENTENCE: u16 = 3;
/// Stands before the chosen row.
const CHOSEN: &str = ">";

/// What a key asks for.
#[derive(Debug, PartialEq, Eq)]
enum Asked {
    End,
    Sort(Order),
    Fold,
    Move(isize),
    Nothing,
}

fn asked(code: KeyCode, modifiers: KeyModifiers) -> Asked {
    match code {
        // The terminal is in raw mode, so Ctrl-C is a key.
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Asked::End,
        KeyCode::Char('q') | KeyCode::Esc => Asked::End,
        KeyCode::Char('b') => Asked::Sort(Order::Bytes),
        KeyCode::Char('m') => Asked::Sort(Order::Messages),
        KeyCode::Char('w') => Asked::Sort(Order::Waits),
        KeyCode::Char('p') => Asked::Sort(Order::Pid),
        KeyCode::Char('n') => Asked::Sort(Order::Name),
        KeyCode::Char('f') | KeyCode::Enter => Asked::Fold,
        KeyCode::Up => Asked::Move(-1),
        KeyCode::Down => Asked::Move(1),
        KeyCode::PageUp => Asked::Move(-20),
        KeyCode::PageDown => Asked::Move(20),
        _ => Asked::Nothing,
    }
}

/// Waits until the terminal has something to read, or the time is over. An error if the terminal is gone: crossterm, asked for
/// an event then, would look for it without an end.
fn wait_for_input(limit: Duration) -> Result<()> {
    let stdin = std::io::stdin();
    let mut fds = [PollFd::new(&stdin, PollFlags::IN)];
    let limit = Timespec::try_from(limit).context("a limit that is too long")?;
    match poll(&mut fds, Some(&limit)) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(e) => return Err(e).context("waiting for a key"),
    }
    match fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) {
        true => Err(anyhow!("the terminal is gone")),
        false => Ok(()),
    }
}

/// Shows the view until a key or a signal ends it. However this ends, by a panic too, the terminal is as it was before.
pub fn run(view: View) -> Result<()> {
    // A signal may come at any time from now on.
    signals::catch_in_terminal();
    let mut terminal = ratatui::try_init().context("preparing the terminal")?;
    let shown = Shown { view, before: Before::default(), now: Vec::new(), table: TableState::default() };
    let ended = shown.until_ended(&mut terminal);
    let restored = ratatui::try_restore().context("restoring the terminal");
    if restored.is_err() {
        // The terminal's drop shows the cursor, and prints a failure to a standard error that is gone like the terminal.
        std::mem::forget(terminal);
    }
    ended.and(restored)
}

/// What the screen shows.
struct Shown {
    view: View,
    before: Before,
    now: Vec<Process>,
    table: TableState,
}

impl Shown {
    fn until_ended(mut self, terminal: &mut DefaultTerminal) -> Result<()> {
        self.now = look()?;
        let mut next = Instant::now() + FIRST.min(self.view.interval);
        loop {
            let rows = rows::rows(&self.now, &self.before, self.view.folded, self.view.order);
            terminal.draw(|frame| self.draw(frame, &rows)).context("drawing")?;
            // Keys are answered at once, from the last look.
            loop {
                if signals::caught().is_some() {
                    return Err(anyhow!("ended by a signal"));
                }
                let left = next.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    self.before = Before::of(&self.now);
                    self.now = look()?;
                    next = Instant::now() + self.view.interval;
                    break;
                }
                wait_for_input(left.min(SIGNAL))?;
                // A new size comes by a signal, which crossterm finds by itself.
                if !event::poll(Duration::ZERO).context("waiting for a key")? {
                    continue;
                }
                let Event::Key(key) = event::read().context("reading a key")? else { break };
                if key.kind != KeyEventKind::Press {
                    continue;
                }
                match asked(key.code, key.modifiers) {
                    Asked::End => return Ok(()),
                    Asked::Sort(order) => self.view.order = order,
                    Asked::Fold => self.view.folded ^= true,
                    Asked::Move(by) => {
                        let at = self.table.selected().map_or(0, |at| at.saturating_add_signed(by));
                        self.table.select(Some(at.min(rows.len().saturating_sub(1))));
                    }
                    Asked::Nothing => continue,
                }
                break;
            }
        }
    }

    fn draw(&mut self, frame: &mut Frame, rows: &[Row]) {
        let width = usize::from(frame.area().width);
        let cells: Vec<_> = rows.iter().map(Row::cells).collect();
        let Fitted { shown, left_out } = columns::fit(&cells, width.saturating_sub(CHOSEN.len()));
        let mut head = columns::wrap(&rows::summary(&self.now, rows), width, 2);
        let order = self.view.order.word();
        let keys = format!("sorted by {order}; q ends, b m w p n sort, f folds, arrows choose");
        head.extend(columns::wrap(&keys, width, 2));
        if !left_out.is_empty() {
            let said = format!("no room for {}: widen the terminal", left_out.join(", "));
            head.extend(columns::wrap(&said, width, 2));
        }
        let chosen = self.table.selected().and_then(|at| rows.get(at));
        let sentence = chosen.map(|row| row.sentence.as_str()).unwrap_or_default();
        let below = columns::wrap(sentence, width, SENTENCE.into());
        let heights =
            [Constraint::Length(head.len() as u16), Constraint::Min(2), Constraint::Length(SENTENCE)];
        let [top, body, bottom] = Layout::vertical(heights).areas(frame.area());
        frame.render_widget(Paragraph::new(head.join("\n")), top);
        frame.render_widget(Paragraph::new(below.join("\n")), bottom);
        let line = |cells: [&str; COLUMNS.len()]| {
            Line::new(shown.iter().map(|(at, width)| {
                let side = if COLUMNS[*at].right { Alignment::Right } else { Alignment::Left };
                Text::from(columns::cut(cells[*at], *width)).alignment(side)
            }))
        };
        let lines = rows.iter().zip(&cells).map(|(row, cells)| {
            // A word says it too: not every terminal has colours, nor sees everybody them.
            let style = if row.blamed.is_some() { Style::new().fg(Color::Yellow) } else { Style::new() };
            line(cells.each_ref().map(String::as_str)).style(style)
        });
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        let table = Table::new(lines, shown.iter().map(|(_, width)| Constraint::Length(*width as u16)))
            .header(line(COLUMNS.map(|column| column.name)).style(reversed))
            .row_highlight_style(Style::new().add_modifier(Modifier::BOLD))
            .highlight_symbol(CHOSEN)
            // The columns stay where they are when a row is chosen.
            .highlight_spacing(HighlightSpacing::Always);
        frame.render_stateful_widget(table, body, &mut self.table);
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    #[test]
    fn ctrl_c_ends_and_c_alone_does_not() {
        assert_eq!(asked(KeyCode::Char('c'), KeyModifiers::CONTROL), Asked::End);
        assert_eq!(asked(KeyCode::Char('c'), KeyModifiers::NONE), Asked::Nothing);
        assert_eq!(asked(KeyCode::Char('w'), KeyModifiers::NONE), Asked::Sort(Order::Waits));
    }

    #[test]
    fn at_any_width_a_row_has_its_whole_process_number_or_none_and_what_is_left_out_is_said() {
        let pid = 4_129_568;
        for chosen in [None, Some(0)] {
            for width in 10..160 {
                let view = View { interval: FIRST, order: Order::Pid, folded: false };
                let now: Vec<_> = rows::tests::two(1, &[1], &[2])
                    .into_iter()
                    .map(|mut process| {
                        (process.pid, process.engines[0].pid) = (pid, pid);
                        process
                    })
                    .collect();
                let mut shown = Shown { view, before: Before::default(), now, table: TableState::default() };
                shown.table.select(chosen);
                let rows = rows::rows(&shown.now, &shown.before, false, Order::Pid);
                let mut terminal = Terminal::new(TestBackend::new(width, 24)).unwrap();
                terminal.draw(|frame| shown.draw(frame, &rows)).unwrap();
                let screen = terminal.backend().to_string();
                let lines: Vec<_> = screen.lines().map(|line| line.trim_matches('"')).collect();
                let head =
                    lines.iter().position(|line| line.split_whitespace().next() == Some("PID")).unwrap();
                for line in &lines[head + 1..head + 3] {
                    let first = line.trim_start_matches('>').split_whitespace().next();
                    assert_eq!(first, Some(pid.to_string().as_str()), "{screen}");
                }
                // Every name of a column stands whole in the head, or among those left out.
                let named = lines[..=head].join(" ");
                for column in COLUMNS.iter().filter(|_| width >= 80) {
                    assert!(named.contains(column.name), "{width}: no {}: {screen}", column.name);
                }
                let cells: Vec<_> = rows.iter().map(Row::cells).collect();
                let all = columns::fit(&cells, usize::from(width) - CHOSEN.len()).left_out.is_empty();
                assert!(all != named.contains("no room for") || width < 20, "{screen}");
            }
        }
    }
}
