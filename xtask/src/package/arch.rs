//! The architectures that packages are made for, and the name that each of the others has for them.

/// An architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Arch {
    /// Built by the host's own compiler, or by zig for older hosts.
    #[value(name = "x86_64")]
    X86_64,
    /// Built by the step aarch64's rustc and by zig.
    Aarch64,
}

impl Arch {
    /// That of the hosts that make packages.
    pub const HOST: Arch = Arch::X86_64;

    /// The name of Linux, which is that of RPM, of Python's wheels, and of Rust's and zig's targets.
    pub fn name(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86_64",
            Arch::Aarch64 => "aarch64",
        }
    }

    /// The name in sentences.
    pub fn spoken(self) -> &'static str {
        match self {
            Arch::X86_64 => "x86-64",
            Arch::Aarch64 => "64-bit ARM",
        }
    }

    /// Debian's name.
    pub fn debian(self) -> &'static str {
        match self {
            Arch::X86_64 => "amd64",
            Arch::Aarch64 => "arm64",
        }
    }

    /// Rust's name of the target. Its standard library asks for less than the oldest glibc of the packages.
    pub fn target(self) -> String {
        format!("{}-unknown-linux-gnu", self.name())
    }

    /// Debian's folder of libraries, below a prefix.
    pub fn libdir(self) -> String {
        format!("lib/{}-linux-gnu", self.name())
    }

    /// zig's name of the target with this glibc.
    pub fn zig(self, glibc: &str) -> String {
        format!("{}-linux-gnu.{glibc}", self.name())
    }
}
