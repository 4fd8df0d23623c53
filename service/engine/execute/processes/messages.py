"""Messages from the server to its other processes, and their answers: plain data."""

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
    """To the fork server: start a host; its connection's descriptor is sent along.

    The answer is its pid, or a LoadError. The host loads ``spec`` and sends the model's description or the error over
    its connection. ``folders``: search folders for users' own models. ``worker_bytes``: the memory that each worker may
    allocate. ``plans``: the folder of the graphs of warm plans; without it they run with hooks. ``pictures``: the model
    is in the server's own process, the host loads nothing and sends None, and its workers only decode pictures for
    these inputs. ``reload``: requests wait for a model that was loaded before, so nothing is compiled, and the host
    waits for no turn.
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

    The answer, None, gives it the turn until it sends ``wanted=False``, the model's description, or an error.
    """

    wanted: bool


@dataclass(frozen=True)
class WaitForProcess:
    """To the process that started a host or a worker: wait until that ends.

    The answer is its exit status, negative after a signal; None if another process started it.
    """

    pid: int


@dataclass(frozen=True)
class StartWorker:
    """To a model's host: start a worker; the descriptors of its connection and its progress are sent along.

    The answer is its pid; the worker sends None over its connection when it is ready.
    """


@dataclass(frozen=True)
class DecodeItems:
    """To a worker: decode items. Its answer is an ``ItemAttempts``."""

    items: Sequence[LocalItem]


@dataclass(frozen=True)
class CallModel:
    """To a worker: call a function of the model. Its answer is a ``CallOutcome``."""

    function: ModelFunction


@dataclass(frozen=True)
class BatchDecoded:
    """From a worker, if rows wait: its batch's pictures are decoded. It waits for a batch of the rows that join."""


ToWorker = DecodeItems | Batch | CallModel  # a batch is answered by one ``BatchResult`` or several
