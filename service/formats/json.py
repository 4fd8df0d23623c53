"""``application/json``: everything in one document.

Numbers are written so that reading them back into the array's dtype gives the same bits. JSON has no NaN and no
infinity: in lists they become null; ``encoding: base64`` keeps them.
"""

from __future__ import annotations

from binascii import b2a_base64
from dataclasses import asdict
from typing import Any

import numpy as np
import orjson

from layertap.models.errors import Fault
from layertap.service.features import Array, Features
from layertap.service.formats.negotiation import Encoding


def encode(features: Features, encoding: Encoding) -> bytes:
    """The reply as UTF-8 JSON; ``data`` as nested lists, or as base64 of little-endian bytes in C order.

    The scales of int8 results are lists in both encodings.
    """
    return orjson.dumps(
        {
            "model": features.model,
            "fingerprint": features.fingerprint,
            "rows": features.rows,
            "features": {key: _entry(features, key, encoding) for key in features.arrays},
            "receipts": receipts(features),
            "errors": errors(features),
            **({"verified": True} if features.verified else {}),
            **({"interventions": features.interventions} if features.interventions else {}),
            **({"warnings": features.warnings} if features.warnings else {}),
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def receipts(features: Features) -> dict[str, dict[str, Any]]:
    """Each result's receipt as plain data."""
    return {key: receipt.as_dict() for key, receipt in features.receipts.items()}


def errors(features: Features) -> list[dict[str, Any]]:
    """The faults of the inputs that were left out, as plain data; what a fault does not have is left out."""
    return [_without_blanks(fault) for fault in features.errors]


def little_endian(array: Array) -> Array:
    """The array in the byte order and memory order of every format here; itself where it is so already."""
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def _entry(features: Features, key: str, encoding: Encoding) -> dict[str, Any]:
    array = little_endian(features.arrays[key])
    data = b2a_base64(array.data, newline=False).decode("ascii") if encoding == "base64" else _listed(array)
    entry = {"shape": array.shape, "dtype": array.dtype.name, "data": data}
    if key in features.scales:
        entry["scale"] = _listed(little_endian(features.scales[key]))
    return entry


def _listed(array: Array) -> Any:
    # orjson writes numpy scalars, but no arrays without an axis.
    return array if array.ndim else array[()]


def _without_blanks(fault: Fault) -> dict[str, Any]:
    return {key: value for key, value in asdict(fault).items() if value not in ("", None)}
