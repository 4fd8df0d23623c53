"""The configured models and what has become of each: loaded once, found by name, unloaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from typing import Literal

from layertap.models.compiled.prepare import prepare_warm_plans
from layertap.models.devices.devices import allow_tf32
from layertap.models.errors import IN_THE_LOG, Failure, LoadError, UnknownModelError, escape, find_nearest, suggest
from layertap.models.loaded_model import LoadedModel
from layertap.models.loading import load_model
from layertap.models.spec import ModelSpec

State = Literal["available", "loading", "ready", "failed"]


@dataclass
class ModelEntry:
    """One configured model; ``reason`` and ``kind`` say why it failed, ``model`` is there when it is ready."""

    spec: ModelSpec
    state: State = "available"
    reason: str = ""
    kind: Failure = ""
    model: LoadedModel | None = None


class Registry:
    """All configured models by name; on a CPU each is loaded with so many replicas and threads, on a GPU for streams.

    Graphs of warm plans are kept in ``plans``; without it they run with hooks. What forwards take is kept in ``costs``.
    ``load`` is called by the thread that owns the model, ``unload`` when that thread has ended; anyone may read.
    """

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        replicas: int = 1,
        threads: int | None = None,
        plans: Path | None = None,
        streams: int = 1,
        costs: Path | None = None,
    ) -> None:
        self._streams = streams
        self._costs = costs
        specs = tuple(specs)
        allow_tf32(any(spec.tf32 for spec in specs))  # also where no model is in float32: parts of one may be
        self._plans = plans
        self._replicas = replicas
        self._threads = threads
        self._entries: dict[str, ModelEntry] = {}
        for spec in specs:
            if spec.name in self._entries:
                raise LoadError(f"two models are called {escape(spec.name)}")
            self._entries[spec.name] = ModelEntry(spec)

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._entries.values())

    def get_entry(self, name: str) -> ModelEntry:
        """The entry of that name; UnknownModelError with near matches where there is none."""
        entry = self._entries.get(name)
        if entry is None:
            hint = suggest(find_nearest(name, self._entries, 3))
            raise UnknownModelError(f"there is no model {escape(name)}", hint=hint or "GET /models lists every model")
        return entry

    def load(self, name: str) -> LoadedModel:
        """Load a model that is not loaded yet; LoadError, kept as the entry's reason, where it can't be."""
        entry = self.get_entry(name)
        if entry.model is not None:
            return entry.model
        entry.state, entry.reason, entry.kind = "loading", "", ""
        try:
            model = load_model(entry.spec, self._replicas, self._threads, self._streams, self._costs)
            entry.model = prepare_warm_plans(model, self._plans) if self._plans and entry.spec.warm else model
        except LoadError as error:
            entry.state, entry.reason = "failed", f"{error.detail}; {error.hint}" if error.hint else error.detail
            entry.kind = error.kind or "other"
            raise
        except BaseException as error:  # a third party's constructor may raise anything; the others serve on
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():  # whoever sits there
                self.unload(name)
                raise
            entry.state, entry.reason = "failed", f"loading ended in {type(error).__name__}; {IN_THE_LOG}"
            entry.kind = "other"
            refusal = LoadError(f"loading ended in {type(error).__name__}", hint=IN_THE_LOG)
            refusal.kind = "other"
            raise refusal from error
        entry.state = "ready"
        return entry.model

    def fail(self, name: str, reason: str, kind: Failure = "lost") -> None:
        """Forget a model that was loaded and then turned out not to run."""
        entry = self.get_entry(name)
        entry.model, entry.state, entry.reason, entry.kind = None, "failed", reason, kind

    def unload(self, name: str) -> None:
        """Forget a loaded model; it can be loaded again."""
        entry = self.get_entry(name)
        entry.model, entry.state, entry.reason, entry.kind = None, "available", "", ""
