"""What the system makes sure of in a process: that it ends with its parent, in time, and takes no more memory."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # prctl(2)
OOM_SCORE = Path("/proc/self/oom_score_adj")
WORKER_OOM_SCORE = "500"  # of 1000
STATUS = Path("/proc/self/status")


def leave_signals_to_server() -> None:
    """Ignore a terminal's Ctrl+C, a service manager's SIGTERM and SIGHUP, which go to all processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent(parent: int) -> None:
    """Have this process killed when the thread that started it ends; ``parent`` is the number of its process."""
    leave_signals_to_server()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        os._exit(1)


def be_killed_first() -> None:
    """Have the system, where it runs out of memory, end this process rather than one that others depend on."""
    with suppress(OSError):
        OOM_SCORE.write_text(WORKER_OOM_SCORE)


def limit_memory(more_bytes: int) -> None:
    """Let this process have so many bytes more than now: what asks for more gets a MemoryError."""
    now = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmData:"))
    limit = int(now.split()[1]) * 1024 + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a dump would have the pictures of others


@contextmanager
def limit_seconds(seconds: float) -> Iterator[None]:
    """End the process where the block takes longer, whatever code it is in."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
