# SPDX-License-Identifier: MIT OR Apache-2.0
"""The C API as classes: a handle is an object, which ``close()`` or a ``with`` statement gives back."""

import ctypes
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from types import TracebackType
from typing import Any, Optional, TypeVar, Union

from . import _library as c
from ._library import call, code, interrupted, lib, reraise
from .errors import Error, ErrorCode, error_of

Buffer = Any
"""An object with the buffer protocol, contiguous: bytes, bytearray, memoryview, mmap, a NumPy array, a tensor's ``numpy()``."""

_Self = TypeVar("_Self", bound="_Handle")


class DeviceKind(IntEnum):
    """What runs a context's kernels."""

    CPU = 1
    CUDA = 2


class Transport(IntEnum):
    """How the queue pairs to a rank go."""

    LOCAL = 1
    VERBS = 2
    TCP = 3


_never_closed: list[Any] = []


class _Handle:
    """A handle of the library. Any thread may use one, but where the class says otherwise."""

    _close = ""
    _stays_open = False

    def __init__(self, handle: ctypes.c_void_p, *needs: object) -> None:
        self._handle: Optional[ctypes.c_void_p] = handle
        # What the handle was made with must not be collected before it.
        self._needs: Optional[tuple[object, ...]] = needs

    @property
    def _as_parameter_(self) -> Optional[ctypes.c_void_p]:
        # A closed handle is NULL, which every call refuses.
        return self._handle

    @property
    def closed(self) -> bool:
        """Whether the handle has been given back."""
        return self._handle is None

    def close(self) -> None:
        """Gives the handle back. Raises :class:`Busy`, and closes nothing, while something that was made with it is open.

        An exception that comes while the call waits, as Ctrl-C's, ends the wait. The cause of the exception says what peers have not
        got. Regions and kernels stay open then, because their memory is in use; everything else is closed.

        A second call does nothing.
        """
        if self._handle is not None:
            try:
                call(self._close, self._handle)
            except BaseException:
                if interrupted() and not self._stays_open:
                    self._handle = self._needs = None
                raise
            self._handle = self._needs = None
            reraise()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if kind is None:
            self.close()
            return
        # The error that is under way says more than one of closing.
        try:
            self.close()
        except Exception as second:
            warnings.warn(f"{type(self).__name__} stays open: {second}", ResourceWarning, stacklevel=2)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            # The library still uses what the handle needs, as a buffer of the program's: it stays for the rest of the process.
            _never_closed.append(self._needs)
            warnings.warn(f"{type(self).__name__} was not closed", ResourceWarning, stacklevel=2, source=self)


def _made(name: str, *arguments: Any) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    call(name, *arguments, ctypes.byref(handle))
    return handle


def _number(kind: Any, name: str, *arguments: Any) -> int:
    value = kind()
    call(name, *arguments, ctypes.byref(value))
    return int(value.value)


def _text(name: str, *arguments: Any) -> str:
    needed = ctypes.c_size_t()
    call(name, *arguments, None, 0, ctypes.byref(needed))
    while True:
        room = needed.value
        buffer = ctypes.create_string_buffer(room)
        call(name, *arguments, buffer, room, ctypes.byref(needed))
        if needed.value <= room:
            return buffer.value.decode()


def _encoded(text: str) -> bytes:
    data = text.encode()
    # C would see a shorter text.
    if b"\0" in data:
        raise ValueError(f"{text!r} has a NUL character")
    return data


def _unsigned(value: int, bits: int, what: str) -> int:
    # ctypes cuts numbers off in silence.
    if not 0 <= value < 1 << bits:
        raise ValueError(f"{what} is {value}, expected 0 to 2^{bits} - 1")
    return value


def _writable(buffer: Buffer) -> Any:
    """A ctypes array over a buffer, which the array keeps from being freed or resized."""
    view = memoryview(buffer)
    if not view.contiguous:
        raise BufferError("the buffer is not contiguous")
    if view.readonly:
        raise BufferError("the buffer is read-only")
    return (ctypes.c_ubyte * view.nbytes).from_buffer(view)


def _readable(buffer: Buffer) -> tuple[Any, int]:
    """What ctypes passes as the address of a buffer's bytes, and how many there are."""
    if isinstance(buffer, bytes):
        return buffer, len(buffer)
    view = memoryview(buffer)
    if not view.contiguous or view.readonly:
        data = view.tobytes()
        return data, len(data)
    return (ctypes.c_ubyte * view.nbytes).from_buffer(view), view.nbytes


class Context(_Handle):
    """A device with its engine, which this process made; in a child of fork every call raises an error.

    :param settings: settings by their names, as ``{"qp": "tcp", "window-size": "4M"}``; they win over variables and the settings file.
    :param device_index: the GPU, from 0. Has no effect on the CPU executor.
    :param for_rank: take GPU and core by this process's number among the ranks of its host, as its launcher tells it.
    :param defaults_only: read neither the settings file nor the environment.

    The constructor reads the environment: no other thread changes it meanwhile.
    """

    _close = "context_close"

    def __init__(
        self,
        settings: Optional[Mapping[str, Union[str, int]]] = None,
        *,
        device_index: int = 0,
        for_rank: bool = False,
        defaults_only: bool = False,
    ) -> None:
        pairs = [(_encoded(name), _encoded(str(value))) for name, value in (settings or {}).items()]
        array = (c.Setting * len(pairs))(*(c.Setting(name, value) for name, value in pairs))
        flags = (1 if defaults_only else 0) | (2 if for_rank else 0)
        index = _unsigned(device_index, 32, "device_index")
        options = c.ContextOptions(ctypes.sizeof(c.ContextOptions), array, len(pairs), flags, index)
        super().__init__(_made("context_create", ctypes.byref(options)))

    @property
    def device(self) -> DeviceKind:
        """What runs the kernels."""
        return DeviceKind(_number(ctypes.c_uint32, "context_device", self))

    def describe(self) -> str:
        """Which device was chosen, and why."""
        return _text("context_describe", self)

    def setting(self, name: str) -> str:
        """The value of a setting."""
        return _text("context_setting", self, _encoded(name))

    def drive(self) -> bool:
        """Makes a pass over the queue pairs, with ``drive = caller``. Returns whether there was something to do."""
        return bool(_number(ctypes.c_uint32, "context_drive", self))

    def counters(self) -> dict[str, int]:
        """Counts of the engine, all of one moment."""
        count = ctypes.c_size_t()
        call("context_counters", self, None, 0, ctypes.byref(count))
        counters = (c.Counter * count.value)()
        call("context_counters", self, counters, count.value, ctypes.byref(count))
        return {counter.name.decode(): int(counter.value) for counter in counters[: count.value]}

    def unique_id(self) -> bytes:
        """Names a new job, in which this process has rank 0, for :meth:`connect_id`. Who has the id can be a rank."""
        made = c.UniqueIdBytes()
        call("unique_id_create", self, ctypes.byref(made))
        return bytes(made.bytes)

    def connect(self, job: str, rank: int, ranks: int) -> "Comm":
        """Joins a job by its name. Waits for all ranks."""
        rank, ranks = _unsigned(rank, 32, "rank"), _unsigned(ranks, 32, "ranks")
        return Comm(_made("comm_connect", self, _encoded(job), rank, ranks), self)

    def connect_id(self, unique_id: bytes, rank: int, ranks: int) -> "Comm":
        """Joins the job of an id. Waits for all ranks."""
        if len(unique_id) != c.UNIQUE_ID_BYTES:
            raise ValueError(f"the id has {len(unique_id)} bytes, expected {c.UNIQUE_ID_BYTES}")
        named = c.UniqueIdBytes.from_buffer_copy(unique_id)
        rank, ranks = _unsigned(rank, 32, "rank"), _unsigned(ranks, 32, "ranks")
        return Comm(_made("comm_connect_id", self, ctypes.byref(named), rank, ranks), self)

    def bootstrap(self, rank: int, ranks: int, all_gather: Callable[[bytes], Sequence[bytes]]) -> "Comm":
        """Joins ranks that can exchange bytes already, as by torch.distributed or mpi4py. Waits for all ranks.

        ``all_gather`` is called once in each rank: it takes this rank's bytes, as many in all ranks, and returns those of all
        ranks in their order. What it raises is the cause of the error that this call raises.
        """
        rank, ranks = _unsigned(rank, 32, "rank"), _unsigned(ranks, 32, "ranks")
        raised: list[BaseException] = []

        def exchange(data: int, length: int, everything: int, _user: object) -> int:
            # An exception can't pass through C.
            try:
                parts = list(all_gather(ctypes.string_at(data, length)))
                if [len(part) for part in parts] != [length] * ranks:
                    raise ValueError(f"all_gather returned {[len(part) for part in parts]} bytes, expected {length} of each of {ranks} ranks")
                ctypes.memmove(everything, b"".join(parts), length * ranks)
            except BaseException as error:
                raised.append(error)
                return 1
            return 0

        try:
            return Comm(_made("comm_bootstrap", self, rank, ranks, c.AllGather(exchange), None), self)
        except Error as error:
            if raised:
                raise error from raised[0]
            raise

    def connect_from_environment(self) -> "Comm":
        """Joins the job for which `pushgate run`, torchrun, mpirun or srun started this process. Waits for all ranks."""
        return Comm(_made("comm_from_environment", self), self)

    def local(self, ranks: int) -> list["Comm"]:
        """Makes ranks that are threads of this process. Each needs a thread of its own in calls that wait for the others."""
        places = (ctypes.c_void_p * _unsigned(ranks, 16, "ranks"))()
        call("comm_local", self, ranks, places)
        return [Comm(ctypes.c_void_p(place), self) for place in places]

    def alloc_host(self, size: int) -> "Memory":
        """Allocates zeroed host memory that kernels access too."""
        return Memory(_made("memory_alloc_host", self, _unsigned(size, 64, "size")), self)

    def alloc_device(self, size: int) -> "Memory":
        """Allocates zeroed memory of the device."""
        return Memory(_made("memory_alloc_device", self, _unsigned(size, 64, "size")), self)

    def use_host(self, buffer: Buffer) -> "Memory":
        """Makes a writable buffer of the program's accessible to kernels and, by a region, to peers. The buffer is kept until then."""
        array = _writable(buffer)
        return Memory(_made("memory_use_host", self, array, len(array)), self, array)

    def use_device(self, address: int, size: int, owner: object = None) -> "Memory":
        """Names memory of the device that another library allocated, as ``tensor.data_ptr()``.

        :param owner: what keeps the memory allocated, as the tensor; the result refers to it until it is closed.
        """
        handle = _made("memory_use_device", self, _unsigned(address, 64, "address"), _unsigned(size, 64, "size"))
        return Memory(handle, self, owner)

    def load_file(self, path: Union[str, "os.PathLike[str]"]) -> "Module":
        """Compiles the kernels of a ``.cu`` file for the device. The result is cached."""
        return Module(_made("module_from_file", self, _encoded(os.fspath(path))), self)

    def load_text(self, name: str, source: str) -> "Module":
        """Compiles the kernels of a text; messages call it ``name``."""
        return Module(_made("module_from_text", self, _encoded(name), _encoded(source)), self)

    def load_image(self, name: str, image: "Union[bytes, bytearray, memoryview]") -> "Module":
        """Loads kernels that were compiled before: a cubin, a fatbin or PTX for a GPU, a shared library for the CPU.

        Messages call the image ``name``.
        """
        data = bytes(image)
        return Module(_made("module_from_image", self, _encoded(name), data, len(data)), self)

    def load_image_file(self, path: Union[str, "os.PathLike[str]"]) -> "Module":
        """Loads kernels of a file that was compiled before, as :meth:`load_image` does."""
        return Module(_made("module_from_image_file", self, _encoded(os.fspath(path))), self)

    def stream(self) -> "Stream":
        """Makes a queue of launches."""
        return Stream(_made("stream_create", self), self)


class Comm(_Handle):
    """One rank's view of a job. A collective (``barrier``, ``all_gather``) is called by one thread of every rank."""

    _close = "comm_close"

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        rank = ctypes.c_uint32()
        call("comm_rank", self, ctypes.byref(rank), None)
        return int(rank.value)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        ranks = ctypes.c_uint32()
        call("comm_rank", self, None, ctypes.byref(ranks))
        return int(ranks.value)

    def transport(self, peer: int) -> Transport:
        """How queue pairs to a rank go."""
        return Transport(_number(ctypes.c_uint32, "comm_transport", self, _unsigned(peer, 32, "peer")))

    def all_gather(self, data: Buffer) -> list[bytes]:
        """Exchanges bytes between all ranks. Each rank gives equally many; returns those of each rank."""
        mine, size = _readable(data)
        ranks = self.ranks
        everything = ctypes.create_string_buffer(max(1, size * ranks))
        call("comm_all_gather", self, mine, size, everything, size * ranks)
        return [everything.raw[size * rank : size * (rank + 1)] for rank in range(ranks)]

    def barrier(self) -> None:
        """Waits until every rank has called ``barrier``."""
        call("comm_barrier", self)

    def check(self) -> None:
        """Raises :class:`PeerLost` once a rank has been lost."""
        call("comm_check", self)

    def abort(self) -> None:
        """Ends all queue pairs of this rank, here and at their peers."""
        call("comm_abort", self)

    def queue_pair(
        self,
        peer: int,
        label: int = 0,
        *,
        window_size: int = 0,
        slots: int = 0,
        receives: int = 0,
        posted_receives: bool = False,
    ) -> "QueuePair":
        """Connects a queue pair with ``peer``, which makes the same call with the same label. Sizes of 0 mean the settings'.

        :param window_size: the payload ring in bytes, a power of two.
        :param posted_receives: messages land in buffers that the receiver's kernel posts.
        """
        options = c.QueuePairOptions(
            ctypes.sizeof(c.QueuePairOptions),
            _unsigned(window_size, 64, "window_size"),
            _unsigned(slots, 64, "slots"),
            _unsigned(receives, 64, "receives"),
            1 if posted_receives else 0,
            0,
        )
        peer, label = _unsigned(peer, 32, "peer"), _unsigned(label, 32, "label")
        return QueuePair(_made("queue_pair_create", self, peer, label, ctypes.byref(options)), self)


class QueuePair(_Handle):
    """A reliable, ordered connection between two ranks' devices."""

    _close = "queue_pair_close"

    @property
    def device_address(self) -> int:
        """The address of the queue pair's ``struct pushgate_qp``, for a kernel's parameters."""
        return _number(ctypes.c_uint64, "queue_pair_device_address", self)

    @property
    def max_message(self) -> int:
        """The largest message in bytes."""
        return _number(ctypes.c_uint64, "queue_pair_max_message", self)

    def check(self) -> None:
        """Raises the cause if the queue pair has ended."""
        call("queue_pair_check", self)

    def abort(self) -> None:
        """Ends the queue pair: waits raise :class:`Aborted`, here and at the peer."""
        call("queue_pair_abort", self)

    def region(self, memory: "Memory") -> "Region":
        """Registers all of a memory with the queue pair."""
        return Region(_made("region_create", self, memory), self, memory)

    def host_end(self) -> "HostEnd":
        """The queue pair's end for a thread of this program. A queue pair gives it once; then no kernel uses this side."""
        return HostEnd(_made("host_end_create", self), self)


class Memory(_Handle):
    """Memory that the device of a context accesses."""

    _close = "memory_close"

    def __init__(self, handle: ctypes.c_void_p, *needs: object) -> None:
        super().__init__(handle, *needs)
        self._views: Optional["weakref.ref[Any]"] = None

    def _place(self) -> tuple[int, Optional[int], int]:
        address, pointer, size = ctypes.c_uint64(), ctypes.c_void_p(), ctypes.c_size_t()
        call("memory_address", self, ctypes.byref(address), ctypes.byref(pointer), ctypes.byref(size))
        return int(address.value), pointer.value, int(size.value)

    @property
    def address(self) -> int:
        """The address for kernels."""
        return self._place()[0]

    def __len__(self) -> int:
        return self._place()[2]

    def view(self) -> memoryview:
        """Host memory as bytes, without a copy. The memory cannot be closed while a view of it, or an array over one, is alive."""
        _, pointer, size = self._place()
        if pointer is None:
            raise BufferError("memory of the device has no view: use read and write")
        array = self._views() if self._views is not None else None
        if array is None:
            # A class of its own, because a plain array takes no weak reference.
            kind: Any = type("Bytes", (ctypes.c_ubyte * size,), {})
            array = kind.from_address(pointer)
            self._views = weakref.ref(array)
        return memoryview(array).cast("B")

    def close(self) -> None:
        """Frees the memory, or gives the program's own back. Raises ``BufferError``, and closes nothing, while a view is alive."""
        if self._views is not None and self._views() is not None:
            raise BufferError("a view of the memory is alive: delete it, and arrays over it, before the memory is closed")
        super().close()

    def write(self, data: Buffer, offset: int = 0) -> None:
        """Copies into memory of :meth:`Context.alloc_device`. Complete on return."""
        source, size = _readable(data)
        call("memory_write", self, _unsigned(offset, 64, "offset"), source, size)

    def read(self, offset: int = 0, size: Optional[int] = None) -> bytes:
        """Copies out of memory of :meth:`Context.alloc_device`: ``size`` bytes, or all from ``offset`` on."""
        offset = _unsigned(offset, 64, "offset")
        size = _unsigned(max(0, len(self) - offset) if size is None else size, 64, "size")
        # A size that no memory has is refused before a buffer is made of it.
        if size > len(self):
            raise ValueError(f"size is {size}, and the memory has {len(self)} bytes")
        buffer = ctypes.create_string_buffer(max(1, size))
        call("memory_read", self, offset, buffer, size)
        return buffer.raw[:size]


class Region(_Handle):
    """Memory that is registered with a queue pair, into which the peer may put."""

    _close = "region_close"
    _stays_open = True

    @property
    def key(self) -> int:
        """The key that the peer needs: lkey and rkey in one."""
        return _number(ctypes.c_uint32, "region_key", self)


class Module(_Handle):
    """Kernels that were loaded from a source."""

    _close = "module_close"

    def resident_blocks(self, kernel: str, block: int, shared_bytes: int = 0) -> int:
        """How many blocks of a kernel the idle device runs at once."""
        block, shared_bytes = _unsigned(block, 32, "block"), _unsigned(shared_bytes, 32, "shared_bytes")
        return _number(ctypes.c_uint32, "module_resident_blocks", self, _encoded(kernel), block, shared_bytes)


class Stream(_Handle):
    """A queue of launches: those of one stream run one after the other."""

    _close = "stream_close"

    def launch(
        self,
        module: Module,
        kernel: str,
        params: Union[bytes, ctypes.Structure],
        *,
        grid: int = 1,
        block: int = 1,
        shared_bytes: int = 0,
        cooperating: bool = False,
        needs: tuple[object, ...] = (),
    ) -> "Kernel":
        """Launches a kernel, and returns at once.

        :param params: the kernel's structure, field by field as the source has it; it is copied.
        :param cooperating: blocks wait for each other, or for a peer's kernel: all of them must be able to run at once.
        :param needs: what must not be collected before the kernel is closed, as the memory that the parameters name.
        """
        shape = c.LaunchOptions(
            ctypes.sizeof(c.LaunchOptions),
            _unsigned(grid, 32, "grid"),
            _unsigned(block, 32, "block"),
            _unsigned(shared_bytes, 32, "shared_bytes"),
            1 if cooperating else 0,
        )
        data = bytes(params)
        handle = _made("kernel_launch", self, module, _encoded(kernel), ctypes.byref(shape), data, len(data))
        return Kernel(handle, self, module, *needs)


class Kernel(_Handle):
    """A kernel that was launched."""

    _close = "kernel_close"
    _stays_open = True

    def wait(self, timeout: Optional[float] = None) -> None:
        """Waits for the kernel's end; what it wrote can be read then.

        :param timeout: seconds, after which :class:`TimedOut` is raised and the kernel still runs. None: no limit, for kernels end by
            themselves, because each wait of the device API is bounded.
        """
        call("kernel_wait", self, c.FOREVER if timeout is None else max(0, round(timeout * 1000)))


class HostEnd(_Handle):
    """A queue pair's end for a thread of this program, which posts, receives and waits as kernels do. One thread at a time uses it.

    Calls wait for the setting ``timeout`` at most, and raise :class:`TimedOut` then. Those named ``try_`` return at once.
    """

    _close = "host_end_close"

    @staticmethod
    def _tried(name: str, *arguments: Any) -> bool:
        number = code(name, *arguments)
        if number == ErrorCode.AGAIN:
            return False
        if number:
            raise error_of(number, c.message())
        return True

    def send(self, payload: Buffer, tag: int = 0) -> None:
        """Sends a message, which takes a receive of the peer. The payload may be changed on return."""
        data, size = _readable(payload)
        call("host_end_send", self, data, size, _unsigned(tag, 32, "tag"))

    def try_send(self, payload: Buffer, tag: int = 0) -> bool:
        """Sends a message. Returns False, having taken nothing, if there is no credit."""
        data, size = _readable(payload)
        return self._tried("host_end_try_send", self, data, size, _unsigned(tag, 32, "tag"))

    def _put(self, rkey: int, offset: int, payload: Buffer, signal: Optional[int], value: int) -> tuple[Any, ...]:
        data, size = _readable(payload)
        index = c.NO_SIGNAL if signal is None else _unsigned(signal, 32, "signal")
        rkey, offset = _unsigned(rkey, 32, "rkey"), _unsigned(offset, 64, "offset")
        return self, rkey, offset, data, size, index, _unsigned(value, 64, "value")

    def put(self, rkey: int, offset: int, payload: Buffer, signal: Optional[int] = None, value: int = 0) -> None:
        """Puts bytes into a region of the peer, then sets the peer's signal ``signal`` to ``value``. A signal only grows.

        A key that names no region, and bytes that leave theirs, end the queue pair.
        """
        call("host_end_put", *self._put(rkey, offset, payload, signal, value))

    def try_put(self, rkey: int, offset: int, payload: Buffer, signal: Optional[int] = None, value: int = 0) -> bool:
        """Puts as :meth:`put` does. Returns False, having taken nothing, if there is no credit."""
        return self._tried("host_end_try_put", *self._put(rkey, offset, payload, signal, value))

    def signal(self, index: int, value: int) -> None:
        """Sets a signal of the peer, after all that was posted before."""
        call("host_end_signal", self, _unsigned(index, 32, "index"), _unsigned(value, 64, "value"))

    def signal_value(self, index: int) -> int:
        """The value of a signal of this end."""
        return _number(ctypes.c_uint64, "host_end_signal_value", self, _unsigned(index, 32, "index"))

    def wait_signal(self, index: int, value: int) -> None:
        """Waits until a signal of this end is at least ``value``."""
        call("host_end_wait_signal", self, _unsigned(index, 32, "index"), _unsigned(value, 64, "value"))

    def flush(self) -> None:
        """Waits until the peer has all that was posted."""
        call("host_end_flush", self)

    def recv(self, room: int) -> tuple[bytes, int]:
        """Waits for the next message; returns its bytes and its tag. A message longer than ``room`` stays the next one, and an
        error is raised."""
        buffer, length, tag = ctypes.create_string_buffer(max(1, room)), ctypes.c_size_t(), ctypes.c_uint32()
        call("host_end_recv", self, buffer, room, ctypes.byref(length), ctypes.byref(tag))
        return buffer.raw[: length.value], int(tag.value)

    def try_recv(self, room: int) -> Optional[tuple[bytes, int]]:
        """Takes the next message as :meth:`recv` does. Returns None if there is none."""
        buffer, length, tag = ctypes.create_string_buffer(max(1, room)), ctypes.c_size_t(), ctypes.c_uint32()
        if not self._tried("host_end_try_recv", self, buffer, room, ctypes.byref(length), ctypes.byref(tag)):
            return None
        return buffer.raw[: length.value], int(tag.value)


def version() -> str:
    """The release of the library, as in ``0.1.0 (commit 0123456789ab)``."""
    text: bytes = lib().pushgate_version()
    return text.decode()


def status_name(status: int) -> str:
    """What a status that a kernel saw means: ``enum class status`` of ``device.cuh``, as a number."""
    text: bytes = lib().pushgate_status_name(_unsigned(status, 64, "status"))
    return text.decode()


def log_to_stderr(filter: Optional[str] = None) -> None:
    """Shows the library's log on stderr from now on; a process calls it once.

    :param filter: levels (error, warn, info, debug, trace, off), each alone or behind CRATE=, with commas between. None: what the
        variable PUSHGATE_LOG says, else warn.
    """
    call("log_start", None if filter is None else _encoded(filter), None, None)
