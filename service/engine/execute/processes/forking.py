"""Copies of a process: how one begins and ends, and what the system makes sure of in it."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # prctl(2)
OOM_SCORE = Path("/proc/self/oom_score_adj")
WORKER_OOM_SCORE = "500"  # of 1000
STATUS = Path("/proc/self/status")
log = logging.getLogger("layertap")


def fork(work: Callable[[], object], failure: str, model: str = "") -> int:
    """Have a copy of this process do something and end, and end also when this thread does; the copy's number.

    What ``work`` raises goes to the log as ``failure``. OSError where the system allows no more processes.
    """
    parent = os.getpid()

    def work_in_copy() -> None:
        end_with_parent(parent)
        work()

    pid = os.fork()
    if pid == 0:
        run_and_exit(work_in_copy, failure, model)
    return pid


def run_and_exit(work: Callable[[], object], failure: str, model: str = "") -> NoReturn:
    """Do something, and end this process at once: libraries would write on the terminal while they end."""
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        log.critical(failure, exc_info=True, extra={"fields": {"model": model} if model else {}})
    finally:
        os._exit(status)


def wait_for_child(pid: int) -> int | None:
    """The exit status of a process that ends; None for one that this process has not started."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status)


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
