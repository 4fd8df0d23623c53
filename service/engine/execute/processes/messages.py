"""Messages between the server and its other processes: plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.spec import ModelSpec
from layertap.service.settings import Settings

# To a worker: the name of its method, and what it is called with. ``decode``: items; the answer is an ``ItemAttempts``.
# ``call``: a function of the model; a ``CallOutcome``. ``run``: a batch as ``wire`` packs it; its results.
ToWorker = tuple[Literal["decode", "call", "run"], Any]
# From a worker: a kind, and its answer. ``part``: some results of a batch, more follow. ``decoded``: its pictures are;
# the worker waits for the slices that join. ``answer``: the last one. ``end``: that, and the worker can't go on.
FromWorker = tuple[Literal["part", "decoded", "answer", "end"], Any]
# To the process that started a host or a worker: wait until the process with this pid ends. The answer is its exit
# status, negative after a signal; None if another process started it.
Pid = int
# From a host: whether it wants to measure its model while no other is measured. The answer, None, gives it the turn
# until it says False, or sends the model's description or an error.
WantsTurn = bool
# To a model's host: start a worker; the descriptors of its connection and its progress are sent along. The answer is
# its pid, or None if the system allows no more processes; the worker sends None over its connection when it is ready.
START_WORKER = "start"


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
