"""The configured models and what has become of each: loaded once, found by name, unloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from typing import Literal

from layertap.models.compiled.prepare import prepare_warm_plans
from layertap.models.devices.devices import allow_tf32
from layertap.models.errors import Failure, LoadError, UnknownModelError, escape, find_nearest, make_load_error, suggest
from layertap.models.loaded_model import LoadedModel
from layertap.models.loading import load_model, take_turn
from layertap.models.model_info import ModelInfo
from layertap.models.spec import ModelSpec

State = Literal["available", "loading", "ready", "failed"]


@dataclass
class ModelEntry:
    """One configured model; ``reason`` and ``kind`` say why it failed, ``model`` is there when it is ready."""

    spec: ModelSpec
    state: State = "available"
    reason: str = ""
    kind: Failure = ""
    model: ModelInfo | None = None


@dataclass(frozen=True)
class ModelLoader:
    """Loads models into this process: on a CPU with so many replicas and threads, on a GPU with a replica a stream.

    Graphs of warm plans are kept in ``plans``; without it they run with hooks. What forwards take is kept in ``costs``.
    """

    replicas: int = 1
    threads: int | None = None
    plans: Path | None = None
    streams: int = 1
    costs: Path | None = None

    def __call__(self, spec: ModelSpec) -> LoadedModel:
        """The model, ready to run; LoadError where it can't be."""
        with take_turn():
            model = load_model(spec, self.replicas, self.threads, self.streams, self.costs)
        return prepare_warm_plans(model, self.plans) if self.plans and spec.warm else model


class Registry:
    """All configured models by name, loaded by ``load``.

    A model is loaded by the thread that owns it, and unloaded when that thread has ended; anyone may read.
    """

    def __init__(self, specs: Iterable[ModelSpec], load: Callable[[ModelSpec], ModelInfo] = ModelLoader()) -> None:
        specs = tuple(specs)
        allow_tf32(any(spec.tf32 for spec in specs))  # also where no model is in float32: parts of one may be
        self._load = load
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

    def load(self, name: str) -> ModelInfo:
        """Load a model that is not loaded yet; LoadError, kept as the entry's reason, where it can't be."""
        entry = self.get_entry(name)
        if entry.model is not None:
            return entry.model
        entry.state, entry.reason, entry.kind = "loading", "", ""
        try:
            entry.model = self._load(entry.spec)
        except LoadError as error:
            entry.state, entry.reason = "failed", f"{error.detail}; {error.hint}" if error.hint else error.detail
            entry.kind = error.kind or "other"
            raise
        except BaseException as error:  # a third party's constructor may raise anything; the others serve on
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():  # whoever sits there
                self.unload(name)
                raise
            refusal = make_load_error(error)
            entry.state, entry.reason, entry.kind = "failed", f"{refusal.detail}; {refusal.hint}", refusal.kind
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
