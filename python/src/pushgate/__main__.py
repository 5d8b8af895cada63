# SPDX-License-Identifier: MIT OR Apache-2.0
"""``python -m pushgate``: where the wheel's files are, and what NCCL and NIXL have to be told."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Optional

from . import _command, _files, _nixl

_PATHS = {
    "plugin": _files.plugin,
    "nixl-plugin": _files.nixl_plugin,
    "library": _files.library,
    "include": _files.include,
    "pkgconfig": _files.pkgconfig,
    "command": _files.command,
}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pushgate", description=__doc__)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    env = tasks.add_parser("env", help="print the variables with which NCCL takes the plugin, as lines for a shell")
    env.add_argument("--json", action="store_true", help="print them as one JSON object")
    path = tasks.add_parser("path", help="print where one of the wheel's files or folders is")
    path.add_argument("what", choices=sorted(_PATHS))
    nixl = tasks.add_parser("nixl", help="make the folder for NIXL_PLUGIN_DIR, with NIXL's backends and this one, and print its path")
    nixl.add_argument("--folder", metavar="DIR", help="the folder to make; NIXL_PLUGIN_DIR is its folder nixl [default: one in the user's cache]")
    nixl.add_argument("--print-env", action="store_true", help="print the variable as a line for a shell")
    tasks.add_parser(
        "check",
        add_help=False,
        help="say whether NCCL takes the plugin, and how fast it is: `pushgate nccl-check`, whose arguments may follow",
    )
    options, rest = parser.parse_known_args(arguments)
    if options.task == "check":
        _command.run(["nccl-check", "--plugin", str(_files.plugin()), *rest])
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.task == "path":
        print(_PATHS[options.what]())
        return 0
    if options.task == "nixl":
        wheel, chosen = _nixl.newest_wheel()
        folder = _nixl.make_folder(wheel, _files.nixl_plugin(), options.folder)
        if chosen:
            print(f"python -m pushgate nixl: {chosen}", file=sys.stderr)
        print(f"export NIXL_PLUGIN_DIR={shlex.quote(str(folder))}" if options.print_env else folder)
        return 0
    variables = _files.nccl_environment()
    if options.json:
        print(json.dumps(variables, indent=2))
    else:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
        sys.exit(status)
    except BrokenPipeError:
        # Who reads has enough. Python would write what is left at its end, and say that it failed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except FileNotFoundError as error:
        sys.exit(f"python -m pushgate: {error}")
    except _nixl.NixlError as error:
        sys.exit(f"python -m pushgate nixl: {error}")
