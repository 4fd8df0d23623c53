"""What an extraction gives: arrays by name, and where each came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from layertap_client.arrays import Array, get_only, read_safetensors
from layertap_client.bodies import SAFETENSORS
from layertap_client.errors import BadReplyError, Fault, read_faults
from layertap_client.messages import Reply
from layertap_client.models import align

MAX_MEASURED = 1 << 24  # numbers of an array of which a repr still computes statistics
HEADERS = ("result", "shape", "dtype", "min", "mean", "max", "fingerprint")
SCALE = ".scale"
LISTS = ("errors", "interventions", "warnings", "top_effects", "top_classes", "texts")  # in a reply's metadata


@dataclass(frozen=True, repr=False, eq=False)
class Result(Mapping[str, Array]):
    """The arrays of one reply by name, in the order that they were asked for.

    All arrays are writable views of the reply's body, which they own together: it lives as long as one of them does, so
    copy what is small and to be kept. ``scales`` has for each int8 array float32 factors along axis 0. ``rows`` counts
    the inputs that were used, ``skipped`` has the places of the others and ``errors`` why. ``receipts`` says where each
    array came from, ``fingerprint`` is that of the whole reply; ``fingerprints`` has those of its arrays. ``space`` is
    that of all vectors, "" where they have several, by their receipts: those of one space may be compared. ``attempts``
    counts how often the request was sent. ``top_effects``: of a sweep, each input's largest;
    ``top_classes``: of an explanation, each picture's best, with ``class``, ``score`` and perhaps ``probability`` and
    ``label``. ``texts``: what each input's generated tokens say.
    """

    arrays: Mapping[str, Array]
    model: str = ""
    fingerprint: str = ""
    rows: int = 0
    receipts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scales: Mapping[str, Array] = field(default_factory=dict)
    errors: tuple[Fault, ...] = ()
    skipped: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    interventions: tuple[tuple[str, ...], ...] = ()
    verified: bool = False
    request_id: str = ""
    attempts: int = 1
    top_effects: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    top_classes: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    space: str = ""
    texts: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def array(self) -> Array:
        """The only array; ValueError where there are several."""
        return get_only(self.arrays)

    @property
    def fingerprints(self) -> dict[str, str]:
        """That of each array, as its receipt has it."""
        return {name: str(receipt.get("fingerprint", "")) for name, receipt in self.receipts.items()}

    def __repr__(self) -> str:
        left_out = f", {len(self.skipped)} left out" if self.skipped else ""
        count = "1 row" if self.rows == 1 else f"{self.rows} rows"
        head = [f"{count}{left_out} of {self.model}", f"fingerprint {self.fingerprint}", *self.warnings]
        rows = [
            (name, str(array.shape), array.dtype.name, *_measure(array), self.fingerprints.get(name, "")[:8])
            for name, array in self.arrays.items()
        ]
        return f"{', '.join(head)}\n{align([HEADERS, *rows])}"


@dataclass(frozen=True, eq=False)
class Comparison(Mapping[str, Array]):
    """Tables by measure, float64: a row for each of ``layers``, a column for each of ``other_layers``; NaN for null.

    "gram" has a matrix (inputs, inputs) for each of both, "hsic" a row and a column for each of both. ``fingerprints``
    are those of the features of both sides, ``fingerprint`` is that of the whole.
    """

    measures: Mapping[str, Array]
    model: str
    other_model: str
    layers: tuple[str, ...]
    other_layers: tuple[str, ...]
    rows: int
    fingerprint: str
    fingerprints: tuple[str, ...]
    warnings: tuple[str, ...] = ()

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Comparison:
        """A comparison as ``POST /compare`` replies it."""
        found: dict[str, Any] = {name: document[name] for name in ("model", "other_model", "rows", "fingerprint")}
        found |= {name: tuple(document[name]) for name in ("layers", "other_layers", "fingerprints")}
        measures = {name: np.array(table, np.float64) for name, table in document["measures"].items()}
        return cls(measures, **found, warnings=tuple(document.get("warnings", ())))

    def __getitem__(self, name: str) -> Array:
        return self.measures[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.measures)

    def __len__(self) -> int:
        return len(self.measures)


def read_result(reply: Reply) -> Result:
    """The result that a good reply in safetensors holds; BadReplyError."""
    media_type = reply.headers.get("content-type", "")
    if media_type != SAFETENSORS:
        raise BadReplyError(f"arrays were asked for, the reply is {media_type[:80]!r}; Client.post gives other replies")
    arrays, metadata = read_safetensors(reply.body)
    try:
        receipts = json.loads(metadata.get("receipts", "{}"))
        lists = {name: json.loads(metadata.get(name, "[]")) for name in LISTS}
        rows = int(metadata.get("rows", 0))
    except ValueError as error:
        raise BadReplyError(f"the reply's metadata can't be read: {error}") from None
    scales = {name.removesuffix(SCALE): arrays[name] for name in arrays.keys() - receipts.keys()}
    skipped = reply.headers.get("x-layertap-skipped", "")
    return Result(
        {name: arrays[name] for name in receipts if name in arrays},
        metadata.get("model", ""),
        reply.headers.get("x-layertap-fingerprint", ""),
        rows,
        receipts,
        scales,
        read_faults(lists["errors"]),
        tuple(int(place) for place in skipped.split(",") if place.strip().isdecimal()),
        tuple(lists["warnings"]),
        tuple(map(tuple, lists["interventions"])),
        reply.headers.get("x-layertap-verified") == "true",
        reply.headers.get("x-request-id", ""),
        reply.attempts,
        tuple(map(tuple, lists["top_effects"])),
        tuple(map(tuple, lists["top_classes"])),
        metadata.get("space", ""),
        tuple(lists["texts"]),
    )


def _measure(array: Array) -> tuple[str, str, str]:
    """Minimum, mean and maximum, if the array is small enough."""
    if not 0 < array.size <= MAX_MEASURED:
        return "", "", ""
    with np.errstate(all="ignore"):
        values = array.min(), array.mean(dtype=np.float64), array.max()
    return f"{values[0]:.4g}", f"{values[1]:.4g}", f"{values[2]:.4g}"
