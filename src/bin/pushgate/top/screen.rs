//! The terminal of `pushgate top`: keys, and a screen for each look.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use pushgate_proxy::recorder::report::Process;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Text;
use ratatui::widgets::{Paragraph, Row as Line, Table, TableState, Wrap};
use ratatui::{DefaultTerminal, Frame};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::rows::{self, Before, COLUMNS, Order, Row};
use super::{FIRST, View, look};
use crate::signals;

/// Between two looks whether a signal asks to end.
const SIGNAL: Duration = Duration::from_millis(100);
/// Rows of the screen for the sentence about the chosen queue pair.
const SENTENCE: u16 = 2;

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
        let areas =
            Layout::vertical([Constraint::Length(2), Constraint::Min(2), Constraint::Length(SENTENCE)]);
        let [head, body, below] = areas.areas(frame.area());
        let order = self.view.order.word();
        let keys = format!("sorted by {order}; q ends, b m w p n sort, f folds, arrows choose");
        frame.render_widget(Paragraph::new(format!("{}\n{keys}", rows::summary(&self.now, rows))), head);
        let cell = |text: String, right: bool| {
            let side = if right { Alignment::Right } else { Alignment::Left };
            Text::from(text).alignment(side)
        };
        let line = |cells: [String; COLUMNS.len()]| {
            Line::new(cells.into_iter().zip(COLUMNS).map(|(text, (_, _, right))| cell(text, right)))
        };
        let lines = rows.iter().map(|row| {
            // A word says it too: not every terminal has colours, nor sees everybody them.
            let style = if row.blamed.is_some() { Style::new().fg(Color::Yellow) } else { Style::new() };
            line(row.cells()).style(style)
        });
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        let last = COLUMNS.len() - 1;
        let widths = COLUMNS.iter().enumerate().map(|(at, (_, width, _))| match at == last {
            true => Constraint::Min(*width),
            false => Constraint::Length(*width),
        });
        let table = Table::new(lines, widths)
            .header(line(COLUMNS.map(|(name, ..)| name.to_string())).style(reversed))
            .row_highlight_style(Style::new().add_modifier(Modifier::BOLD))
            .highlight_symbol(">");
        frame.render_stateful_widget(table, body, &mut self.table);
        let chosen = self.table.selected().and_then(|at| rows.get(at));
        let sentence = chosen.map(|row| row.sentence.as_str()).unwrap_or_default();
        frame.render_widget(Paragraph::new(sentence).wrap(Wrap { trim: true }), below);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ctrl_c_ends_and_c_alone_does_not() {
        assert_eq!(asked(KeyCode::Char('c'), KeyModifiers::CONTROL), Asked::End);
        assert_eq!(asked(KeyCode::Char('c'), KeyModifiers::NONE), Asked::Nothing);
        assert_eq!(asked(KeyCode::Char('w'), KeyModifiers::NONE), Asked::Sort(Order::Waits));
    }
}
