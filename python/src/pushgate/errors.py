# SPDX-License-Identifier: MIT OR Apache-2.0
"""What a call that fails raises."""

from enum import IntEnum


class ErrorCode(IntEnum):
    """The numbers of errors, those of ``PUSHGATE_E_`` in the C header. A number keeps its meaning for ever."""

    CONFIG = 1
    UNKNOWN_SETTING = 2
    SETTINGS_FILE = 3
    PEER_LOST = 4
    REFUSED = 5
    TIMED_OUT = 6
    ABORTED = 7
    STUCK = 8
    OVERRUN = 9
    LINK_DOWN = 10
    FORKED = 11
    DEVICE = 12
    IO = 13
    MEMORY = 14
    PROXY = 15
    QUEUE_PAIR = 16
    RDMA = 17
    TCP = 18
    WINDOW = 19
    MISMATCH = 20
    INTERRUPTED = 21
    ARGUMENT = 64
    HANDLE = 65
    BUSY = 66
    AGAIN = 67
    INTERNAL = 68


class Error(Exception):
    """A call of the library failed."""

    code: int
    """One of :class:`ErrorCode`, or a number that only a newer library has."""
    message: str
    """The sentence that names the thing, the value and the remedy."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        try:
            self.code = ErrorCode(code)
        except ValueError:
            self.code = code
        self.message = message

    def __str__(self) -> str:
        name = self.code.name if isinstance(self.code, ErrorCode) else f"error {self.code}"
        return f"{name}: {self.message}" if self.message else name


class PeerLost(Error):
    """A rank is gone: its process or its proxy ended, or its host cannot be reached."""


class TimedOut(Error, TimeoutError):
    """A wait took longer than its limit."""


class Aborted(Error):
    """The communicator or the queue pair was aborted."""


class Busy(Error):
    """The handle is in use by an open handle that was made with it, or by another thread; the handle stays open."""


_CLASSES: dict[int, type[Error]] = {
    ErrorCode.PEER_LOST: PeerLost,
    ErrorCode.TIMED_OUT: TimedOut,
    ErrorCode.ABORTED: Aborted,
    ErrorCode.BUSY: Busy,
}


def error_of(code: int, message: str) -> Error:
    """The exception for a number that a call returned."""
    return _CLASSES.get(code, Error)(code, message)
