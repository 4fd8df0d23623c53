"""Pictures of models of transformers over HTTP, beside the image processor of their own folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from layertap.models.spec import ModelSpec
from layertap.service.config.configuration import Configuration
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, npy, problem, text64
from tests.transformers_nets import saved

SIZES = {"height": 32, "width": 32}
EXACT = {"levit", "dpt", "torchvision"}  # through the processor itself; others within float32's rounding
FILES: dict[str, Json] = {
    "clip": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32}, "crop_size": SIZES},
    "levit": {"image_processor_type": "LevitImageProcessor", "size": {"shortest_edge": 32}, "crop_size": SIZES},
    "dpt": {"image_processor_type": "DPTImageProcessor", "size": SIZES, "keep_aspect_ratio": True},
    "torchvision": {"image_processor_type": "ViTImageProcessor", "size": SIZES},
    "unknown": {"image_processor_type": "NoSuchImageProcessor"},
}
FIELDS: dict[str, Json] = {"torchvision": {"image_backend": "torchvision"}, "levit": {"decode": "fast"}}
CASES = [(name, size) for name in ("clip", "levit", "torchvision") for size in ((35, 32), (61, 40), (20, 90))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small vision transformer, in a folder for each processor."""
    root = tmp_path_factory.mktemp("processors")
    for name, written in FILES.items():
        saved("vit", root / name)
        (root / name / "preprocessor_config.json").write_text(json.dumps(written))
    return {name: root / name for name in FILES}


def spec(folder: Path) -> ModelSpec:
    name = folder.name
    fields = FIELDS.get(name, {})
    return ModelSpec(name, f"transformers:{folder}", device="cpu", interpolate_pos_encoding=name == "dpt", **fields)


@pytest.fixture(scope="module")
def live(serve: Serve, folders: dict[str, Path]) -> Iterator[Live]:
    """A server of these models."""
    with serve(Configuration(tuple(map(spec, folders.values())), "clip")) as live:
        yield live


def draw(size: tuple[int, int]) -> Image.Image:
    pixels = np.random.default_rng(sum(size)).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def png(picture: Image.Image) -> bytes:
    stream = BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def process(folder: Path, picture: Image.Image) -> Array:
    """What the folder's own processor makes of a picture."""
    backend = FIELDS.get(folder.name, {}).get("image_backend", "pil")
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend=backend)
    rows: Array = np.asarray(processor(images=picture, return_tensors="pt")["pixel_values"])
    return rows


def check(live: Live, name: str, wanted: Array, **request: Any) -> None:
    reply = live.client.post("/extract", params={"model": name, "layers": ".:input", "format": "npz"}, **request)
    (found,) = arrays_of(reply).values()
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0 if name in EXACT else 1e-5)


@pytest.mark.parametrize(("name", "size"), [*CASES, ("dpt", (48, 33))])
def test_rows_are_the_processors(live: Live, folders: dict[str, Path], name: str, size: tuple[int, int]) -> None:
    """An encoded picture becomes the processor's row, also of another shape than the model was loaded with."""
    picture = draw(size)
    check(live, name, process(folders[name], picture), content=png(picture), headers={"content-type": "image/png"})


def test_transparent_pictures_are_laid_onto_white(live: Live, folders: dict[str, Path]) -> None:
    """As a processor that converts to RGB does it; for one that takes no such pictures alpha is dropped."""
    picture = draw((35, 32))
    picture.putalpha(Image.linear_gradient("L").resize(picture.size))
    headers = {"content-type": "image/png"}
    check(live, "clip", process(folders["clip"], picture), content=png(picture), headers=headers)
    check(live, "levit", process(folders["levit"], picture.convert("RGB")), content=png(picture), headers=headers)


def test_a_processor_that_is_not_known_leaves_tensors(live: Live) -> None:
    """The model loads and takes tensors; a picture is refused with the reason."""
    query = {"model": "unknown", "layers": "."}
    sent = {"content": npy(np.zeros((3, 32, 32), np.float32)), "headers": {"content-type": "application/x-npy"}}
    assert live.client.post("/extract", params=query, **sent).status_code == 200
    body = {**query, "layers": ["."], "inputs": [{"image": text64(png(draw((9, 9))))}]}
    refusal = problem(live.client.post("/extract", json=body), 422)
    reason = "image_processor_type of preprocessor_config.json names none"
    assert f"takes tensors, not pictures: {reason}" in str(refusal)
