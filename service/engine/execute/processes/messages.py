"""What the server asks of its other processes, and what they answer: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.spec import ModelSpec
from layertap.service.engine.batch import Batch
from layertap.service.engine.execute.executor import ModelFunction
from layertap.service.inputs.items import LocalItem
from layertap.service.settings import Settings


@dataclass(frozen=True)
class HostOptions:
    """To the fork server: start a host; the descriptor of its connection comes along.

    The answer is the number of its process, or a LoadError. The host loads ``spec``, and says over its connection what
    is known of the model, or the error. ``folders``: where own models are found. ``worker_bytes``: how much memory each
    worker may take beside what it shares. ``plans``: the folder of the graphs of warm plans; without it they run with
    hooks. ``pictures``: the model is in the server's own process, the host loads nothing and says None, and its workers
    only make rows of pictures for these inputs. ``reload``: requests wait for a model that was loaded before, so that
    nothing is compiled, and no turn waited for.
    """

    spec: ModelSpec
    settings: Settings
    folders: Sequence[str]
    worker_bytes: int
    plans: Path | None
    pictures: ModelInputs | None = None
    reload: bool = False


@dataclass(frozen=True)
class Turn:
    """From a host: whether it wants to measure its model while no other is measured.

    The answer, None, gives it the turn until it wants none any more, or says what became of the model.
    """

    wanted: bool


@dataclass(frozen=True)
class WaitForProcess:
    """To the process that started a host or a worker: wait for it, it ends.

    The answer is its exit status, below 0 where a signal ended it; None where another process started it.
    """

    pid: int


@dataclass(frozen=True)
class StartWorker:
    """To a model's host: start one more worker; its connection's descriptor, and its progress's, come along.

    The answer is the number of its process; the worker says None over its connection when it is ready.
    """


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
