"""Messages to workers and from them as plain tuples; specs are sent once, and captures as numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

from layertap.models.catalog.catalog import Costs
from layertap.models.plan.plan import Capture
from layertap.models.plan.projections import count_weights
from layertap.models.plan.requested import TensorData
from layertap.models.run.reduction import Reduced
from layertap.service.engine.batch import RowSlice, SliceResult
from layertap.service.engine.batch_key import BatchKey
from layertap.service.engine.execute.processes.channel import Data, make_reducers, pack_array, pack_data, unpack_array
from layertap.service.engine.prepared_request import ForwardSpec, PreparedRequest
from layertap.service.engine.rows import Rows

MAX_SPECS = 64  # that a worker keeps when it gets a batch
MAX_WEIGHTS = 2**26  # numbers of their projections: 256 MiB
NO_KEY = BatchKey("", (), Costs(), 1)
Captures = tuple[Capture, ...]  # of a spec, in the order of one process: a set's order differs in another
Key = tuple[int, int, int, int, bool]
# The number of a spec, or what the worker doesn't know yet: that, the spec, whether it is unsplittable, its captures.
SpecReference = int | tuple[int | None, ForwardSpec, bool, Captures]
SentSlice = tuple[int, int, SpecReference, Rows, Sequence[Data]]  # how many rows, the first one's number, …, pictures
SentBatch = tuple[int, int, int | None, Sequence[SentSlice]]  # slots, those of a row alone, padded rows, slices
SentResult = tuple[Any, ...]  # the fields of a SliceResult in order, with captures as numbers, and SentArrays
# To a worker: the name of its method, and what it is called with: items, a function of the model, or a SentBatch.
ToWorker = tuple[Literal["decode", "call", "run"], Any]
# From a worker: a kind, and its answer. ``part``: some results of a batch, more follow. ``decoded``: its pictures are;
# the worker waits for the slices that join. ``answer``: the last one. ``end``: that, and the worker can't go on.
FromWorker = tuple[Literal["part", "decoded", "answer", "end"], Any]


class SentSpecs:
    """The specs that a worker has received."""

    def __init__(self) -> None:
        self._sent: dict[Key, tuple[int, Captures, ForwardSpec]] = {}  # a spec keeps its parts' ids unique
        self._weights = 0
        self._kept: dict[tuple[tuple[int, ...], str], int] = {}  # numbers of tensors that are kept, by their content
        self._kept_weights = 0
        self.reducers = make_reducers(self._find_number)

    def clear(self) -> None:
        """Forget all specs and tensors; the worker forgets its own when it receives the next one."""
        self._sent.clear()
        self._kept.clear()
        self._weights = self._kept_weights = 0

    def make_room(self) -> None:
        """Forget all specs if they are too many. Not between a batch and the rows that join it: they share a table."""
        if len(self._sent) >= MAX_SPECS or self._weights > MAX_WEIGHTS:
            self._sent.clear()
            self._weights = 0

    def _find_number(self, tensor: TensorData) -> tuple[int, bool]:
        """The number of a tensor that is kept, and whether the worker doesn't know it yet; of too many all go."""
        key = tensor.shape, tensor.digest
        if (number := self._kept.get(key)) is not None:
            return number, False
        if self._kept_weights > MAX_WEIGHTS:
            self._kept.clear()
            self._kept_weights = 0
        self._kept_weights += prod(tensor.shape)
        number = self._kept[key] = len(self._kept)
        return number, True

    def refer(self, prepared: PreparedRequest) -> tuple[SpecReference, Captures]:
        """The reference to a request's spec, and its captures in the order of their numbers.

        A spec with interventions or an objective is never used again, and may have large tensors: it gets no number.
        """
        spec, plan, whole = prepared.spec, prepared.spec.plan, prepared.unsplittable
        key = id(plan), id(spec.verified_by), id(spec.resumption), id(spec.compiled), whole  # plans are used again
        if (sent := self._sent.get(key)) is not None:
            return sent[:2]
        number, captures = None, tuple(plan.captures)
        if not plan.interventions and plan.objective is None:
            number = len(self._sent)
            self._sent[key] = number, captures, spec
            self._weights += sum(count_weights(capture.reduction.project) for capture in captures)
        return (number, spec, whole, captures), captures

    def pack_slices(self, slices: Sequence[RowSlice], captures: list[Captures]) -> list[SentSlice]:
        """Slices of a batch; those captures are added to a list by which their results are unpacked."""
        packed: list[SentSlice] = []
        for each in slices:
            job, start, stop = each.job, each.start, each.stop
            reference, of_spec = self.refer(job.prepared)
            captures.append(of_spec)
            inputs = each.inputs if job.inputs else {}
            pictures = [pack_data(picture.data) for picture in job.encoded[start:stop]]
            packed.append((stop - start, job.first_row + start, reference, inputs, pictures))
        return packed


class KnownSpecs:
    """A worker's specs, each with the numbers of its captures; one with number 0 replaces all earlier ones."""

    def __init__(self) -> None:
        self._specs: list[tuple[PreparedRequest, dict[Capture, int]]] = []

    def get(self, reference: SpecReference) -> tuple[PreparedRequest, dict[Capture, int]]:
        """The spec of a reference, kept if it is new, as all that a worker has of a request; its captures' numbers."""
        if isinstance(reference, int):
            return self._specs[reference]
        number, spec, unsplittable, captures = reference
        prepared = PreparedRequest(key=NO_KEY, spec=spec, unsplittable=unsplittable)
        found = prepared, {capture: number for number, capture in enumerate(captures)}
        if number == 0:
            self._specs.clear()
        if number is not None:
            self._specs.append(found)
        return found


def pack_result(result: SliceResult, numbers: dict[Capture, int], decode: tuple[float, float]) -> SentResult:
    """A worker's result as a tuple: captures become numbers, and the time of decoding is added."""
    outcome: object = result.results
    if not isinstance(result.results, Exception):
        outcome = [(numbers[capture], *map(pack_array, reduced.parts)) for capture, reduced in result.results.items()]
    return result.index, result.start, result.stop, outcome, result.rows, result.forward, result.copy, decode


def unpack_results(
    sent: Sequence[SentResult], slices: Sequence[RowSlice], captures: Sequence[Captures]
) -> list[SliceResult]:
    """The results of a batch's slices, each among the rows of its job."""
    results = []
    for index, start, stop, outcome, *rest in sent:
        job, first = slices[index].job, slices[index].start
        if isinstance(outcome, list):
            reduced = {}
            for number, *parts in outcome:
                reduced[captures[index][number]] = Reduced(*map(unpack_array, parts))
            if job.joined is not None and stop - start < job.rows:
                reduced = job.joined.add(first + start, first + stop, reduced)
            outcome = reduced
        results.append(SliceResult(index, first + start, first + stop, outcome, *rest))
    return results
