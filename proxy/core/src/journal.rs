//! What is kept of a session outside of its engine: enough for a later engine to go on where an engine died.
//!
//! The memory that keeps it belongs to the program, so a later engine checks all of it before use (P8).

/// The largest count that is taken from a journal. Sums of counts and of what a ring holds stay far below 2^64.
const MOST: u64 = 1 << 56;

/// What is kept of a sender: what was given back to the producer, in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// WQE slots.
    pub slots: u64,
    /// Units of the window, padding included.
    pub units: u64,
    /// Messages.
    pub messages: u64,
    /// SENDs among the messages.
    pub sends: u64,
    /// Completions that were written.
    pub completions: u64,
}

/// What is kept of a receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Messages that are in their places.
    pub received: u64,
    /// Receive records that were written for them.
    pub shown: u64,
    /// The signal that was written last, or is about to be: its index and its value.
    pub signal: Option<(u32, u64)>,
}

/// Why a queue pair can't be gone on with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the session of a queue pair: {0}")]
pub struct Broken(pub String);

impl Sent {
    /// Checks the counts against each other.
    pub fn check(&self) -> Result<(), Broken> {
        let Sent { slots, units, messages, sends, completions } = *self;
        if slots.max(units) > MOST || messages > slots || sends > messages || completions > slots {
            return Err(Broken(format!("counts of what was sent that can't be: {self:?}")));
        }
        Ok(())
    }
}

impl Taken {
    /// Checks the counts against each other, and the signal against the number of `signals`.
    pub fn check(&self, signals: u32) -> Result<(), Broken> {
        let known = self.signal.is_none_or(|(index, _)| index < signals);
        if self.received > MOST || self.shown > self.received || !known {
            return Err(Broken(format!("counts of what was received that can't be: {self:?}")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p8_counts_that_cannot_be_are_refused() {
        let sent = Sent { slots: 9, units: 4, messages: 8, sends: 7, completions: 9 };
        sent.check().unwrap();
        let wrong = [
            Sent { slots: MOST + 1, ..sent },
            Sent { units: u64::MAX, ..sent },
            Sent { messages: 10, ..sent },
            Sent { sends: 9, ..sent },
            Sent { completions: 10, ..sent },
        ];
        assert!(wrong.iter().all(|sent| sent.check().is_err()));
        let taken = Taken { received: 5, shown: 5, signal: Some((3, u64::MAX)) };
        taken.check(4).unwrap();
        let wrong = [
            Taken { received: u64::MAX, ..taken },
            Taken { shown: 6, ..taken },
            Taken { signal: Some((4, 0)), ..taken },
        ];
        assert!(wrong.iter().all(|taken| taken.check(4).is_err()));
    }
}
