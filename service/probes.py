"""Probes: what a layer gives for a fixed input, short enough to be kept beside a fingerprint.

By a fingerprint vectors are known to be made alike; by a probe it is found whether a library, a kernel or a machine
computes otherwise under the same names.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from layertap.models.errors import LayertapError

ProbeInput = Literal["picture", "sound", "video", "text", "tokens", "tensors"]
MAX_VALUES = 64
SCALE, VALUES = np.dtype("<f4"), np.dtype("<f2")
MAX_BYTES = SCALE.itemsize + MAX_VALUES * VALUES.itemsize

# Of a probe's length: more than numbers of threads, sizes of batches and kernels differ by in a dtype that a model
# computes in, and less than the epsilon of most norms (``python -m bench.probes``).
ROUNDING = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 2e-2}
FEW = 20  # at most one entry in so many is rounded to the next float16 where hardly anything differs


@dataclass(frozen=True)
class Probe:
    """What a result is for the fixed input of a kind, as text.

    ``values`` is base64 of little-endian bytes: a float32, the largest magnitude of the result, and up to MAX_VALUES
    float16: entries at even distances of the result in C order, the first and the last among them, divided by it.
    """

    input: ProbeInput
    values: str

    @classmethod
    def of(cls, kind: ProbeInput, result: NDArray[Any], scale: NDArray[Any] | None = None) -> Probe:
        """The probe of a result, and the scales of its rows where it is int8."""
        numbers = result.astype(np.float64)
        if scale is not None:
            numbers *= scale.reshape(-1, *(1,) * (numbers.ndim - 1))
        flat = numbers.ravel()
        kept = flat[np.linspace(0, flat.size - 1, min(MAX_VALUES, flat.size)).astype(np.int64)]
        largest = np.abs(flat).max(initial=0.0)
        shares = (kept / largest if 0 < largest < np.inf else kept).astype(VALUES)
        return cls(kind, base64.b64encode(np.array(largest, SCALE).tobytes() + shares.tobytes()).decode())

    def read_values(self) -> NDArray[np.float64]:
        """The entries of the result that it holds; LayertapError where the text is no probe."""
        try:
            data = base64.b64decode(self.values, validate=True)
        except (binascii.Error, ValueError) as error:
            raise LayertapError("this is no probe: its values are no base64") from error
        if not SCALE.itemsize <= len(data) <= MAX_BYTES or (len(data) - SCALE.itemsize) % VALUES.itemsize:
            raise LayertapError(f"this is no probe: it has {len(data)} bytes")
        largest = float(np.frombuffer(data, SCALE, 1)[0])
        shares = np.frombuffer(data, VALUES, offset=SCALE.itemsize).astype(np.float64)
        return shares * largest if 0 < largest < np.inf else shares


def parse_probe(entry: object) -> Probe | None:
    """The probe in a receipt as JSON has it, None where there is none; LayertapError where it makes no sense."""
    if entry is None:
        return None
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    values, kinds = fields.get("values"), get_args(ProbeInput)
    kind: ProbeInput | None = next((each for each in kinds if each == fields.get("input")), None)
    if kind is None or not isinstance(values, str):
        raise LayertapError("this is no probe: it needs 'input' and 'values'")
    return Probe(kind, values)


def measure_change(before: Probe, after: Probe) -> float:
    """The length of the difference of two probes as a share of the first one's length; infinite where none can be.

    Where both hold a NaN or an infinity in the same place nothing differs there.
    """
    one, other = before.read_values(), after.read_values()
    if one.shape != other.shape:
        return float("inf")
    odd = ~(np.isfinite(one) & np.isfinite(other))
    if not np.array_equal(one[odd], other[odd], equal_nan=True):
        return float("inf")
    length, difference = np.linalg.norm(one[~odd]), np.linalg.norm(one[~odd] - other[~odd])
    if difference == 0:
        return 0.0
    return float(difference / length) if length else float("inf")


def is_rounding(before: Probe, after: Probe, dtype: str) -> bool:
    """Whether two probes of a model that computes in a dtype differ by no more than machines and kernels do."""
    change = measure_change(before, after)
    if change <= ROUNDING.get(dtype, ROUNDING["float32"]):
        return True
    one, other = before.read_values(), after.read_values()
    if not np.isfinite(change):
        return False
    largest = float(np.frombuffer(base64.b64decode(before.values), SCALE, 1)[0])
    steps = np.spacing(np.abs(one / largest).astype(VALUES)).astype(np.float64) * largest
    moved = np.abs(one - other)
    # The scales of the two differ in last bits, so that equal entries do as well.
    return bool((moved <= 1.01 * steps).all() and (moved > 0.1 * steps).sum() <= max(1, one.size // FEW))
