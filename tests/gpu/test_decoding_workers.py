"""A model on a CUDA device whose pictures are decoded in workers: the same rows, and a crash costs one input."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from layertap.models.spec import ModelSpec, PreprocessSpec
from layertap.service.config.configuration import Configuration
from tests.server import Live, serving
from tests.service.engine.processes.fatal_pictures import CRASHES, FatalSide
from tests.service.support import arrays_of, problem, raw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SPEC = ModelSpec(
    "net",
    "torchvision:resnet18",
    weights="random:0",
    device="cuda",
    preprocess=PreprocessSpec(resize=FatalSide(232), crop=224),
)
CLIENTS = 16


def saved(picture: Image.Image, form: str) -> bytes:
    stream = BytesIO()
    picture.save(stream, form)
    return stream.getvalue()


PICTURES = [
    saved(Image.fromarray(pixels).crop((number, number, 400 + number, 300)), form)
    for pixels in load_sample_images().images
    for form in ("JPEG", "PNG")
    for number in range(4)
]


def send(live: Live, data: bytes, layers: str) -> Any:
    return live.client.post("/extract", **raw(data, "image/png", layers=layers, format="npz"))


def test_decoding_workers() -> None:
    """Rows have the bits that they have without workers, also many at once beside a picture that crashes a worker."""
    rows = []
    for workers in (0, 2):
        with serving(Configuration((SPEC,), "net"), workers=workers) as live:
            rows.append([arrays_of(send(live, data, "conv1:input")) for data in PICTURES])
    with serving(Configuration((SPEC,), "net"), workers=2) as live, ThreadPoolExecutor(CLIENTS) as pool:
        refused = pool.submit(send, live, saved(Image.new("RGB", CRASHES), "PNG"), "fc")
        replies = list(pool.map(lambda data: send(live, data, "conv1:input"), PICTURES * 4))
        assert problem(refused.result(), 422)["errors"][0]["detail"] == "this input ends the process that decodes it"
        restarts = [line for line in live.client.get("/metrics").text.splitlines() if "worker_restarts_total{" in line]
    assert any('reason="crash"' in line and line.endswith(" 2.0") for line in restarts)
    rows.append([arrays_of(reply) for reply in replies])
    for without, *others in zip(rows[0] * 4, rows[1] * 4, rows[2], strict=True):
        for found in others:
            np.testing.assert_array_equal(found["conv1:input"], without["conv1:input"])
