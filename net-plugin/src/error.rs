//! The error of a failed call of NCCL's: a code for NCCL and a sentence for the log.

use std::any::Any;
use std::fmt::{self, Display};
use std::io;

use pushgate::Error;
use pushgate_core::refusal::Refusal;
use pushgate_core::session::Status;
use pushgate_driver_shim::{ShimError, abi, limits};
use pushgate_engine::endpoint::EndpointError;
use pushgate_engine::engine::EngineError;
use pushgate_engine::status::link_cause;
use pushgate_link_verbs::VerbsError;
use rustix::io::Errno;

/// The values of `ncclResult_t` that this plugin returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    /// A call of the system failed.
    System = 2,
    /// A bug in this plugin.
    Internal = 3,
    /// An argument that is never valid.
    Argument = 4,
    /// Valid arguments that do not fit together, or a wrong setting.
    Usage = 5,
    /// The other end failed, or the connection to it.
    Remote = 6,
}

/// A failed call: the code for NCCL and the text for the log.
#[derive(Debug)]
pub struct Failure {
    pub code: Code,
    pub text: String,
}

pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Failure { code, text: text.into() }
    }

    /// Makes a closure for `map_err` that reports a failure of `what`.
    ///
    /// Where the system refused a call by a limit, the text says what helps.
    pub fn system<E: Display + 'static>(what: impl Display) -> impl FnOnce(E) -> Self {
        move |e| {
            let any: &dyn Any = &e;
            let number = any.downcast_ref::<Errno>().map(|errno| errno.raw_os_error());
            let number = number.or_else(|| any.downcast_ref::<io::Error>()?.raw_os_error());
            let remedy = number.and_then(|number| limits::remedy(&io::Error::from_raw_os_error(number)));
            Failure::new(Code::System, format!("{what}: {e}{}", limits::added(remedy)))
        }
    }

    /// The failure that a queue pair's final status means for `end`.
    pub fn ended(status: Status, end: impl Display) -> Self {
        let (code, why) = match status.code as u32 {
            abi::PUSHGATE_PEER_LOST => (
                Code::Remote,
                "the other end is gone: its process ended or closed the connection; its log says why".into(),
            ),
            abi::PUSHGATE_LINK_DOWN => {
                let (at, cause) = (which(status), link_cause(status.detail));
                let text = format!(
                    "its link failed at {at}: {cause}; where it is an RDMA link, see `rdma link` there"
                );
                (Code::Remote, text)
            }
            abi::PUSHGATE_REFUSED => {
                let (refusal, _) = Refusal::of(status.detail);
                let code = if refusal == Refusal::Protocol { Code::Remote } else { Code::Usage };
                (code, format!("a message or request of {} was refused: {}", which(status), refusal.words()))
            }
            abi::PUSHGATE_ABORTED => {
                let by = which(status);
                (Code::System, format!("{by} has aborted it; the log of the rank there says why"))
            }
            code => (Code::Internal, format!("it ended with {}", pushgate::status_name(code as u64))),
        };
        Failure::new(code, format!("{end}: {why}"))
    }
}

/// The end of a connection that a status names. The sending end is rank 0 of the queue pair.
fn which(status: Status) -> &'static str {
    match status.rank {
        Some(0) => "the sending end",
        Some(1) => "the receiving end",
        _ => "an end of it",
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        let code = match &e {
            e if e.is_config() => Code::Usage,
            Error::Mismatch { .. } => Code::Remote,
            _ => Code::System,
        };
        Failure::new(code, e.to_string())
    }
}

impl From<VerbsError> for Failure {
    fn from(e: VerbsError) -> Self {
        let code = if matches!(e, VerbsError::Peer { .. }) { Code::Remote } else { Code::System };
        Failure::new(code, e.to_string())
    }
}

impl From<EngineError> for Failure {
    fn from(e: EngineError) -> Self {
        Failure::new(Code::System, e.to_string())
    }
}

impl From<EndpointError> for Failure {
    fn from(e: EndpointError) -> Self {
        Failure::new(Code::System, e.to_string())
    }
}

impl From<ShimError> for Failure {
    fn from(e: ShimError) -> Self {
        Failure::new(Code::System, e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_the_system_refused_by_a_limit_says_what_helps() {
        for text in [
            Failure::system("eventfd")(Errno::MFILE).text,
            Failure::system("eventfd")(io::Error::from_raw_os_error(Errno::MFILE.raw_os_error())).text,
        ] {
            assert!(text.starts_with("eventfd: Too many open files") && text.contains("ulimit -n"), "{text}");
        }
        assert_eq!(Failure::system("eventfd")(Errno::PERM).text, format!("eventfd: {}", Errno::PERM));
        assert_eq!(Failure::system("a GPU")("it is gone").text, "a GPU: it is gone");
    }

    #[test]
    fn the_end_of_a_connection_names_the_reason_that_its_status_carries() {
        use pushgate_core::refusal::Lengths;
        let lengths = Refusal::Long(Lengths::of(300, 299));
        let refused = |refusal: Refusal| refusal.status(0, None);
        let by = |code, rank, detail| Status { rank: Some(rank), detail, ..Status::new(code) };
        for (status, code, says) in [
            (
                refused(lengths),
                Code::Usage,
                "of the sending end was refused: it has 300 bytes, and the receive that it met takes 299",
            ),
            (refused(Refusal::Long(None)), Code::Usage, "it is longer than the receive"),
            (refused(Refusal::Wqe), Code::Usage, "the WQE is none that the ring allows"),
            (refused(Refusal::Source), Code::Usage, "its payload is not in a region of its own"),
            (refused(Refusal::Target), Code::Usage, "no region of this rkey"),
            (refused(Refusal::Signal), Code::Usage, "no signal of this number"),
            (refused(Refusal::Unreadable), Code::Usage, "which this link does not send"),
            (refused(Refusal::Device), Code::Usage, "its device's memory could not be written"),
            (
                Refusal::Receive.status(1, None),
                Code::Usage,
                "of the receiving end was refused: a receive was posted",
            ),
            (Refusal::Protocol.status(1, None), Code::Remote, "it broke the protocol"),
            (by(abi::PUSHGATE_REFUSED, 0, 0), Code::Usage, "the log of its proxy or of its peer's says why"),
            (by(abi::PUSHGATE_ABORTED, 1, 0), Code::System, "the receiving end has aborted it"),
            (by(abi::PUSHGATE_PEER_LOST, 1, 0), Code::Remote, "its process ended or closed the connection"),
            (
                by(abi::PUSHGATE_LINK_DOWN, 0, abi::PUSHGATE_DOWN_PORT),
                Code::Remote,
                "at the sending end: its port is down",
            ),
            (by(abi::PUSHGATE_STUCK, 0, 7), Code::Internal, "it ended with stuck"),
        ] {
            let failure = Failure::ended(status, "send to node7");
            assert!(failure.text.starts_with("send to node7: ") && failure.text.contains(says), "{failure}");
            assert_eq!(failure.code, code, "{failure}");
        }
    }
}
