//! What one party of many may bring into the log: its texts ([`Foreign`]), and how many lines ([`limited!`](crate::limited)).
//!
//! Peers, programs of a proxy and strangers at a socket choose what they send and how often. Each of their texts stands on one
//! line, escaped and cut, so it is never taken for a line of this process; and lines about one of them are few, however often
//! they have a cause.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::{self, Display, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A text that another process chose, or one that quotes such a text, as it stands in a line of the log or in an error:
/// control characters, line separators and marks that turn the direction of writing are escaped, and a text that is too long
/// is cut, with `...` in place of the rest.
///
/// `{:?}` prints it between quotation marks, for the value of a field: the text can't seem to be another field.
pub struct Foreign<T> {
    text: T,
    most: usize,
}

/// The most characters of [`Foreign::word`].
const WORD: usize = 200;
/// The most characters of [`Foreign::sentence`].
const SENTENCE: usize = 1000;

impl<T: Display> Foreign<T> {
    /// A name, a value, or an error that quotes one: at most 200 characters.
    pub fn word(text: T) -> Self {
        Foreign { text, most: WORD }
    }

    /// What another process of pushgate says in a sentence, whose end may be the remedy: at most 1000 characters.
    pub fn sentence(text: T) -> Self {
        Foreign { text, most: SENTENCE }
    }
}

impl<T: Display> Display for Foreign<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cut = Cut { to: f, left: self.most, quoted: false, is_full: false };
        match write!(cut, "{}", self.text) {
            Err(_) if cut.is_full => f.write_str("..."),
            written => written,
        }
    }
}

impl<T: Display> fmt::Debug for Foreign<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        let mut cut = Cut { to: &mut *f, left: self.most, quoted: true, is_full: false };
        match write!(cut, "{}", self.text) {
            Err(_) if cut.is_full => f.write_str("...\""),
            written => written.and_then(|()| f.write_char('"')),
        }
    }
}

/// Passes characters on, escaped, until there are too many.
struct Cut<'a, 'b> {
    to: &'a mut fmt::Formatter<'b>,
    left: usize,
    quoted: bool,
    is_full: bool,
}

impl Write for Cut<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            let escapes = steers(c) || (self.quoted && matches!(c, '"' | '\\'));
            let length = if escapes { c.escape_default().len() } else { 1 };
            if length > self.left {
                self.is_full = true;
                // Ends the text's own `fmt` early: it may be as long as a frame.
                return Err(fmt::Error);
            }
            self.left -= length;
            if escapes { write!(self.to, "{}", c.escape_default())? } else { self.to.write_char(c)? }
        }
        Ok(())
    }
}

/// Whether a character would begin another line, steer a terminal, or show the text in another order than it has.
fn steers(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{e0000}'..='\u{e007f}')
}

/// Lines of one kind about one party that come without a pause.
pub const BURST: u32 = 16;
/// The pause between lines of one kind about one party after the first [`BURST`].
pub const PAUSE: Duration = Duration::from_secs(1);
/// The most pairs of kind and party that a [`Limiter`] keeps.
const MOST: usize = 1024;

/// Limits lines by a key: a burst of them, then one for each pause. Keeps bounded memory whatever the keys are: those that come
/// when there is no room for them share one allowance.
#[derive(Debug)]
pub struct Limiter<K> {
    burst: u32,
    pause: Duration,
    kept: BTreeMap<K, Allowance>,
    rest: Allowance,
    tidied: Option<Instant>,
}

/// What was written by one key.
#[derive(Clone, Copy, Debug, Default)]
struct Allowance {
    /// When the whole burst is allowed again.
    whole_at: Option<Instant>,
    left_out: u64,
}

impl Allowance {
    fn is_whole(&self, now: Instant) -> bool {
        self.whole_at.is_none_or(|at| at <= now)
    }
}

impl<K: Ord> Limiter<K> {
    /// A limiter by which nothing was written yet. `burst` is at least 1.
    pub const fn new(burst: u32, pause: Duration) -> Self {
        let rest = Allowance { whole_at: None, left_out: 0 };
        Limiter { burst, pause, kept: BTreeMap::new(), rest, tidied: None }
    }

    /// Whether a line may be written now: `None`: not; else how many were left out since the one before. Lines that were left out of
    /// keys that are no more kept are counted with those that share an allowance.
    pub fn lets(&mut self, key: K, now: Instant) -> Option<u64> {
        if self.kept.len() >= MOST && !self.kept.contains_key(&key) {
            self.tidy(now);
        }
        let has_room = self.kept.len() < MOST || self.kept.contains_key(&key);
        let allowance = if has_room { self.kept.entry(key).or_default() } else { &mut self.rest };
        let begins = allowance.whole_at.map_or(now, |at| at.max(now));
        if begins.duration_since(now) > self.pause * (self.burst - 1) {
            allowance.left_out += 1;
            return None;
        }
        allowance.whole_at = Some(begins + self.pause);
        Some(std::mem::take(&mut allowance.left_out))
    }

    /// Forgets keys that were quiet for long. Not with each line, for it looks at all of them.
    fn tidy(&mut self, now: Instant) {
        if self.tidied.is_some_and(|at| now.duration_since(at) < self.pause) {
            return;
        }
        self.tidied = Some(now);
        let left_out = &mut self.rest.left_out;
        self.kept.retain(|_, allowance| {
            let keeps = !allowance.is_whole(now);
            *left_out += if keeps { 0 } else { allowance.left_out };
            keeps
        });
    }
}

/// A kind of line, by its place in the source, and the number of the party that it is about.
type Key = (&'static str, u32, u64);

/// The allowance of a thread's lines. A thread has one of its own, unless it was given that of others ([`Lines::enter`]).
#[derive(Clone, Debug)]
pub struct Lines {
    limiter: Arc<Mutex<Limiter<Key>>>,
    /// Whom all lines are about.
    who: Option<u64>,
}

thread_local! {
    static LINES: RefCell<Lines> = RefCell::default();
}

impl Default for Lines {
    fn default() -> Self {
        Lines { limiter: Arc::new(Mutex::new(Limiter::new(BURST, PAUSE))), who: None }
    }
}

impl Lines {
    /// The allowance of the calling thread.
    pub fn current() -> Lines {
        LINES.with_borrow(Lines::clone)
    }

    /// Lines that count as lines about the party `who`, and share the allowance of these lines.
    pub fn about(&self, who: u32) -> Lines {
        Lines { who: Some(who.into()), ..self.clone() }
    }

    /// The calling thread's lines count here from now on.
    pub fn enter(self) {
        LINES.set(self);
    }

    fn lets(&self, file: &'static str, line: u32, who: u64) -> Option<u64> {
        let mut limiter = self.limiter.lock().unwrap_or_else(PoisonError::into_inner);
        limiter.lets((file, line, self.who.unwrap_or(who)), Instant::now())
    }
}

/// For [`limited!`](crate::limited): whether the calling thread may write this line now, and how many were left out.
#[doc(hidden)]
#[cold]
pub fn lets(file: &'static str, line: u32, who: u64) -> Option<u64> {
    // A thread that ends has no allowance any more, and few lines.
    LINES.try_with(|lines| lines.borrow().lets(file, line, who)).unwrap_or(Some(0))
}

/// Logs a line about a party, at a level of `tracing`, unless there were too many of this kind about it: at most [`BURST`](crate::log::BURST)
/// at once, and then one each [`PAUSE`](crate::log::PAUSE). A line after some that were left out says how many, as `left_out`.
///
/// ```ignore
/// limited!(warn, rank, client = number, "lost: {why}");
/// ```
#[macro_export]
macro_rules! limited {
    ($level:ident, $who:expr, $($line:tt)+) => {
        if let Some(left_out) = $crate::log::lets(file!(), line!(), u64::from($who)) {
            tracing::$level!(left_out = (left_out > 0).then_some(left_out), $($line)+)
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p8_a_text_of_another_process_with_line_breaks_and_escape_sequences_prints_one_plain_line() {
        let forged = "x\n2026-01-01T00:00:00Z  WARN pushgate: all is lost\r\x1b[2J\u{9b}31m\u{202e}\u{2028}y";
        let shown = Foreign::word(forged).to_string();
        assert!(!shown.chars().any(steers), "{shown:?}");
        assert_eq!(shown.lines().count(), 1);
        assert!(
            shown.starts_with("x\\n2026") && shown.ends_with("\\u{1b}[2J\\u{9b}31m\\u{202e}\\u{2028}y"),
            "{shown}"
        );
        // As the value of a field it can't seem to be more fields.
        assert_eq!(format!("{:?}", Foreign::word("a\" rank=7 \\\n")), "\"a\\\" rank=7 \\\\\\n\"");
        assert_eq!(Foreign::word("plain text, é and `marks`").to_string(), "plain text, é and `marks`");
    }

    #[test]
    fn p8_a_text_of_another_process_that_is_too_long_is_cut() {
        let is = |text: &str, most: usize| {
            let shown = Foreign { text, most }.to_string();
            assert!(shown.chars().count() <= most + 3, "{shown}");
            shown
        };
        assert_eq!(is(&"é".repeat(WORD), WORD), "é".repeat(WORD));
        assert_eq!(is(&"é".repeat(WORD + 1), WORD), "é".repeat(WORD) + "...");
        // What escaping adds counts.
        assert_eq!(is("\n\n\n", 5), "\\n\\n...");
        assert_eq!(format!("{:?}", Foreign { text: "abc", most: 2 }), "\"ab...\"");
        assert_eq!(Foreign::sentence("x".repeat(1 << 20)).to_string().len(), SENTENCE + 3);
    }

    #[test]
    fn p8_lines_about_one_party_are_few_and_the_next_one_says_how_many_were_left_out() {
        let (mut limiter, begin) = (Limiter::new(3, PAUSE), Instant::now());
        let written = (0..1000).filter(|_| limiter.lets(1, begin).is_some()).count();
        assert_eq!(written, 3);
        // Another party has its own allowance.
        assert_eq!(limiter.lets(2, begin), Some(0));
        assert_eq!(limiter.lets(1, begin + PAUSE), Some(997));
        assert_eq!(limiter.lets(1, begin + PAUSE), None);
        assert_eq!(limiter.lets(1, begin + PAUSE * 2), Some(1));
        // After some time the burst is whole again, and no larger.
        let later = begin + PAUSE * 100;
        assert_eq!((0..1000).filter(|_| limiter.lets(1, later).is_some()).count(), 3);
        // Time that seems to go back does no harm.
        assert_eq!(limiter.lets(1, begin), None);
    }

    #[test]
    fn p8_parties_without_number_take_bounded_memory_and_write_few_lines() {
        let (mut limiter, begin) = (Limiter::new(2, PAUSE), Instant::now());
        let written = (0..100_000u32).filter(|who| limiter.lets(*who, begin).is_some()).count();
        assert!(limiter.kept.len() <= MOST && written == MOST + 2, "{written}");
        // Those that are known still have what is left of theirs.
        assert_eq!(limiter.lets(5, begin), Some(0));
        // There is room for others once the first are quiet.
        let later = begin + PAUSE * 2;
        let said = limiter.lets(200_000, later);
        assert!(said == Some(0) && limiter.kept.len() == 1, "{said:?}, {}", limiter.kept.len());
        // None of what was left out is forgotten.
        let left_out = 100_000 - written as u64;
        assert_eq!(limiter.rest.left_out, left_out);
    }

    #[test]
    fn a_thread_that_enters_lines_shares_their_allowance() {
        let lines = Lines::default();
        let write = |lines: Lines, who: u64| {
            let count = move || {
                lines.enter();
                (0..100).filter(|_| lets("a", 1, who).is_some()).count() as u32
            };
            std::thread::spawn(count).join().unwrap()
        };
        // A pause may pass meanwhile.
        let few = BURST..BURST * 2;
        let all = (0..4).map(|who| write(lines.about(7), who)).sum();
        assert!(few.contains(&all), "{all}");
        assert!(few.contains(&write(lines.about(8), 0)) && few.contains(&write(lines, 1)));
        assert!(few.contains(&write(Lines::default(), 7)));
    }
}
