"""What a reply must hold: tensors that hooks saw offline, reduced by numpy as the documentation says, and how near."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx
import numpy as np

from tests.oracle import Key
from tests.service.load_nets import CONSTANT, MIXED, MIXED_OR_ALONE, Served
from tests.service.support import Array, arrays_of

RTOL = 1e-4  # of each value
ATOL = 1e-5  # of the largest value of the tensor that the hook saw
HALF, SMALLEST_HALF = 2**-11, 2**-24  # float16: rounding, and its smallest number
LEVELS = 127  # of int8 on either side
ZERO = 1e-30  # what the scale of nothing but zeros may stand for
SLACK = 1.02  # on what rounding allows
GEM_P, GEM_EPS = 3.0, 1e-6


@dataclass(frozen=True)
class How:
    """What is done to a tensor."""

    pool: str = "none"
    normalize: bool = False
    dtype: str = "float32"


@dataclass(frozen=True)
class Expected:
    """The rows that a good request is answered for, and the tensor behind each key of the reply."""

    served: Served
    rows: Mapping[str, Array]
    wanted: Mapping[str, tuple[Key, How]]
    isolated: bool = False

    @property
    def count(self) -> int:
        """How many rows."""
        return len(next(iter(self.rows.values())))


def fault_of(expected: Expected, response: httpx.Response) -> str:
    """What is wrong with a good reply, the largest deviation with it; nothing where all is well."""
    found = arrays_of(response)
    seen = expected.served.seen(expected.rows, expected.isolated)
    only = next(iter(expected.wanted)) if "" in found else ""  # .npy has no names
    values = {key or only: value for key, value in found.items()}
    scales = {f"{key}.scale" for key, (point, how) in expected.wanted.items() if _scaled(expected.served, point, how)}
    if values.keys() != expected.wanted.keys() | scales:
        return f"keys {sorted(values)}, not {sorted(expected.wanted.keys() | scales)}"
    faults = [
        f"{key}: {fault}"
        for key, (point, how) in expected.wanted.items()
        if (fault := _fault(values[key], values.get(f"{key}.scale"), _reduced(expected, point, how, seen[point]), how))
    ]
    return "; ".join(faults)


def pools_of(served: Served, key: Key, rows: int) -> frozenset[str]:
    """The pools that are defined for a tensor, none where it can't be had for so many rows."""
    axes = served.axes_of(key)
    if axes in (MIXED, MIXED_OR_ALONE, CONSTANT):
        return frozenset() if axes == MIXED_OR_ALONE and rows > 1 else frozenset({"none"})
    pools = {"none", "flatten"}
    if served.is_float(key) and "C" in axes:
        pools |= {"mean", "max", "gem"} | ({"cls"} if axes == "NTC" and served.prefix else set())
    return frozenset(pools)


@dataclass(frozen=True)
class _Reduced:
    values: Array
    tolerance: Array


def _scaled(served: Served, key: Key, how: How) -> bool:
    return how.dtype == "int8" and served.is_float(key)


def _reduced(expected: Expected, key: Key, how: How, raw: Array) -> _Reduced:
    served = expected.served
    if not served.is_float(key):
        kept = raw.reshape(len(raw), -1) if how.pool == "flatten" else raw
        return _Reduced(kept, np.zeros(kept.shape))
    assert np.isfinite(raw).all(), f"{key} of {served.name} is not finite"
    values = raw.astype(np.float64)
    axes = served.axes_of(key)
    if how.pool != "none":
        values = POOLS[how.pool](_Pixels(values, axes, expected.count, served.prefix if axes == "NTC" else 0))
    atol = np.full(values.shape, ATOL * np.abs(raw).max(initial=0))
    if how.normalize:
        norm = np.maximum(np.sqrt((values**2).sum(-1, keepdims=True)), 1e-12)
        values, atol = values / norm, atol / norm
    return _Reduced(values, RTOL * np.abs(values) + atol)


@dataclass(frozen=True)
class _Pixels:
    values: Array
    axes: str
    rows: int
    prefix: int

    def positions(self) -> Array:
        """(N, positions, C); windows folded into the first axis belong to their row."""
        letters = self.axes.replace("N", "")
        first = np.moveaxis(self.values, self.axes.index("N"), 0)
        last = np.moveaxis(first, 1 + letters.index("C"), -1)
        return last.reshape(self.rows, -1, last.shape[-1])

    def patches(self) -> Array:
        """The same without prefix tokens."""
        return self.positions()[:, self.prefix :]

    def flat(self) -> Array:
        """(N, everything else)."""
        first = np.moveaxis(self.values, self.axes.index("N"), 0)
        return first.reshape(self.rows, math.prod(first.shape) // self.rows)


def _gem(pixels: _Pixels) -> Array:
    gem: Array = (np.maximum(pixels.patches(), GEM_EPS) ** GEM_P).mean(1) ** (1 / GEM_P)
    return gem


def _fault(found: Array, scale: Array | None, wanted: _Reduced, how: How) -> str:
    floating = wanted.values.dtype.kind == "f"
    dtype = how.dtype if floating else wanted.values.dtype.name
    if (found.shape, found.dtype.name) != (wanted.values.shape, dtype):
        return f"{found.dtype} {found.shape}, not {dtype} {wanted.values.shape}"
    if not floating:
        return "" if np.array_equal(found, wanted.values) else f"{(found != wanted.values).sum()} are others"
    tolerance = wanted.tolerance
    values: Array = found.astype(np.float64)
    if dtype == "float16":
        tolerance = tolerance + SLACK * (HALF * np.abs(wanted.values) + SMALLEST_HALF)
    if scale is not None:
        if scale.shape != wanted.values.shape[:1]:
            return f"a scale of shape {scale.shape}"
        step = scale.astype(np.float64).reshape(-1, *[1] * (found.ndim - 1))
        largest = np.abs(wanted.values).reshape(len(found), -1).max(1).reshape(step.shape)
        allowed = tolerance.reshape(len(found), -1).max(1).reshape(step.shape)
        if (np.abs(step * LEVELS - largest) > allowed + ZERO).any():
            return f"scales {scale.tolist()}"
        values, tolerance = values * step, tolerance + SLACK * largest / LEVELS / 2
    return _far(np.abs(values - wanted.values), tolerance, wanted.values)


def _far(off: Array, tolerance: Array, wanted: Array) -> str:
    bad = ~(off <= tolerance)  # not a number is never near
    if not bad.any():
        return ""
    size = max(float(np.abs(wanted).max()), 1e-30)
    first = sorted(set(np.nonzero(bad)[0].tolist()))
    return f"{bad.sum()} of {bad.size} wrong, off by up to {off.max() / size:.1e} of the largest, at {first} of axis 0"


POOLS: dict[str, Callable[[_Pixels], Array]] = {
    "mean": lambda pixels: pixels.patches().mean(1),
    "max": lambda pixels: pixels.patches().max(1),
    "gem": _gem,
    "cls": lambda pixels: pixels.positions()[:, 0],
    "flatten": _Pixels.flat,
}
