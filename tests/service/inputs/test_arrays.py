"""Tensors in JSON, base64, finite numbers, and arrays that are damaged anywhere."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from layertap.models.errors import InputError, LayertapError
from layertap.service.inputs.arrays import (
    decode_base64,
    read_npy,
    read_safetensors,
    read_tensor,
    require_finite,
)
from layertap.service.inputs.items import ArraysItem, ImageItem
from tests.service.inputs.array_files import DTYPES, is_same, make_array, make_npy


def test_booleans() -> None:
    """Of a boolean's byte, as in C, anything but zero is true, and it is true as 1 from there on."""
    assert read_tensor("bool", [4], b"\x00\x01\x02\xff").tobytes() == b"\x00\x01\x01\x01"
    assert read_npy(make_npy(np.array([2, 0], "u1")).replace(b"|u1", b"|b1")).tobytes() == b"\x01\x00"


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor(dtype: str) -> None:
    """Little-endian bytes in C order with dtype and shape give the array."""
    array = make_array(dtype)
    assert is_same(read_tensor(array.dtype.name, [2, 3], array.astype(array.dtype.newbyteorder("<")).tobytes()), array)


def test_tensor_bfloat16() -> None:
    """The bytes of bfloat16 are widened to the float32 of the same value."""
    assert is_same(read_tensor("bfloat16", [2], b"\xc0\x3f\x00\xc0"), np.array([1.5, -2], "f4"))


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "said"),
    [
        ("float32", [2, 3], 23, "takes 24 bytes; 23 were given"),
        ("float32", [], 0, "takes 4 bytes; 0 were given"),
        ("bfloat16", [2], 2, "of bfloat16 takes 4 bytes"),
        ("float32", [10**6, 10**6], 4, "takes 4000000000000 bytes"),
        ("float32", [-1], 0, "makes no sense"),
        ("float32", [True], 4, "makes no sense"),
        ("float32", [10**5000], 4, "makes no sense"),
        ("float32", [2**31 - 1] * 8, 4, "makes no sense"),
        ("float32", [1] * 9, 4, "at most 8"),
        ("float33", [1], 4, "'float33' is not taken"),
        ("object", [1], 8, "is not taken"),
    ],
)
def test_tensor_refused(dtype: str, shape: list[Any], size: int, said: str) -> None:
    """A dtype, shape or number of bytes that does not fit is refused with what was expected and what was given."""
    with pytest.raises(InputError) as caught:
        read_tensor(dtype, shape, bytes(size))
    assert said in caught.value.detail
    assert len(caught.value.detail) < 400


@pytest.mark.parametrize(("dtype", "value"), [("f2", np.nan), ("f4", np.inf), ("f8", -np.inf)])
def test_not_finite(dtype: str, value: float) -> None:
    """A single NaN or infinity is refused."""
    array = np.zeros((3, 4), dtype)
    array[2, 1] = value
    with pytest.raises(InputError, match="NaN or infinite"):
        require_finite(array)


PLAIN = base64.b64encode(bytes(range(250))).decode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", b""),
        ("aGk=", b"hi"),
        (PLAIN, bytes(range(250))),
        ("data:image/png;base64,aGk=", b"hi"),
        ("data:text/plain;charset=utf-8;base64,aGk=", b"hi"),
    ],
)
def test_base64(text: str, expected: bytes) -> None:
    """Standard base64 is decoded, bare or in a data: URI."""
    assert decode_base64(text) == expected


NOT_BASE64 = {
    "no padding": "aGk",
    "two in one": "aGk=aGk=",
    "line break": "aGk=\n",
    "URL alphabet": "_-8=",
    "not ASCII": "é",
    "percent encoding": "data:;base64,%61Gk=",
    "data URI without base64": "data:image/png,aGk=",
    "data URI of nothing": "data:",
    "URL": "https://example.org/x.png",
}


@pytest.mark.parametrize("text", NOT_BASE64.values(), ids=NOT_BASE64)
def test_base64_refused(text: str) -> None:
    """Anything else is refused, with what to send."""
    with pytest.raises(InputError) as caught:
        decode_base64(text)
    assert "standard base64" in caught.value.hint


def outcome(read: Callable[[bytes], object], data: bytes) -> str:
    try:
        read(data)
    except LayertapError as error:
        return error.detail
    return ""


READERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "npy": (read_npy, make_npy(make_array("f4"))),
    "safetensors": (read_safetensors, safetensors.numpy.save({"x": make_array("f4"), "y": make_array("i4")})),
}


@pytest.mark.parametrize("kind", READERS)
def test_damaged(kind: str) -> None:
    """Whatever bytes of a file are changed, it is read or refused in the tree's own errors."""
    chance = random.Random(kind)
    read, whole = READERS[kind]
    for _ in range(400):
        data = bytearray(whole[: chance.randrange(len(whole))] if chance.random() < 0.2 else whole)
        for _ in range(chance.randint(1, 4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        assert len(outcome(read, bytes(data))) < 400


def test_items_hide_their_contents() -> None:
    """An item's text form shows none of the input, so that no log can."""
    shown = repr(ImageItem(b"secret")) + repr(ArraysItem({None: np.array([123456])}))
    assert "secret" not in shown
    assert "123456" not in shown
