"""One input of a source, a picture or a text, and the batches that inputs are taken in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """An input: its key in the source and its bytes, or why there are none."""

    key: str
    data: bytes | None = field(repr=False)
    error: str = ""

    @property
    def digest(self) -> str | None:
        """SHA-256 of the bytes, in hexadecimal."""
        return hashlib.sha256(self.data).hexdigest() if self.data is not None else None


@dataclass(frozen=True)
class BatchLimits:
    """At most how many inputs a batch has, and of how many bytes; one input is a batch whatever its size."""

    rows: int
    nbytes: int


def cut_batches(entries: Iterable[Entry], limits: BatchLimits) -> Iterator[list[Entry]]:
    """The entries in batches: always the same ones, wherever a batch is the first."""
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
