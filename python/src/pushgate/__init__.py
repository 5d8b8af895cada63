# SPDX-License-Identifier: MIT OR Apache-2.0
"""GPU-initiated networking that pushes: the NCCL plugin, the backend for NIXL, the command, and the C API.

``python -m pushgate env`` prints what NCCL has to be told, and ``python -m pushgate nixl`` what NIXL has to. :class:`Context` is where programs of their own begin; the page is
docs/python.md of the project.
"""

from ._api import (
    Comm,
    Context,
    DeviceKind,
    HostEnd,
    Kernel,
    Memory,
    Module,
    QueuePair,
    Region,
    Stream,
    Transport,
    log_to_stderr,
    status_name,
    version,
)
from ._files import command, include, library, nccl_environment, nixl_plugin, pkgconfig, plugin
from ._nixl import NixlError, nixl_folder
from .errors import Aborted, Busy, Error, ErrorCode, PeerLost, TimedOut

__all__ = [
    "Aborted",
    "Busy",
    "Comm",
    "Context",
    "DeviceKind",
    "Error",
    "ErrorCode",
    "HostEnd",
    "Kernel",
    "Memory",
    "Module",
    "NixlError",
    "PeerLost",
    "QueuePair",
    "Region",
    "Stream",
    "TimedOut",
    "Transport",
    "command",
    "include",
    "library",
    "log_to_stderr",
    "nccl_environment",
    "nixl_folder",
    "nixl_plugin",
    "pkgconfig",
    "plugin",
    "status_name",
    "version",
]
