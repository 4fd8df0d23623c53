"""Pictures by HTTP: what comes back for which request, and what is refused."""

from __future__ import annotations

import sys
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from layertap.service.pictures.colormaps import SEQUENTIAL
from tests.server import Live
from tests.service.pictures.test_sheet import find_tile, look_up
from tests.service.queue_harness import read_figure
from tests.service.support import npy, picture, problem, raw, tensor

DIGIT = picture(1)


def draw(live: Live, path: str = "/extract", **query: Any) -> np.ndarray[Any, Any]:
    """The pixels of a reply."""
    reply = live.client.post(path, **raw(DIGIT, "image/png", **{"format": "png"} | query))
    return read(reply)


def read(reply: httpx.Response) -> np.ndarray[Any, Any]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "image/png"
    assert reply.headers["x-layertap-fingerprint"]
    with Image.open(BytesIO(reply.content)) as drawn:
        assert drawn.format == "PNG"
        return np.asarray(drawn.convert("RGB"))


def test_tiles_are_the_arrays(live: Live) -> None:
    """Each channel that is drawn has the colours of the array that JSON has, number by number."""
    values = live.client.post("/extract", **raw(DIGIT, "image/png", layers="block3")).json()["features"]["block3"]
    array = np.array(values["data"], np.float32)[0, :4]
    sheet = draw(live, layers="block3", tiles=4)
    for tile in array:
        find_tile(sheet, look_up(tile, SEQUENTIAL, array.min(), array.max()))


def test_explanation(live: Live) -> None:
    """An explanation stands over the picture that was sent, and beside it; of an array it stands alone."""
    sheet = draw(live, "/explain", method="grad_cam")
    whole = np.asarray(Image.open(BytesIO(DIGIT)).convert("RGB"))
    find_tile(sheet, whole)
    body = {"inputs": [tensor(np.zeros((3, 32, 32), np.float32))], "method": "grad_cam"}
    read(live.client.post("/explain?format=png", json=body))


@pytest.mark.parametrize(
    ("query", "status", "detail"),
    [
        ({"layers": "block1", "tiles": "4"}, 422, "no picture"),
        ({"layers": "block1", "format": "png", "tiles": "0"}, 422, "/tiles"),
        ({"layers": "head", "format": "png", "dtype": "int8"}, 406, "int8"),
        ({"format": "png", "dry_run": "true", "layers": "blok"}, 422, "blok"),
    ],
)
def test_refused(live: Live, query: dict[str, str], status: int, detail: str) -> None:
    """What can't be drawn so is refused in words."""
    reply = live.client.post("/extract", **raw(DIGIT, "image/png", **query))
    problem(reply, status)
    assert detail in reply.text


@pytest.mark.parametrize("query", [{"layers": "head"}, {"layers": "block1,pool", "dry_run": "true"}])
def test_without_matplotlib(live: Live, monkeypatch: pytest.MonkeyPatch, query: dict[str, str]) -> None:
    """Where matplotlib is missing, charts are refused before any forward, with what to install; tiles are drawn."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    forwards = count_forwards(live)
    body = problem(live.client.post("/extract", **raw(DIGIT, "image/png", format="png", **query)), 501)
    assert 'pip install "layertap[charts]"' in body["hint"]
    assert count_forwards(live) == forwards
    draw(live, layers="block1")


def count_forwards(live: Live) -> float:
    """How many requests have had forwards."""
    return read_figure(live, "layertap_step_seconds_count", step="forward")


def test_too_many_maps(live: Live) -> None:
    """Maps of explanations are counted before any forward too, by all rows of a batch that is one input."""
    forwards = count_forwards(live)
    query = {"method": "grad_cam", "classes": ",".join(map(str, range(10))), "format": "png"}
    batch = npy(np.zeros((40, 3, 32, 32), np.float32))
    reply = live.client.post("/explain", **raw(batch, "application/x-npy", **query))
    problem(reply, 413)
    assert "the picture would have" in reply.text
    assert count_forwards(live) == forwards
