"""What the server asks of its other processes, and what they answer: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.spec import ModelSpec
from layertap.service.engine.batch import Batch
from layertap.service.engine.execute.model_functions import ModelFunction
from layertap.service.inputs.items import LocalItem
from layertap.service.settings import Settings


@dataclass(frozen=True)
class HostOptions:
    """To the fork server: start a host; the descriptor of its connection comes along.

    The answer is the number of its process, or a LoadError. The host loads ``spec``; ``folders`` are those in which own
    models are found.

    ``worker_bytes``: how much memory each worker may take beside what it shares. Graphs of warm plans are kept in
    ``plans``; without it they run with hooks. ``pictures``: what workers make rows for where they do nothing else: the
    model is in the server's own process, and the host loads nothing. ``reload``: requests wait for a model that was
    loaded before, so that nothing is compiled, and no turn waited for.
    """

    spec: ModelSpec
    settings: Settings
    folders: Sequence[str]
    worker_bytes: int
    plans: Path | None
    pictures: ModelInputs | None = None
    reload: bool = False


@dataclass(frozen=True)
class TakeTurn:
    """From a host: it waits until no other model is measured.

    The answer, None, gives it the turn until it says ``TurnEnded``, or what became of the model.
    """


@dataclass(frozen=True)
class TurnEnded:
    """From a host: others may be measured."""


@dataclass(frozen=True)
class WaitForProcess:
    """To the process that started a host or a worker: wait for it, it ends.

    The answer is its exit status, below 0 where a signal ended it; None where another process started it.
    """

    pid: int


@dataclass(frozen=True)
class StartWorker:
    """To a model's host: start one more worker; its connection's descriptor, and its progress's, come along.

    The answer is the number of its process.
    """


@dataclass(frozen=True)
class Hello:
    """From a worker, or a host that loads nothing: it is ready."""


@dataclass(frozen=True)
class DecodeItems:
    """To a worker: make rows of items. Its answer is an ``ItemAttempts``."""

    items: Sequence[LocalItem]


@dataclass(frozen=True)
class CallModel:
    """To a worker: call a function of the model. Its answer is a ``CallOutcome``."""

    function: ModelFunction


@dataclass(frozen=True)
class BatchDecoded:
    """From a worker, where rows wait: the pictures of its batch are decoded. It waits for a batch of what joins."""


ToWorker = DecodeItems | Batch | CallModel  # the answer to a batch is one ``BatchResult``, or several
