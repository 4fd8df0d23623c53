"""Which loaded models stay: as many, of as many bytes, and for as long as the settings say."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Set

from layertap.models.errors import LoadError
from layertap.models.registry import ModelEntry
from layertap.service.engine.models.model_handle import ModelHandle
from layertap.service.errors import UnavailableError
from layertap.service.settings import Settings

log = logging.getLogger("layertap")
NO_ROOM_RETRY_S = 5.0
COME_AGAIN = "come again later, or use a model that GET /models calls ready"


class ModelRoom:
    """What may be unloaded to make room, and is. For the event loop only, but for ``measure``.

    Everything counts that is in memory, or is about to be: by what it took when it was measured, and while it loads by
    what it is thought to take. A model that answers, or is to answer, stays; so does one whose next version loads, and
    one that is loaded at the start, unless it has a time-out of its own. Of the others the one that was not used for
    the longest time goes first.
    """

    def __init__(
        self,
        handles: Mapping[str, ModelHandle],
        others: Set[ModelHandle],
        settings: Settings,
        is_idle: Callable[[ModelHandle], bool],
        unload: Callable[[ModelHandle], None],
    ) -> None:
        """``handles`` by the names of their models grow and shrink; ``unload`` takes away one of them that is idle.

        ``others``, which load to take a place or finish what they have, count beside them.
        """
        self._handles = handles
        self._others = others
        self._settings = settings
        self._is_idle = is_idle
        self._unload = unload
        self._is_over = False

    @property
    def used_bytes(self) -> int:
        """What all models take, and those that load are thought to take."""
        return _count_bytes(self._list_handles())

    def make_for(self, entry: ModelEntry, hint: str = COME_AGAIN) -> None:
        """Unload models until one more may be loaded.

        UnavailableError with the hint, and none is unloaded, where those that are in use leave no room.
        """
        staying, unused, going = self._list_handles(), self._list_unused(), list[ModelHandle]()
        while shortage := self._find_shortage(entry, staying):
            if not unused:
                raise UnavailableError(shortage, hint=hint, retry_after=NO_ROOM_RETRY_S)
            going.append(unused.pop(0))
            staying.remove(going[-1])
        for handle in going:
            self._unload(handle)

    def check_size(self, entry: ModelEntry) -> None:
        """LoadError where a model that has been loaded takes more than all models may."""
        budget = self._settings.model_memory_bytes
        if budget is not None and entry.memory_bytes > budget:
            raise LoadError(
                f"it takes {entry.memory_bytes} bytes, and all models together may have {budget}",
                hint="set LAYERTAP_MODEL_MEMORY_BYTES",
            )

    def tidy(self) -> None:
        """Unload what was not used for too long, and while more bytes are used than may be, what is not in use."""
        now = time.monotonic()
        for handle in list(self._handles.values()):
            timeout_s = self._get_timeout(handle)
            if timeout_s is not None and now - handle.last_used >= timeout_s and self._is_unused(handle):
                self._unload(handle)
        budget = self._settings.model_memory_bytes
        if budget is None:
            return
        while self.used_bytes > budget and (unused := self._list_unused()):
            self._unload(unused[0])
        was_over, self._is_over = self._is_over, self.used_bytes > budget
        if self._is_over and not was_over:
            fields = {"used_bytes": self.used_bytes, "model_memory_bytes": budget}
            log.warning("models in use take more than all may: no other is loaded", extra={"fields": fields})

    def _find_shortage(self, entry: ModelEntry, staying: Iterable[ModelHandle]) -> str:
        """What there is too little of to load one more beside others; nothing where there is room."""
        limit, budget = self._settings.max_loaded_models, self._settings.model_memory_bytes
        name, used = entry.spec.name, _count_bytes(staying)
        if len({handle.name for handle in staying} - {name}) >= limit:  # a next version is no further model
            return f"{limit} models are loaded and in use, as many as may be"
        if budget is not None and used + entry.memory_bytes > budget:
            taken = f"model {name} took {entry.memory_bytes} bytes when it was loaded last, and "
            return f"{taken if entry.memory_bytes else ''}models in use have {used} of {budget} bytes"
        return ""

    def _list_handles(self) -> list[ModelHandle]:
        return [handle for handle in (*self._handles.values(), *self._others) if not handle.failed]

    def _list_unused(self) -> list[ModelHandle]:
        """Those that may be unloaded to make room, in the order in which they go."""
        handles = self._handles.values()
        unused = [handle for handle in handles if handle.entry.spec.load == "lazy" and self._is_unused(handle)]
        return sorted(unused, key=lambda handle: handle.last_used)

    def _is_unused(self, handle: ModelHandle) -> bool:
        replacement = handle.entry.replacement
        is_replaced = replacement is not None and replacement.state != "failed"
        in_use = handle.answers == "none" or handle.rows or handle.holders or is_replaced or not handle.is_active
        return not in_use and self._is_idle(handle)

    def _get_timeout(self, handle: ModelHandle) -> float | None:
        spec = handle.entry.spec
        if spec.idle_timeout_s is not None or spec.load != "lazy":
            return spec.idle_timeout_s
        return self._settings.model_idle_timeout_s


def _count_bytes(handles: Iterable[ModelHandle]) -> int:
    return sum(handle.entry.memory_bytes for handle in handles)
