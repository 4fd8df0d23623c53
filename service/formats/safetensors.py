"""``application/x-safetensors``: one tensor per key, and descriptions in the file's metadata."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import orjson

from layertap.service.errors import NotAcceptableError
from layertap.service.features import Array, Features
from layertap.service.formats.buffers import Buffers, EncodeOptions, name_arrays, to_little_endian, view_bytes
from layertap.service.formats.plain_data import describe_as_text

_RESERVED = "__metadata__"


def encode(features: Features, options: EncodeOptions) -> Buffers:
    """The results as a safetensors file, scales as ``KEY.scale``, all else as texts in the metadata.

    The same features give the same bytes. NotAcceptableError: two tensors of one name, or one named ``__metadata__``.
    """
    tensors = {name: to_little_endian(array) for name, array in name_arrays(features, options.encoding).items()}
    if _RESERVED in tensors:
        detail = f"application/x-safetensors has no place for a result named '{_RESERVED}'"
        raise NotAcceptableError(detail, hint="give it another name with `as`")
    # Larger dtypes first, so that each tensor is aligned although there are no gaps.
    tensors = dict(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    header = orjson.dumps({_RESERVED: describe_as_text(features), **_describe_tensors(tensors)})
    header += b" " * (-len(header) % 8)
    return [struct.pack("<Q", len(header)) + header, *map(view_bytes, tensors.values())]


def _describe_tensors(tensors: Mapping[str, Array]) -> dict[str, Any]:
    """The header's entry for each tensor; the library writes a header only with the data, and copies these twice."""
    entries: dict[str, Any] = {}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        entries[name] = {"dtype": _name_dtype(array), "shape": array.shape, "data_offsets": (begin, end)}
    return entries


def _name_dtype(array: Array) -> str:
    """The format's name of a dtype, such as F32 or I64; results are never complex."""
    return "BOOL" if array.dtype.kind == "b" else f"{array.dtype.kind.upper()}{8 * array.dtype.itemsize}"
