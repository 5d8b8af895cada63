//! The log of a run: a hash over all events, and the last events, for a reader of a violation.

/// Events that are kept.
const KEPT: usize = 48;

/// An event: its time, what it was, and numbers that say more.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Event {
    pub(super) now: u64,
    pub(super) what: &'static str,
    pub(super) who: u64,
    pub(super) detail: u64,
}

/// The log of a run.
pub(super) struct Log {
    hash: u64,
    steps: u64,
    kept: [Event; KEPT],
    prints: bool,
}

impl Log {
    /// An empty log. `prints`: each event is printed to stderr.
    pub(super) fn new(prints: bool) -> Self {
        Log { hash: 0xcbf2_9ce4_8422_2325, steps: 0, kept: [Event::default(); KEPT], prints }
    }

    /// Adds to the hash (FNV-1a over words).
    #[inline]
    pub(super) fn mix(&mut self, word: u64) {
        self.hash = (self.hash ^ word).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }

    /// Notes an event.
    #[inline]
    pub(super) fn event(&mut self, now: u64, what: &'static str, who: u64, detail: u64) {
        for word in [now, what.len() as u64 ^ (what.as_bytes()[0] as u64) << 8, who, detail] {
            self.mix(word);
        }
        let event = Event { now, what, who, detail };
        self.kept[(self.steps % KEPT as u64) as usize] = event;
        self.steps += 1;
        if self.prints {
            eprintln!("{}", line(&event));
        }
    }

    /// A sentence beside the last event, if events are printed.
    pub(super) fn note(&mut self, what: std::fmt::Arguments<'_>) {
        if self.prints {
            eprintln!("{:>15}  {what}", "");
        }
    }

    /// Events so far.
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// The hash over all events so far.
    pub(super) fn hash(&self) -> u64 {
        self.hash
    }

    /// The last events, oldest first.
    pub(super) fn last(&self) -> Vec<String> {
        let first = self.steps.saturating_sub(KEPT as u64);
        (first..self.steps).map(|i| line(&self.kept[(i % KEPT as u64) as usize])).collect()
    }
}

fn line(e: &Event) -> String {
    format!("{:>12.3} us  {} {}: {:#x}", e.now as f64 / 1e3, e.what, e.who, e.detail)
}
