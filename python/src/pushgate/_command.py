# SPDX-License-Identifier: MIT OR Apache-2.0
"""Starts the program ``pushgate`` in this process's place."""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Optional

from ._files import command


def run(arguments: Sequence[str]) -> NoReturn:
    """Becomes the program, with these arguments."""
    try:
        program = str(command())
        # A wheel's files lose their mode where pip runs under a narrow umask.
        if not os.access(program, os.X_OK):
            sys.exit(f"pushgate: {program} may not be executed: install the wheel again, as the user who runs it")
        os.execv(program, [program, *arguments])
    except OSError as error:
        sys.exit(f"pushgate: {error}")


def main(arguments: Optional[Sequence[str]] = None) -> NoReturn:
    """The entry point of the console script."""
    run(sys.argv[1:] if arguments is None else arguments)
