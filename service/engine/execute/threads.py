"""How threads of this process begin."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import torch


def start_single_threaded() -> None:
    """Begin a thread: the system shows its name, and torch's operations in it use no other thread."""
    publish_name()
    torch.set_num_threads(1)


def publish_name() -> None:
    """Have the system's tools (``top -H``) know this thread by its name, to 15 letters; Python 3.14 does so itself."""
    with suppress(OSError):  # other systems have no such file
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(threading.current_thread().name[:15])
