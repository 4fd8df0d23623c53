"""Probes: what the fixed input gives, by hand and by HTTP, and what two of them say of each other."""

from __future__ import annotations

import base64
import hashlib
import struct
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms._presets import ImageClassification

from layertap.models.errors import LayertapError
from layertap.service.explain.prober import make_picture
from layertap.service.probes import Probe, is_rounding, measure_change, parse_probe
from tests.server import Live
from tests.service.digits_reference import copy_digits, forward
from tests.service.support import Json, image, picture, problem

PICTURE_DIGEST = "bb7f5d426a8075441db985d9fb2ef1c6834a9b136b8c523fe811696135fb92fc"
NOISE = np.random.default_rng(0)


def read(probe: Json) -> tuple[float, np.ndarray[Any, Any]]:
    """What the text of a probe holds, as the reference says."""
    data = base64.b64decode(probe["values"])
    (largest,) = struct.unpack_from("<f", data)
    return largest, np.frombuffer(data, "<f2", offset=4)


def check_probe(probe: Json, result: np.ndarray[Any, Any]) -> None:
    """A probe is what the documents say, of a result that was computed by hand."""
    largest, shares = read(probe)
    flat = result.astype(np.float64).ravel()
    places = np.linspace(0, flat.size - 1, min(64, flat.size)).astype(int)
    assert largest == pytest.approx(np.abs(flat).max(), rel=1e-5)
    np.testing.assert_allclose(shares, flat[places] / np.abs(flat).max(), atol=2**-10)


def probe_of(live: Live, model: str, **query: str) -> Json:
    reply = live.client.get(f"/models/{model}/probe", params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_picture_stays() -> None:
    """The fixed picture has the pixels that it had: probes of all times are of it."""
    pixels = np.asarray(Image.open(BytesIO(make_picture())))
    assert pixels.shape == (256, 320, 3)
    assert hashlib.sha256(pixels.tobytes()).hexdigest() == PICTURE_DIGEST


def test_probe_of_a_picture(live: Live) -> None:
    """What layers give for the fixed picture, as a plain hook has it."""
    how = live.engine.manager.registry.get_entry("digits").model.preprocess  # type: ignore[union-attr]
    assert how is not None
    preset = ImageClassification(crop_size=how.crop, resize_size=how.resize, mean=how.mean, std=how.std)
    row = preset(Image.open(BytesIO(make_picture())).convert("RGB"))
    with torch.no_grad():
        found = forward(copy_digits(live), row[None], upto="block2")
    body = probe_of(live, "digits", layers="block2", pool="mean")
    (receipt,) = body["receipts"].values()
    assert receipt["probe"]["input"] == "picture"
    check_probe(receipt["probe"], found.mean((2, 3)).numpy())


def test_probes_in_receipts(live: Live) -> None:
    """A request that asks for probes has them in its receipts, those of a GET, and the fingerprints that it has."""
    asked: Json = {
        "layers": ["block1", {"layer": "head", "dtype": "int8", "pool": "flatten"}],
        "inputs": [image(picture(1))],
    }
    plain = live.client.post("/extract", json=asked).json()
    assert all("probe" not in receipt for receipt in plain["receipts"].values())
    first, second = (live.client.post("/extract", json={**asked, "probe": True}).json() for _ in range(2))
    assert first["receipts"] == second["receipts"]
    assert first["features"] == plain["features"]
    got = probe_of(live, "digits", layers="block1")["receipts"]["block1"]
    assert first["receipts"]["block1"]["probe"] == got["probe"]
    assert first["receipts"]["block1"]["fingerprint"] == got["fingerprint"]
    _, shares = read(first["receipts"]["head"]["probe"])
    assert np.abs(shares).max() == 1  # the scale of int8 is in it
    changed = {**asked, "probe": True, "interventions": [{"layer": "block1", "op": "zero"}]}
    assert "has no probes" in problem(live.client.post("/extract", json=changed), 422)["detail"]


# --- comparing ------------------------------------------------------------------------------------------------------


def of(values: Any) -> Probe:
    return Probe.of("tensors", np.asarray(values, np.float32))


RESULT = NOISE.standard_normal(500).astype(np.float32)


def test_same() -> None:
    """Equal results have equal probes, of any size."""
    for result in (RESULT, RESULT[:1], np.zeros(70, np.float32), np.array([np.nan, np.inf, 1.0], np.float32)):
        assert measure_change(of(result), of(result.copy())) == 0
    assert of(RESULT) == of(RESULT)
    assert len(of(RESULT).values) == 176


@pytest.mark.parametrize("share", [1e-7, 1e-6, 5e-4, 1e-2, 1.0])
def test_change(share: float) -> None:
    """What machines differ by is within rounding, wherever it falls; what an epsilon changes is told by how much."""
    for seed in range(50):
        noise = np.random.default_rng(seed).standard_normal(RESULT.shape)
        moved = of(RESULT.astype(np.float64) * (1 + share * noise))
        assert is_rounding(of(RESULT), moved, "float32") == (share < 1e-5)
        assert share < 1e-5 or share / 2 < measure_change(of(RESULT), moved) < share * 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (RESULT, RESULT[:30]),
        (RESULT, np.where(RESULT[0] == RESULT, np.nan, RESULT)),
        (np.zeros(9), np.ones(9)),
        (np.array([1.0, np.inf]), np.array([1.0, -np.inf])),
        (RESULT, -RESULT),
        (RESULT, RESULT * 1.001),
    ],
    ids=["size", "NaN", "nothing", "sign of infinity", "sign", "scale"],
)
def test_never_the_same(one: Any, other: Any) -> None:
    """Other sizes, NaNs, signs and scales are changes in every dtype that could tell them."""
    assert measure_change(of(one), of(other)) > 1e-4
    assert not is_rounding(of(one), of(other), "float32")


@pytest.mark.parametrize(
    "entry", [7, {}, {"input": "picture"}, {"input": "smell", "values": "AAAA"}, {"input": "text", "values": "§"}]
)
def test_no_probes(entry: object) -> None:
    """What is no probe is said to be none."""
    with pytest.raises(LayertapError, match="this is no probe"):
        parse_probe(entry).read_values()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["picture", "sound", "video", "text", "tokens", "tensors"])
def test_a_probe_is_read_again(kind: Any) -> None:
    """An index holds probes of every kind of input that has one."""
    probe = Probe.of(kind, RESULT)
    assert parse_probe({"input": kind, "values": probe.values}) == probe
