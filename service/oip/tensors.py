"""Reads the inputs of an inference as items: arrays by the names of the model's inputs, encoded pictures, texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, TypeVar

import numpy as np

from layertap.models.errors import InputError, RequestError, escape
from layertap.service.engine.limits import check_count
from layertap.service.inputs.arrays import Array, decode_base64, read_tensor
from layertap.service.inputs.items import ArraysItem, EncodedItem, InputItem, TextItem
from layertap.service.oip.schemas import InputTensor
from layertap.service.settings import Settings

T = TypeVar("T")
IMAGE, TEXT = "encoded_image", "text"
BYTES = "BYTES"  # elements of any length, each preceded by its length
DTYPES = {
    "BOOL": "bool",
    **{f"{kind}{bits}": f"{kind.lower()}{bits}" for kind in ("UINT", "INT") for bits in (8, 16, 32, 64)},
    "FP16": "float16",
    "BF16": "bfloat16",
    "FP32": "float32",
    "FP64": "float64",
}
DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items()}
LENGTH_BYTES = 4  # of the length before each element
PIECE = 2**15  # numbers checked at a time, while no other thread runs
KINDS: dict[str, tuple[Any, set[type], str]] = {  # by numpy's dtype kind: the widest dtype, JSON's types and their name
    "b": (np.bool_, {bool}, "true and false"),
    "i": (np.int64, {int}, "whole numbers"),
    "u": (np.uint64, {int}, "whole numbers, none negative"),
    "f": (np.float64, {int, float}, "numbers"),
}


def read_items(
    bodies: Sequence[InputTensor], rest: memoryview, settings: Settings
) -> tuple[tuple[int, InputItem], ...]:
    """The items of a request; ``rest`` is the bytes after its JSON; RequestError, TooLargeError."""
    names = [body.name for body in bodies]
    if len(set(names)) < len(names):
        raise RequestError("two inputs have one name", hint="send rows as a batch")
    pieces = _split_bytes(bodies, rest)
    if all(body.datatype != BYTES for body in bodies):
        arrays: dict[str | None, Array] = {
            body.name: _read(body, _read_array, piece) for body, piece in zip(bodies, pieces, strict=True)
        }
        return ((0, ArraysItem(arrays, may_batch=True, by_name=True)),)
    if len(bodies) > 1:
        detail = f"an input of datatype {BYTES} must be a request's only one"
        raise RequestError(detail, hint="send others in requests of their own")
    (body,), (piece,) = bodies, pieces
    if (make_item := READERS.get(body.name)) is None:
        hint = " or ".join(f"'{name}'" for name in READERS)
        raise RequestError(f"no input {escape(body.name)} is of datatype {BYTES}", hint=f"name it {hint}")
    if not body.shape or body.shape[1:] not in ([], [1]) or not prod(body.shape):
        raise RequestError(f"{body.name}: shape {body.shape} is not taken", hint="send shape [N, 1] or [N]")
    check_count(body.shape[0], settings)
    return tuple((row, make_item(element)) for row, element in enumerate(_read(body, _read_elements, piece)))


def _split_bytes(bodies: Sequence[InputTensor], rest: memoryview) -> list[memoryview | None]:
    """The bytes of each input, None if its numbers are in the JSON; RequestError unless all bytes are used."""
    pieces: list[memoryview | None] = []
    start = 0
    for body in bodies:
        size = body.parameters.binary_data_size
        if size is not None and body.data is not None:
            raise RequestError(f"{escape(body.name)} has 'data' and 'binary_data_size'", hint="send it once")
        if start + (size or 0) > len(rest):
            detail = f"{escape(body.name)} has {size} bytes after the JSON, of which {len(rest) - start} are there"
            raise RequestError(detail, hint="the header Inference-Header-Content-Length says where the JSON ends")
        pieces.append(None if size is None else rest[start : start + size])
        start += size or 0
    if start < len(rest):
        raise RequestError(f"{len(rest) - start} bytes after the JSON belong to no input")
    return pieces


def _read(body: InputTensor, read: Callable[[InputTensor, memoryview | None], T], data: memoryview | None) -> T:
    try:
        return read(body, data)
    except InputError as error:
        raise RequestError(f"{escape(body.name)}: {error.detail}", hint=error.hint) from None


def _read_array(body: InputTensor, data: memoryview | None) -> Array:
    """The array of an input from ``data``, or, if None, from the JSON; InputError."""
    if (dtype := DTYPES.get(body.datatype)) is None:
        hint = f"use {', '.join(DTYPES)} or {BYTES}"
        raise InputError(f"datatype {escape(body.datatype)} is not taken", hint=hint)
    if data is not None:
        return read_tensor(dtype, body.shape, data)
    if dtype == "bfloat16":
        raise InputError("JSON has no numbers of BF16", hint="send its bytes after the JSON, or FP32")
    widest, types, offer = KINDS[np.dtype(dtype).kind]
    numbers = _flatten(body)
    wide: Array = np.empty(len(numbers), widest)
    for start in range(0, len(numbers), PIECE):
        piece = numbers[start : start + PIECE]
        _check_types(piece, body, types, offer)
        try:
            wide[start : start + PIECE] = piece
        except OverflowError:
            raise InputError(f"there is a number beyond {body.datatype}") from None
    with np.errstate(over="ignore"):  # infinities are refused later
        array = wide.astype(dtype)
    if wide.dtype.kind in "iu" and not np.array_equal(array, wide):
        raise InputError(f"there is a number beyond {body.datatype}")
    return array.reshape(body.shape)


def _read_elements(body: InputTensor, data: memoryview | None) -> list[bytes]:
    """The elements of an input of datatype BYTES; in JSON, pictures are base64, as texts may be; InputError."""
    count = prod(body.shape)
    if data is None:
        texts = _flatten(body)
        _check_types(texts, body, {str}, "strings")
        is_base64 = body.name == IMAGE or body.parameters.content_type == "base64"
        return [decode_base64(text) if is_base64 else text.encode() for text in texts]
    elements: list[bytes] = []
    start = 0
    for number in range(count):
        stop = start + LENGTH_BYTES
        end = stop + int.from_bytes(data[start:stop], "little")
        if stop > len(data) or end > len(data):
            hint = f"send each element after its length, {LENGTH_BYTES} bytes little-endian"
            raise InputError(f"element {number} of {count} is cut off", hint=hint)
        elements.append(bytes(data[stop:end]))
        start = end
    if start < len(data):
        raise InputError(f"{len(data) - start} bytes are left after {count} elements of shape {body.shape}")
    return elements


def _flatten(body: InputTensor) -> list[Any]:
    """The numbers in the JSON as a flat list; InputError if they do not fit the shape."""
    if not isinstance(body.data, list):
        detail = "there is no data" if body.data is None else "the data is no list"
        raise InputError(detail, hint="send a list, or 'binary_data_size' and the bytes after the JSON")
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


def _check_types(values: list[Any], body: InputTensor, types: set[type], offer: str) -> None:
    if not types.issuperset(map(type, values)):
        raise InputError(f"the data of {body.datatype} is {offer}")


READERS: Mapping[str, Callable[[bytes], InputItem]] = {IMAGE: EncodedItem, TEXT: TextItem.decode}
