"""A thread that runs what it is given, one task after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

Task = Callable[[], None]


class WorkerThread:
    """A daemon thread and its queue; ``ended`` is done once it has ended. Tasks raise nothing.

    Not an executor of the standard library: Python waits at its end for the threads of these, and a forward, or a
    model's loading, may take for ever.
    """

    def __init__(self, name: str, initialize: Task) -> None:
        self.ended: Future[None] = Future()
        self._initialize = initialize
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, task: Task) -> None:
        """Run a task after all that were submitted before."""
        self._tasks.put(task)

    def shutdown(self) -> None:
        """End the thread after the tasks that were submitted before."""
        self._tasks.put(None)

    def _work(self) -> None:
        try:
            self._initialize()
            while (task := self._tasks.get()) is not None:
                task()
                del task  # or what it holds would live until the next one comes
        finally:
            self.ended.set_result(None)
