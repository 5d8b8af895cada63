# SPDX-License-Identifier: MIT OR Apache-2.0
"""The C library, opened at the first call, with the prototypes of ``pushgate/pushgate.h``."""

import ctypes
import threading
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, Generator, Optional

from ._files import library
from .errors import ErrorCode, error_of

INTERFACE = 2
"""``PUSHGATE_INTERFACE`` of the header that these prototypes are of. A minor number more is another interface while the major is 0."""

FOREVER = 2**64 - 1
NO_SIGNAL = 2**32 - 1
UNIQUE_ID_BYTES = 128


class Setting(ctypes.Structure):
    """``pushgate_setting``."""

    _fields_ = [("name", c_char_p), ("value", c_char_p)]


class ContextOptions(ctypes.Structure):
    """``pushgate_context_options``."""

    _fields_ = [
        ("size", c_size_t),
        ("settings", POINTER(Setting)),
        ("settings_count", c_size_t),
        ("flags", c_uint32),
        ("device_index", c_uint32),
    ]


class Counter(ctypes.Structure):
    """``pushgate_counter``."""

    _fields_ = [("name", c_char_p), ("value", c_uint64)]


class UniqueIdBytes(ctypes.Structure):
    """``pushgate_unique_id``."""

    _fields_ = [("bytes", ctypes.c_uint8 * UNIQUE_ID_BYTES)]


class QueuePairOptions(ctypes.Structure):
    """``pushgate_queue_pair_options``."""

    _fields_ = [
        ("size", c_size_t),
        ("window_size", c_uint64),
        ("slots", c_uint64),
        ("receives", c_uint64),
        ("flags", c_uint32),
        ("reserved", c_uint32),
    ]


class LaunchOptions(ctypes.Structure):
    """``pushgate_launch_options``."""

    _fields_ = [
        ("size", c_size_t),
        ("grid", c_uint32),
        ("block", c_uint32),
        ("shared_bytes", c_uint32),
        ("flags", c_uint32),
    ]


_HANDLE, _TEXT, _SIZE, _U32, _U64 = c_void_p, c_char_p, c_size_t, c_uint32, c_uint64
_TO = POINTER(c_void_p)
_TEXT_OUT = [c_void_p, c_size_t, POINTER(c_size_t)]
AllGather = ctypes.CFUNCTYPE(c_int, c_void_p, c_size_t, c_void_p, c_void_p)
"""``pushgate_all_gather``: a function of the program."""

# Each call that returns a PUSHGATE_E_ number, with what it takes.
_CALLS: dict[str, list[Any]] = {
    "interrupt_by": [c_void_p, c_void_p],
    "log_start": [_TEXT, c_void_p, c_void_p],
    "context_create": [POINTER(ContextOptions), _TO],
    "context_close": [_HANDLE],
    "context_device": [_HANDLE, POINTER(_U32)],
    "context_describe": [_HANDLE, *_TEXT_OUT],
    "context_setting": [_HANDLE, _TEXT, *_TEXT_OUT],
    "context_drive": [_HANDLE, POINTER(_U32)],
    "context_counters": [_HANDLE, POINTER(Counter), _SIZE, POINTER(_SIZE)],
    "unique_id_create": [_HANDLE, POINTER(UniqueIdBytes)],
    "comm_connect": [_HANDLE, _TEXT, _U32, _U32, _TO],
    "comm_from_environment": [_HANDLE, _TO],
    "comm_connect_id": [_HANDLE, POINTER(UniqueIdBytes), _U32, _U32, _TO],
    "comm_bootstrap": [_HANDLE, _U32, _U32, AllGather, c_void_p, _TO],
    "comm_local": [_HANDLE, _U32, _TO],
    "comm_close": [_HANDLE],
    "comm_rank": [_HANDLE, POINTER(_U32), POINTER(_U32)],
    "comm_transport": [_HANDLE, _U32, POINTER(_U32)],
    "comm_all_gather": [_HANDLE, c_void_p, _SIZE, c_void_p, _SIZE],
    "comm_barrier": [_HANDLE],
    "comm_check": [_HANDLE],
    "comm_abort": [_HANDLE],
    "queue_pair_create": [_HANDLE, _U32, _U32, POINTER(QueuePairOptions), _TO],
    "queue_pair_close": [_HANDLE],
    "queue_pair_device_address": [_HANDLE, POINTER(_U64)],
    "queue_pair_max_message": [_HANDLE, POINTER(_U64)],
    "queue_pair_check": [_HANDLE],
    "queue_pair_abort": [_HANDLE],
    "memory_alloc_host": [_HANDLE, _SIZE, _TO],
    "memory_alloc_device": [_HANDLE, _SIZE, _TO],
    "memory_use_host": [_HANDLE, c_void_p, _SIZE, _TO],
    "memory_use_device": [_HANDLE, _U64, _SIZE, _TO],
    "memory_close": [_HANDLE],
    "memory_address": [_HANDLE, POINTER(_U64), _TO, POINTER(_SIZE)],
    "memory_write": [_HANDLE, _SIZE, c_void_p, _SIZE],
    "memory_read": [_HANDLE, _SIZE, c_void_p, _SIZE],
    "region_create": [_HANDLE, _HANDLE, _TO],
    "region_key": [_HANDLE, POINTER(_U32)],
    "region_close": [_HANDLE],
    "module_from_file": [_HANDLE, _TEXT, _TO],
    "module_from_text": [_HANDLE, _TEXT, _TEXT, _TO],
    "module_from_image": [_HANDLE, _TEXT, c_void_p, _SIZE, _TO],
    "module_from_image_file": [_HANDLE, _TEXT, _TO],
    "module_close": [_HANDLE],
    "module_resident_blocks": [_HANDLE, _TEXT, _U32, _U32, POINTER(_U32)],
    "stream_create": [_HANDLE, _TO],
    "stream_close": [_HANDLE],
    "kernel_launch": [_HANDLE, _HANDLE, _TEXT, POINTER(LaunchOptions), c_void_p, _SIZE, _TO],
    "kernel_wait": [_HANDLE, _U64],
    "kernel_close": [_HANDLE],
    "host_end_create": [_HANDLE, _TO],
    "host_end_close": [_HANDLE],
    "host_end_try_send": [_HANDLE, c_void_p, _SIZE, _U32],
    "host_end_send": [_HANDLE, c_void_p, _SIZE, _U32],
    "host_end_try_put": [_HANDLE, _U32, _U64, c_void_p, _SIZE, _U32, _U64],
    "host_end_put": [_HANDLE, _U32, _U64, c_void_p, _SIZE, _U32, _U64],
    "host_end_signal": [_HANDLE, _U32, _U64],
    "host_end_signal_value": [_HANDLE, _U32, POINTER(_U64)],
    "host_end_wait_signal": [_HANDLE, _U32, _U64],
    "host_end_flush": [_HANDLE],
    "host_end_recv": [_HANDLE, c_void_p, _SIZE, POINTER(_SIZE), POINTER(_U32)],
    "host_end_try_recv": [_HANDLE, c_void_p, _SIZE, POINTER(_SIZE), POINTER(_U32)],
}

# The calls that return something else.
_OTHERS: dict[str, tuple[list[Any], Any]] = {
    "strerror": ([c_int], c_char_p),
    "last_message": ([], c_char_p),
    "version": ([], c_char_p),
    "interface": ([], c_uint32),
    "status_name": ([c_uint64], c_char_p),
}


@lru_cache(maxsize=None)
def lib() -> ctypes.CDLL:
    """The library. Its calls release Python's lock, so a thread that waits in one keeps no other thread from running."""
    found = ctypes.CDLL(str(library()))
    for name, (arguments, result) in _OTHERS.items():
        function = getattr(found, f"pushgate_{name}")
        function.argtypes, function.restype = arguments, result
    if found.pushgate_interface() != INTERFACE:
        raise ImportError(f"{library()} has interface {found.pushgate_interface()}, expected {INTERFACE}: install the wheel again")
    for name, arguments in _CALLS.items():
        function = getattr(found, f"pushgate_{name}")
        function.argtypes, function.restype = arguments, c_int
    return found


class _Thread(threading.local):
    """Of each thread: what its calls that wait ask, and the exception that has ended one."""

    def __init__(self) -> None:
        self.raised: Optional[BaseException] = None
        self.interrupted = False
        self._ask: Any = None

    def begin(self) -> None:
        """Before a call of this thread."""
        self.raised, self.interrupted = None, False
        if self._ask is None:
            asked = self._asked()
            next(asked)
            self._ask = ctypes.CFUNCTYPE(c_int, c_void_p)(asked.send)
            lib().pushgate_interrupt_by(self._ask, None)

    def _asked(self) -> Generator[int, object, None]:
        """Python's handlers of signals, and exceptions that another thread raises in this one, come when the generator goes on after
        its ``yield``: within the ``try``, where a function would have them before its first statement."""
        while True:
            try:
                while True:
                    yield int(self.raised is not None)
            except GeneratorExit:
                raise
            except BaseException as raised:
                self.raised = raised

    def reraise(self, told: Optional[BaseException] = None) -> None:
        """Raises the exception that has come during the call, if one has; ``told``: what the library says of it."""
        if self.raised is not None:
            # The traceback has the generator's frame, and clearing that frame would end the generator.
            raise self.raised.with_traceback(None) from told


_this_thread = _Thread()


def code(name: str, *arguments: Any) -> int:
    """Calls ``pushgate_NAME``; returns the call's number."""
    for argument in arguments:
        # A closed handle would be NULL for the library, which does not know what it was.
        if getattr(argument, "closed", False):
            raise error_of(ErrorCode.HANDLE, f"this {type(argument).__name__} is closed")
    this = _this_thread
    this.begin()
    number: int = getattr(lib(), f"pushgate_{name}")(*arguments)
    this.interrupted = number == ErrorCode.INTERRUPTED
    if this.interrupted:
        this.reraise(error_of(number, message()))
    return number


def interrupted() -> bool:
    """Whether an exception has ended this thread's last call."""
    return _this_thread.interrupted


def reraise() -> None:
    """Raises the exception that has come during this thread's last call, which has not ended by it."""
    _this_thread.reraise()


def message() -> str:
    """The sentence of this thread's last call that failed."""
    text: bytes = lib().pushgate_last_message()
    return text.decode()


def call(name: str, *arguments: Any) -> None:
    """Calls ``pushgate_NAME``; raises the error that the call returns."""
    number = code(name, *arguments)
    if number:
        # The message belongs to the thread, and ctypes makes both calls in this one.
        raise error_of(number, message() or lib().pushgate_strerror(number).decode())
