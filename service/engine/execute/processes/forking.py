"""Forked processes: how they start, end and are limited; at the end, the server's view of them."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import select
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

from layertap.models.devices.memory import count_oom_kills
from layertap.service.engine.execute.processes.channel import Channel

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 1, 36, 37  # prctl(2)
END_SECONDS = 60.0  # for a process that is killed
OOM_SCORE = Path("/proc/self/oom_score_adj")
LOADING_OOM_SCORE, WORKER_OOM_SCORE = "1000", "500"  # of 1000
STATUS = Path("/proc/self/status")
Cause = Literal["killed", "memory", "crash"]  # from outside, by a system that is out of memory, or by what it ran
_prctl = ctypes.CDLL(None, use_errno=True).prctl
log = logging.getLogger("layertap")


def fork(work: Callable[[], object], failure: str, model: str = "") -> int:
    """Run ``work`` in a forked process, which also ends when this thread does; returns its pid.

    Errors of ``work`` are logged as ``failure``. OSError if the system allows no more processes.
    """
    parent = os.getpid()

    def work_with_parent() -> None:
        end_with_parent(parent)
        work()

    return _fork(work_with_parent, failure, model)


def fork_for_parent(work: Callable[[], object], failure: str, model: str = "") -> int:
    """As ``fork``, but the new process becomes a child of this one's parent, which adopts it, before this returns.

    It does not end with any process until ``work`` calls ``end_with_parent``, after that parent has spoken to it.
    """
    reader, writer = os.pipe()

    def work_alone() -> None:
        os.close(reader)
        os.close(writer)
        work()

    def fork_and_end() -> None:
        with suppress(OSError):
            os.write(writer, b"%d" % _fork(work_alone, failure, model))

    try:
        try:
            between = _fork(fork_and_end, failure, model)
        finally:
            os.close(writer)
        os.waitpid(between, 0)
        pid = os.read(reader, 20)
    finally:
        os.close(reader)
    if not pid:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return int(pid)


def _fork(work: Callable[[], object], failure: str, model: str) -> int:
    pid = os.fork()
    if pid == 0:
        run_and_exit(work, failure, model)
    return pid


def run_and_exit(work: Callable[[], object], failure: str, model: str = "") -> NoReturn:
    """Run ``work``, then exit at once: libraries would print messages."""
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        log.critical(failure, exc_info=True, extra={"fields": {"model": model} if model else {}})
    finally:
        os._exit(status)


def fork_on_request(channel: Channel, fork: Callable[..., int], work: Callable[..., object], failure: str) -> NoReturn:
    """Serve a ``Forker``: call ``work`` in a forked process with the descriptors of each message; EOFError at the end.

    A message is the name of the process's model, or the pid of a process to end.
    """
    while True:
        message, descriptors = channel.read()
        if isinstance(message, int):
            channel.send(end_child(message))
            continue

        def work_alone(descriptors: Sequence[int] = descriptors) -> None:
            channel.close()
            work(*descriptors)

        try:
            answer: int | str = fork(work_alone, failure, message)
        except OSError as error:
            answer = error.strerror or ""
        for each in descriptors:
            os.close(each)
        channel.send(answer)


def end_child(pid: int) -> int | None:
    """Kill a process unless it has ended; its exit status, negative after a signal, or None if it is no child."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return None


def end_with_parent(parent: int) -> None:
    """Have this process killed when the thread that started it ends, and not before by signals for all processes.

    ``parent`` is that thread's process. The signals: Ctrl+C in the terminal, SIGTERM and SIGHUP of a service manager.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


class Adoption:
    """While a block of ``adopt`` runs, this process adopts those below it whose parent ends; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks = 0
        self._adopts_anyway = ctypes.c_int()

    @contextmanager
    def adopt(self) -> Iterator[None]:
        """Adopt processes inside."""
        with self._lock:
            if not self._blocks:
                _prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(self._adopts_anyway))
                _prctl(PR_SET_CHILD_SUBREAPER, 1)
            self._blocks += 1
        try:
            yield
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks:
                    _prctl(PR_SET_CHILD_SUBREAPER, self._adopts_anyway)


def find_cause(status: int | None, oom_kills: int) -> Cause:
    """What ended a process, by its exit status, None if unknown; ``oom_kills`` were counted while it ran."""
    if status is not None and status != -signal.SIGKILL:
        return "crash"
    return "memory" if count_oom_kills() > oom_kills else "killed"


def set_oom_score(score: str) -> str:
    """Set how soon the kernel kills this process when the system is out of memory, 1000 first; returns what it was."""
    before = WORKER_OOM_SCORE
    with suppress(OSError):
        before = OOM_SCORE.read_text()
        OOM_SCORE.write_text(score)
    return before


def limit_memory(more_bytes: int) -> None:
    """Let this process allocate at most ``more_bytes`` more than now; beyond that, MemoryError."""
    now = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmData:"))
    limit = int(now.split()[1]) * 1024 + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain users' pictures


class Forker:
    """A process that runs ``fork_on_request``; any thread may use it."""

    def __init__(self, channel: Channel, end: Callable[[], int | None]) -> None:
        """``end`` kills the process, and returns its exit status."""
        self.channel = channel
        self._end: Callable[[], int | None] | None = end
        self._lock = threading.Lock()

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone: the channel is closed, there or here."""
        poll = select.poll()
        try:
            poll.register(self.channel.connection, 0)  # only whether the other end is closed
        except ValueError:  # this end is closed
            return True
        return bool(poll.poll(0))

    def fork(self, model: str, descriptors: Sequence[int], seconds: float) -> int:
        """The pid of a new process, which gets the descriptors. EOFError; OSError if none can be started."""
        answer = self._ask(model, descriptors, seconds)
        if isinstance(answer, str):
            raise OSError(0, answer)
        return int(answer)

    def end_process(self, pid: int) -> int | None:
        """Kill a process that it has forked, unless that has ended; the exit status, None if unknown."""
        with suppress(EOFError, OSError):
            status: int | None = self._ask(pid, (), END_SECONDS)
            return status
        with suppress(ChildProcessError):  # it ends with its parent; this process may have adopted it
            os.waitpid(pid, 0)
        return None

    def kill(self) -> int | None:
        """End the process itself, also while it is asked; the exit status, None if unknown."""
        end, self._end = self._end, None
        return end() if end is not None else None

    def close(self) -> int | None:
        """End the process, and close the channel; returns as ``kill``."""
        status = self.kill()
        self.channel.close()
        return status

    def _ask(self, message: object, descriptors: Sequence[int], seconds: float) -> Any:
        with self._lock:
            try:
                self.channel.send(message, descriptors)
                return self.channel.receive(seconds)
            except (EOFError, TimeoutError) as error:
                self.close()  # a late answer would be taken for the next one
                raise EOFError("the process does not answer") from error
