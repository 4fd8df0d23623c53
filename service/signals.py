"""What signals do while a server is being put together; imports nothing that takes long."""

from __future__ import annotations

import signal
import sys


def ends_with_0() -> None:
    """From now on SIGTERM and SIGINT end this process with 0: it was asked to, and did."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
