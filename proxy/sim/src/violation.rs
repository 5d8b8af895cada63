//! A promise that was broken: what a check answers.

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The promise's number, 1 to 8; 0 where the code panicked.
    pub promise: u8,
    /// What was found.
    pub sentence: String,
}

#[cold]
pub(super) fn broken(promise: u8, sentence: String) -> Violation {
    Violation { promise, sentence }
}
