""".npz bodies: what is read, and what is refused before it is unpacked."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Callable

import numpy as np
import pytest

from layertap.models.errors import InputError, TooLargeError
from layertap.service.inputs.arrays import (
    read_npz,
)
from tests.service.inputs.array_files import LIMIT, Evil, is_same, make_array, make_npy, make_npz, make_zip


@pytest.mark.parametrize("pack", [np.savez, np.savez_compressed])
def test_npz(pack: Callable[..., None]) -> None:
    """A .npz file, packed or not, gives its arrays by name."""
    arrays = {"pixels": make_array("f4"), "mask": make_array("?"), "a.b-c_1": np.array(4, "i8")}
    found = read_npz(make_npz(pack, **arrays), LIMIT)
    assert found.keys() == arrays.keys()
    assert all(is_same(found[name], arrays[name]) for name in arrays)


def encrypted() -> bytes:
    data = bytearray(make_npz(x=make_array("f4")))
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + offset] |= 1
    return bytes(data)


def mislabelled() -> bytes:
    """An entry that unpacks to more than its directory says."""
    data = bytearray(make_zip({"x.npy": make_npy(np.zeros(5000))}, zipfile.ZIP_DEFLATED))
    data[data.index(b"PK\x01\x02") + 24 : data.index(b"PK\x01\x02") + 28] = struct.pack("<I", 200)
    return bytes(data)


def twice() -> bytes:
    return make_zip({"x.npy": make_npy(make_array("f4")), "y.npy": make_npy(make_array("f4"))}).replace(
        b"y.npy", b"x.npy"
    )


BAD_NPZ = {
    "empty": b"",
    "text": b"hello",
    "npy": make_npy(make_array("f4")),
    "no entries": make_zip({}),
    "cut": make_npz(x=make_array("f4"))[:-30],
    "encrypted": encrypted(),
    "mislabelled": mislabelled(),
    "twice": twice(),
    "lzma": make_zip({"x.npy": make_npy(make_array("f4"))}, zipfile.ZIP_LZMA),
    "path": make_zip({"../x.npy": make_npy(make_array("f4"))}),
    "absolute": make_zip({"/x.npy": make_npy(make_array("f4"))}),
    "backslash": make_zip({"a\\x.npy": make_npy(make_array("f4"))}),
    "folder": make_zip({"a/": b""}),
    "other file": make_zip({"x.txt": b"hello"}),
    "no name": make_zip({".npy": make_npy(make_array("f4"))}),
    "long name": make_zip({"x" * 300 + ".npy": make_npy(make_array("f4"))}),
    "objects": make_zip({"x.npy": make_npy(np.array([Evil()], dtype=object))}),
    "pickle": make_zip({"x.npy": pickle.dumps(Evil())}),
    "crowd": make_zip({f"x{n}.npy": b"" for n in range(300)}),
}


@pytest.mark.parametrize("kind", BAD_NPZ)
def test_npz_refused(kind: str) -> None:
    """An archive that is broken, encrypted or holds anything else than NAME.npy is refused."""
    with pytest.raises(InputError) as caught:
        read_npz(BAD_NPZ[kind], LIMIT)
    assert len(caught.value.detail) < 400


def test_npz_too_large() -> None:
    """A small archive that unpacks to too much is refused by figure and limit before it is unpacked."""
    data = make_npz(np.savez_compressed, x=np.zeros(200_000), y=np.zeros(200_000))
    assert len(data) < 10_000
    with pytest.raises(TooLargeError, match=r"3200\d\d\d bytes; the limit is 1000000"):
        read_npz(data, LIMIT)
