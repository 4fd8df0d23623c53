"""Commands in a pseudo-terminal, as a person runs them."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

from tests.server import CACHE
from tests.service.cli.commands import ROOT

LIMIT_S = 240
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run_in_terminal(*words: str | Path, width: int = 120, **variables: str) -> tuple[int, str]:
    """A command's status, and all that it writes to a terminal of so many columns."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LAYERTAP_", "NO_COLOR"))}
    hidden = {"COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CI"}
    environment = {name: value for name, value in kept.items() if name not in hidden}
    environment |= {"TERM": "xterm-256color", "LAYERTAP_CACHE_DIR": str(CACHE), **variables}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "layertap", *map(str, words)],
        cwd=ROOT,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    chunks = []
    with suppress(OSError):  # Linux says so once nobody has the other end
        while chunk := os.read(ours, 65536):
            chunks.append(chunk)
    os.close(ours)
    return process.wait(LIMIT_S), b"".join(chunks).decode()


def strip_escapes(text: str) -> str:
    """What a terminal shows, without colours and moves."""
    return ESCAPES.sub("", text).replace("\r\n", "\n")
