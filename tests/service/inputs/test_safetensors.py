"""safetensors bodies: what is read, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import safetensors.numpy

from layertap.models.errors import InputError
from layertap.service.inputs.arrays import (
    read_safetensors,
)
from tests.service.inputs.array_files import DTYPES, is_same, make_array, make_safetensors


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors(dtype: str) -> None:
    """A safetensors file of any number type gives its arrays by name."""
    arrays = {"x": make_array(dtype), "empty": np.zeros((0, 2), dtype), "no axis": np.array(1, dtype)}
    found = read_safetensors(safetensors.numpy.save(arrays))
    assert found.keys() == arrays.keys()
    assert all(is_same(found[name], arrays[name]) for name in arrays)


def test_safetensors_bfloat16() -> None:
    """A bfloat16 tensor is widened to the float32 of the same value."""
    body = np.array([0x3FC0, 0xC000, 0x7F80, 0x0001], "<u2").tobytes()
    found = read_safetensors(make_safetensors('{"x":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}', body))
    assert is_same(found["x"], np.array([[1.5, -2.0], [np.inf, 2.0**-133]], "f4"))


BAD_SAFETENSORS = {
    "empty": b"",
    "text": b"hello, this is no tensor",
    "long header": struct.pack("<Q", 2**62) + b"{}",
    "no tensors": make_safetensors("{}"),
    "list": make_safetensors("[]"),
    "lying": make_safetensors('{"x":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,8]}}', bytes(8)),
    "beyond": make_safetensors('{"x":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}', bytes(8)),
    "negative": make_safetensors('{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}', bytes(8)),
    "many axes": make_safetensors('{"x":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}', bytes(1)),
    "float8": make_safetensors('{"x":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}', bytes(2)),
    "complex": make_safetensors('{"x":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}', bytes(8)),
}


@pytest.mark.parametrize("kind", BAD_SAFETENSORS)
def test_safetensors_refused(kind: str) -> None:
    """What is no safetensors file, or lies about its size, is refused."""
    with pytest.raises(InputError) as caught:
        read_safetensors(BAD_SAFETENSORS[kind])
    assert len(caught.value.detail) < 400
