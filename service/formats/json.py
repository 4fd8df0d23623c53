"""``application/json``: one document, written in pieces of about a millisecond, because orjson holds the GIL.

Numbers read back into the array's dtype have the same bits. In lists NaN and infinity become null.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import orjson

from layertap.service.features import Array, Features
from layertap.service.formats.buffers import Buffers, Coding, EncodeOptions, Encoding, to_little_endian, view_bytes
from layertap.service.formats.plain_data import describe_errors, describe_extras, describe_receipts
from layertap.service.formats.sparse import SparseRows

# The most characters of a number in a list, with its comma.
NUMBER_BYTES = {"bool": 6, "float16": 17, "float32": 17, "float64": 25} | {
    name: len(f"{np.iinfo(name).min or np.iinfo(name).max},")
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}
INSTEAD = 'ask for "encoding": "base64", or for ?format=npy, npz or safetensors'
PIECE_VALUES = 2**14  # numbers, or other values of a document
PIECE_BYTES = 3 * 2**18  # of base64: a multiple of 3, so that pieces can be joined
VALUE_BYTES = PIECE_BYTES // PIECE_VALUES  # base64 of this many bytes takes as long as one number


def encode(features: Features, options: EncodeOptions) -> Buffers:
    """The reply as UTF-8 JSON.

    ``data`` is nested lists, base64 of little-endian bytes in C order, or ``indices`` and ``values`` of each row.
    """
    document = {
        "model": features.model,
        "fingerprint": features.fingerprint,
        **({"space": features.space} if features.space else {}),
        "rows": features.rows,
        "features": {key: _make_entry(features, key, options) for key in features.arrays},
        "receipts": describe_receipts(features),
        "errors": describe_errors(features) if features.errors else [],
        **describe_extras(features),
    }
    return write_json(document)


def list_codings(encoding: Encoding, keys: Sequence[str]) -> Sequence[Coding]:
    """How each of the results with these keys is written."""
    return [encoding] * len(keys)


def count_text(coding: Coding, dtype: str, numbers: int, nbytes: int) -> int:
    """The most bytes that the text of a result takes, beside the array; 0 if its own bytes are sent."""
    if coding in ("list", "sparse"):  # how many values are not 0 is unknown
        return numbers * (NUMBER_BYTES[dtype] + (NUMBER_BYTES["int32"] if coding == "sparse" else 0))
    return (nbytes + 2) // 3 * 4 if coding == "base64" else 0


def _make_entry(features: Features, key: str, options: EncodeOptions) -> dict[str, Any]:
    array = to_little_endian(features.arrays[key])
    if options.encoding == "sparse":
        rows = SparseRows.from_array(key, array)
        rows.check_count(options.max_numbers)
        data: Any = list(rows.split())
    else:
        data = view_bytes(array) if options.encoding == "base64" else _to_list(array)
    entry = {"shape": array.shape, "dtype": _name_dtype(array.dtype), "data": data}
    if key in features.scales:
        entry["scale"] = _to_list(to_little_endian(features.scales[key]))
    return entry


@lru_cache(maxsize=64)
def _name_dtype(dtype: np.dtype[Any]) -> str:
    """Cached: numpy makes the name anew each time."""
    return dtype.name


def _to_list(array: Array) -> Any:
    # orjson writes arrays as nested lists, and numpy scalars, but not arrays without axes.
    return array if array.ndim else array[()]


def write_json(document: Any) -> Buffers:
    """A document as UTF-8 in buffers that, joined, are orjson's output.

    Arrays (with an axis, in C order) become nested lists, memoryviews base64.
    """
    return list(_write(document))


def _write(value: Any) -> Iterator[bytes]:
    if _is_short(value):
        yield _dump(value)
    elif isinstance(value, memoryview):
        starts = range(0, len(value), PIECE_BYTES)
        yield b'"'
        yield from (b2a_base64(value[start : start + PIECE_BYTES], newline=False) for start in starts)
        yield b'"'
    elif isinstance(value, dict):
        yield from _join(b"{", (chain([_dump(key) + b":"], _write(each)) for key, each in value.items()), b"}")
    elif isinstance(value, np.ndarray):
        yield from _join(b"[", _write_rows(value), b"]")
    elif isinstance(value, (list, tuple)):
        yield from _join(b"[", map(_write, value), b"]")
    else:
        yield _dump(value)


def _write_rows(array: Array) -> Iterator[Iterable[bytes]]:
    """The elements of an array's first axis, in groups of at most ``PIECE_VALUES`` numbers."""
    row_values = array.size // len(array)
    if row_values > PIECE_VALUES:
        yield from map(_write, array)
        return
    rows = PIECE_VALUES // row_values
    yield from ((_dump(array[start : start + rows])[1:-1],) for start in range(0, len(array), rows))


def _join(opening: bytes, parts: Iterable[Iterable[bytes]], closing: bytes) -> Iterator[bytes]:
    for number, part in enumerate(parts):
        yield b"," if number else opening
        yield from part
    yield closing


def _is_short(value: Any) -> bool:
    """Whether a value has no more than ``PIECE_VALUES`` values in it, whatever holds them."""
    count, left = 0, [value]
    while left and count <= PIECE_VALUES:
        each = left.pop()
        if isinstance(each, dict):
            left.extend(each.values())
        elif isinstance(each, (list, tuple)):
            left.extend(each)
        elif isinstance(each, np.ndarray):
            count += each.size
        else:
            count += len(each) // VALUE_BYTES if isinstance(each, memoryview) else 1
    return count <= PIECE_VALUES


def _dump(value: Any) -> bytes:
    return orjson.dumps(value, default=_encode_base64, option=orjson.OPT_SERIALIZE_NUMPY)


def _encode_base64(value: Any) -> str:
    if not isinstance(value, memoryview):
        raise TypeError
    return b2a_base64(value, newline=False).decode("ascii")
