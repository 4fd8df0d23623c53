"""``application/x-npy``: one array and nothing else."""

from __future__ import annotations

from functools import lru_cache
from io import BytesIO

from numpy.lib import format as npy_format

from layertap.service.errors import NotAcceptableError
from layertap.service.features import Array, Features
from layertap.service.formats.buffers import Buffers, to_little_endian, view_bytes
from layertap.service.formats.reply_format import EncodeOptions

_HINT = "use application/x-npz (format=npz), which holds any number of arrays"


def encode(features: Features, options: EncodeOptions) -> Buffers:
    """The only result as a .npy file; ``options`` change nothing.

    NotAcceptableError: none or several results, or one with a scale.
    """
    if len(features.arrays) != 1:
        detail = f"application/x-npy holds exactly one result; this request has {len(features.arrays)}"
        raise NotAcceptableError(detail, hint=_HINT)
    if features.scales:
        raise NotAcceptableError("application/x-npy has no place for the scale of an int8 result", hint=_HINT)
    (array,) = features.arrays.values()
    return write_npy(array)


def write_npy(array: Array) -> Buffers:
    """An array as a .npy file, format version 1.0: what precedes its data, and its data."""
    array = to_little_endian(array)
    return [_make_header(array.shape, array.dtype.str), view_bytes(array)]


@lru_cache(maxsize=256)
def _make_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """What precedes the data of an array in C order; cached, for writing it takes longer than writing an embedding."""
    stream = BytesIO()
    npy_format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()
