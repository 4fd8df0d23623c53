"""Forked processes: how they start, end and are limited; at the end, the server's view of them."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import select
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from layertap.service.engine.execute.processes.channel import Channel

PR_SET_PDEATHSIG = 1  # prctl(2)
END_SECONDS = 60.0  # for a process that has been killed
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


class Forker:
    """A process that runs ``fork_on_request``; any thread may use it."""

    def __init__(self, channel: Channel, kill: Callable[[], object]) -> None:
        """``kill`` ends the process, whatever it does."""
        self.channel = channel
        self._kill: Callable[[], object] | None = kill
        self._lock = threading.Lock()

    def fork(self, message: object, descriptors: Sequence[int], seconds: float) -> int:
        """The pid of a new process, which gets a message and descriptors. EOFError; OSError if none can be started."""
        answer = self._ask(message, descriptors, seconds)
        if isinstance(answer, str):
            raise OSError(0, answer)
        return int(answer)

    def wait(self, pid: int) -> int | None:
        """The exit status of a process that has been killed, or ends; None if unknown."""
        with suppress(EOFError, OSError):
            status: int | None = self._ask(pid, (), END_SECONDS)
            return status
        return None

    def close(self) -> None:
        """End the process, also while it is asked."""
        kill, self._kill = self._kill, None
        if kill is not None:
            kill()
        self.channel.close()

    def _ask(self, message: object, descriptors: Sequence[int], seconds: float) -> Any:
        with self._lock:
            try:
                return self.channel.ask(message, seconds, descriptors)
            except (EOFError, TimeoutError) as error:
                self.close()  # a late answer would be taken for the next one
                raise EOFError("the process does not answer") from error


class ForkedProcess:
    """A process that a ``forker`` has started; whoever asked for it ends it."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self._forker = forker
        self._pid = pid
        self._descriptor = os.pidfd_open(pid)  # only ``end`` waits for the process, so the pid is not reused before

    def watch(self) -> int:
        """A descriptor that becomes readable when the process ends, owned by the caller."""
        return os.dup(self._descriptor)

    def kill(self) -> None:
        """Kill the process; any thread may, also during ``end``."""
        with suppress(OSError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def end(self, seconds: float = 0.0) -> int | None:
        """The exit status; kills the process after ``seconds``. None if the status is unknown."""
        has_ended(self._descriptor, seconds)
        self.kill()
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)
        return self._forker.wait(self._pid)


def has_ended(descriptor: int, seconds: float = 0.0) -> bool:
    """Whether the process of a pidfd has ended, or does within ``seconds``."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
