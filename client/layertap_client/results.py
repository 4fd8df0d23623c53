"""What an extraction gives: arrays by name, and where each came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from layertap_client.arrays import Array, read_npy, read_safetensors
from layertap_client.errors import BadReplyError, Fault, read_faults
from layertap_client.messages import Reply
from layertap_client.tables import align

NPY, SAFETENSORS = "application/x-npy", "application/x-safetensors"
MAX_MEASURED = 1 << 24  # numbers of an array of which a repr still computes statistics
HEADERS = ("result", "shape", "dtype", "min", "mean", "max", "fingerprint")
SCALE = ".scale"


@dataclass(frozen=True, repr=False, eq=False)
class Result(Mapping[str, Array]):
    """The arrays of one reply by name, in the order that they were asked for.

    All arrays are writable views of the reply's body, which they own together: it lives as long as one of them does, so
    copy what is small and to be kept. ``scales`` has for each int8 array float32 factors along axis 0. ``rows`` counts
    the inputs that were used, ``skipped`` has the places of the others and ``errors`` why. ``receipts`` says where each
    array came from, ``fingerprint`` is that of the whole reply; ``fingerprints`` has those of its arrays. ``timings``
    are milliseconds at the server. ``attempts`` counts how often the request was sent.
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
    timings: Mapping[str, float] = field(default_factory=dict)
    attempts: int = 1

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    @property
    def array(self) -> Array:
        """The only array; ValueError where there are several."""
        if len(self.arrays) != 1:
            raise ValueError(f"there are {len(self.arrays)} arrays: {', '.join(self.arrays)}")
        return next(iter(self.arrays.values()))

    @property
    def fingerprints(self) -> dict[str, str]:
        """That of each array, as its receipt has it."""
        return {name: str(receipt.get("fingerprint", "")) for name, receipt in self.receipts.items()}

    def __repr__(self) -> str:
        return f"{self._describe()}\n{align([HEADERS, *self._list_rows()])}"

    def _describe(self) -> str:
        left_out = f", {len(self.skipped)} left out" if self.skipped else ""
        parts = [f"{self.rows} rows{left_out} of {self.model}" if self.model else "", f"fingerprint {self.fingerprint}"]
        return ", ".join([*filter(None, parts), *self.warnings])

    def _list_rows(self) -> list[tuple[str, ...]]:
        return [
            (name, str(array.shape), array.dtype.name, *_measure(array), self.fingerprints.get(name, "")[:8])
            for name, array in self.arrays.items()
        ]


def read_result(reply: Reply) -> Result:
    """The result that a good reply holds; BadReplyError."""
    media_type = reply.headers.get("content-type", "")
    if media_type == SAFETENSORS:
        return _read_safetensors(reply)
    if media_type == NPY:
        array = read_npy(reply.body)
        return Result({"": array}, rows=len(array) if array.ndim else 0, **_read_head(reply))
    raise BadReplyError(f"arrays were asked for, the reply is {media_type[:80]!r}")


def _read_safetensors(reply: Reply) -> Result:
    arrays, metadata = read_safetensors(reply.body)
    try:
        receipts = json.loads(metadata.get("receipts", "{}"))
        faults = read_faults(json.loads(metadata.get("errors", "[]")))
        interventions = json.loads(metadata.get("interventions", "[]"))
        warnings = json.loads(metadata.get("warnings", "[]"))
        rows = int(metadata.get("rows", 0))
    except ValueError as error:
        raise BadReplyError(f"the reply's metadata can't be read: {error}") from None
    scales = {name.removesuffix(SCALE): arrays[name] for name in arrays.keys() - receipts.keys()}
    head = _read_head(reply)
    head["warnings"] = tuple(warnings)
    return Result(
        {name: arrays[name] for name in receipts if name in arrays},
        metadata.get("model", ""),
        rows=rows,
        receipts=receipts,
        scales=scales,
        errors=faults,
        interventions=tuple(map(tuple, interventions)),
        **head,
    )


def _read_head(reply: Reply) -> dict[str, Any]:
    """What the head of a reply in any format says."""
    skipped = reply.headers.get("x-layertap-skipped", "")
    warnings = reply.headers.get("x-layertap-warnings", "")
    return {
        "fingerprint": reply.headers.get("x-layertap-fingerprint", ""),
        "skipped": tuple(int(place) for place in skipped.split(",") if place.strip().isdecimal()),
        "warnings": tuple(filter(None, warnings.split("; "))),
        "verified": reply.headers.get("x-layertap-verified") == "true",
        "request_id": reply.headers.get("x-request-id", ""),
        "timings": read_timings(reply.headers.get("server-timing", "")),
        "attempts": reply.attempts,
    }


def read_timings(text: str) -> dict[str, float]:
    """The durations of a ``Server-Timing`` header, in milliseconds."""
    timings = {}
    for entry in text.split(","):
        name, _, value = entry.strip().partition(";dur=")
        try:
            timings[name] = float(value)
        except ValueError:
            continue  # one that has no duration
    return timings


def _measure(array: Array) -> tuple[str, str, str]:
    """The least, the mean and the greatest number, where they are quickly had."""
    if not 0 < array.size <= MAX_MEASURED:
        return "", "", ""
    with np.errstate(all="ignore"):
        values = array.min(), array.mean(dtype=np.float64), array.max()
    return f"{values[0]:.4g}", f"{values[1]:.4g}", f"{values[2]:.4g}"
