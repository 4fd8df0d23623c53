"""A batch in a replica's thread: one forward for all, and what to do where it fails."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from models import warmup
from models.errors import LayertapError, OutOfMemoryError
from models.loaded import LoadedModel
from models.plan import Capture
from models.pooling import Reduced
from models.replica import Replica
from models.union import Share
from service.engine.job import Job
from service.engine.policy import Batch, Part, Work

Jobs = Mapping[Work, Job]
Results = Mapping[Capture, Reduced]


@dataclass(frozen=True)
class Outcome:
    """What became of a part: its results in the host's memory, or why there are none.

    ``rows`` and ``requests`` shared the forward, which took ``forward`` seconds, the way to the host ``copy``.
    """

    part: Part
    results: Results | LayertapError | RuntimeError
    rows: int
    requests: int
    forward: float = 0.0
    copy: float = 0.0


@dataclass(frozen=True)
class Failures:
    """What went wrong: forwards without enough memory, how often the batch was split for that, and for other errors.

    ``too_many``: rows that memory does not hold.
    """

    out_of_memory: int = 0
    memory: int = 0
    error: int = 0
    too_many: int | None = None


class Execution:
    """Runs one batch; made and used in the thread of its replica."""

    def __init__(self, model: LoadedModel, own: Replica, batch: Batch, jobs: Jobs, threads: int) -> None:
        self.failures = Failures()
        self._model = model
        self._own = own
        self._batch = batch
        self._jobs = jobs
        self._threads = threads

    def outcomes(self) -> list[Outcome]:
        """One or several for each part of the batch; nothing is raised."""
        with warmup.threads(self._threads):
            return self._attempt(self._batch.parts)

    def _attempt(self, parts: Sequence[Part]) -> list[Outcome]:
        """Whatever can't run together is tried in two halves, until a request stands alone with what it caused."""
        found = self._try(parts)
        if isinstance(found, list):
            return found
        # Here, outside the except block, all that the failed forward held is let go.
        rows = sum(part.stop - part.start for part in parts)
        halves: tuple[Sequence[Part], Sequence[Part]] | None
        if isinstance(found, OutOfMemoryError):
            halves = _by_rows(parts, rows)
            self._failed(out_of_memory=1, memory=halves is not None)
            self.failures = replace(self.failures, too_many=rows)
            _release(self._model.device)
        else:
            halves = _by_request(parts)
            self._failed(error=halves is not None)
        if halves is None:
            return [Outcome(part, found, rows, len(parts)) for part in parts]
        return [outcome for half in halves for outcome in self._attempt(half)]

    def _failed(self, out_of_memory: int = 0, memory: int = 0, error: int = 0) -> None:
        known = self.failures
        self.failures = replace(
            known,
            out_of_memory=known.out_of_memory + out_of_memory,
            memory=known.memory + memory,
            error=known.error + error,
        )

    def _try(self, parts: Sequence[Part]) -> list[Outcome] | LayertapError | RuntimeError:
        try:
            return self._run(parts)
        except LayertapError as error:
            return error.with_traceback(None)  # its frames hold the batch
        except BaseException as error:  # StopIteration, CancelledError, TimeoutError, SystemExit: asyncio has its own
            return raised(error)

    def _run(self, parts: Sequence[Part]) -> list[Outcome]:
        pieces, shares, at = [], [], 0
        for part in parts:
            job, count = self._jobs[part.work], part.stop - part.start
            pieces.append({name: value[part.start : part.stop] for name, value in job.inputs.items()})
            shares.append(Share(at, at + count, job.plan.captures))
            at += count
        begun = time.perf_counter()
        padded = None if parts[0].work.whole else self._batch.lane.padded
        taken = self._model.run(self._own, pieces, shares, padded)
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)
        ran = time.perf_counter()
        taken = taken.on_host()
        copied = time.perf_counter()
        return [
            Outcome(part, taken.of(share), at, len(parts), ran - begun, copied - ran)
            for part, share in zip(parts, shares, strict=True)
        ]


def raised(error: BaseException) -> RuntimeError:
    """What to hand on instead of an error that would mean something else to whoever gets it."""
    wrapped = RuntimeError(f"the model raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _by_rows(parts: Sequence[Part], rows: int) -> tuple[list[Part], list[Part]] | None:
    if rows < 2 or parts[0].work.whole:
        return None
    first: list[Part] = []
    second: list[Part] = []
    left = rows // 2
    for part in parts:
        cut = part.start + min(left, part.stop - part.start)
        if cut > part.start:
            first.append(Part(part.work, part.start, cut))
        if cut < part.stop:
            second.append(Part(part.work, cut, part.stop))
        left -= cut - part.start
    return first, second


def _by_request(parts: Sequence[Part]) -> tuple[Sequence[Part], Sequence[Part]] | None:
    half = len(parts) // 2
    return (parts[:half], parts[half:]) if half else None
