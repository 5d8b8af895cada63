# SPDX-License-Identifier: MIT OR Apache-2.0
"""Where the files lie that the wheel has installed."""

from pathlib import Path

_NATIVE = Path(__file__).resolve().parent / "_native"


def _existing(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(
            f"no {path}: this is no installed wheel; `cargo xtask package --wheel` makes one, which pip installs"
        )
    return path


def plugin() -> Path:
    """The NCCL plugin, for ``NCCL_NET_PLUGIN``."""
    return _existing(_NATIVE / "lib" / "libnccl-net-pushgate.so")


def nixl_plugin() -> Path:
    """The backend for NIXL."""
    return _existing(_NATIVE / "lib" / "nixl" / "libplugin_PUSHGATE.so")


def library() -> Path:
    """The C library."""
    return _existing(_NATIVE / "lib" / "libpushgate.so.0.2")


def include() -> Path:
    """The folder to name with ``-I``: it has ``pushgate/pushgate.h`` for programs and ``pushgate/device.cuh`` for kernels."""
    return _existing(_NATIVE / "include")


def pkgconfig() -> Path:
    """The folder for ``PKG_CONFIG_PATH``, with which ``pkg-config --cflags --libs pushgate`` serves programs in C."""
    return _existing(_NATIVE / "lib" / "pkgconfig")


def command() -> Path:
    """The program ``pushgate``."""
    return _existing(_NATIVE / "bin" / "pushgate")


def nccl_environment() -> dict[str, str]:
    """The variables with which NCCL takes the plugin. They are set before the process makes its first communicator."""
    return {
        "NCCL_NET_PLUGIN": str(plugin()),
        # Without this variable NCCL passes over a plugin whose init fails, in silence, and takes its own networks.
        "NCCL_NET": "pushgate",
        # Without this variable some releases of NCCL forget the plugin when the last communicator is destroyed.
        "NCCL_NET_PLUGIN_REF_COUNT": "1",
    }
