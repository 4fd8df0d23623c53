"""``application/json``: everything in one document.

Numbers are written so that reading them back into the array's dtype gives the same bits. JSON has no NaN and no
infinity: in lists they become null; ``encoding: base64`` keeps them.
"""

from __future__ import annotations

from typing import Any

from layertap.service.features import Array, Features
from layertap.service.formats.buffers import Buffers, to_little_endian, view_bytes
from layertap.service.formats.json_writer import write_json
from layertap.service.formats.plain_data import describe_errors, describe_receipts, describe_top_classes
from layertap.service.formats.reply_format import EncodeOptions, Encoding

NUMBER_BYTES = 12  # a float32 written in full takes 8 to 14 characters with its comma


def encode(features: Features, options: EncodeOptions) -> Buffers:
    """The reply as UTF-8 JSON; ``data`` as nested lists, or as base64 of little-endian bytes in C order.

    The scales of int8 results are lists in both encodings.
    """
    document = {
        "model": features.model,
        "fingerprint": features.fingerprint,
        "rows": features.rows,
        "features": {key: _make_entry(features, key, options.encoding) for key in features.arrays},
        "receipts": describe_receipts(features),
        "errors": describe_errors(features),
        **({"verified": True} if features.verified else {}),
        **({"interventions": features.interventions} if features.interventions else {}),
        **({"warnings": features.warnings} if features.warnings else {}),
        **({"top_classes": describe_top_classes(features)} if features.top_classes else {}),
    }
    return write_json(document)


def estimate_bytes(encoding: Encoding, numbers: int, nbytes: int) -> int:
    """About how large a reply is that holds so many numbers of so many bytes."""
    return numbers * NUMBER_BYTES if encoding == "list" else nbytes * 4 // 3


def _make_entry(features: Features, key: str, encoding: Encoding) -> dict[str, Any]:
    array = to_little_endian(features.arrays[key])
    data = view_bytes(array) if encoding == "base64" else _to_list(array)
    entry = {"shape": array.shape, "dtype": array.dtype.name, "data": data}
    if key in features.scales:
        entry["scale"] = _to_list(to_little_endian(features.scales[key]))
    return entry


def _to_list(array: Array) -> Any:
    # orjson writes arrays as nested lists, and numpy scalars, but no arrays without an axis.
    return array if array.ndim else array[()]
