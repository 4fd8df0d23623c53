from __future__ import annotations

import base64
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from layertap.models.errors import InputError, LayertapError, TooLargeError
from layertap.service.inputs.arrays import (
    decode_base64,
    read_npy,
    read_npz,
    read_safetensors,
    read_tensor,
    require_finite,
)
from layertap.service.inputs.items import ArraysItem, ImageItem

Array = np.ndarray[Any, Any]
LIMIT = 1_000_000
NUMBERS = [1.5, -2, 0, 7, 100, 3]
DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]


def npy(array: Array) -> bytes:
    stream = BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npz(pack: Callable[..., None] = np.savez, **arrays: Array) -> bytes:
    stream = BytesIO()
    pack(stream, **arrays)
    return stream.getvalue()


def zipped(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, body in entries.items():
            archive.writestr(name, body)
    return stream.getvalue()


def header(text: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + struct.pack("<H", len(text)) + text.encode() + body


def described(descr: str, shape: str, body: bytes = b"") -> bytes:
    return header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n", body)


def sample(dtype: str) -> Array:
    return np.array(NUMBERS).astype("i8" if dtype.startswith("u") else dtype).astype(dtype).reshape(2, 3)


def same(found: Array, expected: Array) -> bool:
    """Equal bits, native byte order, C order."""
    native = expected.astype(expected.dtype.newbyteorder("="))
    return (
        found.dtype == native.dtype
        and found.dtype.isnative
        and found.flags.c_contiguous
        and found.shape == expected.shape
        and found.tobytes() == native.tobytes()
    )


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_npy(dtype: str, order: str) -> None:
    """A .npy file of any number type and byte order gives its array, native-endian."""
    array = sample(dtype).astype(np.dtype(order + dtype))
    assert same(read_npy(npy(array)), array)


@pytest.mark.parametrize(
    "array",
    [np.asfortranarray(sample("f4")), np.array(3.5, "f4"), np.zeros((0, 3), "f4"), np.zeros((3, 0), "i8", order="F")],
    ids=["fortran", "no axis", "no items", "empty fortran"],
)
def test_npy_shapes(array: Array) -> None:
    """Column order, no axes and axes of length zero are read as what they are."""
    assert same(read_npy(npy(array)), np.asarray(array, order="C"))


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy_versions(version: tuple[int, int]) -> None:
    """All versions of the format are read."""
    stream = BytesIO()
    np.lib.format.write_array(stream, sample("f4"), version=version)
    assert same(read_npy(stream.getvalue()), sample("f4"))


@pytest.mark.parametrize(
    "text",
    [
        "{'descr':'<f4','fortran_order':False,'shape':(2,3)}",
        "{'shape': (2, 3), 'fortran_order': False, 'descr': '<f4'}\n",
        '{ "descr" : "=f4" , "fortran_order" : True , "shape" : ( 2 , 3 , ) , }  \n',
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }\n",
        "{'descr': 'f4', 'fortran_order': False, 'shape': (6,), }",
    ],
    ids=["dense", "other order", "loose", "Python 2", "no byte order"],
)
def test_npy_by_other_writers(text: str) -> None:
    """Headers in other spellings mean what they mean to numpy."""
    data = header(text, sample("f4").tobytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # numpy has one for the spelling of Python 2
        expected = np.load(BytesIO(data))
    assert same(read_npy(data), expected)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("an unpickler ran",))


BAD_NPY = {
    "empty": b"",
    "text": b"hello",
    "magic only": b"\x93NUMPY",
    "version": header("{}", version=b"\x09\x00"),
    "pickle": pickle.dumps(Evil()),
    "objects": npy(np.array([Evil()], dtype=object)),
    "strings": npy(np.array(["a"])),
    "bytes": npy(np.array([b"a"])),
    "void": npy(np.zeros(2, "V4")),
    "structured": npy(np.zeros(2, [("a", "f4"), ("b", "i4")])),
    "dates": npy(np.zeros(2, "M8[s]")),
    "complex": npy(np.zeros(2, "c8")),
    "long double": npy(np.zeros(2, np.longdouble)),
    "subarray": described("('<f4', (2,))", "(1,)", bytes(8)),
    "short body": npy(sample("f4"))[:-1],
    "long body": npy(sample("f4")) + b"\x00",
    "lying shape": described("'<f4'", "(1000000000, 1000000000)", bytes(24)),
    "lying shape, one axis": described("'|u1'", "(99999999999999,)"),
    "huge axes around zero": described("'<f4'", f"(0, {2**31 - 1}, {2**31 - 1})"),
    "axis beyond any": described("'<f4'", f"({10**300}, 0)"),
    "negative": described("'<f4'", "(-1, -6)", bytes(24)),
    "boolean axis": described("'<f4'", "(True, 1)", bytes(4)),
    "many axes": described("'|u1'", str((1,) * 9), b"\x00"),
    "no tuple": described("'<f4'", "6", bytes(24)),
    "code": described("__import__('os')", "(1,)"),
    "numbers in parentheses": described("'<f4'", "(6)", bytes(24)),
    "names": described("'float32'", "(1,)", bytes(4)),
    "fields by comma": described("'f4,f4'", "(1,)", bytes(8)),
    "ends numpy's process": described("'8<2T '", "()", bytes(16)),
    "no shape": header("{'descr': '<f4', 'fortran_order': False}", bytes(4)),
    "order by number": header("{'descr': '<f4', 'fortran_order': 1, 'shape': (1,)}", bytes(4)),
    "another key": header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 'y'}", bytes(4)),
    "brackets for quotes": described("[<f4]", "(1,)", bytes(4)),
    "a version to come": npy(sample("f4")).replace(b"\x93NUMPY\x01\x00", b"\x93NUMPY\x01\x07"),
    "more behind it": header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} + {}", bytes(4)),
    "unknown dtype": described("'<q9'", "(1,)"),
    "deep": header("(" * 3000),
    "long header": header("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}" + " " * 5000, bytes(4)),
}


@pytest.mark.parametrize("kind", BAD_NPY)
def test_npy_refused(kind: str) -> None:
    """What is no plain array of numbers, or lies about its size, is refused without allocating or unpickling."""
    with pytest.raises(InputError) as caught:
        read_npy(BAD_NPY[kind])
    assert len(caught.value.detail) < 400


@pytest.mark.parametrize("pack", [np.savez, np.savez_compressed])
def test_npz(pack: Callable[..., None]) -> None:
    """A .npz file, packed or not, gives its arrays by name."""
    arrays = {"pixels": sample("f4"), "mask": sample("?"), "a.b-c_1": np.array(4, "i8")}
    found = read_npz(npz(pack, **arrays), LIMIT)
    assert found.keys() == arrays.keys()
    assert all(same(found[name], arrays[name]) for name in arrays)


def encrypted() -> bytes:
    data = bytearray(npz(x=sample("f4")))
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + offset] |= 1
    return bytes(data)


def mislabelled() -> bytes:
    """An entry that unpacks to more than its directory says."""
    data = bytearray(zipped({"x.npy": npy(np.zeros(5000))}, zipfile.ZIP_DEFLATED))
    data[data.index(b"PK\x01\x02") + 24 : data.index(b"PK\x01\x02") + 28] = struct.pack("<I", 200)
    return bytes(data)


def twice() -> bytes:
    return zipped({"x.npy": npy(sample("f4")), "y.npy": npy(sample("f4"))}).replace(b"y.npy", b"x.npy")


BAD_NPZ = {
    "empty": b"",
    "text": b"hello",
    "npy": npy(sample("f4")),
    "no entries": zipped({}),
    "cut": npz(x=sample("f4"))[:-30],
    "encrypted": encrypted(),
    "mislabelled": mislabelled(),
    "twice": twice(),
    "lzma": zipped({"x.npy": npy(sample("f4"))}, zipfile.ZIP_LZMA),
    "path": zipped({"../x.npy": npy(sample("f4"))}),
    "absolute": zipped({"/x.npy": npy(sample("f4"))}),
    "backslash": zipped({"a\\x.npy": npy(sample("f4"))}),
    "folder": zipped({"a/": b""}),
    "other file": zipped({"x.txt": b"hello"}),
    "no name": zipped({".npy": npy(sample("f4"))}),
    "long name": zipped({"x" * 300 + ".npy": npy(sample("f4"))}),
    "objects": zipped({"x.npy": npy(np.array([Evil()], dtype=object))}),
    "pickle": zipped({"x.npy": pickle.dumps(Evil())}),
    "crowd": zipped({f"x{n}.npy": b"" for n in range(300)}),
}


@pytest.mark.parametrize("kind", BAD_NPZ)
def test_npz_refused(kind: str) -> None:
    """An archive that is broken, encrypted or holds anything else than NAME.npy is refused."""
    with pytest.raises(InputError) as caught:
        read_npz(BAD_NPZ[kind], LIMIT)
    assert len(caught.value.detail) < 400


def test_npz_too_large() -> None:
    """A small archive that unpacks to too much is refused by figure and limit before it is unpacked."""
    data = npz(np.savez_compressed, x=np.zeros(200_000), y=np.zeros(200_000))
    assert len(data) < 10_000
    with pytest.raises(TooLargeError, match=r"3200\d\d\d bytes; the limit is 1000000"):
        read_npz(data, LIMIT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_safetensors(dtype: str) -> None:
    """A safetensors file of any number type gives its arrays by name."""
    arrays = {"x": sample(dtype), "empty": np.zeros((0, 2), dtype), "no axis": np.array(1, dtype)}
    found = read_safetensors(safetensors.numpy.save(arrays))
    assert found.keys() == arrays.keys()
    assert all(same(found[name], arrays[name]) for name in arrays)


def raw_safetensors(text: str, body: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + body


def test_safetensors_bfloat16() -> None:
    """A bfloat16 tensor is widened to the float32 of the same value."""
    body = np.array([0x3FC0, 0xC000, 0x7F80, 0x0001], "<u2").tobytes()
    found = read_safetensors(raw_safetensors('{"x":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}', body))
    assert same(found["x"], np.array([[1.5, -2.0], [np.inf, 2.0**-133]], "f4"))


BAD_SAFETENSORS = {
    "empty": b"",
    "text": b"hello, this is no tensor",
    "long header": struct.pack("<Q", 2**62) + b"{}",
    "no tensors": raw_safetensors("{}"),
    "list": raw_safetensors("[]"),
    "lying": raw_safetensors('{"x":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,8]}}', bytes(8)),
    "beyond": raw_safetensors('{"x":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}', bytes(8)),
    "negative": raw_safetensors('{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}', bytes(8)),
    "many axes": raw_safetensors('{"x":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}}', bytes(1)),
    "float8": raw_safetensors('{"x":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}', bytes(2)),
    "complex": raw_safetensors('{"x":{"dtype":"C64","shape":[1],"data_offsets":[0,8]}}', bytes(8)),
}


@pytest.mark.parametrize("kind", BAD_SAFETENSORS)
def test_safetensors_refused(kind: str) -> None:
    """What is no safetensors file, or lies about its size, is refused."""
    with pytest.raises(InputError) as caught:
        read_safetensors(BAD_SAFETENSORS[kind])
    assert len(caught.value.detail) < 400


def test_booleans() -> None:
    """Of a boolean's byte, as in C, anything but zero is true, and it is true as 1 from there on."""
    assert read_tensor("bool", [4], b"\x00\x01\x02\xff").tobytes() == b"\x00\x01\x01\x01"
    assert read_npy(npy(np.array([2, 0], "u1")).replace(b"|u1", b"|b1")).tobytes() == b"\x01\x00"


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor(dtype: str) -> None:
    """Little-endian bytes in C order with dtype and shape give the array."""
    array = sample(dtype)
    assert same(read_tensor(array.dtype.name, [2, 3], array.astype(array.dtype.newbyteorder("<")).tobytes()), array)


def test_tensor_bfloat16() -> None:
    """The bytes of bfloat16 are widened to the float32 of the same value."""
    assert same(read_tensor("bfloat16", [2], b"\xc0\x3f\x00\xc0"), np.array([1.5, -2], "f4"))


@pytest.mark.parametrize(("shape", "count"), [([], 1), ([0, 5], 0), ([1] * 8, 1)])
def test_tensor_shapes(shape: list[int], count: int) -> None:
    """No axes, an axis of length zero and the highest rank are shapes like any other."""
    assert read_tensor("float32", shape, bytes(4 * count)).shape == tuple(shape)


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "said"),
    [
        ("float32", [2, 3], 23, "takes 24 bytes; 23 were given"),
        ("float32", [2, 3], 48, "takes 24 bytes; 48 were given"),
        ("float32", [], 0, "takes 4 bytes; 0 were given"),
        ("float32", [0], 4, "takes 0 bytes; 4 were given"),
        ("bfloat16", [2], 2, "of bfloat16 takes 4 bytes"),
        ("float32", [10**6, 10**6], 4, "takes 4000000000000 bytes"),
        ("float32", [-1], 0, "makes no sense"),
        ("float32", [True], 4, "makes no sense"),
        ("float32", [1.0], 4, "makes no sense"),
        ("float32", [10**5000], 4, "makes no sense"),
        ("float32", [2**31 - 1] * 8, 4, "makes no sense"),
        ("float32", [1] * 9, 4, "at most 8"),
        ("float33", [1], 4, "'float33' is not taken"),
        ("complex64", [1], 8, "is not taken"),
        ("object", [1], 8, "is not taken"),
        ("", [1], 8, "is not taken"),
    ],
)
def test_tensor_refused(dtype: str, shape: list[Any], size: int, said: str) -> None:
    """A dtype, shape or number of bytes that does not fit is refused with what was expected and what was given."""
    with pytest.raises(InputError) as caught:
        read_tensor(dtype, shape, bytes(size))
    assert said in caught.value.detail
    assert len(caught.value.detail) < 400


@pytest.mark.parametrize("array", [sample("f4"), sample("f2"), sample("i8"), sample("?"), np.zeros((0,), "f4")])
def test_finite(array: Array) -> None:
    """Finite numbers, integers, booleans and no numbers at all pass."""
    require_finite(array)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
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
        ("DATA:image/png;BASE64,aGk=", b"hi"),
        ("data:;base64,aGk=", b"hi"),
        ("data:text/plain;charset=utf-8;base64,aGk=", b"hi"),
    ],
)
def test_base64(text: str, expected: bytes) -> None:
    """Standard base64 is decoded, bare or in a data: URI."""
    assert decode_base64(text) == expected


NOT_BASE64 = {
    "no padding": "aGk",
    "too much padding": "aGk==",
    "two in one": "aGk=aGk=",
    "line break": "aGk=\n",
    "space": "a Gk=",
    "URL alphabet": "_-8=",
    "not ASCII": "é",
    "surrogate": "\ud800",
    "percent encoding": "data:;base64,%61Gk=",
    "data URI without base64": "data:image/png,aGk=",
    "data URI without comma": "data:image/png;base64",
    "data URI without padding": "data:;base64,aGk",
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
    "npy": (read_npy, npy(sample("f4"))),
    "npz": (lambda data: read_npz(data, LIMIT), npz(np.savez_compressed, x=sample("f4"), y=sample("i4"))),
    "safetensors": (read_safetensors, safetensors.numpy.save({"x": sample("f4"), "y": sample("i4")})),
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
