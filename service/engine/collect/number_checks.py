"""Numbers that say nothing: NaN and infinity in a result, vectors of zeros where length 1 was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from layertap.models.errors import escape
from layertap.service.features import Array, Features, Receipt

MAX_NAMED = 8  # results that warnings name; a header holds no more
FEW_NUMBERS, FEW_RESULTS = 2**16, 64  # counted in less time than a way to another thread and back takes
HALF_EXPONENT = 0x7C00  # all bits set: NaN or infinite

Count = Callable[[Array, Array | None, Receipt], int]


def add_warnings(features: Features) -> Features:
    """The same with a warning for each result that holds such numbers: its key and how many."""
    found = [
        f"{escape(key)}: {text}"
        for key, array in features.arrays.items()
        for text in describe_numbers(array, features.scales.get(key), features.receipts[key])
    ]
    if not found:
        return features
    others = [f"{len(found) - MAX_NAMED} more warnings of such numbers"] if len(found) > MAX_NAMED else []
    return replace(features, warnings=(*features.warnings, *found[:MAX_NAMED], *others))


def is_short(features: Features) -> bool:
    """Whether all numbers are looked at in little time."""
    arrays = features.arrays.values()
    return len(arrays) <= FEW_RESULTS and sum(array.size for array in arrays) <= FEW_NUMBERS


def describe_numbers(array: Array, scale: Array | None, receipt: Receipt) -> Iterator[str]:
    """What is wrong with the numbers of a result, in words."""
    for text, count_in in CHECKS.items():
        if count := count_in(array, scale, receipt):
            yield f"{count} {text}"


def find_row(features: Features) -> tuple[int, str] | None:
    """The first row of a result (rows, …) whose numbers are wrong, and what is; None where there is none."""
    ((key, array),) = features.arrays.items()
    receipt = features.receipts[key]
    if not any(describe_numbers(array, None, receipt)):
        return None
    rows = ((row, next(describe_numbers(array[row : row + 1], None, receipt), None)) for row in range(len(array)))
    return next((row, text) for row, text in rows if text is not None)


def _count_nonfinite(array: Array) -> int:
    if array.dtype.kind != "f":
        return 0
    if array.dtype != np.float16:
        return array.size - int(np.count_nonzero(np.isfinite(array)))
    return int(np.count_nonzero((array.view(np.uint16) & HALF_EXPONENT) == HALF_EXPONENT))  # ten times as fast


def _count_overflowing(array: Array, scale: Array | None, receipt: Receipt) -> int:
    if array.dtype.kind != "f" or (array.dtype != np.float16 and receipt.dtype != "float16"):
        return 0
    return int(np.count_nonzero(np.isinf(array))) if _count_nonfinite(array) else 0


def _count_others(array: Array, scale: Array | None, receipt: Receipt) -> int:
    """How many are not finite, without those that overflowed."""
    return (count := _count_nonfinite(array)) and count - _count_overflowing(array, scale, receipt)


def _count_scales(array: Array, scale: Array | None, receipt: Receipt) -> int:
    return 0 if scale is None else scale.size - int(np.count_nonzero(np.isfinite(scale)))


def _count_zero_vectors(array: Array, scale: Array | None, receipt: Receipt) -> int:
    if not receipt.normalize or not array.size:
        return 0
    vectors = array.reshape(-1, array.shape[-1])
    may_be = vectors[:, 0] == 0
    return int(np.count_nonzero(~vectors[may_be].any(1))) if may_be.any() else 0


CHECKS: dict[str, Count] = {
    "numbers are NaN or infinite": _count_others,
    "numbers are infinite: float16 ends at 65504": _count_overflowing,
    "scales are NaN: the values that they scale are not finite": _count_scales,
    "vectors are all zeros: they have no length 1": _count_zero_vectors,
}
