//! Keeps the lines of a log.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Keeps lines of this level and of more urgent ones. Clones share them.
#[derive(Clone)]
pub struct Log {
    level: Level,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Log {
    pub fn new(level: Level) -> Log {
        Log { level, lines: Arc::default() }
    }

    /// The lines so far: each field as its name and its value, the message without a name.
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => self.0.insert_str(0, &format!("{value:?}")),
            name => write!(self.0, " {name}={value:?}").unwrap(),
        }
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        self.lines.lock().unwrap().push(text.0);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
