"""Arrays written as clients write them: .npy files and their headers."""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any

import numpy as np
import pytest

Array = np.ndarray[Any, Any]

NUMBERS = [1.5, -2, 0, 7, 100, 3]

DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]


def make_npy(array: Array) -> bytes:
    stream = BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def make_npy_file(text: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text.encode() + body


def make_described_npy(descr: str, shape: str, body: bytes = b"") -> bytes:
    return make_npy_file(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n", body)


def make_array(dtype: str) -> Array:
    return np.array(NUMBERS).astype("i8" if dtype.startswith("u") else dtype).astype(dtype).reshape(2, 3)


def is_same(found: Array, expected: Array) -> bool:
    """Equal bits, native byte order, C order."""
    native = expected.astype(expected.dtype.newbyteorder("="))
    return (
        found.dtype == native.dtype
        and found.dtype.isnative
        and found.flags.c_contiguous
        and found.shape == expected.shape
        and found.tobytes() == native.tobytes()
    )


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("an unpickler ran",))


def make_safetensors(text: str, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + body
