"""Rows that are mostly zeros, as their other values and where these are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from layertap.models.errors import TooLargeError, escape
from layertap.service.errors import NotAcceptableError
from layertap.service.features import Array


@dataclass(frozen=True)
class SparseRows:
    """The values of (N, columns) that are not 0, as compressed sparse rows; NaN counts as a value.

    Row ``n`` has ``values[starts[n] : starts[n + 1]]`` at the columns ``indices[starts[n] : starts[n + 1]]``.
    """

    shape: tuple[int, int]
    starts: Array  # int64 (N + 1,)
    indices: Array  # int32
    values: Array

    @classmethod
    def from_array(cls, key: str, array: Array) -> SparseRows:
        """The rows of the result with this key; NotAcceptableError unless it has two axes."""
        if array.ndim != 2:
            detail = f"{escape(key)} is not one vector for each input, so it can't be sparse"
            raise NotAcceptableError(detail, hint="pool it, or leave 'encoding' out")
        rows, columns = array.nonzero()
        starts = np.searchsorted(rows, np.arange(len(array) + 1))
        return cls(array.shape, starts, columns.astype(np.int32), array[rows, columns])

    def check_count(self, most: int | None) -> None:
        """TooLargeError if lists of indices and values have more than ``most`` numbers."""
        if most is not None and 2 * len(self.values) > most:
            detail = f"the reply would have {2 * len(self.values)} numbers in JSON lists, the limit is {most}"
            raise TooLargeError(detail, hint="send fewer inputs at once, or ask for npz or safetensors")

    def split(self) -> Iterator[dict[str, Array]]:
        """``indices`` and ``values`` of each row."""
        for start, stop in zip(self.starts[:-1], self.starts[1:], strict=True):
            yield {"indices": self.indices[start:stop], "values": self.values[start:stop]}

    def name_arrays(self, key: str) -> dict[str, Array]:
        """The arrays of ``scipy.sparse.csr_array``, each as ``KEY.`` and its name there."""
        shape = np.array(self.shape, np.int64)
        return {
            f"{key}.{name}": array
            for name, array in zip(
                ("indptr", "indices", "data", "shape"), (self.starts, self.indices, self.values, shape), strict=True
            )
        }
