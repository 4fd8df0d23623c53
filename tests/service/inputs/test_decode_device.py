"""``decode: device``: which files a GPU is given, and that all others are decoded as ever."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

from layertap.models.digits import spec as digits
from layertap.models.errors import InputError, TooLargeError
from layertap.models.inputs.device_decoder import DeviceDecoder
from layertap.models.run.loaded_model import LoadedModel
from layertap.models.spec import ModelSpec, PreprocessSpec
from layertap.service.engine.execute.decode import decode_item, normalize_rows
from layertap.service.inputs.images import get_plain_jpeg_size
from layertap.service.inputs.items import EncodedItem
from layertap.service.settings import Settings
from tests.loading import load_model
from tests.service.inputs.test_images import encode, oriented

LIMIT = 1_000_000
CHINA = Image.fromarray(load_sample_image("china.jpg").copy())
SIZE = CHINA.size
HOW = PreprocessSpec(resize=40, crop=32, mean=(0, 0, 0), std=(1, 1, 1))


def saved(form: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    return encode(CHINA.convert(mode), form, **options)


def adobe(data: bytes, transform: int) -> bytes:
    """A JPEG that says by an Adobe marker, and by no other, whether its components are colours or luma and chroma."""
    jfif = 2 + 2 + struct.unpack(">H", data[4:6])[0]
    assert data[2:4] == b"\xff\xe0"
    body = b"Adobe" + struct.pack(">HHHB", 100, 0, 0, transform)
    return data[:2] + b"\xff\xee" + struct.pack(">H", len(body) + 2) + body + data[jfif:]


JPEG = saved()
PLAIN = {
    "colours": JPEG,
    "gray": saved(mode="L"),
    "progressive": saved(progressive=True),
    "full colour": saved(subsampling=0),
    "upright": saved(exif=oriented(1)),
    "Adobe's luma": adobe(JPEG, 1),
}
OTHERS = {
    **{f"turned {value}": saved(exif=oriented(value)) for value in (3, 6)},
    "CMYK": saved(mode="CMYK"),
    "Adobe's colours": adobe(JPEG, 0),
    "both": JPEG[:2] + adobe(JPEG, 0)[2:18] + JPEG[2:],
    "more after its end": JPEG + b"\0",
    "cut short": JPEG[:-2],
    "no picture": b"\xff\xd8\xff" + b"\xff\xd9" * 9,
    "PNG": saved("PNG"),
    "nothing": b"",
}


@pytest.mark.parametrize("data", PLAIN.values(), ids=PLAIN.keys())
def test_plain(data: bytes) -> None:
    """Upright JPEGs of luma, alone or with two chromas, whole to their end."""
    assert get_plain_jpeg_size(data, LIMIT) == SIZE


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS.keys())
def test_others(data: bytes) -> None:
    """What one decoder may see otherwise than another, or refuse, is left to the CPU."""
    assert get_plain_jpeg_size(data, LIMIT) is None


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    spec = ModelSpec("net", "python:layertap.models.digits:digits", weights="random:0", device="cpu", preprocess=HOW)
    return load_model(replace(spec, inputs=digits().inputs))


@pytest.fixture
def placed(model: LoadedModel) -> LoadedModel:
    """The model with the decoder of a GPU's, on the CPU: torchvision decodes and resizes."""
    spec = replace(model.spec, decode="device")
    inputs = replace(model.model_inputs, decode="device", decoder=DeviceDecoder(torch.device("cpu"), HOW))
    return replace(model, spec=spec, model_inputs=inputs)


def row(model: LoadedModel, data: bytes, **limits: int) -> Any:
    (rows,) = decode_item(EncodedItem(data), model.model_inputs, Settings(**limits))
    assert not isinstance(rows, Exception)
    (value,) = normalize_rows(rows, model.model_inputs).values()
    return value


@pytest.mark.filterwarnings("ignore:.*decod:DeprecationWarning")
def test_rows(model: LoadedModel, placed: LoadedModel) -> None:
    """A plain JPEG goes through the device's decoder: nearly the same row, of the same shape."""
    for data in PLAIN.values():
        found, wanted = row(placed, data), row(model, data)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert not torch.equal(found, wanted)
        assert (found - wanted).abs().max() <= 2.1 / 255


@pytest.mark.parametrize("kind", ["turned 3", "turned 6", "CMYK", "Adobe's colours", "more after its end", "PNG"])
def test_other_rows(model: LoadedModel, placed: LoadedModel, kind: str) -> None:
    """All other pictures have the bits of ``exact``."""
    assert torch.equal(row(placed, OTHERS[kind]), row(model, OTHERS[kind]))


@pytest.mark.filterwarnings("ignore:.*decod:DeprecationWarning")
def test_refused_by_the_decoder(model: LoadedModel, placed: LoadedModel) -> None:
    """What the device's decoder can't decode the CPU does, or refuses in its own words."""
    start = JPEG.index(b"\xff\xda")
    broken = JPEG[: start + 400] + b"\xff\xd9"  # an end where half a picture is missing
    assert get_plain_jpeg_size(broken, LIMIT) == SIZE
    refusals = []
    for each in (placed, model):
        with pytest.raises(InputError) as caught:
            row(each, JPEG[:start] + b"\xff\xd9")
        refusals.append(caught.value.detail)
    assert refusals[0] == refusals[1]


@pytest.mark.filterwarnings("ignore:.*decod:DeprecationWarning")
def test_limits(placed: LoadedModel) -> None:
    """Both limits hold before anything is decoded."""
    for limits in ({"max_pixels": 1000}, {"max_resized_pixels": 1000}):
        with pytest.raises(TooLargeError, match="the limit is 1000"):
            row(placed, JPEG, **limits)
