"""The comparison on the page: two pictures, layers or models, with the numbers that numpy has for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from tests.server import Live
from tests.service.support import Array
from tests.service.ui.conftest import Open, Opened
from tests.service.ui.support import captured, check_tiles, read_pixels

UI = Path(__file__).parents[3] / "service" / "ui"
TWO, ZERO = ((UI / f"digit-{number}.png").read_bytes() for number in (2, 0))
PICTURES = "model=digits&layer=block3&sample=digit-2&other-sample=digit-0"
LAYERS = "model=digits&layer=block1&sample=digit-2&other-layer=block3"
pytestmark = pytest.mark.slow


def read_number(opened: Opened, name: str) -> float:
    return float(opened.page.locator("#similarity div", has_text=name).locator("dd").first.inner_text())


def find_cosines(place: Array, maps: Array) -> Array:
    """The cosine of a vector to each of a picture's places, (height, width)."""
    lengths = np.linalg.norm(maps, axis=0) * np.linalg.norm(place)
    return np.einsum("c,chw->hw", place, maps) / lengths


def get_heat(opened: Opened, side: int, shape: tuple[int, ...]) -> Any:
    """How opaque each place of a picture is."""
    return read_pixels(opened.page.locator("#sides .seen canvas").nth(side), *shape)[..., 3]


def check_heat(opened: Opened, side: int, cosines: Array) -> None:
    wanted = 255 * 0.85 * (cosines - cosines.min()) / (cosines.max() - cosines.min())
    np.testing.assert_allclose(get_heat(opened, side, cosines.shape), wanted, atol=2)


def test_two_pictures(shown: Live, open_page: Open) -> None:
    """Of one layer the cosine of the two pictures' mean vectors, both sides' maps, and where the places are alike."""
    opened = open_page(f"{shown.url}/#{PICTURES}").show_maps()
    page = opened.page
    here, there = (captured(shown, data, "block3") for data in (TWO, ZERO))
    x, y = here.mean((1, 2)), there.mean((1, 2))
    assert read_number(opened, "cosine") == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-3)
    for number, maps in enumerate((here, there)):
        check_tiles(opened, maps[:8], f"#sides .side:nth-child({number + 1})")
    check_heat(opened, 1, find_cosines(here[:, 4, 4], there))
    left, right = page.locator("#sides .seen canvas").nth(0), page.locator("#sides .seen canvas").nth(1)
    box = left.bounding_box()
    left.hover(position={"x": box["width"] * 2.5 / 8, "y": box["height"] * 6.5 / 8})
    cosines = find_cosines(here[:, 6, 2], there)
    row, column = divmod(int(cosines.argmax()), 8)
    expect(page.locator("#match-reading")).to_contain_text(f"most like row {row}, column {column} of the second")
    check_heat(opened, 1, cosines)
    right.hover(position={"x": box["width"] * 0.5 / 8, "y": box["height"] * 0.5 / 8})
    expect(page.locator("#match-reading")).to_contain_text("Row 0, column 0 of the second")
    check_heat(opened, 0, find_cosines(there[:, 0, 0], here))


def test_two_layers(shown: Live, open_page: Open) -> None:
    """Of two layers both sides' maps; vectors of two kinds have no number, and it says so. The address restores it."""
    opened = open_page(f"{shown.url}/#{LAYERS}").show_maps()
    wide, coarse = (captured(shown, TWO, name) for name in ("block1", "block3"))
    expect(opened.page.locator("#similarity div")).to_have_count(0)
    expect(opened.page.locator("#similarity-note")).to_contain_text("Vectors of two kinds have no cosine")
    expect(opened.page.locator("#sides .seen canvas").first).to_be_hidden()
    check_tiles(opened, wide[:8], "#sides .side:nth-child(1)")
    check_tiles(opened, coarse[:8], "#sides .side:nth-child(2)")
    opened.page.click("#other-samples [data-sample=digit-0]")
    expect(opened.page.locator("#sides .side").nth(1)).to_contain_text("digit-0.png", timeout=30_000)
    opened.wait()
    again = open_page(opened.page.url).show_maps()
    sides = again.page.locator("#sides .side figcaption")
    assert sides.all_inner_texts() == opened.page.locator("#sides .side figcaption").all_inner_texts()
    expect(again.page.locator("#sides .side .name")).to_have_text(["block1", "block3"])
    again.page.click("#other-stop")
    expect(again.page.locator("#compare-result")).to_be_hidden()
    assert "other" not in again.page.url
