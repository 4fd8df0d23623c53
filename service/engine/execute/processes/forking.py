"""Forked processes: how they start and end, and their limits."""

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
    """Run ``work`` in a forked process, which also ends when this thread does; returns its pid.

    Errors of ``work`` are logged as ``failure``. OSError if the system allows no more processes.
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
    """Run ``work``, then exit at once: libraries would print messages during a normal exit."""
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        log.critical(failure, exc_info=True, extra={"fields": {"model": model} if model else {}})
    finally:
        os._exit(status)


def wait_for_child(pid: int) -> int | None:
    """The exit status of an ending process; None if this process did not start it."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status)


def leave_signals_to_server() -> None:
    """Ignore Ctrl+C in the terminal, and SIGTERM and SIGHUP of a service manager, which are sent to all processes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def end_with_parent(parent: int) -> None:
    """Have this process killed when the thread that started it ends; ``parent`` is that thread's process."""
    leave_signals_to_server()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


def be_killed_first() -> None:
    """Let the kernel kill this process first when the system is out of memory."""
    with suppress(OSError):
        OOM_SCORE.write_text(WORKER_OOM_SCORE)


def limit_memory(more_bytes: int) -> None:
    """Let this process allocate at most ``more_bytes`` more than now; beyond that, MemoryError."""
    now = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmData:"))
    limit = int(now.split()[1]) * 1024 + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain users' pictures


@contextmanager
def mute_stderr() -> Iterator[None]:
    """Keep what the block writes to stderr out of the log: libtiff has a line for each bad row of a fax."""
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
