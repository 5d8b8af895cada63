//! The plugin's log: to stderr, as the variable `PUSHGATE_LOG` says; warnings and errors by default.

use std::io;
use std::sync::Once;

use tracing::Level;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// Starts the log, once.
pub fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let words = std::env::var("PUSHGATE_LOG").unwrap_or_default();
        let targets = words.parse::<Targets>().ok().filter(|_| !words.is_empty());
        let targets = targets.unwrap_or_else(|| Targets::new().with_default(Level::WARN));
        let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(false);
        let _ = tracing_subscriber::registry().with(lines).with(targets).try_init();
    });
}
