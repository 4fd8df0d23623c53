"""Pictures of models of transformers over HTTP, beside the image processor of their own folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import transformers
from PIL import Image

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Json, arrays_of, configured, picture, raw
from tests.transformers_nets import saved

pytestmark = pytest.mark.slow  # the library imports a lot for its processors
SIZES = {"height": 32, "width": 32}
# How exactly rows are the processor's: to the bit through the processor itself, else within float32's rounding.
FILES: dict[str, tuple[Json, float]] = {
    "clip": (
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32}, "crop_size": SIZES},
        1e-5,
    ),
    "levit": (
        {"image_processor_type": "LevitImageProcessor", "size": {"shortest_edge": 32}, "crop_size": SIZES},
        0.0,
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small vision transformer, in a folder for each processor."""
    root = tmp_path_factory.mktemp("processors")
    for name, (written, _) in FILES.items():
        saved("vit", root / name)
        (root / name / "preprocessor_config.json").write_text(json.dumps(written))
    return {name: root / name for name in FILES}


@pytest.fixture(scope="module")
def live(serve: Serve, folders: dict[str, Path]) -> Iterator[Live]:
    """A server of these models."""
    specs = (ModelSpec(name, f"transformers:{folder}", device="cpu") for name, folder in folders.items())
    with serve(configured(*specs)) as live:
        yield live


@pytest.mark.parametrize("transparent", [False, True])
@pytest.mark.parametrize(("name", "size"), [("clip", (61, 40)), ("levit", (20, 90))])
def test_rows(live: Live, folders: dict[str, Path], name: str, size: tuple[int, int], transparent: bool) -> None:
    """An encoded picture becomes the processor's row.

    A transparent one is laid onto white, as a processor that converts to RGB does it; else alpha is dropped.
    """
    drawn, stream = Image.open(BytesIO(picture(0, size))), BytesIO()
    if transparent:
        drawn.putalpha(Image.linear_gradient("L").resize(size))
    drawn.save(stream, "PNG")
    reply = live.client.post("/extract", **raw(stream.getvalue(), "image/png", model=name, layers=".:input"))
    processor = transformers.AutoImageProcessor.from_pretrained(folders[name], backend="pil")
    taken = drawn if name == "clip" else drawn.convert("RGB")
    wanted = np.asarray(processor(images=taken, return_tensors="pt")["pixel_values"])
    np.testing.assert_allclose(arrays_of(reply)[".:input"], wanted, rtol=0, atol=FILES[name][1])
