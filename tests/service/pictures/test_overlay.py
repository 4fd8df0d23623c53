"""Maps over the pictures that they explain."""

from __future__ import annotations

import tracemalloc
from io import BytesIO

import numpy as np
import pytest
from PIL import ExifTags, Image

from layertap.models.errors import TooLargeError
from layertap.models.spec import PreprocessSpec
from layertap.service.pictures.colormaps import Scale
from layertap.service.pictures.overlay import Original, SentPicture, find_map_scale, lay_over

SCALE = Scale(0.0, 1.0, diverging=False)


def sent(image: Image.Image, spec: PreprocessSpec, **options: object) -> SentPicture:
    stream = BytesIO()
    image.save(stream, **{"format": "PNG"} | options)  # type: ignore[arg-type]
    return SentPicture(stream.getvalue(), spec, 10**6)


def test_upright() -> None:
    """A picture that is stored on its side is shown upright."""
    image = Image.new("RGB", (60, 30), (0, 0, 255))
    image.paste((255, 0, 0), (0, 0, 30, 30))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # to be turned by 90 degrees, clockwise: its left side is above then
    original = sent(image, PreprocessSpec(), format="JPEG", exif=exif, quality=95).decode(60, 10**6)[0]
    assert original.image.size == (30, 60)
    red, _, blue = original.image.getpixel((15, 5))  # type: ignore[misc]
    assert red > 200 > 50 > blue


def test_the_part_that_is_seen() -> None:
    """A map covers what a centre crop leaves of a picture; what the model does not see is dark."""
    image = Image.new("RGB", (200, 100), (200, 200, 200))
    original = sent(image, PreprocessSpec(resize=50, crop=50)).decode(200, 10**6)[0]
    assert original.seen == (50.0, 0.0, 150.0, 100.0)
    drawn = np.asarray(lay_over(original, np.ones((7, 7), np.float32), SCALE)).astype(int)
    assert (drawn[:, :50] == drawn[0, 0]).all()
    assert (drawn[:, 150:] == drawn[0, 0]).all()
    assert (drawn[:, 50:150] == drawn[50, 100]).all()
    assert drawn[50, 100].sum() > drawn[0, 0].sum() + 100


def test_where_the_map_is_high() -> None:
    """The place that is coloured most is where the map's maximum is, in the colour of the scale's end."""
    original = Original(Image.new("RGB", (90, 90), (128, 128, 128)), (0.0, 0.0, 90.0, 90.0))
    values = np.zeros((3, 3), np.float32)
    values[0, 2] = 1.0
    drawn = np.asarray(lay_over(original, values, SCALE)).astype(int)
    covered = np.abs(drawn - 128).sum(-1)
    row, column = np.unravel_index(covered.argmax(), covered.shape)
    assert row < 30
    assert column >= 60
    assert (drawn[80, 5] == 128).all()


def test_signs() -> None:
    """What speaks for a class is warm, what speaks against it cold, and what does neither has no colour."""
    original = Original(Image.new("RGB", (90, 90), (128, 128, 128)), (0.0, 0.0, 90.0, 90.0))
    values = np.zeros((3, 3), np.float32)
    values[0, 2], values[2, 0] = 1.0, -1.0
    drawn = np.asarray(lay_over(original, values, Scale(-1.0, 1.0, diverging=True))).astype(int)
    warmth = drawn[..., 0] - drawn[..., 2]
    assert warmth[15, 75] > 50
    assert warmth[75, 15] < -50
    assert np.abs(warmth[45, 45]) <= 2


def test_outliers() -> None:
    """A few numbers that are far larger than all others do not set the scale."""
    scale = find_map_scale(np.array([[1.0] * 999 + [1e6]]), is_share=False)
    assert (scale.low, scale.high) == (0.0, 1.0)


def test_crop_far_beyond_the_picture() -> None:
    """A picture of one pixel under a large crop takes no memory beyond what is drawn."""
    original = sent(Image.new("RGB", (1, 1), (90, 90, 90)), PreprocessSpec(crop=224)).decode(288, 10**6)[0]
    tracemalloc.start()
    drawn = lay_over(original, np.random.default_rng(0).random((14, 14)).astype(np.float32), SCALE)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drawn.size == (288, 288)
    assert peak < 50 * 2**20


def test_too_many_pixels() -> None:
    """What has more pixels than may be decoded is refused by its head."""
    picture = sent(Image.new("RGB", (100, 100)), PreprocessSpec())
    assert picture.decode(50, 10_000)[1] == 10_000
    with pytest.raises(TooLargeError):
        picture.decode(50, 9_999)
