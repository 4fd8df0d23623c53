"""Pictures by HTTP: what comes back for which request, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from layertap.models.spec import InputSpec, ModelSpec, PreprocessSpec
from layertap.service.pictures.colormaps import DIVERGING, SEQUENTIAL
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.pictures.test_sheet import find_tile, look_up
from tests.service.support import Json, configured, image, npy, picture, problem, raw, tensor

DIGIT = picture(1)
SQUARE = picture(4, (32, 32))


def draw(live: Live, path: str = "/extract", media_type: str = "image/png", **query: Any) -> np.ndarray[Any, Any]:
    """The pixels of a reply."""
    reply = live.client.post(path, **raw(DIGIT, "image/png", **{"format": media_type[6:]} | query))
    return read(reply, media_type)


def read(reply: httpx.Response, media_type: str = "image/png") -> np.ndarray[Any, Any]:
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == media_type
    assert reply.headers["x-layertap-fingerprint"]
    with Image.open(BytesIO(reply.content)) as drawn:
        assert drawn.format == media_type[6:].upper()
        return np.asarray(drawn.convert("RGB"))


@pytest.mark.parametrize("media_type", ["image/png", "image/webp"])
def test_tiles_are_the_arrays(live: Live, media_type: str) -> None:
    """Each channel that is drawn has the colours of the array that JSON has, number by number."""
    values = live.client.post("/extract", **raw(DIGIT, "image/png", layers="block3")).json()["features"]["block3"]
    array = np.array(values["data"], np.float32)[0, :4]
    sheet = draw(live, media_type=media_type, layers="block3", tiles=4)
    for tile in array:
        find_tile(sheet, look_up(tile, SEQUENTIAL, array.min(), array.max()))


def test_by_accept(live: Live) -> None:
    """A picture is had by Accept too."""
    sent = raw(DIGIT, "image/png", layers="pool")
    sent["headers"] = {**sent["headers"], "Accept": "image/png"}
    read(live.client.post("/extract", **sent))


def test_chosen_channels(live: Live) -> None:
    """Channels that a layer's entry names are drawn, in their order."""
    body = {"inputs": [image(DIGIT)], "layers": [{"layer": "block3", "channels": [9, 2]}]}
    values = live.client.post("/extract", json=body).json()["features"]["block3"]["data"]
    array = np.array(values, np.float32)[0]
    sheet = read(live.client.post("/extract?format=png", json=body))
    places = [find_tile(sheet, look_up(tile, SEQUENTIAL, array.min(), array.max())) for tile in array]
    assert places[0][1] < places[1][1]


def test_gradients(live: Live) -> None:
    """Gradients are drawn around zero."""
    query = {"layers": "block3:grad_output", "objective": "logit", "class": "3"}
    values = live.client.post("/extract", **raw(DIGIT, "image/png", **query)).json()["features"]["block3:grad_output"]
    array = np.array(values["data"], np.float32)[0, :2]
    bound = float(np.abs(array).max())
    find_tile(draw(live, tiles=2, **query), look_up(array[0], DIVERGING, -bound, bound))


def test_several(live: Live) -> None:
    """Several layers and inputs are one picture; statistics and vectors too."""
    body = {
        "inputs": [image(DIGIT), image(picture(2, (100, 20)))],
        "layers": ["block1", "block2:input", "head", {"layer": "block2", "stats": True}],
        "tiles": 8,
    }
    alone = {**body, "layers": body["layers"][:1]}
    assert len(read(live.client.post("/extract?format=png", json=body))) > len(
        read(live.client.post("/extract?format=png", json=alone))
    )


@pytest.mark.parametrize("method", ["grad_cam", "saliency"])
def test_explanation(live: Live, method: str) -> None:
    """An explanation stands over the picture that was sent, and beside it; of an array it stands alone."""
    sheet = draw(live, "/explain", method=method)
    whole = np.asarray(Image.open(BytesIO(DIGIT)).convert("RGB"))
    find_tile(sheet, whole)
    body = {"inputs": [tensor(np.zeros((3, 32, 32), np.float32))], "method": method}
    read(live.client.post("/explain?format=png", json=body))


def test_several_methods_and_classes(live: Live) -> None:
    """All maps of a picture stand beside it: it is drawn once, whatever is asked for."""
    sheet = draw(live, "/explain", method="grad_cam,saliency,occlusion", classes="1,top", window=8)
    whole = np.asarray(Image.open(BytesIO(DIGIT)).convert("RGB"))
    large = whole.repeat(7, 0).repeat(7, 1)  # 40 by 32 pixels in a square of 288
    corners = np.argwhere((sheet[: 1 - len(large), : 1 - large.shape[1]] == large[0, 0]).all(-1))
    found = [
        place for place in corners if (sheet[place[0] :, place[1] :][: len(large), : large.shape[1]] == large).all()
    ]
    assert len(found) == 1


def test_shapes_of_explanations(served_vectors: Live) -> None:
    """Inputs of several shapes are drawn each by itself."""
    body = {"method": ["saliency", "occlusion"], "window": 8, "model": "cnn"}
    inputs = [tensor(np.full(shape, 0.5, np.float32)) for shape in ((3, 32, 32), (3, 40, 24))]
    sheet = read(served_vectors.client.post("/explain?format=png", json={**body, "inputs": inputs}))
    alone = read(served_vectors.client.post("/explain?format=png", json={**body, "inputs": inputs[:1]}))
    assert len(sheet) > len(alone)


@pytest.fixture(scope="module")
def served_vectors(serve: Serve) -> Iterator[Live]:
    """A server of a network that takes any size."""
    spec = ModelSpec(
        "cnn",
        "python:tests.service.nets_http:Cnn",
        weights="random:5",
        inputs=(InputSpec("x", (3, 32, 32)),),
        preprocess="none",
    )
    with serve(configured(spec)) as live:
        yield live


def test_left_out(live: Live) -> None:
    """Inputs that were left out are named in the head, and the others keep their own pictures."""
    body = {"inputs": [image(b"no picture"), image(DIGIT)], "on_error": "skip", "method": "saliency"}
    reply = live.client.post("/explain?format=png", json=body)
    find_tile(read(reply), np.asarray(Image.open(BytesIO(DIGIT)).convert("RGB")))
    assert reply.headers["x-layertap-skipped"] == "0"


def preprocess(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pixels as a model's input: any numbers of its shape do."""
    return np.moveaxis(pixels.astype(np.float32) / 255 - 0.5, -1, 0)


def check_heads_over(sheet: np.ndarray[Any, Any], heads: np.ndarray[Any, Any], sent: bytes) -> None:
    """Each head is on the sheet over the picture in grey: a square for each patch, its colour mixed by its place."""
    zoom = 35
    side = heads.shape[1] * zoom
    with Image.open(BytesIO(sent)) as opened:
        original = opened.convert("RGB")
    factor = 288 // original.width
    large = original.resize((original.width * factor,) * 2, Image.Resampling.NEAREST)
    seen = large.resize((side, side), Image.Resampling.BICUBIC)
    grey = np.asarray(seen.convert("L"), np.float64)[..., None]
    find_near(sheet, np.asarray(seen, np.float64))
    high = np.quantile(heads.astype(np.float64), 0.99)
    for head in heads.astype(np.float64):
        places = ((head - heads.min()) / (high - heads.min())).clip(0, 1).repeat(zoom, 0).repeat(zoom, 1)
        colors = SEQUENTIAL[np.floor(places * 256 + 0.5).astype(int)]
        cover = 0.85 * places[..., None]
        find_near(sheet, grey * (1 - cover) + colors * cover)


def find_near(sheet: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Where these pixels stand on a sheet, to a rounding; fails for none."""
    height, width = wanted.shape[:2]
    probes = [(0, 0), (height - 1, width - 1), (height // 2, width // 3), (height // 5, width // 2)]
    room = sheet[: len(sheet) - height + 1, : sheet.shape[1] - width + 1]
    places = np.argwhere((np.abs(room.astype(float) - wanted[0, 0]) <= 1).all(-1))
    for row, column in probes:
        pixels = sheet[places[:, 0] + row, places[:, 1] + column].astype(float)
        places = places[(np.abs(pixels - wanted[row, column]) <= 1).all(-1)]
    for top, left in places:
        if np.abs(sheet[top : top + height, left : left + width] - wanted).max() <= 1:
            return int(top), int(left)
    raise AssertionError("no such picture is on the sheet")


def test_attention(serve: Serve) -> None:
    """Attention of a vision transformer is a grid for each head, and its tokens one for each channel."""
    vit = ModelSpec(
        "vit",
        "timm:vit_tiny_patch16_224",
        weights="random:0",
        device="cpu",
        args={"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 3},
        preprocess=PreprocessSpec(resize=(32, 32)),  # all of the picture is seen
    )
    with serve(configured(vit)) as live:
        query = {"model": "vit", "layers": "blocks.1.attn:attention,blocks.0"}
        reply = live.client.post("/extract", **raw(SQUARE, "image/png", **query)).json()
        weights, tokens = (np.array(each["data"], np.float32)[0] for each in reply["features"].values())
        assert [each["prefix_tokens"] for each in reply["receipts"].values()] == [1, 1]
        sheet = read(live.client.post("/extract", **raw(SQUARE, "image/png", format="png", tiles="3", **query)))
        pixels = np.random.default_rng(3).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        body = {"model": "vit", "layers": ["blocks.1.attn:attention"], "inputs": [tensor(preprocess(pixels))]}
        plain = read(live.client.post("/extract?format=png", json=body))
        of_array = live.client.post("/extract", json=body).json()["features"]["blocks.1.attn:attention"]["data"]
        rolled_out = live.client.post(
            "/explain", **raw(DIGIT, "image/png", model="vit", method="attention_rollout", format="png")
        )
        read(rolled_out)
    heads = np.array(of_array, np.float32)[0, :, 0, 1:].reshape(3, 4, 4)
    for head in heads:
        find_tile(plain, look_up(head, SEQUENTIAL, heads.min(), heads.max()))
    check_heads_over(sheet, weights[:, 0, 1:].reshape(3, 4, 4), SQUARE)
    grids = tokens[1:, :3].T.reshape(3, 4, 4)
    bound = float(np.abs(grids).max())
    find_tile(sheet, look_up(grids[2], DIVERGING, -bound, bound))


@pytest.mark.parametrize(
    ("query", "status", "detail"),
    [
        ({"layers": "block1", "tiles": "4"}, 422, "no picture"),
        ({"layers": "block1", "format": "png", "tiles": "0"}, 422, "/tiles"),
        ({"layers": "block1", "format": "png", "tiles": "257"}, 422, "/tiles"),
        ({"layers": "block1", "format": "png", "picture": "4"}, 422, "picture"),
        ({"layers": "head", "format": "png", "dtype": "int8"}, 406, "int8"),
        ({"layers": "block1", "format": "gif"}, 406, "gif"),
        ({"format": "png", "dry_run": "true", "layers": "blok"}, 422, "blok"),
    ],
)
def test_refused(live: Live, query: dict[str, str], status: int, detail: str) -> None:
    """What can't be drawn so is refused in words."""
    reply = live.client.post("/extract", **raw(DIGIT, "image/png", **query))
    problem(reply, status)
    assert detail in reply.text


@pytest.mark.parametrize(
    ("query", "dry_run"),
    [({"layers": "head"}, False), ({"layers": "block1", "pool": "mean"}, False), ({"layers": "block1,pool"}, True)],
)
def test_without_matplotlib(live: Live, monkeypatch: pytest.MonkeyPatch, query: dict[str, str], dry_run: bool) -> None:
    """Where matplotlib is missing, charts are refused before any forward, with what to install; tiles are drawn."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    forwards = count_forwards(live)
    options = {"dry_run": "true"} if dry_run else {}
    body = problem(live.client.post("/extract", **raw(DIGIT, "image/png", format="png", **query, **options)), 501)
    assert 'pip install "layertap[charts]"' in body["hint"]
    assert count_forwards(live) == forwards
    draw(live, layers="block1")


def test_charts_at_once(live: Live) -> None:
    """Charts that several threads draw at once are those that each draws alone."""
    layers = [["head"], ["pool"], ["head", "pool"], [{"layer": "block1", "stats": True}]]
    bodies = [{"inputs": [image(DIGIT)], "layers": each} for each in layers]

    def post(body: Json) -> httpx.Response:
        return live.client.post("/extract?format=png", json=body)

    alone = [read(post(body)) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = [read(reply) for reply in pool.map(post, bodies * 4)]
    for number, found in enumerate(together):
        np.testing.assert_array_equal(found, alone[number % len(bodies)])


@pytest.mark.slow
def test_what_is_imported() -> None:
    """Matplotlib is imported by the first chart alone, and never its state for the whole process."""
    code = """if True:
        import sys
        import numpy as np
        import layertap.service.app, layertap.service.cli.pictures
        from layertap.service.pictures.charts import draw_chart
        from layertap.service.pictures.panels import ResultInfo
        print("matplotlib" in sys.modules)
        draw_chart(ResultInfo(name="x", module="", site="", shape=(1, 2)), np.ones(2), (300, 202))
        print("matplotlib.pyplot" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def count_forwards(live: Live) -> float:
    """How many requests have had forwards."""
    found = re.search(
        r'^layertap_step_seconds_count{step="forward"} (\S+)$', live.client.get("/metrics").text, re.MULTILINE
    )
    assert found is not None
    return float(found[1])


def test_too_large(live: Live) -> None:
    """A picture of too many pixels is refused before the forward."""
    body = {"inputs": [image(DIGIT)] * 256, "layers": ["*"], "tiles": 256}
    forwards = count_forwards(live)
    reply = live.client.post("/extract?format=png", json=body)
    problem(reply, 413)
    assert "pixels" in reply.text
    assert count_forwards(live) == forwards


@pytest.mark.parametrize("batched", [False, True])
def test_too_many_maps(live: Live, batched: bool) -> None:
    """Maps of explanations are counted before any forward too, by all rows of a batch that is one input."""
    forwards = count_forwards(live)
    row = np.zeros((3, 32, 32), np.float32)
    classes = list(range(10))
    if batched:
        query = {"method": "grad_cam", "classes": ",".join(map(str, classes)), "format": "png"}
        reply = live.client.post("/explain", **raw(npy(np.stack([row] * 40)), "application/x-npy", **query))
    else:
        body = {"inputs": [tensor(row)] * 40, "method": "grad_cam", "classes": classes}
        reply = live.client.post("/explain?format=png", json=body)
    problem(reply, 413)
    assert "the picture would have" in reply.text
    assert count_forwards(live) == forwards
