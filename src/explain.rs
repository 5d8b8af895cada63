//! An error as one sentence.

use std::error::Error;

/// The message of `error` and of its causes, joined by colons, each cause once.
///
/// Some errors repeat the message of their cause in their own message. Such a cause is not
/// repeated a second time.
///
/// ```
/// let error = pushgate::Error::Io {
///     what: "opening /dev/pushgate".into(),
///     source: std::io::Error::other("no such device"),
/// };
/// assert_eq!(pushgate::explain(&error), "opening /dev/pushgate: no such device");
/// ```
pub fn explain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{what}")]
    struct Outer {
        what: &'static str,
        source: std::io::Error,
    }

    #[test]
    fn a_cause_is_named_once() {
        let with = |what| explain(&Outer { what, source: std::io::Error::other("disk full") });
        assert_eq!(with("writing x"), "writing x: disk full");
        assert_eq!(with("writing x: disk full"), "writing x: disk full");
        assert_eq!(with("writing x: disk full; free some space"), "writing x: disk full; free some space");
    }
}
