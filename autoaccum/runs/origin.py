"""Where a run comes from: the command that has started it, and the commit of the code around it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

_PATIENCE = 5.0
"""Wait so many seconds for git, which reads every file of a working tree: a run does not wait longer to begin."""


def command_line() -> str | None:
    """Return what was typed to start this process, as a shell takes it; None in a session that nothing was typed for.

    Folders of the interpreter and of a console script are left out, and passwords in URLs.
    """
    words = list(sys.orig_argv)
    # An interpreter that runs a notebook, or reads from a prompt, was started long before anybody thought of the run.
    # A process of multiprocessing is started by another one, and not by anybody.
    if "--multiprocessing-fork" in words:
        return None
    if len(words) < 2 or not sys.argv[:1] or sys.argv[0] in ("", "-") or "ipykernel" in sys.argv[0]:
        return None
    if (
        Path(sys.argv[0]).parent == Path(sys.executable).parent
    ):  # a script that pip has installed beside the interpreter
        words = [sys.argv[0], *sys.argv[1:]]
    words[0] = Path(words[0]).name
    # A storage is named with the password to it, and this is read by whoever is shown the report.
    return re.sub(r"://[^/@\s]*@", "://...@", shlex.join(words))


def commit() -> str | None:
    """Return the commit of the working tree that the process is in, with ``-dirty`` where files differ from it.

    None where it is in none, or git cannot tell.
    """
    try:
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            # Nothing is asked of a terminal, and nothing is written to the working tree.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=True,
        )
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return said.stdout.strip() or None
