# SPDX-License-Identifier: MIT OR Apache-2.0
"""The folder from which NIXL loads its backends and pushgate's.

NIXL looks for backends in ``NIXL_PLUGIN_DIR`` alone where that is set, so the folder has links to those of NIXL's wheel too. The loader
looks for their libraries in the folder above, and by the path of the link: so the libraries are linked there.

The command ``pushgate nixl-check`` has a copy of this file, which runs without the package: so nothing of the package is imported at its top.
"""

import hashlib
import os
import re
import secrets
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, Optional, Union

_WHEELS = ("nixl-cu13", "nixl-cu12", "nixl")
# The minor releases whose classes the backend lays out. NIXL itself compares the version of its plugin interface alone, which they share.
_FIRST, _LAST = (1, 3), (1, 5)


class NixlError(Exception):
    """Why no folder was made."""


class _Wheel(NamedTuple):
    """An installed wheel of NIXL: what compares first is how new the wheel is."""

    version: tuple[int, ...]
    name: str
    text: str
    libraries: Path

    def __str__(self) -> str:
        return f"{self.name} {self.text} in {self.libraries.parent}"

    @property
    def module(self) -> str:
        """What programs import."""
        return self.name.replace("-", "_")


def _wheels() -> list[_Wheel]:
    """The wheels of NIXL that this Python imports, the newest first. The package ``nixl`` of today has no backends of its own."""
    found: dict[str, _Wheel] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        # Python imports the first one on its path.
        if name not in _WHEELS or name in found:
            continue
        libraries = Path(str(distribution.locate_file(f"{name.replace('-', '_')}.libs"))).resolve()
        if any(libraries.glob("nixl/libplugin_*.so")):
            version = tuple(int(part) for part in re.findall(r"\d+", distribution.version)[:3])
            found[name] = _Wheel(version, name, distribution.version, libraries)
    return sorted(found.values(), reverse=True)


def _default(wheel: _Wheel, ours: Path) -> Path:
    """A folder for each pair of wheels, so that two environments of one user do not change each other's."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    pair = hashlib.sha256(os.fsencode(f"{wheel.libraries}\0{ours}")).hexdigest()[:12]
    return base / "pushgate" / "nixl" / f"{wheel.name}-{wheel.text}-{pair}"


def _link(link: Path, to: Path) -> None:
    """Makes a link, or changes one. A program that looks meanwhile sees the old or the new one."""
    if link.is_symlink() and os.readlink(link) == str(to):
        return
    if link.exists() and not link.is_symlink():
        raise NixlError(f"{link} is there already and is no link: choose another --folder")
    new = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    new.symlink_to(to)
    os.replace(new, link)


def newest_wheel() -> tuple[_Wheel, Optional[str]]:
    """The newest wheel of NIXL that this Python imports, and a sentence where there are several."""
    wheels = _wheels()
    if not wheels:
        raise NixlError(f"this Python has no wheel of NIXL with backends (looked for {', '.join(_WHEELS)}): pip install nixl-cu13")
    if not _FIRST <= wheels[0].version[:2] <= _LAST:
        first, last, after = (".".join(map(str, v)) for v in (_FIRST, _LAST, (_LAST[0], _LAST[1] + 1)))
        raise NixlError(f"{wheels[0]}: the backend is made for NIXL {first} to {last}: pip install '{wheels[0].name}>={first},<{after}'")
    others = "; ".join(map(str, wheels[1:]))
    return wheels[0], f"took {wheels[0]}, the newest; there is also {others}" if others else None


def make_folder(wheel: _Wheel, ours: Path, folder: Union[str, "os.PathLike[str]", None] = None) -> Path:
    """Makes ``folder``, or one in the user's cache, and in it the folder ``nixl`` for ``NIXL_PLUGIN_DIR``; returns the latter.

    ``ours`` is the backend's library.
    """
    top = _default(wheel, ours) if folder is None else Path(folder).absolute()
    backends = top / "nixl"
    # Some backends need libraries of NIXL itself, which lie apart.
    core = wheel.libraries.with_name(f".{wheel.libraries.stem}.mesonpy.libs")
    needed = [*(core.iterdir() if core.is_dir() else ()), *wheel.libraries.iterdir()]
    wanted = {top / entry.name: entry for entry in needed if entry.name not in ("nixl", "plugins")}
    wanted.update({backends / backend.name: backend for backend in wheel.libraries.glob("nixl/*.so")})
    wanted[backends / ours.name] = ours
    try:
        backends.mkdir(parents=True, exist_ok=True)
        for link, to in wanted.items():
            _link(link, to)
        # A backend of an earlier wheel does not fit the library of this one. Names with a dot are links that another process makes now.
        for link in (*top.iterdir(), *backends.iterdir()):
            if link not in wanted and not link.name.startswith(".") and link.is_symlink() and ".libs/" in os.readlink(link):
                link.unlink(missing_ok=True)
    except OSError as error:
        raise NixlError(f"cannot make {top}: {error.strerror or error}: choose another --folder") from error
    return backends


def nixl_folder(folder: Union[str, "os.PathLike[str]", None] = None) -> Path:
    """Makes ``folder``, or one in the user's cache, and in it the folder ``nixl`` for ``NIXL_PLUGIN_DIR``; returns the latter.

    A process sets the variable before its first agent of NIXL.
    """
    from . import _files

    return make_folder(newest_wheel()[0], _files.nixl_plugin(), folder)
