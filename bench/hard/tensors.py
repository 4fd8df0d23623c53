"""Hostile arrays in the three formats that a body may have, made by hand."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np

ROW = np.zeros((3, 32, 32), np.float32)
MIB = 1 << 20
NPY, NPZ, SAFETENSORS = "application/x-npy", "application/x-npz", "application/x-safetensors"
COMMAND = "cos\nsystem\n(S'exit 1'\ntR."


class Evil:
    """What unpickling would call; numpy has a type of its own for it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('an unpickler ran')",))


def npy(array: Any) -> bytes:
    """A .npy file."""
    stream = BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def header(text: str, body: bytes = b"") -> bytes:
    """A .npy file with a header by hand."""
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)) + text.encode() + body


def described(shape: str, body: bytes = b"", descr: str = "'<f4'") -> bytes:
    """A .npy file that claims a shape."""
    return header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n", body)


def zipped(body: bytes) -> bytes:
    """A .npz file of one entry."""
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("image.npy", body)
    return stream.getvalue()


def safetensors(text: str, body: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with a header by hand, which may claim another length."""
    return struct.pack("<Q", len(text) if length is None else length) + text.encode() + body


def entry(shape: str, begin: int, end: int, dtype: str = "F32", name: str = "image") -> str:
    """A tensor in such a header."""
    return f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def wide(value: float, dtype: str = "<f4") -> Any:
    """A good row but for its last number."""
    array = ROW.astype(dtype)
    array.flat[-1] = value
    return array


@dataclass(frozen=True)
class Hostile:
    """A body: its type, what makes it, the status it gets, and a word that the answer says."""

    kind: str
    make: Callable[[], bytes]
    status: int = 422
    says: str = ""


def _npy(body: bytes, says: str = "") -> Hostile:
    return Hostile(NPY, lambda: body, 422, says)


def _tensors(text: str, body: bytes = b"", length: int | None = None, says: str = "") -> Hostile:
    return Hostile(SAFETENSORS, lambda: safetensors(text, body, length), 422, says)


CASES: dict[str, Hostile] = {
    "npy of objects": _npy(npy(np.array([Evil()], object)), "not a .npy"),
    "npy of a structure of objects": _npy(npy(np.zeros(2, [("a", object)])), "not a .npy"),
    "npy that is a pickle": _npy(pickle.dumps(Evil()), "not a .npy"),
    "npy that is a pickle by hand": _npy(COMMAND.encode(), "not a .npy"),
    "npy with code in its header": _npy(described("(1,)", bytes(4), "__import__('os').system('exit 1')"), "not a .npy"),
    "npy with code as its header": _npy(header("__import__('os').system('exit 1')\n"), "not a .npy"),
    "npy with code as its shape": _npy(described("(exec('1/0'),)"), "not a .npy"),
    "npy with a header of depth": _npy(header("(" * 4000), "not a .npy"),
    "npy with a header of 60 kB": _npy(header("{" + " " * 60_000 + "}"), "not a .npy"),
    "npy with a number of 4,000 digits": _npy(described(f"({'9' * 4000},)")),
    "npy that lies about its shape": _npy(described("(3, 32000, 32000)", bytes(64)), "takes"),
    "npy that lies by one byte": _npy(npy(ROW)[:-1], "takes"),
    "npy of a negative shape": _npy(described("(-3, -32, 32)", bytes(12_288)), "not a .npy"),
    "npy of one negative axis": _npy(described("(-1,)", bytes(4)), "not a .npy"),
    "npy of a shape beyond 64 bits": _npy(described(f"({2**62}, 4, 4)"), "makes no sense"),
    "npy of a shape that wraps to zero": _npy(described(f"({2**32}, {2**32})"), "makes no sense"),
    "npy of a shape that wraps to one": _npy(described(f"({2**63 + 1}, 2)", bytes(8)), "makes no sense"),
    "npy of huge axes around a zero": _npy(described(f"(0, {2**31 - 1}, {2**31 - 1}, {2**31 - 1})"), "makes no sense"),
    "npy of rank 40": _npy(described(str((1,) * 40), bytes(4)), "40 axes"),
    "npy of rank 400": _npy(described(str((1,) * 400), bytes(4)), "400 axes"),
    "npy of no end": _npy(npy(wide(np.inf)), "finite"),
    "npy of no number": _npy(npy(wide(np.nan)), "finite"),
    "npy beyond float32": _npy(npy(wide(1e300, "<f8")), "finite"),
    "npz of 100 MB in 100 kB": Hostile(
        NPZ, lambda: zipped(described("(26214400,)", bytes(100 * MIB))), 413, "unpacks to"
    ),
    "npz of a pickle": Hostile(NPZ, lambda: zipped(pickle.dumps(Evil())), 422, "not a .npy"),
    "safetensors with a header of 16 EiB": _tensors("{}", length=2**64 - 1),
    "safetensors with a header longer than it": _tensors("{}", length=1000),
    "safetensors with a header beyond 1 MiB": Hostile(
        SAFETENSORS, lambda: safetensors("{" + " " * MIB + "}"), 413, "header"
    ),
    "safetensors with a header of depth": _tensors("[" * 100_000),
    "safetensors of 5,000 tensors": Hostile(
        SAFETENSORS,
        lambda: safetensors("{" + ",".join(entry("[0]", 0, 0, name=f"x{n}") for n in range(5000)) + "}"),
        413,
        "5000",
    ),
    "safetensors that lies": _tensors("{" + entry("[3,32000,32000]", 0, 64) + "}", bytes(64)),
    "safetensors beyond its end": _tensors("{" + entry("[3,32,32]", 0, 12_288) + "}", bytes(64)),
    "safetensors of overlaps": _tensors(
        "{" + entry("[4]", 0, 16, name="a") + "," + entry("[4]", 8, 24, name="b") + "}", bytes(24)
    ),
    "safetensors of one place for two": _tensors(
        "{" + entry("[4]", 0, 16, name="a") + "," + entry("[4]", 0, 16, name="b") + "}", bytes(16)
    ),
    "safetensors with a hole": _tensors("{" + entry("[3,32,32]", 8, 12_296) + "}", bytes(12_296)),
    "safetensors of backward offsets": _tensors("{" + entry("[4]", 16, 0) + "}", bytes(16)),
    "safetensors of a shape that wraps": _tensors("{" + entry(f"[{2**32},{2**32}]", 0, 0) + "}"),
    "safetensors of a negative shape": _tensors("{" + entry("[-3,32,32]", 0, 12_288) + "}", bytes(12_288)),
    "safetensors of rank 40": _tensors("{" + entry(str([1] * 40), 0, 4) + "}", bytes(4), says="40 axes"),
    "safetensors of no number": _tensors("{" + entry("[3,32,32]", 0, 12_288) + "}", b"\xff" * 12_288, says="finite"),
    "safetensors of no number in 16 bits": _tensors(
        "{" + entry("[3,32,32]", 0, 6144, "BF16") + "}", b"\x80\x7f" * 3072, says="finite"
    ),
    "safetensors that is a pickle": Hostile(SAFETENSORS, lambda: pickle.dumps(Evil())),
}
