"""Probes: what the fixed input gives, by hand and by HTTP, and what two of them say of each other."""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms._presets import ImageClassification

from layertap.models.errors import LayertapError
from layertap.models.inputs.model_inputs import ModelInputs, TextSpec
from layertap.models.spec import InputSpec
from layertap.service.explain.prober import make_picture, make_probe_input
from layertap.service.inputs.items import ArraysItem, TextItem, TokensItem
from layertap.service.probes import Probe, is_rounding, measure_change, parse_probe
from tests.conftest import net_spec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import copy_digits, forward
from tests.service.support import Json, configured, image, npy, picture, problem, raw

PICTURE_DIGEST = "bb7f5d426a8075441db985d9fb2ef1c6834a9b136b8c523fe811696135fb92fc"
NOISE = np.random.default_rng(0)


@pytest.fixture(scope="module")
def nets(serve: Serve) -> Iterator[Live]:
    """The embedded model, and one that takes tensors only."""
    with serve(configured(net_spec("Chain"))) as live:
        yield live


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
    body: Json = reply.json()
    return body


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


def test_without_layers(live: Live) -> None:
    """Without layers a probe is of the embedding."""
    reply = live.client.post("/extract", json={"inputs": [image(picture(1))]}).json()
    assert probe_of(live, "digits")["fingerprint"] == reply["fingerprint"]


def test_rows_of_the_caller(live: Live) -> None:
    """Tensors of a model of pictures have a probe of tensors, with their fingerprint."""
    row = np.zeros((3, 32, 32), np.float32)
    reply = live.client.post("/extract", **raw(npy(row), "application/x-npy", layers="pool", probe="true")).json()
    got = probe_of(live, "digits", layers="pool", preprocessed="caller")
    assert reply["receipts"]["pool"]["probe"] == got["receipts"]["pool"]["probe"]
    assert got["receipts"]["pool"]["probe"]["input"] == "tensors"
    assert got["fingerprint"] == reply["fingerprint"] != probe_of(live, "digits", layers="pool")["fingerprint"]


def test_a_model_of_tensors(nets: Live) -> None:
    """A model that takes no pictures is probed by a tensor."""
    (receipt,) = probe_of(nets, "Chain", layers="conv")["receipts"].values()
    assert receipt["probe"]["input"] == "tensors"


@pytest.mark.parametrize(
    "more",
    [
        {"interventions": [{"layer": "block1", "op": "zero"}]},
        {"objective": {"kind": "logit"}, "layers": ["block1:grad_output"]},
    ],
    ids=["interventions", "objective"],
)
def test_no_probe(live: Live, more: Json) -> None:
    """What a fixed input can't show is refused."""
    body = {"layers": ["block1"], "inputs": [image(picture(1))], "probe": True, **more}
    assert "has no probes" in problem(live.client.post("/extract", json=body), 422)["detail"]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/models/digit/probe", 404, "there is no model"),
        ("/models/digits/probe?layers=blok1", 422, "blok1"),
        ("/models/digits/probe?layer=block1", 422, "layer"),
        ("/models/digits/probe?format=npz", 422, "format"),
        ("/models/digits/probe?dry_run=true", 422, "dry_run"),
        ("/models/digits/probe?pool=mode", 422, "flatten"),
        ("/models/digits/probe?layers=block1:grad_output", 422, "objective"),
    ],
)
def test_mistakes(live: Live, path: str, status: int, says: str) -> None:
    """Mistakes are told as those of other requests."""
    assert says in problem(live.client.get(path), status)["detail"]


def make_inputs(*specs: InputSpec, text: TextSpec | None = None) -> ModelInputs:
    return ModelInputs("m", specs, torch.float32, None, text)


def test_inputs_of_every_kind() -> None:
    """Texts where there is a tokenizer, tokens where there is none, tensors of every dtype within their values."""
    text = TextSpec(ids="ids", mask="mask", max_tokens=5, pad=0, vocabulary=7, encode=lambda words: [1] * len(words))
    specs = (InputSpec("ids", (5,), "int64", (0, 7)), InputSpec("mask", (5,), "int64"))
    assert isinstance(make_probe_input(make_inputs(*specs, text=text), preprocessed=False)[1], TextItem)
    kind, tokens = make_probe_input(
        make_inputs(*specs, text=TextSpec("ids", "mask", 5, 0, 7, encode=None)), preprocessed=False
    )
    assert isinstance(tokens, TokensItem)
    assert (kind, len(tokens.tokens)) == ("tokens", 5)
    assert all(0 <= token < 7 for token in tokens.tokens)
    kind, arrays = make_probe_input(make_inputs(*specs, text=text), preprocessed=True)
    assert isinstance(arrays, ArraysItem)
    assert kind == "tensors"
    assert arrays.arrays["mask"].all()
    several = make_inputs(
        InputSpec("a", (2, 3)),
        InputSpec("b", (4,), "bfloat16"),
        InputSpec("c", (50,), "uint8", (3, 9)),
        InputSpec("d", (9,), "bool"),
    )
    _, arrays = make_probe_input(several, preprocessed=False)
    assert isinstance(arrays, ArraysItem)
    found = arrays.arrays
    assert [found[name].dtype.name for name in "abcd"] == ["float32", "float32", "uint8", "bool"]
    assert 3 <= found["c"].min() < found["c"].max() < 9
    assert np.abs(found["a"]).max() < 1.74


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


@pytest.mark.parametrize("share", [1e-7, 1e-6])
def test_rounding(share: float) -> None:
    """What machines differ by is within rounding, wherever it falls."""
    for seed in range(200):
        noise = np.random.default_rng(seed).standard_normal(RESULT.shape)
        moved = RESULT.astype(np.float64) * (1 + share * noise)
        assert is_rounding(of(RESULT), of(moved.astype(np.float32)), "float32")


@pytest.mark.parametrize("share", [5e-4, 1e-3, 1e-2, 1.0])
def test_changed(share: float) -> None:
    """What an epsilon changes is found, and told by how much."""
    for seed in range(200):
        noise = np.random.default_rng(seed).standard_normal(RESULT.shape)
        moved = (RESULT * (1 + share * noise)).astype(np.float32)
        assert not is_rounding(of(RESULT), of(moved), "float32")
        assert share / 2 < measure_change(of(RESULT), of(moved)) < share * 2


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
    "entry", [7, {}, {"input": "picture"}, {"input": "sound", "values": "AAAA"}, {"input": "text", "values": "§"}]
)
def test_no_probes(entry: object) -> None:
    """What is no probe is said to be none."""
    with pytest.raises(LayertapError, match="this is no probe"):
        parse_probe(entry).read_values()  # type: ignore[union-attr]


def test_no_entry() -> None:
    """A receipt without a probe has none."""
    assert parse_probe(None) is None


def test_one_step_of_a_large_entry() -> None:
    """One entry that is rounded to its neighbour is rounding, even where it is most of the probe."""
    one = np.zeros(64, np.float32)
    one[5], one[9] = 1.0, 0.7000
    other = one.copy()
    other[9] = 0.7005
    assert measure_change(of(one), of(other)) > 1e-4
    assert is_rounding(of(one), of(other), "float32")
    other[9] = 0.7020
    assert not is_rounding(of(one), of(other), "float32")
