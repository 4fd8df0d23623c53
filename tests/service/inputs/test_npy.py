""".npy bodies: what is read, by whomever it was written, and what is refused."""

from __future__ import annotations

import pickle
from io import BytesIO

import numpy as np
import pytest

from layertap.models.errors import InputError
from layertap.service.inputs.arrays import (
    read_npy,
)
from tests.service.inputs.array_files import (
    DTYPES,
    Array,
    Evil,
    is_same,
    make_array,
    make_described_npy,
    make_npy,
    make_npy_file,
)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_npy(dtype: str, order: str) -> None:
    """A .npy file of any number type and byte order gives its array, native-endian."""
    array = make_array(dtype).astype(np.dtype(order + dtype))
    assert is_same(read_npy(make_npy(array)), array)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(make_array("f4")),
        np.array(3.5, "f4"),
        np.zeros((0, 3), "f4"),
        np.zeros((3, 0), "i8", order="F"),
    ],
    ids=["fortran", "no axis", "no items", "empty fortran"],
)
def test_npy_shapes(array: Array) -> None:
    """Column order, no axes and axes of length zero are read as what they are."""
    assert is_same(read_npy(make_npy(array)), np.asarray(array, order="C"))


@pytest.mark.parametrize(
    "text",
    [
        "{'descr':'<f4','fortran_order':False,'shape':(2,3)}",
        '{ "descr" : "=f4" , "fortran_order" : True , "shape" : ( 2 , 3 , ) , }  \n',
        "{'descr': 'f4', 'fortran_order': False, 'shape': (6,), }",
    ],
    ids=["dense", "loose", "no byte order"],
)
def test_npy_by_other_writers(text: str) -> None:
    """Headers in other spellings mean what they mean to numpy."""
    data = make_npy_file(text, make_array("f4").tobytes())
    assert is_same(read_npy(data), np.load(BytesIO(data)))


BAD_NPY = {
    "empty": b"",
    "text": b"hello",
    "magic only": b"\x93NUMPY",
    "version": make_npy_file("{}", version=b"\x09\x00"),
    "pickle": pickle.dumps(Evil()),
    "objects": make_npy(np.array([Evil()], dtype=object)),
    "bytes": make_npy(np.array([b"a"])),
    "void": make_npy(np.zeros(2, "V4")),
    "structured": make_npy(np.zeros(2, [("a", "f4"), ("b", "i4")])),
    "complex": make_npy(np.zeros(2, "c8")),
    "subarray": make_described_npy("('<f4', (2,))", "(1,)", bytes(8)),
    "short body": make_npy(make_array("f4"))[:-1],
    "lying shape": make_described_npy("'<f4'", "(1000000000, 1000000000)", bytes(24)),
    "huge axes around zero": make_described_npy("'<f4'", f"(0, {2**31 - 1}, {2**31 - 1})"),
    "axis beyond any": make_described_npy("'<f4'", f"({10**300}, 0)"),
    "negative": make_described_npy("'<f4'", "(-1, -6)", bytes(24)),
    "boolean axis": make_described_npy("'<f4'", "(True, 1)", bytes(4)),
    "many axes": make_described_npy("'|u1'", str((1,) * 9), b"\x00"),
    "code": make_described_npy("__import__('os')", "(1,)"),
    "fields by comma": make_described_npy("'f4,f4'", "(1,)", bytes(8)),
    "ends numpy's process": make_described_npy("'8<2T '", "()", bytes(16)),
    "no shape": make_npy_file("{'descr': '<f4', 'fortran_order': False}", bytes(4)),
    "another key": make_npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 'y'}", bytes(4)),
    "a version to come": make_npy(make_array("f4")).replace(b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x07"),
    "more behind it": make_npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} + {}", bytes(4)),
    "deep": make_npy_file("(" * 3000),
    "long header": make_npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}" + " " * 5000, bytes(4)),
}


@pytest.mark.parametrize("kind", BAD_NPY)
def test_npy_refused(kind: str) -> None:
    """What is no plain array of numbers, or lies about its size, is refused without allocating or unpickling."""
    with pytest.raises(InputError) as caught:
        read_npy(BAD_NPY[kind])
    assert len(caught.value.detail) < 400
