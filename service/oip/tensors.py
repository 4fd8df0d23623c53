"""Inputs as arrays or as encoded elements, from JSON or from the bytes behind it."""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import Any

import numpy as np

from layertap.models.errors import InputError
from layertap.service.inputs.arrays import Array, decode_base64, read_tensor
from layertap.service.oip.datatypes import get_dtype
from layertap.service.oip.schemas import TensorBody

LENGTH_BYTES = 4  # of the length that stands before each element
PIECE = 2**15  # numbers that are looked at at a time: meanwhile no other thread runs
KINDS: dict[str, tuple[set[type], str]] = {  # by numpy's kinds of dtypes
    "b": ({bool}, "true and false"),
    "i": ({int}, "whole numbers"),
    "u": ({int}, "whole numbers, none negative"),
    "f": ({int, float}, "numbers"),
}


def read_array(body: TensorBody, data: memoryview | None) -> Array:
    """The array of an input whose bytes are ``data``, None where its numbers are in the JSON; InputError."""
    dtype = get_dtype(body.datatype)
    if data is not None:
        return read_tensor(dtype, body.shape, data)
    if dtype == "bfloat16":
        raise InputError("JSON has no numbers of BF16", hint="send its bytes behind the JSON, or FP32")
    kind = np.dtype(dtype).kind
    numbers = _flatten(body)
    wide: Array = np.empty(len(numbers), WIDEST[kind])
    for start in range(0, len(numbers), PIECE):
        piece = numbers[start : start + PIECE]
        _check_types(piece, body, *KINDS[kind])
        try:
            wide[start : start + PIECE] = piece
        except OverflowError:
            raise InputError(f"there is a number beyond {body.datatype}") from None
    if kind in "iu" and wide.size and not (np.iinfo(dtype).min <= wide.min() and wide.max() <= np.iinfo(dtype).max):
        raise InputError(f"there is a number beyond {body.datatype}")
    with np.errstate(over="ignore"):  # what becomes infinite is refused with all that is not finite
        return wide.astype(dtype).reshape(body.shape)


def read_elements(body: TensorBody, data: memoryview | None) -> list[bytes]:
    """The elements of an input of datatype BYTES; InputError."""
    count = prod(body.shape)
    if data is None:
        texts = _flatten(body)
        _check_types(texts, body, {str}, "strings")
        return [text.encode() for text in texts]
    elements: list[bytes] = []
    start = 0
    for _ in range(count):
        stop = start + LENGTH_BYTES
        end = stop + int.from_bytes(data[start:stop], "little")
        if stop > len(data) or end > len(data):
            raise InputError(
                f"element {len(elements)} of {count} is cut off",
                hint=f"send each element behind its length, {LENGTH_BYTES} bytes little-endian",
            )
        elements.append(bytes(data[stop:end]))
        start = end
    if start < len(data):
        raise InputError(f"{len(data) - start} bytes are left behind {count} elements of shape {body.shape}")
    return elements


def read_pictures(body: TensorBody, data: memoryview | None) -> list[bytes]:
    """The same of encoded pictures, which JSON has in base64."""
    elements = read_elements(body, data)
    return elements if data is not None else [decode_base64(text.decode()) for text in elements]


def _flatten(body: TensorBody) -> list[Any]:
    """What JSON holds one after another; InputError where that does not fit the shape."""
    if not isinstance(body.data, list):
        detail = "there is no data" if body.data is None else "the data is no list"
        raise InputError(detail, hint="send a list, or 'binary_data_size' and the bytes behind the JSON")
    level, shape = body.data, [len(body.data)]
    while level and isinstance(level[0], list):
        lengths = {len(each) if isinstance(each, list) else -1 for each in level}
        if len(lengths) > 1:
            raise InputError("the data is nested unevenly", hint="send the numbers one after another")
        shape += lengths
        level = list(chain.from_iterable(level))
    if len(level) != prod(body.shape) or (len(shape) > 1 and shape != body.shape):
        found = f"is nested as {shape}" if len(shape) > 1 else f"has {len(level)} elements"
        raise InputError(f"the data {found}, the shape says {body.shape}")
    return level


def _check_types(values: list[Any], body: TensorBody, types: set[type], offer: str) -> None:
    if not types.issuperset(map(type, values)):
        raise InputError(f"the data of {body.datatype} is {offer}")


WIDEST = {"b": np.bool_, "i": np.int64, "u": np.uint64, "f": np.float64}
