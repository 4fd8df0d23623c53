"""The readers: what each may be given, what it may raise, what must hold of what it gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import safetensors.numpy
from PIL import Image

from layertap.models.errors import InputError, LayertapError, SelectorError, TooLargeError
from layertap.models.plan.requested import Selector
from layertap.models.plan.selectors import parse_selector
from layertap.service.errors import UnsupportedMediaError
from layertap.service.inputs.arrays import Array, read_npy, read_npz, read_safetensors
from layertap.service.inputs.images import decode_image

MAX_PIXELS = 1_000_000
MAX_BYTES = 2**22
LEAST = 32


@dataclass(frozen=True)
class Reader:
    """``read`` checks what it gives, and raises one of ``refusals`` or nothing; ``seeds`` are good inputs."""

    read: Callable[[bytes], None]
    refusals: tuple[type[LayertapError], ...]
    seeds: Callable[[], dict[str, bytes]]


def _image(data: bytes) -> None:
    _check_picture(decode_image(data, MAX_PIXELS).image)
    _check_picture(decode_image(data, MAX_PIXELS, lambda width, height: (LEAST, LEAST)).image)


def _check_picture(image: Image.Image) -> None:
    assert image.mode == "RGB", image.mode
    assert image.width * image.height <= MAX_PIXELS, image.size
    image.tobytes()


def _arrays(read: Callable[[bytes], Mapping[Any, Array]]) -> Callable[[bytes], None]:
    def checked(data: bytes) -> None:
        for array in read(data).values():
            assert array.dtype.kind in "fiub", array.dtype
            assert array.flags.c_contiguous
            assert array.flags.aligned
            array.sum()  # reads all of it

    return checked


def _selector(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")  # lone surrogates too
    found = parse_selector(text)
    assert isinstance(found, Selector), found


def _pictures() -> dict[str, bytes]:
    found = {}
    modes = {"PNG": ("RGB", "LA", "P", "I;16"), "JPEG": ("RGB", "CMYK", "L"), "GIF": ("P",)}
    for kind, names in {
        **modes,
        "BMP": ("RGB",),
        "WEBP": ("RGB", "RGBA"),
        "AVIF": ("RGB",),
        "TIFF": ("RGB", "1"),
    }.items():
        for mode in names:
            stream = BytesIO()
            Image.new(mode, (9, 7), 1).save(stream, kind)
            found[f"{mode.replace(';', '')}.{kind.lower()}"] = stream.getvalue()
    return found


def _npy(array: Array) -> bytes:
    stream = BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _npys() -> dict[str, bytes]:
    arrays = (np.zeros((2, 3), np.float32), np.zeros((), np.int64), np.ones((1, 2, 2), bool, order="F"))
    return {f"{place}.npy": _npy(array) for place, array in enumerate(arrays)}


def _npzs() -> dict[str, bytes]:
    stored, packed = BytesIO(), BytesIO()
    np.savez(stored, x=np.zeros((2, 3), np.float32))
    np.savez_compressed(packed, x=np.zeros((2, 3), np.float32), y=np.ones(2))
    return {"stored.npz": stored.getvalue(), "packed.npz": packed.getvalue()}


def _safetensors() -> dict[str, bytes]:
    whole = safetensors.numpy.save({"x": np.zeros((2, 3), np.float32), "y": np.ones(2, np.int8)}, {"a": "b"})
    header = json.dumps({"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    return {"two": whole, "bfloat16": len(header).to_bytes(8, "little") + header + b"\0" * 4}


def _selectors() -> dict[str, bytes]:
    texts = ("layer3.*.bn2", "head#-1[0][logits]:grad_output", ".", "a?b#*:input", "block1:attention")
    return {str(place): text.encode() for place, text in enumerate(texts)}


READERS: dict[str, Reader] = {
    "image": Reader(_image, (InputError, TooLargeError, UnsupportedMediaError), _pictures),
    "npy": Reader(_arrays(lambda data: {"": read_npy(data)}), (InputError, TooLargeError), _npys),
    "npz": Reader(_arrays(lambda data: read_npz(data, MAX_BYTES)), (InputError, TooLargeError), _npzs),
    "safetensors": Reader(_arrays(read_safetensors), (InputError, TooLargeError), _safetensors),
    "selector": Reader(_selector, (SelectorError,), _selectors),
}
