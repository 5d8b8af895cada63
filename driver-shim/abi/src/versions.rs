//! Versions of what two programs say to each other. Each program says which versions it speaks, and both use the newest
//! that both speak, so an old program meets a new proxy, and the reverse.
//!
//! Programs before the first range named a single version in a field `version`, and refused every other. So `version` is
//! the oldest that a program speaks, and a field `newest` beside it names the newest, if that is another.

use std::fmt;

use crate::abi;

/// The layouts of segments that this build reads and writes, `PUSHGATE_ABI_VERSION` the newest.
pub const ABI: Versions = Versions::new(2, abi::PUSHGATE_ABI_VERSION);

/// The versions of a language that a program speaks: the oldest, the newest, and all between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    oldest: u32,
    newest: u32,
}

/// Two programs have no version in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it speaks version {theirs}, expected {ours}: run releases that are closer to each other, best the same"
)]
pub struct TooFarApart {
    /// What the other program speaks.
    pub theirs: Versions,
    /// What this program speaks.
    pub ours: Versions,
}

impl Versions {
    /// The versions from `oldest` to `newest`.
    ///
    /// # Panics
    /// If `newest` is less than `oldest`; at compile time, where this makes a constant.
    pub const fn new(oldest: u32, newest: u32) -> Self {
        assert!(oldest <= newest);
        Versions { oldest, newest }
    }

    /// The versions that another program says it speaks. A range that is none counts as its first version alone.
    pub fn told(version: u32, newest: Option<u32>) -> Self {
        Versions { oldest: version, newest: newest.unwrap_or(version).max(version) }
    }

    /// The oldest version, which goes into the field `version`.
    pub const fn oldest(self) -> u32 {
        self.oldest
    }

    /// The newest version for the field `newest`; `None` if there is one version alone, which leaves the field out.
    pub fn newest(self) -> Option<u32> {
        (self.newest != self.oldest).then_some(self.newest)
    }

    /// Whether a version lies in the range.
    pub const fn contains(self, version: u32) -> bool {
        self.oldest <= version && version <= self.newest
    }

    /// The newest version that both programs speak.
    pub fn agree(self, theirs: Versions) -> Result<u32, TooFarApart> {
        let newest = self.newest.min(theirs.newest);
        match newest >= self.oldest.max(theirs.oldest) {
            true => Ok(newest),
            false => Err(TooFarApart { theirs, ours: self }),
        }
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.newest() {
            None => write!(f, "{}", self.oldest),
            Some(newest) => write!(f, "{} to {newest}", self.oldest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_programs_use_the_newest_version_that_both_speak() {
        let v = Versions::new;
        for (ours, theirs, agreed) in [
            (v(2, 2), v(2, 2), Some(2)),
            (v(2, 4), v(3, 9), Some(4)),
            (v(3, 9), v(2, 4), Some(4)),
            (v(2, 4), v(2, 2), Some(2)),
            (v(3, 4), v(1, 2), None),
            (v(1, 2), v(3, 4), None),
        ] {
            assert_eq!(ours.agree(theirs).ok(), agreed, "{ours} and {theirs}");
        }
    }

    #[test]
    fn a_program_that_names_one_version_speaks_that_alone() {
        assert_eq!(Versions::told(2, None), Versions::new(2, 2));
        assert_eq!(Versions::told(2, Some(5)), Versions::new(2, 5));
        assert_eq!(Versions::told(5, Some(2)), Versions::new(5, 5), "a range that is none");
        assert_eq!((Versions::new(2, 2).newest(), Versions::new(2, 5).newest()), (None, Some(5)));
    }

    #[test]
    fn versions_too_far_apart_are_refused_with_both_ranges() {
        let why = Versions::new(3, 4).agree(Versions::told(9, None)).unwrap_err().to_string();
        assert_eq!(
            why,
            "it speaks version 9, expected 3 to 4: run releases that are closer to each other, best the same"
        );
    }
}
