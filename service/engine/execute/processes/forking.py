"""Forked processes: how they start, for whom, how they end, and their limits."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from layertap.service.engine.execute.processes.channel import Channel

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


def fork_on_request(
    channel: Channel, prepare: Callable[[Any], str], work: Callable[..., object], failure: str
) -> NoReturn:
    """Serve a ``Forker``: call ``work`` in a forked process with each message and its descriptors; EOFError at the end.

    ``prepare`` is called before, in this process, with the message; it returns the model's name.
    """
    while True:
        message, descriptors = channel.receive_with_descriptors()
        if isinstance(message, int):
            channel.send(wait_for_child(message))
            continue

        def work_alone(message: Any = message, descriptors: Sequence[int] = descriptors) -> None:
            channel.close()
            work(message, *descriptors)

        try:
            answer: int | str = fork(work_alone, failure, prepare(message))
        except OSError as error:
            answer = error.strerror or ""
        for each in descriptors:
            os.close(each)
        channel.send(answer)


def wait_for_child(pid: int) -> int | None:
    """The exit status of an ending process, negative after a signal; None if this process did not start it."""
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


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
