"""Tensors in JSON, files of arrays, base64: what is read, by whomever it was written, and what is refused.

Files that are hostile ``tests/service/test_hostile_tensors.py`` sends, and damaged ones ``tests/fuzz`` reads.
"""

from __future__ import annotations

import base64
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from layertap.models.errors import InputError, TooLargeError
from layertap.service.inputs.arrays import (
    decode_base64,
    read_npy,
    read_npz,
    read_safetensors,
    read_tensor,
    require_finite,
)
from layertap.service.inputs.items import ArraysItem, EncodedItem
from tests.service.support import Array, npy, npz

LIMIT = 1_000_000
NUMBERS = [1.5, -2, 0, 7, 100, 3]
DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]


def make_array(dtype: str) -> Array:
    return np.array(NUMBERS).astype("i8" if dtype.startswith("u") else dtype).astype(dtype).reshape(2, 3)


def make_npy_file(text: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text.encode() + body


def make_described_npy(descr: str, shape: str, body: bytes = b"") -> bytes:
    return make_npy_file(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n", body)


def make_safetensors(text: str, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + body


def make_zip(entries: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, body in entries.items():
            archive.writestr(name, body)
    return stream.getvalue()


def encrypt(data: bytes) -> bytes:
    """An archive of one entry that says it is encrypted."""
    changed = bytearray(data)
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        changed[data.index(mark) + offset] |= 1
    return bytes(changed)


def understate(data: bytes) -> bytes:
    """An archive of one entry whose directory says that it unpacks to 200 bytes."""
    place = data.index(b"PK\x01\x02") + 24
    return data[:place] + struct.pack("<I", 200) + data[place + 4 :]


def is_same(found: Array, expected: Array) -> bool:
    """Equal bits, native byte order, C order."""
    native = expected.astype(expected.dtype.newbyteorder("="))
    plain = found.dtype.isnative and found.flags.c_contiguous
    same_kind = (found.dtype, found.shape) == (native.dtype, native.shape)
    return plain and same_kind and found.tobytes() == native.tobytes()


def test_booleans() -> None:
    """Of a boolean's byte, as in C, anything but zero is true, and it is true as 1 from there on."""
    assert read_tensor("bool", [4], b"\x00\x01\x02\xff").tobytes() == b"\x00\x01\x01\x01"
    assert read_npy(npy(np.array([2, 0], "u1")).replace(b"|u1", b"|b1")).tobytes() == b"\x01\x00"


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
        pytest.param("AAAA" * 2**18 + "aGk=", bytes(3 * 2**18) + b"hi", id="long"),
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
    "two in a long one": "A" * (2**20 - 2) + "==" + "aGk=",
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


def test_items_hide_their_contents() -> None:
    """An item's text form shows none of the input, so that no log can."""
    shown = repr(EncodedItem(b"secret")) + repr(ArraysItem({None: np.array([123456])}))
    assert "secret" not in shown
    assert "123456" not in shown


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_npy(dtype: str, order: str) -> None:
    """A .npy file of any number type and byte order gives its array, native-endian."""
    array = make_array(dtype).astype(np.dtype(order + dtype))
    assert is_same(read_npy(npy(array)), array)


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
    assert is_same(read_npy(npy(array)), np.asarray(array, order="C"))


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
    "bytes": npy(np.array([b"a"])),
    "void": npy(np.zeros(2, "V4")),
    "structured": npy(np.zeros(2, [("a", "f4"), ("b", "i4")])),
    "complex": npy(np.zeros(2, "c8")),
    "subarray": make_described_npy("('<f4', (2,))", "(1,)", bytes(8)),
    "boolean axis": make_described_npy("'<f4'", "(True, 1)", bytes(4)),
    "fields by comma": make_described_npy("'f4,f4'", "(1,)", bytes(8)),
    "ends numpy's process": make_described_npy("'8<2T '", "()", bytes(16)),
    "no shape": make_npy_file("{'descr': '<f4', 'fortran_order': False}", bytes(4)),
    "another key": make_npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 'y'}", bytes(4)),
    "a version to come": npy(make_array("f4")).replace(b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x07"),
    "more behind it": make_npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} + {}", bytes(4)),
    "long header": make_npy_file("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}" + " " * 5000, bytes(4)),
}


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


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(save: Callable[..., None]) -> None:
    """A .npz file, packed or not, gives its arrays by name."""
    arrays = {"pixels": make_array("f4"), "a.b-c_1": np.array(4, "i8"), "batch.ids": np.zeros((0, 2), "u1")}
    stream = BytesIO()
    save(stream, **arrays)
    found = read_npz(stream.getvalue(), LIMIT)
    assert found.keys() == arrays.keys()
    assert all(is_same(found[name], arrays[name]) for name in arrays)


BAD_NPZ = {
    "empty": b"",
    "npy": npy(make_array("f4")),
    "no entries": make_zip({}),
    "cut": npz(x=make_array("f4"))[:-30],
    "another checksum": make_zip({"x.npy": npy(make_array("f4"))}, zipfile.ZIP_STORED).replace(
        b"\x00\x00\xc0?", bytes(4)
    ),
    "encrypted": encrypt(npz(x=make_array("f4"))),
    "more than it says": understate(npz(x=np.zeros(5000))),
    "lzma": make_zip({"x.npy": npy(make_array("f4"))}, zipfile.ZIP_LZMA),
    "another file": make_zip({"x.txt": b"hello"}),
    "folder": make_zip({"a/": b""}),
    "objects": npz(x=np.array([{}], object)),
}


@pytest.mark.parametrize("count", [257, 70_000])
def test_npz_of_many(count: int) -> None:
    """An archive of very many entries is refused before its directory is read."""
    with pytest.raises(TooLargeError, match="more arrays than the limit, 256"):
        read_npz(make_zip({f"{number}.npy": b"" for number in range(257)}) * (count // 257), LIMIT)


def test_npz_too_large() -> None:
    """A small archive that unpacks to too much is refused before it is unpacked."""
    data = npz(x=np.zeros(200_000), y=np.zeros(200_000))
    assert len(data) < 10_000
    with pytest.raises(TooLargeError, match=r"3200\d\d\d bytes; the limit is 1000000"):
        read_npz(data, LIMIT)


BAD_SAFETENSORS = {
    "empty": b"",
    "text": b"hello, this is no tensor",
    "no tensors": make_safetensors("{}"),
    "list": make_safetensors("[]"),
    "float8": make_safetensors('{"x":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}', bytes(2)),
    "complex": make_safetensors('{"x":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}', bytes(8)),
}


FILES: list[tuple[Callable[[bytes], object], bytes, str]]
FILES = [(read_npy, data, f"npy {kind}") for kind, data in BAD_NPY.items()]
FILES += [(partial(read_npz, max_bytes=LIMIT), data, f"npz {kind}") for kind, data in BAD_NPZ.items()]
FILES += [(read_safetensors, data, f"safetensors {kind}") for kind, data in BAD_SAFETENSORS.items()]


@pytest.mark.parametrize(("read", "data"), [each[:2] for each in FILES], ids=[each[2] for each in FILES])
def test_files_refused(read: Callable[[bytes], object], data: bytes) -> None:
    """What is no plain array of numbers, or lies about its size, is refused without allocating."""
    with pytest.raises(InputError) as caught:
        read(data)
    assert len(caught.value.detail) < 400
