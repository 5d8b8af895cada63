//! Where a value comes from, for messages.

use std::fmt;
use std::path::PathBuf;

/// Where the value of a setting or of an argument comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// Nobody set it: it is the default.
    Default,
    /// The program set it.
    Program,
    /// A variable of the environment, by its name.
    Variable(String),
    /// A line of a settings file.
    File {
        /// The file.
        path: PathBuf,
        /// The line, the first is 1.
        line: usize,
    },
    /// A flag of the command line, with its dashes.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::Program => f.write_str("the program"),
            Origin::Variable(name) => f.write_str(name),
            Origin::File { path, line } => write!(f, "{}:{line}", path.display()),
            Origin::Flag(flag) => f.write_str(flag),
        }
    }
}
