"""A thread that does what it is given, one thing after another; each replica of a model has one."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

Task = Callable[[], None]
log = logging.getLogger("layertap")


class WorkerThread:
    """A thread and its queue. Tasks raise nothing: what goes wrong in them is theirs to tell.

    One that does so all the same ends the thread; ``on_death`` is told, in that thread, and the log says why.
    """

    def __init__(self, name: str, on_death: Callable[[], None]) -> None:
        self._stopped = False
        self._on_death = on_death
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def is_dead(self) -> bool:
        """Whether the thread ended though nobody stopped it."""
        return not self._stopped and not self._thread.is_alive()

    def post(self, task: Task) -> None:
        """Do something after all that was posted before."""
        self._queue.put(task)

    def stop(self) -> None:
        """End the thread after the tasks that were posted before."""
        self._stopped = True
        self._queue.put(None)

    def join(self, timeout: float | None) -> None:
        """Wait for the thread's end, at most so many seconds."""
        self._thread.join(timeout)

    def _work(self) -> None:
        publish_name()
        try:
            while (task := self._queue.get()) is not None:
                task()
                del task  # or what it holds would live until the next one comes
        except BaseException:
            log.critical("a thread died", exc_info=True, extra={"fields": {"thread": self._thread.name}})
            self._on_death()


def start_single_threaded() -> None:
    """Begin a pool's thread: shown by its name, with torch's operations to itself."""
    publish_name()
    torch.set_num_threads(1)


def publish_name() -> None:
    """Have the system's tools (``top -H``) know this thread by its name, to 15 letters; Python 3.14 does so itself."""
    with suppress(OSError):  # other systems have no such file
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(threading.current_thread().name[:15])
