"""What a request gets back, before it is bytes: numpy arrays and where each came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.errors import Fault

Array = NDArray[Any]


@dataclass(frozen=True)
class Receipt:
    """Where one result came from and what was done to it.

    ``captured`` and ``dtype`` are those of the tensor the hook saw, before pooling and casting; ``path`` leads into a
    structured value ("[logits]") and is empty for a single tensor.
    """

    layer: str
    call: int
    module: str
    site: str
    path: str
    layout: str | None
    captured: tuple[int, ...]
    dtype: str
    pool: str
    normalize: bool
    fingerprint: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; an empty path and an absent normalisation are left out."""
        return {key: value for key, value in asdict(self).items() if value is not False and value not in ("", None)}


@dataclass(frozen=True)
class Features:
    """The results of one request.

    ``arrays`` holds one C-contiguous little-endian array per key, in the order asked for; ``scales`` one float32 array
    for each int8 key, to multiply along axis 0; ``rows`` counts the inputs that were used; ``errors`` names the others.
    """

    model: str
    fingerprint: str
    rows: int
    arrays: dict[str, Array]
    receipts: dict[str, Receipt]
    scales: dict[str, Array] = field(default_factory=dict)
    errors: tuple[Fault, ...] = ()


def joined(parts: Sequence[Features]) -> Features:
    """The features of several requests for the same layers of one model as those of one, rows in order."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return replace(
        first,
        rows=sum(part.rows for part in parts),
        arrays={key: np.concatenate([part.arrays[key] for part in parts], _axis(first, key)) for key in first.arrays},
        scales={key: np.concatenate([part.scales[key] for part in parts]) for key in first.scales},
        errors=tuple(fault for part in parts for fault in part.errors),
    )


def _axis(features: Features, key: str) -> int:
    receipt = features.receipts[key]
    return (receipt.layout or "N").index("N") if receipt.pool == "none" else 0
