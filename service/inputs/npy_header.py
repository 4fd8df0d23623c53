"""The header of a .npy file, matched against what it may say; nothing in it is evaluated or given to numpy.

numpy's own reader evaluates it as a Python literal and makes a dtype of any string in it: some of those end the process
(numpy 2.4: ``numpy.dtype("8<2T ").newbyteorder("=")``), the literals of others upset the threads of Python 3.11.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import numpy as np

from layertap.models.errors import InputError

MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}  # of the header, by the format's version
_MAX_HEADER_BYTES = 4096  # numpy.save writes 118 or so
_OPENING = re.compile(rb"\s*+\{\s*+")
_STRING, _FIELDS, _FLAG = rb"'[^']*+'|\"[^\"]*+\"", rb"\[[^]]*+\]", rb"True|False"
_SHAPE = rb"\([-\dL,\s]*+\)"
_ENTRY = re.compile(
    rb"['\"](?P<key>\w++)['\"]\s*+:\s*+(?P<value>%b|%b|%b|%b)\s*+(?:,\s*+|(?=\}))" % (_STRING, _FIELDS, _FLAG, _SHAPE)
)
_CLOSING = re.compile(rb"\}\s*+")
_AXIS = re.compile(rb"\s*+(-?\d++)L?\s*+")  # Python 2 wrote an L behind large numbers
_ORDERS: dict[bytes, Literal["C", "F"]] = {b"False": "C", b"True": "F"}
_KINDS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
_DESCRIPTIONS = tuple(order + kind for order, kind in product(("", *"<>=|"), _KINDS))
_DTYPES = {f"{quote}{text}{quote}".encode(): np.dtype(text) for text in _DESCRIPTIONS for quote in "'\""}
_NAMES = ", ".join(np.dtype(kind).name for kind in _KINDS)


@dataclass(frozen=True)
class NpyHeader:
    """What a .npy file says of its numbers, and at which byte they begin."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    order: Literal["C", "F"]
    end: int

    @classmethod
    def parse(cls, data: bytes) -> NpyHeader:
        """The header at the start of ``data``; its shape may be any.

        InputError: no .npy file, or one of anything but plain numbers.

        The format: numpy.lib.format, versions 1.0 to 3.0.
        """
        begin = len(MAGIC) + 2 + _LENGTH_BYTES.get(data[6:8], 0)
        end = begin + int.from_bytes(data[8:begin], "little")
        if not data.startswith(MAGIC) or not 8 < begin < end <= min(len(data), begin + _MAX_HEADER_BYTES):
            raise _not_npy_error()
        fields = _parse_entries(data[begin:end])
        if fields.keys() != {b"descr", b"fortran_order", b"shape"}:
            raise _not_npy_error()
        dtype, order = _DTYPES.get(fields[b"descr"]), _ORDERS.get(fields[b"fortran_order"])
        shape = _parse_shape(fields[b"shape"])
        if order is None or shape is None:
            raise _not_npy_error()
        if dtype is None:
            raise InputError("a .npy array of this dtype is not taken", hint=f"convert the array to one of {_NAMES}")
        return cls(dtype, shape, order, end)


def _parse_entries(header: bytes) -> dict[bytes, bytes]:
    """The fields of a header, as written; nothing where it is not written as such headers are."""
    fields: dict[bytes, bytes] = {}
    opening = _OPENING.match(header)
    place = opening.end() if opening else 0
    while entry := _ENTRY.match(header, place):
        fields[entry["key"]] = entry["value"]
        place = entry.end()
    return fields if _CLOSING.fullmatch(header, place) else {}


def _parse_shape(text: bytes) -> tuple[int, ...] | None:
    """The numbers of a tuple, None where it is none; ``(3)`` is not."""
    *axes, last = text[1:-1].split(b",")
    if last.strip():
        axes = [*axes, last] if axes else [b""]
    sizes = [_AXIS.fullmatch(axis) for axis in axes]
    return tuple(int(size[1]) for size in sizes if size) if text[:1] == b"(" and all(sizes) else None


def _not_npy_error() -> InputError:
    return InputError("this is not a .npy file of plain numbers", hint="write an array of numbers with numpy.save")
