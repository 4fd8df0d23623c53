"""The configured models and their states, found by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import current_thread, main_thread
from typing import Literal

from layertap.models.devices.devices import allow_tf32
from layertap.models.errors import Failure, LoadError, UnknownModelError, escape, find_nearest, make_load_error, suggest
from layertap.models.run.model_info import ModelInfo
from layertap.models.spec import ModelSpec

State = Literal["available", "loading", "ready", "failed"]

EVERY_MODEL = "GET /models, or `layertap check`, lists every model"


@dataclass
class ModelEntry:
    """One configured model."""

    spec: ModelSpec
    state: State = "available"
    reason: str = ""  # why it failed
    kind: Failure = ""
    model: ModelInfo | None = None  # set when it is ready
    memory_bytes: int = 0  # that it used when last loaded; before that an estimate, 0 if there is none
    replacement: ModelEntry | None = None  # its next version while that loads, and after it has failed to load

    def make_next(self, spec: ModelSpec) -> ModelEntry:
        """The entry of its next version, with this memory estimate if this one is loaded or has its architecture."""
        is_alike = (spec.source, spec.args, spec.dtype) == (self.spec.source, self.spec.args, self.spec.dtype)
        return ModelEntry(spec, memory_bytes=self.memory_bytes if is_alike or self.model is not None else 0)

    def fail(self, reason: str, kind: Failure = "lost") -> None:
        """Mark a model as failed: it could not be loaded, or was loaded and then stopped working."""
        self.model, self.state, self.reason, self.kind = None, "failed", reason, kind

    def recover(self, model: ModelInfo) -> None:
        """Mark the model as ready, also after a failure."""
        self.model, self.state, self.reason, self.kind = model, "ready", "", ""

    def unload(self) -> None:
        """Forget a loaded model; it can be loaded again."""
        self.model, self.state, self.reason, self.kind = None, "available", "", ""


class Registry:
    """All configured models by name, loaded by ``load``; ``aliases`` are further names of some.

    Only one thread adds and removes entries; any thread may call the other methods.
    """

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        load: Callable[[ModelSpec], ModelInfo],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        specs = tuple(specs)
        allow_tf32(any(spec.tf32 for spec in specs))  # also if no model is in float32: parts of one may be
        self.aliases = dict(aliases or {})
        self._load = load
        self._entries: dict[str, ModelEntry] = {}
        for spec in specs:
            if spec.name in self._entries:
                raise LoadError(f"two models are called {escape(spec.name)}")
            self._entries[spec.name] = ModelEntry(spec)

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._entries.values())

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def get_entry(self, name: str) -> ModelEntry:
        """The entry of a name or an alias; UnknownModelError with near matches where there is none."""
        entry = self._entries.get(self.aliases.get(name, name))
        if entry is None:
            hint = suggest(find_nearest(name, (*self._entries, *self.aliases), 3))
            raise UnknownModelError(f"there is no model {escape(name)}", hint=hint or EVERY_MODEL)
        return entry

    def put_entry(self, entry: ModelEntry) -> None:
        """Replace the entry of the same name, or add one."""
        self._entries = {**self._entries, entry.spec.name: entry}  # a running iteration continues over the old one

    def remove_entry(self, name: str) -> None:
        """Forget an entry."""
        self._entries = {each: entry for each, entry in self._entries.items() if each != name}

    def load_model(self, spec: ModelSpec) -> ModelInfo:
        """Load a model, whose entry is not changed; LoadError if it can't be loaded."""
        try:
            return self._load(spec)
        except LoadError:
            raise
        except BaseException as error:  # a third party's constructor may raise anything; the other models keep serving
            if isinstance(error, KeyboardInterrupt) and current_thread() is main_thread():  # Ctrl+C in a terminal
                raise
            raise make_load_error(error) from error
