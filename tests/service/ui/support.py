"""What tests of the explorer share: files let go over it, its pixels, and what they are to be."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import expect

from layertap.service.pictures.colormaps import DIVERGING, SEQUENTIAL
from tests.server import Live
from tests.service.support import Array, image
from tests.service.ui.conftest import Opened

DIGIT = Path(__file__).parents[3] / "examples" / "digit.png"
PIXELS = """canvas => Array.from(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data)"""
CALL = """async ([module, name, arguments]) => {
  const functions = await import(new URL(`ui/${module}.js`, document.baseURI));
  return functions[name](...arguments);
}"""
DROP = """([text, name, type, place]) => {
  const transfer = new DataTransfer();
  transfer.items.add(new File([Uint8Array.from(atob(text), each => each.charCodeAt(0))], name, {type}));
  document.getElementById(place).dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, bubbles: true}));
}"""


def drop(opened: Opened, data: bytes, name: str = "digit.png", kind: str = "image/png", place: str = "drop") -> None:
    """A file let go over an element of the page."""
    opened.page.evaluate(DROP, [b64encode(data).decode(), name, kind, place])


def call(opened: Opened, module: str, function: str, *arguments: object) -> Any:
    """What a function of one of the page's modules returns."""
    return opened.page.evaluate(CALL, [module, function, arguments])


def captured(live: Live, data: bytes, layer: object, **body: object) -> Array:
    """One layer of one picture, by the API."""
    reply = live.client.post("/extract", json={"inputs": [image(data)], "layers": [layer], **body}).json()
    (feature,) = reply["features"].values()
    return np.array(feature["data"], np.float32)[0]


def colours(values: Array) -> Array:
    """The colours of maps on one scale, by the server's table."""
    low, high = float(values.min()), float(values.max())
    table = SEQUENTIAL if low >= 0 else DIVERGING
    if low < 0:
        high = max(-low, high)
        low = -high
    return table[np.rint((values.astype(float) - low) / (high - low) * (len(table) - 1)).astype(int)].astype(float)


def read_pixels(canvas: Any, height: int, width: int) -> Array:
    """Red, green, blue and alpha of each pixel."""
    return np.array(canvas.evaluate(PIXELS), float).reshape(height, width, 4)


def check_tiles(opened: Opened, maps: Array, place: str = "#maps") -> None:
    """The tiles of some maps are there, no others, and each pixel has the colour of its number."""
    tiles = opened.page.locator(f"{place} .tile canvas")
    expect(tiles).to_have_count(len(maps))
    wanted = colours(maps)
    for number, expected in enumerate(wanted):
        pixels = read_pixels(tiles.nth(number), *maps.shape[1:])
        assert np.abs(pixels[..., :3] - expected).max() <= 4  # a step of the scale
        assert (pixels[..., 3] == 255).all()
