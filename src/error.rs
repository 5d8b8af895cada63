//! What can go wrong, for callers.

use std::fmt;
use std::time::Duration;

use pushgate_core::refusal::Refusal;
use pushgate_core::session::Status;
use pushgate_driver_shim::fork::Forked;
use pushgate_driver_shim::interrupt::Interrupted;
use pushgate_driver_shim::kmod::KmodError;
use pushgate_driver_shim::log::Foreign;
use pushgate_driver_shim::{ShimError, abi, limits};
use pushgate_engine::endpoint::EndpointError;
use pushgate_engine::engine::EngineError;
use pushgate_engine::status::link_cause;
pub use pushgate_engine::status::status_name;
use pushgate_gpu_kernels::DeviceError;
use pushgate_link_verbs::VerbsError;

use crate::origin::Origin;

/// The result of most calls of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed. Each error, printed by `Display`, names the thing, the value and the remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting or argument that is not allowed.
    #[error("invalid {name} `{}`{}: expected {allowed}", Foreign::sentence(.value), OfOrigin(.origin))]
    Config {
        /// The setting's name, as a flag or argument.
        name: String,
        /// The value of the setting or argument.
        value: String,
        /// Where the value comes from.
        origin: Origin,
        /// What it may be.
        allowed: String,
    },
    /// A name that no setting has.
    #[error("unknown setting `{}`{}: {}", Foreign::sentence(.name), OfPlace(.origin), Meant(.near))]
    UnknownSetting {
        /// The name, as it was written.
        name: String,
        /// Where it was written.
        origin: Origin,
        /// The setting that was probably meant, in the spelling of that place.
        near: Option<String>,
    },
    /// A settings file that is no TOML.
    #[error("invalid settings file {path}: {why}")]
    SettingsFile {
        /// The file.
        path: String,
        /// What is wrong: several lines, with the line of the file and a caret below the place.
        why: String,
    },
    /// A rank is gone: its process or its proxy ended, or its host can't be reached.
    #[error(
        "rank {rank} is lost: its process or its proxy ended, or its host is out of reach; its own output says why"
    )]
    PeerLost {
        /// Which.
        rank: u32,
    },
    /// Something that a rank named was refused.
    #[error("a request of rank {rank} was refused{}: {why}", InSlot(.slot))]
    Refused {
        /// Whose.
        rank: u32,
        /// Low 24 bits of the slot, where the end that refused it knows the slot.
        slot: Option<u32>,
        /// Why, with the remedy, from the end that refused it.
        why: String,
    },
    /// A wait took longer than its limit.
    #[error("{what} timed out{}; raise `timeout` if that is too short", After(.after))]
    TimedOut {
        /// What was waited for.
        what: String,
        /// The limit, or zero where it is another rank's.
        after: Duration,
    },
    /// The communicator or queue pair was aborted.
    #[error("aborted by rank {rank}; its own output says why")]
    Aborted {
        /// By whom.
        rank: u32,
    },
    /// A WQE slot was reserved and never published.
    #[error(
        "slot {slot} of rank {rank} was reserved and never published: a kernel began a batch and ended; publish \
         every slot that is reserved, a NOP at the least"
    )]
    Stuck {
        /// Whose.
        rank: u32,
        /// Which.
        slot: u32,
    },
    /// A message arrived for which there was no room: a fault of the sender's proxy.
    #[error(
        "rank {rank} sent what was not granted (message {message}): a fault of its proxy; run one release of \
         pushgate on all hosts"
    )]
    Overrun {
        /// The sender.
        rank: u32,
        /// Low 32 bits of its sequence number.
        message: u32,
    },
    /// The transport to a rank failed under a queue pair.
    #[error(
        "the link of rank {rank} failed: {cause}; over RDMA, `pushgate doctor --qp verbs` on its host looks why"
    )]
    Transport {
        /// Whose end it is: this rank's own, or the peer's.
        rank: u32,
        /// What happened.
        cause: String,
    },
    /// A handle of the process that this one was forked from.
    #[error(transparent)]
    Forked(#[from] Forked),
    /// The device or its compiler said no.
    #[error(transparent)]
    Device(DeviceError),
    /// Memory, sockets, files.
    #[error("{what}: {source}{}", remedy(source))]
    Io {
        /// What was tried.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Shared memory could not be made or was not what a peer said it is.
    #[error(transparent)]
    Memory(#[from] ShimError),
    /// The proxy's engine.
    #[error(transparent)]
    Proxy(EngineError),
    /// The proxy's view of a queue pair.
    #[error(transparent)]
    QueuePair(#[from] EndpointError),
    /// An RDMA device, or what it was asked for.
    #[error(transparent)]
    Rdma(VerbsError),
    /// Queue pairs over TCP: the listening socket or the connections. The text is a sentence.
    #[error("qp = tcp: {0}")]
    Tcp(String),
    /// The kernel module gave no window.
    #[error("a {kind} window of {bytes} bytes: {why}")]
    Window {
        /// The setting `window`.
        kind: String,
        /// Asked for.
        bytes: usize,
        /// What it said.
        why: KmodError,
    },
    /// The program ended the call while it waited ([`interrupt_by`](crate::interrupt_by)).
    #[error("the program has interrupted the call")]
    Interrupted,
    /// Two ends that do not fit together.
    #[error("rank {rank}: {reason}")]
    Mismatch {
        /// The other end.
        rank: u32,
        /// What does not fit.
        reason: String,
    },
}

/// The number of each kind of [`Error`]. A number never changes and is never used again, so programs of any release and in
/// any language may store and compare numbers; the C API returns them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(i32)]
pub enum ErrorCode {
    /// [`Error::Config`].
    Config = 1,
    /// [`Error::UnknownSetting`].
    UnknownSetting = 2,
    /// [`Error::SettingsFile`].
    SettingsFile = 3,
    /// [`Error::PeerLost`].
    PeerLost = 4,
    /// [`Error::Refused`].
    Refused = 5,
    /// [`Error::TimedOut`].
    TimedOut = 6,
    /// [`Error::Aborted`].
    Aborted = 7,
    /// [`Error::Stuck`].
    Stuck = 8,
    /// [`Error::Overrun`].
    Overrun = 9,
    /// [`Error::Transport`].
    Transport = 10,
    /// [`Error::Forked`].
    Forked = 11,
    /// [`Error::Device`].
    Device = 12,
    /// [`Error::Io`].
    Io = 13,
    /// [`Error::Memory`].
    Memory = 14,
    /// [`Error::Proxy`].
    Proxy = 15,
    /// [`Error::QueuePair`].
    QueuePair = 16,
    /// [`Error::Rdma`].
    Rdma = 17,
    /// [`Error::Tcp`].
    Tcp = 18,
    /// [`Error::Window`].
    Window = 19,
    /// [`Error::Mismatch`].
    Mismatch = 20,
    /// [`Error::Interrupted`].
    Interrupted = 21,
}

impl From<DeviceError> for Error {
    fn from(e: DeviceError) -> Self {
        match e {
            DeviceError::Forked(forked) => Error::Forked(forked),
            DeviceError::Interrupted(interrupted) => interrupted.into(),
            e => Error::Device(e),
        }
    }
}

impl From<EngineError> for Error {
    fn from(e: EngineError) -> Self {
        match e {
            EngineError::Forked(forked) => Error::Forked(forked),
            EngineError::Interrupted(interrupted) => interrupted.into(),
            e => Error::Proxy(e),
        }
    }
}

impl From<Interrupted> for Error {
    fn from(_: Interrupted) -> Self {
        Error::Interrupted
    }
}

impl Error {
    /// A setting or argument that is not allowed, set by the program.
    pub fn config(name: &str, value: impl ToString, allowed: impl ToString) -> Self {
        let (value, allowed) = (value.to_string(), allowed.to_string());
        Error::Config { name: name.into(), value, origin: Origin::Program, allowed }
    }

    /// A flag of the command line, `name` without its dashes, that is not allowed.
    pub fn flag(name: &str, value: impl ToString, allowed: impl ToString) -> Self {
        Self::config(name, value, allowed).from_origin(Origin::Flag(format!("--{name}")))
    }

    /// Sets where the refused value of an [`Error::Config`] comes from. Leaves every other error as it is.
    pub fn from_origin(mut self, from: Origin) -> Self {
        if let Error::Config { origin, .. } = &mut self {
            *origin = from;
        }
        self
    }

    /// The number of this kind of error, for programs that compare errors and for other languages.
    pub fn code(&self) -> ErrorCode {
        match self {
            Error::Config { .. } => ErrorCode::Config,
            Error::UnknownSetting { .. } => ErrorCode::UnknownSetting,
            Error::SettingsFile { .. } => ErrorCode::SettingsFile,
            Error::PeerLost { .. } => ErrorCode::PeerLost,
            Error::Refused { .. } => ErrorCode::Refused,
            Error::TimedOut { .. } => ErrorCode::TimedOut,
            Error::Aborted { .. } => ErrorCode::Aborted,
            Error::Stuck { .. } => ErrorCode::Stuck,
            Error::Overrun { .. } => ErrorCode::Overrun,
            Error::Transport { .. } => ErrorCode::Transport,
            Error::Forked(_) => ErrorCode::Forked,
            Error::Device(_) => ErrorCode::Device,
            Error::Io { .. } => ErrorCode::Io,
            Error::Memory(_) => ErrorCode::Memory,
            Error::Proxy(_) => ErrorCode::Proxy,
            Error::QueuePair(_) => ErrorCode::QueuePair,
            Error::Rdma(_) => ErrorCode::Rdma,
            Error::Tcp(_) => ErrorCode::Tcp,
            Error::Window { .. } => ErrorCode::Window,
            Error::Mismatch { .. } => ErrorCode::Mismatch,
            Error::Interrupted => ErrorCode::Interrupted,
        }
    }

    /// Whether a setting, an argument or the settings file is wrong. Programs exit with 2 then.
    pub fn is_config(&self) -> bool {
        matches!(
            self,
            Error::Config { .. }
                | Error::UnknownSetting { .. }
                | Error::SettingsFile { .. }
                | Error::Rdma(VerbsError::Window { .. })
        )
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Error::Io { what, source }
    }

    /// What a queue pair's status word means; `here` is this side's rank.
    pub fn from_status(status: Status, here: u32) -> Self {
        let rank = status.rank.unwrap_or(here);
        match status.code as u32 {
            abi::PUSHGATE_PEER_LOST => Error::PeerLost { rank },
            abi::PUSHGATE_TIMED_OUT => {
                Error::TimedOut { what: format!("a wait of rank {rank}"), after: Duration::ZERO }
            }
            abi::PUSHGATE_REFUSED => {
                let (refusal, slot) = Refusal::of(status.detail);
                Error::Refused { rank, slot, why: refusal.words() }
            }
            abi::PUSHGATE_STUCK => Error::Stuck { rank, slot: status.detail },
            abi::PUSHGATE_OVERRUN => Error::Overrun { rank, message: status.detail },
            abi::PUSHGATE_LINK_DOWN => Error::Transport { rank, cause: link_cause(status.detail) },
            _ => Error::Aborted { rank },
        }
    }
}

/// Prints ` (from PLACE)`, and nothing for what the program or a default says.
struct OfOrigin<'a>(&'a Origin);

impl fmt::Display for OfOrigin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Origin::Default | Origin::Program => Ok(()),
            place => write!(f, " (from {place})"),
        }
    }
}

/// Prints ` (from PLACE)` where the name of the setting does not say it.
struct OfPlace<'a>(&'a Origin);

impl fmt::Display for OfPlace<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Origin::Variable(_) => f.write_str(" (from the environment)"),
            place => OfOrigin(place).fmt(f),
        }
    }
}

/// Prints what to do about an unknown setting.
struct Meant<'a>(&'a Option<String>);

impl fmt::Display for Meant<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(near) => write!(f, "did you mean `{near}`?"),
            None => f.write_str("`pushgate config` lists the settings"),
        }
    }
}

/// Prints ` (slot 5)`, and nothing where the slot is not known.
struct InSlot<'a>(&'a Option<u32>);

impl fmt::Display for InSlot<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(slot) => write!(f, " (slot {slot})"),
            None => Ok(()),
        }
    }
}

/// Prints ` after 1.5s`, and nothing for a limit that is not known.
struct After<'a>(&'a Duration);

impl fmt::Display for After<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_zero() { Ok(()) } else { write!(f, " after {:?}", self.0) }
    }
}

/// What to do about a limit of the system that is reached; empty for another error.
fn remedy(source: &std::io::Error) -> String {
    let per_queue_pair = match rustix::io::Errno::from_io_error(source) {
        Some(rustix::io::Errno::MFILE) => "; a queue pair holds about six files",
        _ => "",
    };
    limits::added(limits::remedy(source).map(|remedy| remedy + per_queue_pair))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_is_down_says_why() {
        let said = |detail| {
            let status = Status { rank: Some(3), detail, ..Status::new(abi::PUSHGATE_LINK_DOWN) };
            Error::from_status(status, 0).to_string()
        };
        let expected = |cause| {
            format!(
                "the link of rank 3 failed: {cause}; over RDMA, `pushgate doctor --qp verbs` on its host looks why"
            )
        };
        assert_eq!(said(1), expected("its port is down"));
        assert_eq!(said(4), expected("it does not answer (retries exceeded)"));
        assert_eq!(said(256 + 12), expected("work completion status 12"));
        assert_eq!(said(77), expected("cause 77"));
        assert_eq!(status_name(abi::PUSHGATE_LINK_DOWN as u64), "link down");
    }

    #[test]
    fn a_limit_that_is_known_is_said() {
        let timed_out = |after| Error::TimedOut { what: "a wait of rank 1".into(), after }.to_string();
        let remedy = "raise `timeout` if that is too short";
        assert_eq!(timed_out(Duration::ZERO), format!("a wait of rank 1 timed out; {remedy}"));
        assert_eq!(
            timed_out(Duration::from_millis(1500)),
            format!("a wait of rank 1 timed out after 1.5s; {remedy}")
        );
    }

    #[test]
    fn a_limit_of_open_files_that_is_reached_is_said_with_the_remedy() {
        let error = |errno: rustix::io::Errno| Error::io("a descriptor")(errno.into()).to_string();
        let said = error(rustix::io::Errno::MFILE);
        assert!(said.contains("the limit of open files is ") && said.contains("ulimit -n"), "{said}");
        assert!(!error(rustix::io::Errno::NOENT).contains("limit"));
    }

    /// The numbers are part of the C API's interface: this list may grow, and nothing in it may change.
    #[test]
    fn numbers_of_errors_never_change() {
        use ErrorCode::*;
        let all = [
            (Config, 1),
            (UnknownSetting, 2),
            (SettingsFile, 3),
            (PeerLost, 4),
            (Refused, 5),
            (TimedOut, 6),
            (Aborted, 7),
            (Stuck, 8),
            (Overrun, 9),
            (Transport, 10),
            (Forked, 11),
            (Device, 12),
            (Io, 13),
            (Memory, 14),
            (Proxy, 15),
            (QueuePair, 16),
            (Rdma, 17),
            (Tcp, 18),
            (Window, 19),
            (Mismatch, 20),
            (Interrupted, 21),
        ];
        for (code, number) in all {
            assert_eq!(code as i32, number, "{code:?}");
        }
    }

    #[test]
    fn an_error_made_of_a_status_has_the_number_of_its_cause() {
        for (status, code) in [
            (abi::PUSHGATE_PEER_LOST, ErrorCode::PeerLost),
            (abi::PUSHGATE_ABORTED, ErrorCode::Aborted),
            (abi::PUSHGATE_TIMED_OUT, ErrorCode::TimedOut),
            (abi::PUSHGATE_REFUSED, ErrorCode::Refused),
            (abi::PUSHGATE_STUCK, ErrorCode::Stuck),
            (abi::PUSHGATE_OVERRUN, ErrorCode::Overrun),
            (abi::PUSHGATE_LINK_DOWN, ErrorCode::Transport),
        ] {
            assert_eq!(Error::from_status(Status::new(status), 0).code(), code, "status {status}");
        }
        assert_eq!(Error::config("rank", 7, "0 to 3").code(), ErrorCode::Config);
    }

    #[test]
    fn settings_arguments_and_their_file_are_errors_of_configuration() {
        let config = Error::flag("runs", 0, "1 to 1000");
        assert_eq!(config.to_string(), "invalid runs `0` (from --runs): expected 1 to 1000");
        assert!(config.is_config() && !Error::Aborted { rank: 0 }.is_config());
    }
}
