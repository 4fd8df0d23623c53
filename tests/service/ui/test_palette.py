"""The page has the server's colours, and lays maps where the server lays them."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from layertap.models.spec import PreprocessSpec
from layertap.service.pictures.colormaps import DIVERGING, NOT_FINITE, SEQUENTIAL
from tests.server import Live
from tests.service.ui.conftest import Open
from tests.service.ui.support import call

PAINT = """async ([values, name]) => {
  const colors = await import(new URL("ui/colors.js", document.baseURI));
  const canvas = document.createElement("canvas");
  const map = {width: values.length, height: 1, values: values.map(Number)};
  const scale = name === "paint" ? colors.makeScale(map.values) : colors.makeOverlayScale(map.values);
  colors[name](canvas, map, scale);
  return {scale, pixels: Array.from(canvas.getContext("2d").getImageData(0, 0, values.length, 1).data)};
}"""
SPECS = [
    PreprocessSpec(resize=256, crop=224),
    PreprocessSpec(resize=232, crop=(224, 200)),
    PreprocessSpec(resize=(30, 41), crop=(25, 32)),
    PreprocessSpec(resize=20, crop=33),
    PreprocessSpec(resize=None, crop=17),
    PreprocessSpec(resize=32, crop=None),
]
pytestmark = pytest.mark.slow


def paint(page: Any, values: list[float], name: str = "paint") -> tuple[dict[str, Any], Any]:
    answer = page.evaluate(PAINT, [[str(value) for value in values], name])
    return answer["scale"], np.array(answer["pixels"]).reshape(-1, 4)


def test_colours(shown: Live, open_page: Open) -> None:
    """Each number has the colour that the server's table has for it; NaN and infinite ones have their own."""
    page = open_page(shown.url).page
    steps = len(SEQUENTIAL)
    scale, pixels = paint(page, list(range(steps)))
    assert scale == {"kind": "sequential", "low": 0, "high": steps - 1}
    np.testing.assert_array_equal(pixels[:, :3], SEQUENTIAL)
    scale, pixels = paint(page, [each - steps // 2 for each in range(steps)])
    assert scale == {"kind": "diverging", "low": -(steps // 2), "high": steps // 2}
    np.testing.assert_array_equal(pixels[:, :3], DIVERGING)
    _, pixels = paint(page, [0.0, float("NaN"), 1.0])
    assert tuple(pixels[1, :3]) == NOT_FINITE


def test_seen(shown: Live, open_page: Open) -> None:
    """The part of a picture that a model sees is where the server says that it is."""
    opened = open_page(shown.url)
    for spec, (width, height) in product(SPECS, [(640, 480), (333, 517), (20, 21), (31, 90), (40, 40)]):
        body = {"resize": spec.resize, "crop": spec.crop}
        left, top, right, bottom = spec.find_seen_box(width, height)
        wanted = [left / width, top / height, (right - left) / width, (bottom - top) / height]
        assert call(opened, "seen", "findSeen", body, width, height) == pytest.approx(wanted, abs=1e-9)
