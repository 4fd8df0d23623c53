"""Reads arrays from the formats of requests; nothing here unpickles or trusts the sizes in a header."""

from __future__ import annotations

import base64
import math
import re
import zipfile
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import deserialize

from layertap.models.errors import InputError, LayertapError, TooLargeError, escape

Array = NDArray[Any]

_BASE64_PIECE = 2**20  # characters, a multiple of 4, that are decoded before other threads may run
_MAX_RANK = 8
_MAX_AXIS = 2**31 - 1
_MAX_ENTRIES = 256
_MAX_SAFETENSORS_HEADER = 1 << 20  # of safetensors; the library's own limit is a hundred times that
_MAX_NPY_HEADER = 4096  # numpy.save writes 118 bytes or so
_ZIP_ENTRY = b"PK\x01\x02"  # what an entry of a zip's directory begins with
NPY_MAGIC = b"\x93NUMPY"
_NPY_STARTS = frozenset(NPY_MAGIC + version for version in (b"\x01\x00", b"\x02\x00", b"\x03\x00"))
# As numpy.save and similar writers write it. numpy's own reader evaluates the header as a Python literal, and makes
# a dtype of any string, which may crash the process (numpy 2.4: ``numpy.dtype("8<2T ").newbyteorder("=")``).
_NPY_HEADER = re.compile(
    rb"""\s*+\{\s*+['"]descr['"]\s*+:\s*+['"](?P<dtype>[<>=|]?(?:f[248]|[iu][1248]|b1))['"]\s*+,"""
    rb"""\s*+['"]fortran_order['"]\s*+:\s*+(?P<fortran>True|False)\s*+,"""
    rb"""\s*+['"]shape['"]\s*+:\s*+\((?P<shape>\s*+|(?:\s*+\d++\s*+,)++(?:\s*+\d++)?+\s*+)\)\s*+,?+\s*+\}\s*+"""
)
_NPZ_HINT = "write it with numpy.savez or numpy.savez_compressed"
_INPUTS_HINT = "send the model's inputs only"
_BASE64_HINT = "send standard base64 with its padding and no line breaks, or data:TYPE;base64,…"


def read_tensor(dtype: str, shape: Sequence[int], data: bytes | bytearray | memoryview) -> Array:
    """An array from little-endian bytes in C order; bfloat16 is widened to float32.

    InputError: no such dtype, an impossible shape, or a number of bytes that does not fit them.
    """
    stored_dtype = _DTYPES.get(dtype)
    if stored_dtype is None:
        raise InputError(f"dtype {escape(dtype)} is not taken", hint="use " + ", ".join(_DTYPES))
    array = _make_array(stored_dtype, dtype, shape, data)
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array


def read_npy(data: bytes) -> Array:
    """The array of a .npy file, native-endian and C-contiguous; it may be a read-only view of ``data``.

    InputError: not such a file, a dtype other than bool, integers and floats, or a body of another size than declared.
    """
    begin = 12 if data[6:7] in (b"\x02", b"\x03") else 10  # later versions of the format have longer headers
    end = begin + int.from_bytes(data[8:begin], "little")
    header = _NPY_HEADER.fullmatch(data, begin, end) if end <= begin + _MAX_NPY_HEADER else None
    if data[:8] not in _NPY_STARTS or header is None:
        hint = "write an array of bool, integers or floats of up to 64 bits with numpy.save"
        raise InputError("this is not a .npy file of plain numbers", hint=hint)
    dtype = np.dtype(header["dtype"].decode())
    shape = [int(size) for size in re.findall(rb"\d+", header["shape"])]
    order: Literal["C", "F"] = "F" if header["fortran"] == b"True" else "C"
    return _make_array(dtype, dtype.newbyteorder("=").name, shape, data, end, order)


def read_npz(data: bytes, max_bytes: int) -> dict[str | None, Array]:
    """The arrays of a .npz file by name, as of ``read_npy``.

    InputError: not such a file, empty, or with anything else in it. TooLargeError: it holds more than 256 entries, or
    unpacks to more than ``max_bytes``.
    """
    if data.count(_ZIP_ENTRY) > _MAX_ENTRIES:  # zipfile would make an object of each
        raise TooLargeError(f"the .npz file holds more arrays than the limit, {_MAX_ENTRIES}", hint=_INPUTS_HINT)
    try:
        with zipfile.ZipFile(BytesIO(data)) as archive:
            entries = archive.infolist()
            size = sum(entry.file_size for entry in entries)
            if size > max_bytes:
                detail = f"the .npz file unpacks to {size} bytes; the limit is {max_bytes}"
                raise TooLargeError(detail, hint="send fewer or smaller inputs")
            files = {entry.filename: _read_entry(archive, entry) for entry in entries}
    except LayertapError:
        raise
    except Exception as error:  # zipfile and zlib have no one error for what is broken
        raise InputError("this is not a .npz file", hint=_NPZ_HINT) from error
    if not files:
        raise InputError("the .npz file holds no arrays", hint="name each of the model's inputs in it")
    return {name.removesuffix(".npy"): _read_named_npy(name, file) for name, file in files.items()}


def read_safetensors(data: bytes) -> dict[str | None, Array]:
    """The arrays of a safetensors file by name; bfloat16 is widened to float32.

    InputError: not such a file, empty, or with a dtype that numpy does not have. TooLargeError: its header is longer
    than 1 MiB, or names more than 256 tensors.
    """
    length = int.from_bytes(data[:8], "little")
    if _MAX_SAFETENSORS_HEADER < length <= len(data):
        detail = f"the safetensors header has {length} bytes; the limit is {_MAX_SAFETENSORS_HEADER}"
        raise TooLargeError(detail, hint=_INPUTS_HINT)
    load: Callable[[bytes], list[tuple[str, dict[str, Any]]]] = deserialize
    try:
        tensors = load(data)
    except Exception as error:  # its error class is not public in every version
        raise InputError("this is not a safetensors file", hint="write it with safetensors.numpy.save") from error
    if len(tensors) > _MAX_ENTRIES:
        detail = f"the safetensors file holds {len(tensors)} tensors; the limit is {_MAX_ENTRIES}"
        raise TooLargeError(detail, hint=_INPUTS_HINT)
    if not tensors:
        raise InputError("the safetensors file holds no tensors", hint="name each of the model's inputs in it")
    return {name: _read_safetensor(name, entry) for name, entry in tensors}


def require_finite(array: Array) -> None:
    """InputError if there is a NaN or an infinity in ``array``; integers and booleans always pass."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InputError("the input holds NaN or infinite values", hint="send finite numbers only")


def decode_base64(text: str) -> bytes:
    """The bytes of standard base64, bare or as a ``data:`` URI; InputError for anything else."""
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise InputError("the data: URI is not base64", hint=_BASE64_HINT)
    try:
        if len(text) <= _BASE64_PIECE:
            return base64.b64decode(text, validate=True)
        if text.find("=", 0, -2) >= 0:  # at the end of a piece it would be taken
            raise ValueError
        starts = range(0, len(text), _BASE64_PIECE)
        return b"".join([base64.b64decode(text[start : start + _BASE64_PIECE], validate=True) for start in starts])
    except ValueError as error:
        raise InputError("the text is not base64", hint=_BASE64_HINT) from error


def _make_array(
    dtype: np.dtype[Any],
    name: str,
    shape: Sequence[int],
    data: bytes | bytearray | memoryview,
    offset: int = 0,
    order: Literal["C", "F"] = "C",
) -> Array:
    expected, actual = _count_elements(shape) * dtype.itemsize, len(data) - offset
    if expected != actual:
        detail = f"shape {list(shape)} of {name} takes {expected} bytes; {actual} were given"
        raise InputError(detail, hint="send exactly the bytes of the array")
    array: Array = np.ndarray(tuple(shape), dtype, buffer=data, offset=offset, order=order)
    if dtype.kind == "b":  # bytes other than 0 and 1 are invalid booleans in numpy and torch
        array = array.view(np.uint8) != 0
    return np.require(array, dtype.newbyteorder("="), ["C_CONTIGUOUS", "ALIGNED"])


def _count_elements(shape: Sequence[int]) -> int:
    if len(shape) > _MAX_RANK:
        raise InputError(f"the shape has {len(shape)} axes; at most {_MAX_RANK} are taken")
    # The second product ignores zeros, because numpy also refuses an empty array with too long axes.
    if not all(type(n) is int and 0 <= n <= _MAX_AXIS for n in shape) or math.prod(n or 1 for n in shape) >= 2**48:
        raise InputError("the shape makes no sense", hint="send a list of whole numbers, none negative")
    return math.prod(shape)


def _read_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """The bytes of an entry of an archive: never more than its directory says."""
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InputError("the .npz file is packed in an unusual way", hint=_NPZ_HINT)
    with archive.open(entry) as file:
        return file.read(entry.file_size + 1)  # one more, so that the checksum is looked at


def _read_named_npy(name: str, data: bytes) -> Array:
    try:
        return read_npy(data)
    except InputError as error:
        raise InputError(f"entry {escape(name)}: {error.detail}", hint=error.hint) from error


def _read_safetensor(name: str, entry: dict[str, Any]) -> Array:
    dtype = _SAFETENSORS_DTYPES.get(entry["dtype"])
    if dtype is None:
        hint = "convert it to one of " + ", ".join(_DTYPES)
        raise InputError(f"tensor {escape(name)} is of a dtype that is not taken", hint=hint)
    try:
        return read_tensor(dtype, entry["shape"], entry["data"])
    except InputError as error:
        raise InputError(f"tensor {escape(name)}: {error.detail}", hint=error.hint) from error


_CODES = {  # safetensors' own, of the dtypes that are taken
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
}
_SAFETENSORS_DTYPES = {code: name for name, code in _CODES.items()}
_DTYPES = {name: np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<") for name in _CODES}
