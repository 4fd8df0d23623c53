"""The page of ``layertap bulk --atlas``: the strongest pictures, from one file that asks nobody."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from layertap.service.bulk.bulk import ATLAS, RESULTS
from tests.service.cli.commands import run_here
from tests.service.ui.conftest import Open
from tests.service.ui.test_accessibility import SIZES, check

COUNT, TOP = 12, 4
HOSTILE = "</script><img src=x onerror=alert(1)>.png"  # a folder and a file in it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pictures of a job and its results."""
    folder = tmp_path_factory.mktemp("atlas")
    for number in range(COUNT):
        side = 300 if number == 1 else 24
        pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        path = folder / "source" / (HOSTILE if number == 0 else f"{number:02}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels // (number % 3 + 1)).save(path)
    words = ("--layers", "block1,block3,head", "--atlas", "--top", str(TOP), "--out", folder / "out")
    done = run_here("bulk", folder / "source", *words)
    assert done.status == 0, done.notes
    return folder


def read_data(page: Path) -> Any:
    """What the page shows."""
    text = page.read_text("utf-8")
    start_of_data = text.index('id="data">') + len('id="data">')
    return json.loads(text[start_of_data : text.index("</script>", start_of_data)])


def test_pictures(folder: Path) -> None:
    """Each channel has its strongest inputs in order; a small picture is the source's, pixel by pixel."""
    data = read_data(folder / "out" / ATLAS)
    assert (data["model"], data["inputs"]) == ("digits", COUNT)
    assert [layer["name"] for layer in data["layers"]] == ["block1", "block3", "head"]
    with np.load(folder / "out" / RESULTS) as results:
        for layer in data["layers"]:
            name = layer["name"]
            for channel, top, names in zip(
                layer["channels"], results[f"{name}.top"], results[f"{name}.top_names"], strict=True
            ):
                assert [data["pictures"][place]["key"] for place, _ in channel["top"]] == names.tolist()
                np.testing.assert_allclose([value for _, value in channel["top"]], top, rtol=1e-6)
            np.testing.assert_allclose([each["zeros"] for each in layer["channels"]], results[f"{name}.zeros"])
    by_key = {picture["key"]: picture for picture in data["pictures"]}
    assert HOSTILE in by_key
    for key, picture in by_key.items():
        image = Image.open(io.BytesIO(base64.b64decode(picture["uri"].removeprefix("data:image/webp;base64,"))))
        with Image.open(folder / "source" / key) as original:
            if original.width == 24:
                np.testing.assert_array_equal(np.asarray(image), np.asarray(original))
            else:
                assert image.size == (96, 96)


@pytest.mark.slow
def test_page(folder: Path, open_page: Open) -> None:
    """It opens from the disk, is for everybody, and shows another layer, in another order, by the keyboard."""
    width, height, scheme = SIZES[0]
    opened = open_page((folder / "out" / ATLAS).as_uri(), (width, height), scheme, bypass_csp=True)
    page, data = opened.page, read_data(folder / "out" / ATLAS)
    expect(page.locator("#channels > li")).to_have_count(16)
    check(opened, width)
    page.get_by_label("Layer").focus()
    page.keyboard.press("End")
    expect(page.locator("#shown")).to_have_text("10 of 10 channels")
    page.get_by_label("Order").select_option("max")
    strongest = max(data["layers"][2]["channels"], key=lambda channel: channel["max"])
    first = page.locator("#channels > li").first
    expect(first.locator("h2")).to_have_text(f"Channel {strongest['number']}")
    expect(first.locator("img")).to_have_count(TOP)
    key = data["pictures"][strongest["top"][0][0]]["key"]
    assert str(first.locator("img").first.get_attribute("alt")).startswith(f"{key}: ")
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
