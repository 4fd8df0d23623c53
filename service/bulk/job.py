"""The types of a job: its question, the outline of answers, and the answers to batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, Protocol

import numpy as np

from layertap.models.errors import Fault, LayertapError, RequestError
from layertap.models.spec import Truncate
from layertap.service.bulk.reductions import CKA, HSIC, make_entry
from layertap.service.bulk.sources import Entry
from layertap.service.features import Array
from layertap_client.errors import Fault as ClientFault
from layertap_client.results import Comparison


@dataclass(frozen=True)
class Question:
    """The question for every input; ``model`` None is the default one, ``layers`` empty its embedding.

    ``layers``: selectors, or the JSON of objects.

    ``reduce``: the reductions to write instead of vectors; ``top``: how many inputs to keep for each channel.
    ``other``: the JSON of the field ``with`` of a comparison, if it has one.
    ``texts``: inputs are texts, not pictures; ``prompt``: the name of a prompt in the model's folder, put before each
    text; ``truncate``: which end of a long text is cut.
    """

    model: str | None
    layers: tuple[str, ...] = ()
    pool: str | None = None
    normalize: bool = False
    prompt: str | None = None
    truncate: Truncate | None = None
    texts: bool = False
    reduce: tuple[str, ...] = ()
    top: int = 0
    other: str = ""

    @property
    def compares(self) -> bool:
        """Whether layers are compared: an answer is one table of all inputs, a block."""
        return CKA in self.reduce

    @property
    def comparison(self) -> dict[str, Any]:
        """The fields of a comparison beside those of an extraction."""
        return {"measures": HSIC, "other": json.loads(self.other) if self.other else None}

    @property
    def entries(self) -> list[Any]:
        """The ``layers`` field of a request."""
        entries = [json.loads(layer) if layer.startswith("{") else layer for layer in self.layers]
        if not self.reduce or self.compares:
            return entries
        return [make_entry(entry, self.reduce) for entry in entries]

    def describe(self) -> dict[str, Any]:
        """The question as plain data."""
        return {**asdict(self), "layers": list(self.layers), "reduce": list(self.reduce)}


LATE = ("token_embeddings", "colbert_embedding")  # layers of folders for late interaction
LONG_TEXT = 512  # tokens: most models take no more


@dataclass(frozen=True)
class Column:
    """The shape and dtype of a result for one input, and the name of its column in files.

    ``by_token``: the shape is that of one token; results are arrays of objects, one (tokens, …) for each text.
    """

    shape: tuple[int, ...]
    dtype: str
    name: str
    by_token: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the result for one input, of a long text if it has a row for each token."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize * (LONG_TEXT if self.by_token else 1)

    def make_empty(self) -> Array:
        """The results for no inputs."""
        return np.empty(0, object) if self.by_token else np.zeros((0, *self.shape), self.dtype)

    def fits(self, found: Array) -> bool:
        """Whether results are of this shape and dtype."""
        rows = found if found.dtype == object else [found]
        return (found.dtype == object) == self.by_token and all(
            (row.shape[1:], row.dtype.name) == (self.shape, self.dtype) for row in rows
        )


@dataclass(frozen=True)
class Outline:
    """The properties that all answers share: model, fingerprint, the column and the receipt of each result."""

    model: str
    fingerprint: str
    columns: Mapping[str, Column]
    receipts: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, model: str, fingerprint: str, arrays: Mapping[str, Array], receipts: Mapping[str, Any]) -> Outline:
        """From the answer to one input. RequestError unless it has exactly one row of each result."""
        columns = {}
        for name, array in arrays.items():
            if receipts[name].get("row_axis", 0) != 0:
                raise RequestError(f"{name} has no row for each input", hint="add --pool mean, or name another layer")
            if len(array) != 1:
                detail = f"{name} has {len(array)} rows for each input: windows are folded into the batch there"
                raise RequestError(detail, hint="name another layer, such as the block that it is in")
            by_token = _is_by_token(receipts[name])
            columns[name] = Column(array.shape[1 + by_token :], array.dtype.name, name, by_token)
        return cls(model, fingerprint, columns, receipts)

    @classmethod
    def of_comparison(cls, found: Comparison) -> Outline:
        """From a comparison of some inputs: one result, a table of all layers, for each input that of its block."""
        count = len(found[HSIC])  # without other layers there are the layers once
        first, second = len(found.layers), len(found.other_layers)
        receipt = {
            "stats": [HSIC],
            "cka_layers": [*found.layers, *found.other_layers][:count],
            "cka_models": ([found.model] * first + [found.other_model] * second)[:count],
            "cka_fingerprints": np.repeat(found.fingerprints, (first, second))[:count].tolist(),
        }
        return cls(found.model, found.fingerprint, {HSIC: Column((count, count, 1), "float64", HSIC)}, {HSIC: receipt})

    def rename(self, names: Sequence[str]) -> Outline:
        """With other names of the columns, in their order; LayertapError unless there is one for each."""
        if names and len(names) != len(self.columns):
            detail = f"--as has {len(names)} names for {len(self.columns)} results: {', '.join(self.columns)}"
            raise LayertapError(detail, hint="name each, in this order")
        named = zip(self.columns.items(), names or self.columns, strict=True)
        return replace(self, columns={key: replace(column, name=name) for (key, column), name in named})

    @property
    def space(self) -> str:
        """The spaces of the results, in their order."""
        return ",".join(str(receipt.get("space", "")) for receipt in self.receipts.values())

    @property
    def receipts_by_column(self) -> dict[str, Mapping[str, Any]]:
        """The receipts by the names that results have in files."""
        return {column.name: self.receipts[key] for key, column in self.columns.items()}

    @property
    def row_bytes(self) -> int:
        """Bytes of all results for one input."""
        return sum(column.nbytes for column in self.columns.values())

    def find_misfit(self, arrays: Mapping[str, Array]) -> str:
        """Why results do not fit the columns: other names or shapes; empty if they fit."""
        for name in {**self.columns, **arrays}:
            found, wanted = arrays.get(name), self.columns.get(name)
            if found is None or wanted is None:
                return f"it has {'no' if found is None else 'another'} result {name}"
            if not wanted.fits(found):
                return f"its result {name} has the shape {list(found.shape[1:])}, those of others {list(wanted.shape)}"
        return ""


@dataclass(frozen=True)
class Answer:
    """The answer to a batch of entries.

    ``errors``: the reasons, by the index of each entry without a result; ``arrays``: a row for each other entry.
    """

    fingerprint: str
    arrays: Mapping[str, Array]
    errors: Mapping[int, str]

    @classmethod
    def of(
        cls,
        fingerprint: str,
        arrays: Mapping[str, Array],
        receipts: Mapping[str, Any],
        faults: Iterable[Fault | ClientFault],
    ) -> Answer:
        """From features: texts without the padding behind their tokens."""
        cut = {
            name: _cut_texts(array, receipts[name]) if _is_by_token(receipts[name]) else array
            for name, array in arrays.items()
        }
        return cls(fingerprint, cut, list_reasons(faults))

    @classmethod
    def of_comparison(cls, found: Comparison) -> Answer:
        """From a comparison of a block: each input has the block's table, so that blocks count by their inputs."""
        table = found[HSIC][..., None]
        return cls(found.fingerprint, {HSIC: np.broadcast_to(table, (found.rows, *table.shape))}, {})


@dataclass(frozen=True)
class Rows:
    """Entries and their results, ready to be written, without the entries' bytes."""

    keys: Sequence[str]
    digests: Sequence[str | None]
    errors: Sequence[str | None]
    fingerprint: str
    arrays: Mapping[str, Array] = field(repr=False)
    kept: Sequence[Any] = ()  # of a source's other columns, a ``pyarrow.RecordBatch`` for each entry

    @property
    def nbytes(self) -> int:
        """Bytes of the results, and of what is kept of the source."""
        arrays = (each for array in self.arrays.values() for each in (array if array.dtype == object else [array]))
        return sum(each.nbytes for each in (*arrays, *self.kept))


@dataclass(frozen=True)
class BatchLimits:
    """The most inputs and bytes of a batch; a single larger input is a batch of its own."""

    rows: int
    nbytes: int


class Extractor(Protocol):
    """Answers batches: an engine in this process, a server or a cluster; ``in_flight`` batches keep it busy.

    ``outline`` sets all numbers.
    """

    in_flight: int
    max_input_bytes: int
    max_batch_bytes: int
    max_rows: int

    async def outline(self, question: Question) -> Outline:
        """The outline of all answers; LayertapError."""

    async def extract(self, question: Question, entries: Sequence[Entry]) -> Answer:
        """The answer to a batch of entries with bytes; errors that name an input are part of it.

        A comparison of inputs of which some have errors has these errors only, and no arrays.
        RequestError, TooLargeError: a smaller batch may succeed. Any other LayertapError ends the job.
        """

    async def close(self) -> None:
        """Free all resources."""


def cut_batches(entries: Iterable[Entry], limits: BatchLimits) -> Iterator[list[Entry]]:
    """Cut entries into batches; the result does not depend on where an earlier run stopped between batches."""
    batch: list[Entry] = []
    nbytes = 0
    for entry in entries:
        size = len(entry.data or b"")
        if batch and (len(batch) == limits.rows or nbytes + size > limits.nbytes):
            yield batch
            batch, nbytes = [], 0
        batch.append(entry)
        nbytes += size
    if batch:
        yield batch


def make_rows(entries: Sequence[Entry], answer: Answer, outline: Outline, indices: Sequence[int]) -> Rows:
    """The rows of a batch; ``indices``: those of the entries that were sent."""
    errors: list[str | None] = [entry.error or None for entry in entries]
    for index, reason in answer.errors.items():
        errors[indices[index]] = reason
    good = sum(error is None for error in errors)
    for name, array in answer.arrays.items():
        if len(array) != good:  # whatever the answer, rows must never be assigned to other pictures
            raise LayertapError(f"{name} has {len(array)} rows for {good} inputs", hint="name another layer")
    arrays = answer.arrays or {name: column.make_empty() for name, column in outline.columns.items()}
    keys, digests = [entry.key for entry in entries], [entry.digest for entry in entries]
    kept = [entry.kept for entry in entries if entry.kept is not None]
    return Rows(keys, digests, errors, answer.fingerprint, arrays, kept)


def _is_by_token(receipt: Mapping[str, Any]) -> bool:
    """Whether a result has a row for each token of a text, of which each has its own number."""
    kept = receipt["pool"] == "none" and not (receipt.get("tokens") or receipt.get("stats"))
    return kept and bool(receipt.get("token_counts")) and str(receipt.get("layout"))[1:2] == "T"


def _cut_texts(array: Array, receipt: Mapping[str, Any]) -> Array:
    """The rows of (N, T, …) as an array of objects, each with its own tokens, which come first.

    Of late interaction those that count: the others are 0, and would be found by any query.
    """
    rows = np.empty(len(array), object)
    rows[:] = [row[:count] for row, count in zip(array, receipt["token_counts"], strict=True)]
    if receipt["layer"] in LATE:
        rows[:] = [row[row.any(-1)] for row in rows]
    return rows


def join_answers(answers: Sequence[Answer], indices: Sequence[Sequence[int]]) -> Answer:
    """Join the answers to parts of a batch; ``indices``: those of each part's entries in the batch."""
    errors, good = dict[int, str](), list[int]()
    for answer, of_part in zip(answers, indices, strict=True):
        errors |= {of_part[number]: reason for number, reason in answer.errors.items()}
        good += [index for number, index in enumerate(of_part) if number not in answer.errors]
    parts, order = [answer.arrays for answer in answers if answer.arrays], np.argsort(good)
    arrays = {key: np.concatenate([part[key] for part in parts])[order] for key in parts[0]} if parts else {}
    return Answer(next((each.fingerprint for each in answers if each.fingerprint), ""), arrays, errors)


def list_reasons(faults: Iterable[Fault | ClientFault]) -> dict[int, str]:
    """Why inputs have no result, by their indexes."""
    return {fault.input: fault.detail for fault in faults if fault.input is not None}
