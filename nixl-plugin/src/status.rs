//! NIXL's statuses, as the face returns them.

/// A value of `nixl_status_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    /// Under way.
    InProgress = 1,
    /// Done.
    Success = 0,
    /// The transfer was never posted.
    NotPosted = -1,
    /// An argument is wrong.
    InvalidParam = -2,
    /// Something of ours or of the system failed; the log says what.
    Backend = -3,
    /// What was named is not there: an agent, or a registration that has ended.
    NotFound = -4,
    /// Two things that belong together differ.
    Mismatch = -5,
    /// The call is not allowed now.
    NotAllowed = -6,
    /// The transfer is under way already.
    RepostActive = -7,
    /// We do not serve this.
    NotSupported = -9,
    /// The peer, or the way to it, is gone.
    RemoteDisconnect = -10,
    /// The program cancelled it, or ended a registration that it used.
    Canceled = -11,
}

impl Status {
    /// How a transfer stands.
    pub fn of_transfer(transfer: &crate::transfer::Transfer) -> Status {
        match transfer.status() {
            1 => Status::InProgress,
            other => Status::of(other),
        }
    }

    /// The status that a peer sent, or any other error.
    pub fn of(value: i32) -> Status {
        use Status::*;
        [
            Success,
            NotPosted,
            InvalidParam,
            NotFound,
            Mismatch,
            NotAllowed,
            NotSupported,
            RemoteDisconnect,
            Canceled,
        ]
        .into_iter()
        .find(|status| *status as i32 == value)
        .unwrap_or(Backend)
    }
}

/// What a call of ours answers.
pub type Result<T> = std::result::Result<T, Status>;
