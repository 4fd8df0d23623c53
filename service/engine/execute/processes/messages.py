"""What the server asks of its other processes, and what they answer: plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layertap.models.capture.reduction import ReducedTensor
from layertap.models.errors import LayertapError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.selection.plan import Capture
from layertap.models.spec import ModelSpec
from layertap.service.engine.execute.executor import CallOutcome, ModelFunction
from layertap.service.engine.execute.forward_batch import BatchFailures, ForwardSpec, Interval
from layertap.service.engine.execute.processes.channel import LargeBytes
from layertap.service.engine.rows.rows import ItemAttempts, Rows
from layertap.service.inputs.items import LocalItem
from layertap.service.settings import Settings

NO_TIME: Interval = (0.0, 0.0)


@dataclass(frozen=True)
class HostOptions:
    """What a host loads, and how; ``folders`` are those in which own models are found.

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
    """From a host: it waits until no other model is measured. The answer is ``TurnTaken``."""


@dataclass(frozen=True)
class TurnTaken:
    """To a host: it has the turn until it says ``TurnEnded``, or what became of the model."""


@dataclass(frozen=True)
class TurnEnded:
    """From a host: others may be measured."""


@dataclass(frozen=True)
class StartHost:
    """To the fork server: start a host; the descriptor of its connection comes along."""

    options: HostOptions


@dataclass(frozen=True)
class ProcessStarted:
    """From the fork server of a host, or from a host of a worker: the number of its process."""

    pid: int


@dataclass(frozen=True)
class WaitForProcess:
    """To who started a host or a worker: wait for it, it ends."""

    pid: int


@dataclass(frozen=True)
class ProcessEnded:
    """The exit status of a host or a worker, below 0 where a signal ended it; None for one of somebody else's."""

    status: int | None


@dataclass(frozen=True)
class StartWorker:
    """To a model's host: start one more worker; its connection's descriptor, and its progress's, come along."""


@dataclass(frozen=True)
class Hello:
    """From a worker, or a host that loads nothing: it is ready."""


@dataclass(frozen=True)
class DecodeItems:
    """To a worker: make rows of pictures, which are bytes, and of other items. Its answer is a ``DecodedItems``."""

    items: Sequence[LargeBytes | LocalItem]


@dataclass(frozen=True)
class DecodedItems:
    """The rows of each item, or why there are none."""

    attempts: ItemAttempts


@dataclass(frozen=True)
class SentSlice:
    """A ``ForwardSlice`` whose spec is in a place of the worker's table; pictures' bytes are ``encoded``."""

    place: int
    start: int
    stop: int
    inputs: Rows
    spec: int
    encoded: tuple[LargeBytes, ...]
    first_row: int


@dataclass(frozen=True)
class SentSpec:
    """A spec, and the order in which its captures come back: a set has another order in each process."""

    spec: ForwardSpec
    captures: tuple[Capture, ...]


@dataclass(frozen=True)
class RunBatch:
    """To a worker: run a ``ForwardBatch``. Its answer is a ``BatchRun``.

    Before, ``new_specs`` take their places in its table. Where it is ``open`` and rows wait, a ``BatchDecoded`` comes
    before that.
    """

    slices: tuple[SentSlice, ...]
    new_specs: Mapping[int, SentSpec]
    threads: int
    threads_alone: int
    padded_rows: int | None
    unsplittable: bool
    open: bool


@dataclass(frozen=True)
class BatchDecoded:
    """From a worker: the pictures of a batch are decoded. It waits for an ``ExtendBatch``."""


@dataclass(frozen=True)
class ExtendBatch:
    """To a worker: what joins the batch, whose forward begins where there is nothing; ``threads`` as it is then."""

    slices: tuple[SentSlice, ...]
    new_specs: Mapping[int, SentSpec]
    threads: int


@dataclass(frozen=True)
class SentResult:
    """A ``SliceResult`` whose results are in the order of its spec's captures."""

    place: int
    start: int
    stop: int
    results: Sequence[ReducedTensor] | LayertapError | RuntimeError
    rows: int
    forward: Interval = NO_TIME
    copy: Interval = NO_TIME
    decode: Interval = NO_TIME


@dataclass(frozen=True)
class BatchRun:
    """What became of a batch; ``hooks``: those of ours that are left on the model."""

    results: Sequence[SentResult]
    failures: BatchFailures
    failure: str
    hooks: int


@dataclass(frozen=True)
class CallModel:
    """To a worker: call a function of the model. Its answer is a ``CallOutcome``."""

    function: ModelFunction


ToWorker = DecodeItems | RunBatch | ExtendBatch | CallModel
FromWorker = DecodedItems | BatchRun | BatchDecoded | CallOutcome
