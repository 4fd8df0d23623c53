"""The server's view of processes that fork others, and of processes that it can end."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from layertap.service.engine.execute.processes.channel import Channel

END_SECONDS = 60.0  # for a process that has been killed


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
