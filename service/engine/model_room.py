"""Which loaded models stay: as many, of as many bytes, and for as long as the settings say."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from layertap.models.registry import ModelEntry, Registry
from layertap.service.engine.model_worker import ModelWorker
from layertap.service.errors import UnavailableError
from layertap.service.settings import Settings

NO_ROOM_RETRY_S = 5.0


class ModelRoom:
    """What may be unloaded to make room, and is. For the event loop only.

    A model that answers, or is to answer, stays; so does one that is loaded at the start, unless it has a time-out of
    its own. Of the others the one that was not used for the longest time goes first.
    """

    def __init__(
        self,
        workers: Mapping[str, ModelWorker],
        registry: Registry,
        settings: Settings,
        is_idle: Callable[[ModelWorker], bool],
        unload: Callable[[ModelWorker], None],
    ) -> None:
        """``workers`` by the names of their models grow and shrink; ``unload`` takes away one that is idle."""
        self._workers = workers
        self._registry = registry
        self._settings = settings
        self._is_idle = is_idle
        self._unload = unload

    @property
    def used_bytes(self) -> int:
        """What the models that are loaded took when they were."""
        active = (worker for worker in self._workers.values() if worker.is_active)
        return sum(self._registry.get_entry(worker.name).memory_bytes for worker in active)

    def make_for(self, entry: ModelEntry) -> None:
        """Unload models until one more may be loaded; UnavailableError where those that are in use leave no room."""
        limit = self._settings.max_loaded_models
        while sum(not worker.failed for worker in self._workers.values()) >= limit:
            self._unload_oldest(f"{limit} models are loaded and in use, as many as may be")
        budget = self._settings.model_memory_bytes
        while budget is not None and self.used_bytes + entry.memory_bytes > budget:
            self._unload_oldest(
                f"model {entry.spec.name} took {entry.memory_bytes} bytes when it was loaded last, and models in use "
                f"have {self.used_bytes} of {budget}"
            )

    def tidy(self) -> None:
        """Unload what was not used for too long, and while more bytes are used than may be, what is not in use."""
        now = time.monotonic()
        for worker in list(self._workers.values()):
            timeout_s = self._get_timeout(worker)
            if timeout_s is not None and now - worker.last_used >= timeout_s and self._is_unused(worker):
                self._unload(worker)
        budget = self._settings.model_memory_bytes
        while budget is not None and self.used_bytes > budget and (oldest := self._find_oldest()) is not None:
            self._unload(oldest)

    def _unload_oldest(self, otherwise: str) -> None:
        oldest = self._find_oldest()
        if oldest is None:
            hint = "come again later, or use a model that GET /models calls ready"
            raise UnavailableError(otherwise, hint=hint, retry_after=NO_ROOM_RETRY_S)
        self._unload(oldest)

    def _find_oldest(self) -> ModelWorker | None:
        unused = [worker for worker in self._workers.values() if self._is_lazy(worker) and self._is_unused(worker)]
        return min(unused, key=lambda worker: worker.last_used, default=None)

    def _is_lazy(self, worker: ModelWorker) -> bool:
        return self._registry.get_entry(worker.name).spec.load == "lazy"

    def _is_unused(self, worker: ModelWorker) -> bool:
        in_use = worker.stopping or worker.rows or worker.holders or not worker.is_active
        return not in_use and self._is_idle(worker)

    def _get_timeout(self, worker: ModelWorker) -> float | None:
        own = self._registry.get_entry(worker.name).spec.idle_timeout_s
        return own if own is not None or not self._is_lazy(worker) else self._settings.model_idle_timeout_s
