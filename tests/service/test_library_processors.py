"""Pictures of models of transformers over HTTP, beside the image processor of their own folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from layertap.models.spec import ModelSpec, PreprocessSpec
from layertap.service.config.configuration import Configuration
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, npy, problem, text64
from tests.transformers_nets import saved

SIZES = {"height": 32, "width": 32}
EXACT = {"levit", "dpt", "glpn", "torchvision"}  # through the processor itself; others within float32's rounding
FILES: dict[str, Json] = {
    "clip": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32}, "crop_size": SIZES},
    "levit": {"image_processor_type": "LevitImageProcessor", "size": {"shortest_edge": 32}, "crop_size": SIZES},
    "dpt": {"image_processor_type": "DPTImageProcessor", "size": SIZES, "keep_aspect_ratio": True},
    "glpn": {"image_processor_type": "GLPNImageProcessor", "size_divisor": 32},
    "torchvision": {"image_processor_type": "ViTImageProcessor", "size": SIZES},
    "matte": {"image_processor_type": "VitMatteImageProcessor"},
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


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.slow)])
def live(serve: Serve, folders: dict[str, Path], request: Any) -> Iterator[Live]:
    """A server of these models, in its own process and in workers."""
    specs = tuple(
        ModelSpec(
            name,
            f"transformers:{folder}",
            device="cpu",
            interpolate_pos_encoding=name in ("dpt", "glpn"),
            **FIELDS.get(name, {}),
        )
        for name, folder in folders.items()
    )
    with serve(Configuration(specs, "clip"), workers=request.param) as live:
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


@pytest.mark.parametrize(("name", "size"), [*CASES, ("dpt", (48, 33)), ("glpn", (100, 70))])
def test_rows_are_the_processors(live: Live, folders: dict[str, Path], name: str, size: tuple[int, int]) -> None:
    """An encoded picture becomes the processor's row, also of another shape than the model was loaded with."""
    picture = draw(size)
    check(live, name, process(folders[name], picture), content=png(picture), headers={"content-type": "image/png"})


@pytest.mark.parametrize("name", ["clip", "levit"])
def test_decoded_pictures_too(live: Live, folders: dict[str, Path], name: str) -> None:
    """Pixels in an array go the same way."""
    picture = draw((35, 41))
    headers = {"content-type": "application/x-npy"}
    check(live, name, process(folders[name], picture), content=npy(np.asarray(picture)), headers=headers)


def test_transparent_pictures_are_laid_onto_white(live: Live, folders: dict[str, Path]) -> None:
    """As a processor that converts to RGB does it; for one that takes no such pictures alpha is dropped."""
    picture = draw((35, 32))
    picture.putalpha(Image.linear_gradient("L").resize(picture.size))
    headers = {"content-type": "image/png"}
    check(live, "clip", process(folders["clip"], picture), content=png(picture), headers=headers)
    check(live, "levit", process(folders["levit"], picture.convert("RGB")), content=png(picture), headers=headers)


def test_who_makes_the_rows_is_said(live: Live) -> None:
    """A proven preprocessing is shown by its steps, a library's processor by its name: it decodes exactly."""
    fast, own = (live.client.get(f"/models/{name}").json()["preprocess"] for name in ("clip", "levit"))
    assert (fast["crop"], fast["crop_rounding"], fast["background"]) == ([32, 32], "floor", [255, 255, 255])
    assert (own["processor"], own["decode"]) == ("LevitImageProcessorPil", "exact")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("matte", "VitMatteImageProcessorPil, which image_processor_type of preprocessor_config.json names, raises"),
        ("unknown", "image_processor_type of preprocessor_config.json names none"),
    ],
)
def test_a_processor_that_takes_no_pictures_leaves_tensors(live: Live, name: str, reason: str) -> None:
    """The model loads and takes tensors; a picture is refused with the reason."""
    query = {"model": name, "layers": "."}
    sent = {"content": npy(np.zeros((3, 32, 32), np.float32)), "headers": {"content-type": "application/x-npy"}}
    assert live.client.post("/extract", params=query, **sent).status_code == 200
    body = {**query, "layers": ["."], "inputs": [{"image": text64(png(draw((9, 9))))}]}
    refusal = problem(live.client.post("/extract", json=body), 422)
    assert f"takes tensors, not pictures: {reason}" in str(refusal)


def test_positions_of_other_sizes(serve: Serve, folders: dict[str, Path]) -> None:
    """With ``interpolate_pos_encoding`` every forward has the library's, for pictures as configured and for tensors."""
    module = transformers.ViTForImageClassification.from_pretrained(folders["clip"]).eval()
    steps = PreprocessSpec(resize=(48, 40), mean=(0.5,) * 3, std=(0.5,) * 3)
    source = f"transformers:{folders['clip']}"
    spec = ModelSpec("vit", source, device="cpu", preprocess=steps, interpolate_pos_encoding=True)
    rows = torch.randn(1, 3, 64, 32, generator=torch.Generator().manual_seed(0))
    with serve(Configuration((spec,), "vit"), workers=0) as live:
        assert live.client.get("/models/vit").json()["inputs"][0]["shape"] == [3, 48, 40]
        sent = {"content": npy(rows[0].numpy()), "headers": {"content-type": "application/x-npy"}}
        reply = live.client.post("/extract", params={"layers": ".[logits]", "format": "npz"}, **sent)
    with torch.no_grad():
        wanted = module(rows, interpolate_pos_encoding=True).logits
    np.testing.assert_allclose(arrays_of(reply)[".[logits]"], wanted.numpy(), rtol=1e-4, atol=1e-5)
