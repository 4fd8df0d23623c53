"""A tensor's own shape is known before it is decoded: limits go by it, not by the configured one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from layertap.models.loaded_model import LoadedModel
from layertap.models.spec import InputSpec
from tests.conftest import net_spec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, image, npy, picture, problem, raw, tensor

SIDE, SMALL, LARGE = 64, 16, 256
LIMIT = 100_000  # bytes of a reply; one row of `conv` has 8 * 64 * 64 * 4
FORMS = ("tensor", "npy", "npy of a batch", "safetensors")


def row(side: int) -> Array:
    """A row of that height and width."""
    return np.random.default_rng(side).standard_normal((3, side, side)).astype(np.float32)


def request(form: str, array: Array, **fields: Any) -> Json:
    """A request for a layer whose output is as large as its input, with one tensor, in one of the forms."""
    query = {"model": "Chain", "layers": "conv", "format": "npz", **fields}
    return {
        "npy": raw(npy(array), "application/x-npy", **query),
        "npy of a batch": raw(npy(array[None]), "application/x-npy", **query),
        "safetensors": raw(safetensors.numpy.save({"image": array}), "application/x-safetensors", **query),
        "tensor": {
            "json": {"model": "Chain", "layers": ["conv"], "inputs": [tensor(array)]},
            "params": {"format": "npz", **fields},
        },
    }[form]


def chain(live: Live) -> LoadedModel:
    """The model that takes large rows."""
    model = live.engine.manager.registry.get_entry("Chain").model
    assert model is not None
    return model


SPEC = net_spec("Chain", inputs=(InputSpec("image", (3, SIDE, SIDE)),))


@pytest.fixture(scope="module")
def strict(serve: Serve) -> Iterator[Live]:
    """A server whose replies may not hold a layer of the configured shape."""
    with serve(configured(SPEC), max_reply_bytes=LIMIT) as live:
        live.client.get("/models/Chain/layers").raise_for_status()
        yield live


@pytest.fixture(scope="module")
def lenient(serve: Serve) -> Iterator[Live]:
    """A server whose replies may, and no layer of much larger rows."""
    with serve(configured(SPEC), max_reply_bytes=4 * LIMIT) as live:
        assert live.client.post("/extract", **request("npy", row(SIDE))).status_code == 200
        yield live


@pytest.mark.parametrize("form", FORMS)
def test_small(strict: Live, form: str) -> None:
    """Small rows of a model for large ones are answered, a second time too, when the shape is known."""
    array = row(SMALL + FORMS.index(form))  # each of its own, so that none was seen before
    expected = chain(strict).module.conv(torch.from_numpy(array)[None]).detach().numpy()
    for _ in range(2):
        found = arrays_of(strict.client.post("/extract", **request(form, array)))
        np.testing.assert_allclose(found["conv"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_small_dry_run(strict: Live, form: str) -> None:
    """A dry run goes by the rows that it is given; without any, by the configured shape."""
    promised = strict.client.post("/extract", **request(form, row(SMALL), dry_run="true")).json()
    assert promised["features"]["conv"]["shape"] == [1, 8, SMALL, SMALL]
    assert promised["bytes"] == 8 * SMALL * SMALL * 4
    without = {"model": "Chain", "layers": ["conv"]}
    problem(strict.client.post("/extract?dry_run=true&format=npz", json=without), 413)


@pytest.mark.parametrize("form", FORMS)
def test_configured(strict: Live, form: str) -> None:
    """A row of the configured shape is refused before it is decoded, as ever."""
    reply = strict.client.post("/extract", **request(form, row(SIDE)))
    assert f"limit is {LIMIT}" in problem(reply, 413)["detail"]
    assert "decode" not in reply.headers["server-timing"]


def test_small_and_too_many(strict: Live) -> None:
    """Small rows whose answer is too large are refused; once the shape is known, before anything is decoded."""
    count = LIMIT // (8 * SMALL * SMALL * 4) + 1
    batch = np.stack([row(SMALL)] * count)
    sent = raw(npy(batch), "application/x-npy", model="Chain", layers="conv", format="npz")
    problem(strict.client.post("/extract", **sent), 413)
    body = {"model": "Chain", "layers": ["conv"], "inputs": [tensor(each) for each in batch]}
    reply = strict.client.post("/extract?format=npz", json=body)
    assert f"limit is {LIMIT}" in problem(reply, 413)["detail"]
    assert "decode" not in reply.headers["server-timing"]


@pytest.mark.parametrize("form", FORMS)
def test_large(lenient: Live, form: str) -> None:
    """Rows larger than configured are refused before they are decoded, and before anything runs with their shape."""
    reply = lenient.client.post("/extract", **request(form, row(LARGE)))
    assert f"limit is {4 * LIMIT}" in problem(reply, 413)["detail"]
    assert "decode" not in reply.headers["server-timing"]
    assert chain(lenient).catalogs.get_catalog(((3, LARGE, LARGE),)) is None


def test_memory(serve: Serve) -> None:
    """What a request holds in memory is counted by its own shape as well."""
    with serve(configured(SPEC), max_queue_bytes=LIMIT) as live:
        assert live.client.post("/extract", **request("npy", row(SMALL))).status_code == 200
        assert "the queue holds" in problem(live.client.post("/extract", **request("npy", row(SIDE))), 413)["detail"]


def test_beside_bad_ones(strict: Live) -> None:
    """Inputs that are left out have no say: neither a picture for a model of tensors nor a tensor of a wrong rank."""
    inputs = [image(picture()), tensor(np.zeros((3, 4), np.float32)), tensor(row(SMALL)), tensor(row(SMALL))]
    body = {"model": "Chain", "layers": ["conv"], "inputs": inputs, "on_error": "skip"}
    found = arrays_of(strict.client.post("/extract?format=npz", json=body))
    assert found["conv"].shape == (2, 8, SMALL, SMALL)


def test_faults_as_before(strict: Live) -> None:
    """What no model takes is still told by the input."""
    for wrong in (np.zeros((3, 4), np.float32), np.zeros((4, SMALL, SMALL), np.float32), np.zeros((3, 0, 4), "f4")):
        body = {"model": "Chain", "layers": ["head"], "inputs": [tensor(wrong)]}
        assert problem(strict.client.post("/extract", json=body), 422)["errors"][0]["input"] == 0
