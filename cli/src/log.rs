//! The log of a program: what the libraries report, on standard error.

use std::io::IsTerminal as _;

use pushgate::Error;
use pushgate::settings::Origin;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

/// The variable that says what is shown.
const VARIABLE: &str = "PUSHGATE_LOG";

/// Shows from now on what `PUSHGATE_LOG` asks for, or what `default` does where the variable is not set or empty.
/// Called once. A filter that can't be read is refused.
pub fn start(default: &str) -> Result<(), Error> {
    let set = std::env::var_os(VARIABLE).filter(|text| !text.is_empty());
    let text = set.as_ref().map_or(default.into(), |text| text.to_string_lossy());
    let filter: Targets = text.parse().map_err(|_| {
        let expected =
            "levels (error, warn, info, debug, trace, off), each alone or behind CRATE=, with commas between";
        Error::config(VARIABLE, &text, expected).from_origin(Origin::Variable(VARIABLE.into()))
    })?;
    let colours =
        std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(colours);
    tracing_subscriber::registry().with(lines).with(filter).init();
    Ok(())
}
