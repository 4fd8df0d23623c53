"""TIFFs, sent to a server with workers: answered as PNGs of their pixels, or refused at the cost of one input."""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from bench.hard.pictures import TIFFS, gray, tiff
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.inputs.test_images import encode, oriented
from tests.service.support import Json, image, picture, problem, raw

GRAIN = Image.fromarray(np.random.default_rng(5).integers(0, 256, (24, 40, 3), np.uint8))


@pytest.fixture(scope="module")
def live(serve: Serve) -> Iterator[Live]:
    """A server with workers."""
    with serve(workers=1, worker_memory_bytes=1 << 30) as started:
        yield started


def ask(live: Live, *files: bytes, **fields: Any) -> Json:
    """The reply to some files, but for what differs from request to request."""
    reply = live.client.post("/extract", json={"inputs": [image(data) for data in files], "layers": ["pool"], **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def as_png(data: bytes) -> bytes:
    """The first page of a file as Pillow shows it, upright."""
    with Image.open(BytesIO(data)) as opened:
        return encode(ImageOps.exif_transpose(opened).convert("RGB"), "PNG")


def palette() -> Image.Image:
    return GRAIN.convert("P", palette=Image.Palette.ADAPTIVE)


def planes() -> bytes:
    """Red, green and blue one after another, each in strips of a row."""
    bands = np.asarray(GRAIN).transpose(2, 0, 1)
    bits = np.array([8, 8, 8], "<u2").tobytes()
    places, counts = 16 + 40 * np.arange(72, dtype="<u4"), np.full(72, 40, "<u4")
    body = bits.ljust(8, b"\0") + bands.tobytes() + places.tobytes() + counts.tobytes()
    behind = 16 + bands.size
    changes = {
        "t258": (258, 3, 3, 8),
        "t262": (262, 3, 1, 2),
        "t273": (273, 4, 72, behind),
        "t277": (277, 3, 1, 3),
        "t278": (278, 4, 1, 1),
        "t279": (279, 4, 72, behind + 288),
        "t284": (284, 3, 1, 2),
    }
    return tiff(gray(40, 24, **changes), body)


GOOD: dict[str, bytes] = {
    **{
        f"packed by {way}": encode(GRAIN, "TIFF", compression=way)
        for way in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg", "lzma", "zstd")
    },
    **{f"of mode {mode}": encode(GRAIN.convert(mode), "TIFF") for mode in ("1", "L", "LA", "RGBA", "RGBX", "CMYK")},
    "of mode P": encode(palette(), "TIFF"),
    "a fax": encode(GRAIN.convert("1"), "TIFF", compression="group4"),
    "a JPEG in YCbCr": encode(GRAIN.convert("YCbCr"), "TIFF", compression="jpeg"),
    "BigTIFF": encode(GRAIN, "TIFF", big_tiff=True),
    "white is zero": tiff(gray(8, 8, t262=(262, 3, 1, 0)), bytes(range(64))),
    "in strips of a row": encode(GRAIN, "TIFF", strip_size=120, compression="tiff_lzw"),
    "in planes": planes(),
    **{f"of orientation {turn}": encode(GRAIN, "TIFF", exif=oriented(turn)) for turn in range(1, 9)},
    **{
        f"of orientation {turn}, packed": encode(GRAIN, "TIFF", exif=oriented(turn), compression="tiff_lzw")
        for turn in (3, 6)
    },
}


@pytest.mark.parametrize("name", GOOD)
def test_pixels(live: Live, name: str) -> None:
    """A TIFF is answered bit for bit as a PNG of its pixels, with the same fingerprint."""
    assert ask(live, GOOD[name], layers=["block1:input"]) == ask(live, as_png(GOOD[name]), layers=["block1:input"])


def test_pages(live: Live) -> None:
    """Of several pages the first is used, and a warning says so, beside pictures of one page too."""
    pages = encode(GRAIN, "TIFF", save_all=True, append_images=[GRAIN.rotate(180), GRAIN.convert("F")])
    found = ask(live, pages)
    assert found["features"] == ask(live, as_png(pages))["features"]
    assert found["warnings"] == ["1 of 1 pictures have several pages, of which only the first is used"]
    single = encode(GRAIN, "TIFF")
    assert "warnings" not in ask(live, single, single)
    assert ask(live, single, pages, pages)["warnings"][0].startswith("2 of 3 pictures have several pages")


DEEP = np.random.default_rng(6).integers(0, 65536, (24, 40), np.uint16)
FLOATS = encode(Image.fromarray(DEEP.astype(np.float32)), "TIFF")
OTHER: dict[str, bytes] = {
    "16-bit gray": encode(Image.fromarray(DEEP), "TIFF"),
    "16-bit colours": tiff(
        gray(2, 2, t258=(258, 3, 3, 8), t262=(262, 3, 1, 2), t273=(273, 4, 1, 16), t277=(277, 3, 1, 3)),
        np.array([16, 16, 16, 0, *range(12)], "<u2").tobytes(),
    ),
    "floats": FLOATS,
    "32-bit": encode(Image.fromarray(DEEP.astype(np.int32)), "TIFF"),
    "signed bytes": tiff(gray(8, 8, t339=(339, 3, 1, 2)), bytes(64)),
    "64-bit floats": tiff(gray(2, 2, t258=(258, 3, 1, 64), t339=(339, 3, 1, 3)), bytes(64)),
    "5 bands": tiff(
        gray(2, 2, t258=(258, 3, 5, 8), t262=(262, 3, 1, 2), t277=(277, 3, 1, 5), t338=(338, 3, 2, 0)),
        np.array([8] * 5, "<u2").tobytes().ljust(64, b"\0"),
    ),
    "2 bands of which one is no alpha": tiff(gray(2, 2, t258=(258, 3, 2, 0x80008), t277=(277, 3, 1, 2)), bytes(64)),
    "7 bands": tiff(gray(2, 2, t277=(277, 3, 1, 7)), bytes(64)),
    "Lab": encode(GRAIN.convert("LAB"), "TIFF"),
    "a preview of a raw photograph": tiff(gray(8, 8, t254=(254, 4, 1, 1)), bytes(64)),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_pixels(live: Live, name: str) -> None:
    """Pixels that would have to be cut to 8 bits or 4 bands are refused with what to send."""
    found = problem(live.client.post("/extract", **raw(OTHER[name], "image/tiff", layers="pool")), 415)
    assert "8-bit grey, RGB, palette or CMYK" in found["detail"]
    assert found["errors"][0]["input"] == 0
    assert found["hint"] == "send other pixels as an array"


def test_other_pixels_among_others(live: Live) -> None:
    """A TIFF that is refused is left out, or nothing is answered, as is asked."""
    found = ask(live, GOOD["BigTIFF"], FLOATS, on_error="skip")
    assert found["rows"] == 1
    assert found["errors"][0]["input"] == 1
    body = {"inputs": [image(GOOD["BigTIFF"]), image(FLOATS)], "layers": ["pool"]}
    assert problem(live.client.post("/extract", json=body), 415)["errors"][0]["input"] == 1


@pytest.mark.parametrize("name", TIFFS)
def test_hostile(live: Live, name: str) -> None:
    """A TIFF made to cost is answered or refused with the reason, and the next picture is answered as ever."""
    case = TIFFS[name]
    reply = live.client.post("/extract", **raw(case.make(), "image/tiff", layers="pool"))
    if case.status == 200:
        assert reply.status_code == 200
    else:
        assert case.says in problem(reply, case.status)["detail"]
    ask(live, picture())


def test_drawing(live: Live) -> None:
    """A drawing shows what was computed of a TIFF, but not the TIFF, which the server would have to decode."""
    drawn = live.client.post("/extract", **raw(GOOD["BigTIFF"], "image/tiff", layers="block1", format="png"))
    assert drawn.headers["content-type"] == "image/png"
    wanted = live.client.post("/explain", **raw(as_png(GOOD["BigTIFF"]), "image/png", method="saliency", format="png"))
    found = live.client.post("/explain", **raw(GOOD["BigTIFF"], "image/tiff", method="saliency", format="png"))
    assert (wanted.status_code, found.status_code) == (200, 200), (wanted.text, found.text)
    assert found.content != wanted.content


def test_without_workers(serve: Serve) -> None:
    """Where no process may be lost, a TIFF is refused with the reason."""
    with serve() as alone:
        found = problem(alone.client.post("/extract", **raw(GOOD["BigTIFF"], "image/tiff", layers="pool")), 415)
    assert "worker processes" in found["detail"]
    assert "PNG" in found["hint"]
