"""A request's way through the engine: what is asked, what was made ready, how long each step took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from layertap.models import fingerprint
from layertap.models.catalog.catalog import Catalog
from layertap.models.compiled.compiled_plan import CompiledPlan
from layertap.models.errors import Fault
from layertap.models.loaded_model import LoadedModel
from layertap.models.resume.resumption import Resumption
from layertap.models.selection.hook_points import Embedding, Intervention, Objective, Selector
from layertap.models.selection.plan import Plan
from layertap.models.spec import Preprocessed
from layertap.service.inputs.items import InputItem
from layertap.service.types import Priority


@dataclass
class Timings:
    """Milliseconds by step, in the order in which the steps ended; ``notes`` says things that are no times."""

    steps: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time spent inside to a step."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begun)

    def add(self, name: str, seconds: float) -> None:
        """Add to a step."""
        self.steps[name] = self.steps.get(name, 0.0) + seconds * 1000


def _anything(size: int) -> None:
    """No bound."""


@dataclass(frozen=True)
class ExtractRequest:
    """What a request wants, whatever dialect it came in.

    ``items`` carry their places in the request; ``faults`` are of inputs that were already left out; ``deadline`` is
    on the monotonic clock; ``resume`` names the layer whose outputs the items are, if they are not the model's inputs;
    ``embedding`` is asked for in place of ``selectors``; ``isolated`` shares a forward with no other request;
    ``verify`` puts outputs back in one;
    ``reserve`` is told of bytes that it will hold in memory, and raises QueueFullError where there is no room for them.
    """

    model: str | None
    items: tuple[tuple[int, InputItem], ...]
    selectors: tuple[Selector, ...]
    deadline: float
    interventions: tuple[Intervention, ...] = ()
    objective: Objective | None = None
    resume: Selector | None = None
    on_error: Literal["fail", "skip"] = "fail"
    faults: tuple[Fault, ...] = ()
    timings: Timings = field(default_factory=Timings)
    isolated: bool = False
    verify: bool = False
    embedding: Embedding | None = None
    priority: Priority = "interactive"
    reserve: Callable[[int], None] = _anything


@dataclass(frozen=True)
class Job:
    """A request ready to run: its rows are decoded, its layers are resolved, its reply's size is known.

    ``fingerprints`` holds that of each result by its key. ``together``: its rows affect each other, and are one batch.
    ``preprocessed`` tells by whom its rows were.
    """

    model: LoadedModel
    catalog: Catalog
    plan: Plan
    inputs: dict[str, Tensor]
    rows: int
    deadline: float
    faults: tuple[Fault, ...]
    timings: Timings
    fingerprints: Mapping[str, str]
    isolated: bool = False
    priority: Priority = "interactive"
    verify: bool = False
    resumption: Resumption | None = None
    compiled: CompiledPlan | None = None
    together: bool = False
    preprocessed: Preprocessed = ""

    @property
    def nbytes(self) -> int:
        """Bytes of its rows and of its results."""
        return self.plan.nbytes(self.rows) + sum(value.nbytes for value in self.inputs.values())

    @property
    def rows_per_forward(self) -> int | None:
        """How many rows a forward has where rows affect each other; None where they don't."""
        if self.catalog.rowwise:
            return None
        return self.rows if self.together else 1

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the whole reply."""
        return fingerprint.digest_reply(self.fingerprints.values())
