"""A model on an accelerator whose pictures are decoded in workers: the same rows, and a crash costs one input."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from layertap.models.spec import PreprocessSpec
from layertap.service.config.configuration import Configuration
from tests.gpu.accelerator import SIDE, on_accelerator
from tests.gpu.nets import net_spec
from tests.server import Live, serving
from tests.service.engine.processes.fatal_pictures import CRASHES, FatalSide
from tests.service.support import arrays_of, problem, raw

pytestmark = on_accelerator
SPEC = net_spec(preprocess=PreprocessSpec(resize=FatalSide(SIDE + 8), crop=SIDE))
CLIENTS = 16


def saved(picture: Image.Image, form: str) -> bytes:
    stream = BytesIO()
    picture.save(stream, form)
    return stream.getvalue()


PICTURES = [
    saved(Image.fromarray(pixels).crop((number, number, 400 + number, 300)), form)
    for pixels in load_sample_images().images
    for form in ("JPEG", "PNG")
    for number in range(2)
]


def send(live: Live, data: bytes, layers: str) -> Any:
    return live.client.post("/extract", **raw(data, "image/png", layers=layers, format="npz"))


def test_decoding_workers() -> None:
    """Rows have the bits that they have without workers, also many at once beside a picture that crashes a worker."""
    with serving(Configuration((SPEC,), "net"), workers=0) as live:
        rows = [[arrays_of(send(live, data, "conv1:input")) for data in PICTURES]]
    with serving(Configuration((SPEC,), "net"), workers=2) as live, ThreadPoolExecutor(CLIENTS) as pool:
        rows.append([arrays_of(send(live, data, "conv1:input")) for data in PICTURES])
        refused = pool.submit(send, live, saved(Image.new("RGB", CRASHES), "PNG"), "fc")
        replies = list(pool.map(lambda data: send(live, data, "conv1:input"), PICTURES * 2))
        assert problem(refused.result(), 422)["errors"][0]["detail"] == "this input ends the process that decodes it"
        restarts = [line for line in live.client.get("/metrics").text.splitlines() if "worker_restarts_total{" in line]
    assert any('reason="crash"' in line and line.endswith(" 2.0") for line in restarts)
    rows.append([arrays_of(reply) for reply in replies])
    for without, *others in zip(rows[0] * 2, rows[1] * 2, rows[2], strict=True):
        for found in others:
            np.testing.assert_array_equal(found["conv1:input"], without["conv1:input"])
