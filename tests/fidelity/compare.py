"""What hooks saw offline, under the names that a reply must have, and how near a reply comes to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tests.oracle import Key
from tests.service.support import Array

RTOL = 1e-4  # of each value
ATOL = 1e-5  # of the largest value of its tensor


@dataclass
class Tally:
    """What was compared so far; ``deviation`` is the largest one found, relative to its tensor's largest value."""

    tensors: int = 0
    identical: int = 0
    deviation: float = 0.0
    layers: set[str] = field(default_factory=set)

    def add(self, found: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
        """Compare a reply's arrays, each of which must have been wanted."""
        assert found.keys() <= wanted.keys(), sorted(found.keys() - wanted.keys())
        wrong = [fault for key, array in found.items() if (fault := self._fault(key, array, wanted[key]))]
        assert not wrong, f"{len(wrong)} of {len(found)} are not as hooks saw them, such as {wrong[:8]}"

    def _fault(self, key: str, found: Array, wanted: Array) -> str:
        if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
            return f"{key}: {found.dtype} {found.shape}, not {wanted.dtype} {wanted.shape}"
        self.tensors += 1
        self.layers.add(layer_of(key))
        if found.tobytes() == wanted.tobytes():
            self.identical += 1
            return ""
        size = float(np.abs(wanted).max())
        deviation = float(np.abs(found.astype(np.float64) - wanted).max()) / max(size, 1e-30)
        self.deviation = max(self.deviation, deviation)
        return "" if np.allclose(found, wanted, rtol=RTOL, atol=ATOL * size) else f"{key}: off by {deviation:.1e}"


def named(seen: Mapping[Key, Tensor]) -> dict[str, Array]:
    """Recorded tensors as arrays under canonical names, floating ones in float32."""
    runs: dict[str, int] = defaultdict(int)
    leaves: dict[tuple[str, int, str], int] = defaultdict(int)
    for name, call, _, site in seen:
        runs[name] = max(runs[name], call + 1)
        leaves[name, call, site] += 1
    found = {}
    for (name, call, path, site), value in seen.items():
        # The whole model is asked for by its name, and a name that means one tensor stays as it was written.
        lone = name == "." and leaves[name, call, site] == 1
        number = f"#{call}" if runs[name] > 1 else ""
        steps = "" if lone else "".join(f"[{step}]" for step in path)
        found[f"{name}{number}{steps}" + ("" if site == "output" else f":{site}")] = _array(value)
    assert len(found) == len(seen)
    return found


def layer_of(key: str) -> str:
    """The name of the layer in a canonical name."""
    return key.partition(":")[0].partition("[")[0].partition("#")[0]


def _array(value: Tensor) -> Array:
    return (value.float() if value.is_floating_point() else value).numpy()
