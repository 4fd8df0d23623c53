"""Arrays to and from bytes: .npy and safetensors; what is read is a view of the bytes, never a copy."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from layertap_client.errors import BadReplyError, InputError

Array = NDArray[Any]
METADATA = "__metadata__"
DTYPES = {
    "BOOL": "?",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def to_array(value: Any) -> Array:
    """An array, a torch tensor, or whatever numpy reads, as an array that can be sent: little-endian, in C order.

    Torch's bfloat16, which numpy does not have, becomes float32. InputError where it holds no numbers.
    """
    if hasattr(value, "detach"):  # a tensor of torch, which need not be imported to know it
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "?buif" or array.dtype.newbyteorder("<") not in NAMES:
        raise InputError(f"an array of {array.dtype} can't be sent; use bool, integers or floats of up to 64 bits")
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def write_npy(array: Array) -> bytes:
    """A .npy file of what ``to_array`` gives."""
    stream = BytesIO()
    npy_format.write_array(stream, array, version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def get_only(arrays: Mapping[str, Array]) -> Array:
    """The only array; ValueError where there are several, or none."""
    if len(arrays) != 1:
        raise ValueError(f"there are {len(arrays)} arrays: {', '.join(arrays)}")
    return next(iter(arrays.values()))


def write_safetensors(arrays: Mapping[str, Array]) -> bytes:
    """A safetensors file of what ``to_array`` gives, each under its name."""
    header: dict[str, Any] = {}
    end = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [end, end := end + array.nbytes],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return b"".join((struct.pack("<Q", len(text)), text, *(array.tobytes() for array in arrays.values())))


def read_safetensors(body: bytearray) -> tuple[dict[str, Array], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata.

    Each array is a writable view of ``body``, which they own together; BadReplyError.
    """
    try:
        (length,) = struct.unpack_from("<Q", body)
        start = 8 + length
        if start > len(body):
            raise BadReplyError("the safetensors reply is cut")
        header = json.loads(body[8:start])
        metadata = header.pop(METADATA, {})
        arrays = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            dtype = np.dtype(DTYPES[entry["dtype"]])
            arrays[name] = _view(body, start + first, start + last, dtype, entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise BadReplyError(f"the safetensors reply can't be read: {error!r}") from None
    return arrays, metadata


def _view(body: bytearray, start: int, end: int, dtype: np.dtype[Any], shape: Any) -> Array:
    count = int(np.prod(shape, dtype=np.int64)) if len(shape) else 1
    if count * dtype.itemsize != end - start or not 0 <= start <= end <= len(body):
        raise BadReplyError("the reply is cut, or says wrongly how long it is")
    return np.frombuffer(body, dtype, count, start).reshape(shape) if count else np.zeros(shape, dtype)
