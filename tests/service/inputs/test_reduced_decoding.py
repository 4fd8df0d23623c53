"""Large JPEGs decoded at a reduced scale: as far from the full decode as was measured, and otherwise just as before.

What ``decode: fast`` does besides, ``tests/models/inputs/test_preprocess.py`` compares.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torchvision.transforms import functional as tvf

from layertap.models.digits import spec as digits
from layertap.models.errors import InputError, LayertapError, TooLargeError
from layertap.models.inputs.preprocess import compute_least_size, preprocess
from layertap.models.spec import Interpolation, PreprocessSpec
from layertap.service.config.configuration import Configuration, read_configuration
from layertap.service.inputs.images import Picture, decode_image
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.inputs.test_images import encode, oriented
from tests.service.support import UPRIGHT, Array, arrays_of, image, problem, raw

LIMIT = 20_000_000
CHINA = Image.fromarray(load_sample_image("china.jpg"))
PLAIN = PreprocessSpec(resize=120, crop=None, mean=(0, 0, 0), std=(1, 1, 1))
# In steps of 8 bits. Measured on the pictures below: at most 18, and on average 1.0. Decoded at once the resized sides
# instead of twice, the sharp ones have 26 to 45, and 1.1 to 3.1.
MOST, MEAN = 24, 1.2


def photo(size: tuple[int, int], mode: str = "RGB", **options: Any) -> bytes:
    """The sample picture enlarged, with noise, as JPEG."""
    pixels = np.asarray(CHINA.resize(size, Image.Resampling.BICUBIC), np.int16)
    grain = np.random.default_rng(size[0]).integers(-8, 9, pixels.shape, dtype=np.int16)
    noisy = Image.fromarray((pixels + grain).clip(0, 255).astype(np.uint8))
    return encode(noisy.convert(mode), "JPEG", **{"quality": 90, **options})


def decoded(data: bytes, spec: PreprocessSpec = PLAIN, limit: int = LIMIT) -> Picture:
    return decode_image(data, limit, partial(compute_least_size, spec))


def fast(data: bytes, spec: PreprocessSpec = PLAIN) -> Array:
    """What is made of a picture, in steps of 8 bits, by the code to judge."""
    picture = decoded(data, spec)
    return preprocess(picture.image, spec, picture.size, picture.box).numpy() * 255


def exact(data: bytes, size: list[int], mode: str = "bilinear") -> Array:
    """The same by Pillow and torchvision alone, of the upright picture in full, for a resize to ``size``."""
    whole = Image.open(BytesIO(data))
    turned = {6: Image.Transpose.ROTATE_270, 3: Image.Transpose.ROTATE_180}.get(whole.getexif().get(0x0112, 1))
    upright = whole.convert("RGB") if turned is None else whole.convert("RGB").transpose(turned)
    resized = tvf.resize(upright, size, tvf.InterpolationMode(mode))
    return tvf.to_tensor(resized).numpy() * 255  # type: ignore[no-any-return]


PHOTOS: dict[str, tuple[tuple[int, int], str, dict[str, Any], Any]] = {  # size, mode, options, what it is resized to
    "tall": ((1001, 3000), "RGB", {}, 120),
    "turned": ((2001, 1503), "RGB", {"exif": oriented(6)}, 120),
    "full colour": ((2001, 1503), "RGB", {"subsampling": 0}, 120),
    "progressive": ((2001, 1503), "RGB", {"progressive": True}, 120),
    "gray turned": ((2049, 2047), "L", {"exif": oriented(6)}, 120),
    "cmyk": ((2001, 1503), "CMYK", {}, 120),
    "to height and width": ((2101, 2103), "RGB", {}, (256, 256)),
    "to a wide strip": ((2999, 2249), "RGB", {}, (100, 700)),
}


@pytest.mark.parametrize("kind", PHOTOS)
def test_photos(kind: str) -> None:
    """A large photo is decoded at no less than twice each side that is asked for, at a scale, and close to in full."""
    size, mode, options, resize = PHOTOS[kind]
    data, spec = photo(size, mode, **options), replace(PLAIN, resize=resize)
    picture = decoded(data, spec)
    assert picture.size == (size[::-1] if "turned" in kind else size)
    assert picture.box is not None
    assert picture.image.width < picture.size[0]
    height, width = resize if isinstance(resize, tuple) else (resize, resize)
    assert picture.image.height >= 2 * height
    assert picture.image.width >= 2 * width
    check_close(data, spec)


SHARP = encode(CHINA, "JPEG", quality=95)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("side", [26, 106])
def test_sharp(side: int, mode: Interpolation) -> None:
    """A picture with detail in every pixel, just large enough for each scale, stays within what was measured."""
    check_close(SHARP, replace(PLAIN, resize=side, interpolation=mode))


def check_close(data: bytes, spec: PreprocessSpec) -> None:
    """What is made of a reduced picture has the full decode's shape, and its values within what was measured."""
    sides = [spec.resize] if isinstance(spec.resize, int) else list(spec.resize or ())
    found, expected = fast(data, spec), exact(data, sides, spec.interpolation)
    assert found.shape == expected.shape
    apart = np.abs(found - expected)
    assert apart.max() < MOST
    assert 0 < apart.mean() < MEAN


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_orientation(orientation: int) -> None:
    """However a picture is turned, its part of the reduced image is turned with it: 7 pixels beyond are left out."""
    stored, (width, height) = photo((2049, 1537)), (257, 193)
    turned = photo((2049, 1537), exif=oriented(orientation))
    tall = orientation > 4
    spec = replace(PLAIN, resize=(64, 48) if tall else (48, 64))
    picture = decoded(turned, spec)
    assert np.array_equal(np.asarray(picture.image), UPRIGHT[orientation](np.asarray(decoded(stored, PLAIN48).image)))
    assert picture.image.size == ((height, width) if tall else (width, height))
    # Marked where it is beyond the picture: an eighth of the last column and row is the picture's.
    marks = np.zeros((height, width), bool)
    marks[-1], marks[:, -1] = True, True
    upright = UPRIGHT[orientation](marks[..., None])[..., 0]
    left, upper, right, lower = picture.box or (0, 0, 0, 0)
    for line, start, end in ((upright.all(0), left, right), (upright.all(1), upper, lower)):
        assert (start, end) == ((0.875, len(line)) if line[0] else (0, len(line) - 0.875))


PLAIN48 = replace(PLAIN, resize=(48, 64))


@pytest.mark.parametrize(
    ("data", "spec"),
    [
        (photo((640, 427)), replace(PLAIN, resize=232)),
        (photo((640, 427), exif=oriented(6)), replace(PLAIN, resize=256, crop=224)),
        (photo((1600, 1200)), replace(PLAIN, resize=None, crop=224)),
        (photo((1600, 1200)), replace(PLAIN, interpolation="nearest")),
        (encode(CHINA.resize((1600, 1200)), "PNG", exif=oriented(6)), PLAIN),
    ],
    ids=["small", "small turned", "no resize", "nearest", "png"],
)
def test_bit_for_bit(data: bytes, spec: PreprocessSpec) -> None:
    """Small pictures, other formats, and rows that need single pixels have the full decode's bits."""
    picture = decoded(data, spec)
    assert picture.box is None
    row = preprocess(picture.image, spec, picture.size, picture.box)
    assert torch.equal(row, preprocess(decode_image(data, LIMIT).image, spec))


def test_limit_counts_in_full() -> None:
    """The limit of pixels is that of the picture in full, as its header says."""
    data = photo((2000, 1500))
    with pytest.raises(TooLargeError, match=r"3000000 pixels \(2000 by 1500\); the limit is 2999999"):
        decoded(data, limit=2_999_999)
    assert decoded(data, limit=3_000_000).box is not None


def refusal(data: bytes, *, reduce: bool) -> tuple[str, str]:
    try:
        decoded(data) if reduce else decode_image(data, LIMIT)
    except LayertapError as error:
        return type(error).__name__, error.detail
    return "", ""


@pytest.mark.parametrize("options", [{}, {"progressive": True}], ids=["baseline", "progressive"])
def test_truncated(options: dict[str, Any]) -> None:
    """A photo cut short anywhere is refused just where, and as, the full decode refuses it."""
    data = photo((1200, 900), **options)
    for kept in (*(int(len(data) * part / 8) for part in range(8)), len(data) - 400, len(data) - 2, len(data) - 1):
        assert refusal(data[:kept], reduce=True) == refusal(data[:kept], reduce=False)
    with pytest.raises(InputError, match="cut short"):
        decoded(data[: len(data) // 2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_over_http(serve: Serve, tmp_path: Path) -> None:
    """Only ``fast`` gives other numbers, and of a large photo alone; each mode is shown, and in the fingerprint.

    ``device`` on a CPU has the bits of ``exact``.
    """
    entry = "{{name: {0}, source: 'python:layertap.models.digits:digits', weights: 'random:0', decode: {0}, {1}}}"
    how = "inputs: [{name: image, shape: [3, 32, 32]}], preprocess: {resize: 32, crop: 32}"
    file, modes = tmp_path / "models.yaml", ("exact", "fast", "device")
    file.write_text(f"models: [{', '.join(entry.format(mode, how) for mode in modes)}]", encoding="utf-8")
    pictures = photo((1600, 1200)), photo((64, 48)), SHARP
    with serve(Configuration((digits(), *read_configuration(file).models), "exact")) as live:
        exact, fast, device = (ask(live, mode, *pictures) for mode in modes)
        assert len({exact["fingerprint"], fast["fingerprint"], device["fingerprint"]}) == 3
        assert exact["fingerprint"] == ask(live, "exact", pictures[1])["fingerprint"]
        assert np.array_equal(exact["values"], device["values"])
        apart = np.abs(exact["values"] - fast["values"]).max((1, 2, 3)) * 255 * 0.224  # in steps of 8 bits
        assert 0 < apart[0] < 6
        assert apart[1] <= 1.01
        shown = [live.client.get(f"/models/{mode}").json()["preprocess"] for mode in modes]
        assert [each.pop("decode") for each in shown] == list(modes)
        assert shown[0] == shown[1] == shown[2]
        for mode in modes:
            refused = live.client.post("/extract", **raw(pictures[0][:9000], "image/jpeg", model=mode, layers="pool"))
            assert "cut short" in problem(refused, 422)["errors"][0]["detail"]


def ask(live: Live, model: str, *pictures: bytes) -> dict[str, Any]:
    body = {"model": model, "layers": ["block1:input"], "inputs": [image(data) for data in pictures]}
    reply = live.client.post("/extract", json=body)
    return {"fingerprint": reply.json()["fingerprint"], "values": next(iter(arrays_of(reply).values()))}
