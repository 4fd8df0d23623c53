"""``decode: device`` on a CUDA device: nvJPEG's pictures near to Pillow's, everyone's own, and all others as ever."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from layertap.models.inputs.device_decoder import DeviceDecoder
from layertap.models.inputs.preprocess import preprocess
from layertap.models.spec import ModelSpec, PreprocessSpec
from layertap.service.config.configuration import Configuration
from tests.gpu.accelerator import on_cuda
from tests.server import Live, serving
from tests.service.support import arrays_of, image, problem, raw, tensor

pytestmark = [
    *on_cuda,
    pytest.mark.filterwarnings("ignore:.*decod:DeprecationWarning"),
]
HOW = PreprocessSpec(resize=232, crop=224)
PICTURES = [Image.fromarray(pixels) for pixels in load_sample_images().images]
MOST, MEAN = 24, 2.0  # steps of 8 bits; never measured before this ran on a GPU: chroma is enlarged otherwise


def saved(picture: Image.Image, form: str = "JPEG", **options: Any) -> bytes:
    stream = BytesIO()
    picture.save(stream, form, **{"quality": 95, **options})
    return stream.getvalue()


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


PLAIN = [
    *(saved(picture) for picture in PICTURES),
    saved(PICTURES[0], progressive=True),
    saved(PICTURES[1], subsampling=0),
    saved(PICTURES[1].convert("L")),
    saved(PICTURES[0].crop((3, 5, 304, 204))),
]
OTHERS = [
    saved(PICTURES[0], exif=turned()),
    saved(PICTURES[0].convert("CMYK")),
    saved(PICTURES[1], "PNG"),
]


def steps(found: Any, wanted: Any) -> Any:
    std = np.array(HOW.std, np.float32).reshape(3, 1, 1)
    return np.abs(np.asarray(found) - np.asarray(wanted)) * std * 255


@pytest.mark.parametrize("data", PLAIN, ids=range(len(PLAIN)))
def test_near_to_pillow(data: bytes) -> None:
    """Baseline, progressive, full chroma, gray, odd sizes: within a bound of what the CPU makes of them."""
    picture = Image.open(BytesIO(data))
    row = DeviceDecoder(torch.device("cuda", 0), HOW).decode_row(data, picture.size)
    assert row is not None
    assert row.device == torch.device("cuda", 0)
    apart = steps(row.cpu(), preprocess(picture.convert("RGB"), HOW))
    assert apart.max() <= MOST
    assert apart.mean() <= MEAN


@pytest.fixture(scope="module")
def live() -> Any:
    """One model twice: pictures decoded by the CPU, and by the device."""
    specs = [
        ModelSpec(name, "torchvision:resnet18", weights="random:0", device="cuda", preprocess=HOW, decode=name)  # type: ignore[arg-type]
        for name in ("exact", "device")
    ]
    with serving(Configuration(tuple(specs), "exact")) as server:
        model = server.engine.manager.registry.get_entry("device").model
        assert model is not None
        assert model.model_inputs.decoder is not None
        yield server


def rows(live: Live, model: str, *inputs: Any) -> Any:
    body = {"model": model, "layers": ["conv1:input"], "inputs": list(inputs), "encoding": "base64"}
    reply = live.client.post("/extract", json=body)
    assert reply.status_code == 200, reply.text
    return next(iter(arrays_of(reply).values()))


def test_requests_of_all_kinds(live: Live) -> None:
    """Pictures for the device, for the CPU, and tensors, in one request: each as alone, the CPU's bit for bit."""
    given = np.random.default_rng(0).normal(size=(3, 224, 224)).astype(np.float32)
    inputs = [image(PLAIN[0]), tensor(given), *(image(data) for data in OTHERS), *(image(data) for data in PLAIN[1:])]
    exact, device = (rows(live, name, *inputs) for name in ("exact", "device"))
    assert np.array_equal(exact[1:5], device[1:5])
    assert np.array_equal(device[1], given)
    for place in (0, *range(5, len(inputs))):
        apart = steps(device[place], exact[place])
        assert 0 < apart.mean() <= MEAN
        assert apart.max() <= MOST
        assert np.array_equal(rows(live, "device", inputs[place])[0], device[place])


def test_many_at_once(live: Live) -> None:
    """Many clients, each with a picture of its own, decoded together: each gets what it gets alone."""
    files = [saved(PICTURES[number % 2].crop((number, 2 * number, 400 + number, 300))) for number in range(32)]
    alone = [rows(live, "device", image(data)) for data in files]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda data: rows(live, "device", image(data)), files * 3))
    for place, found in enumerate(together):
        assert np.array_equal(found, alone[place % len(files)])


def test_bad_ones(live: Live) -> None:
    """What is no picture, or is cut short, is refused in the CPU's words, also among good ones."""
    whole = PLAIN[0]
    for data in (whole[: len(whole) // 2], whole[:200] + b"\xff\xd9", b"\xff\xd8\xff" + b"\xff\xd9"):
        told = [
            problem(live.client.post("/extract", **raw(data, "image/jpeg", model=name, layers="fc")), 422)["errors"]
            for name in ("exact", "device")
        ]
        assert told[0][0]["detail"] == told[1][0]["detail"]
    assert rows(live, "device", image(whole)).shape == (1, 3, 224, 224)
    prints = {
        live.client.post("/extract", **raw(whole, "image/jpeg", model=name, layers="fc")).headers[
            "X-Layertap-Fingerprint"
        ]
        for name in ("exact", "device")
    }
    assert len(prints) == 2
