"""Inputs that want something of their own: an objective, a class, changes; each as if it had been sent alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.server import Live
from tests.service.digits_reference import copy_digits, forward, gradient, random_images
from tests.service.support import Array, Json, arrays_of, image, picture, problem, tensor

LAYER, HEAD = "block2", "head"
GRADIENT = f"{LAYER}:grad_output"
ROWS = random_images(4, seed=11)


@pytest.fixture(scope="module")
def chain(live: Live) -> Any:
    """The embedded model offline."""
    return copy_digits(live)


def body(options: Sequence[Json], layers: Sequence[Any], **fields: Any) -> Json:
    inputs = [{**tensor(row), **each} for row, each in zip(ROWS, options, strict=False)]
    return {"inputs": inputs, "layers": list(layers), "encoding": "base64", **fields}


def post(live: Live, options: Sequence[Json], layers: Sequence[Any], **fields: Any) -> Any:
    return live.client.post("/extract", json=body(options, layers, **fields))


def slope(module: Any, row: Array, klass: int) -> Array:
    """A class's score differentiated at the layer."""
    found: Array = gradient(module, torch.from_numpy(row[None]), LAYER, lambda out: out[:, klass]).numpy()
    return found[0]


def head(module: Any, row: Array, channels: Sequence[int]) -> Array:
    """The scores where channels of the layer are 0."""
    value = forward(module, torch.from_numpy(row[None]), LAYER)
    value[:, list(channels)] = 0
    found: Array = forward(module, value, behind=LAYER).detach().numpy()
    return found[0]


def test_classes(live: Live, chain: Any) -> None:
    """Each input's gradient is of its own class; the receipt tells all of them, and a fingerprint for each."""
    reply = post(live, [{"class": 3}, {}, {"class": "top"}, {"class": 7}], [GRADIENT], objective={"class": 0})
    found = arrays_of(reply)[GRADIENT]
    receipt = reply.json()["receipts"][GRADIENT]
    top = int(forward(chain, torch.from_numpy(ROWS[2:3])).argmax())
    assert receipt["classes"] == [3, 0, top, 7]
    for row, klass in enumerate(receipt["classes"]):
        np.testing.assert_allclose(found[row], slope(chain, ROWS[row], klass), rtol=1e-3, atol=1e-6)
    for row, klass in ((0, 3), (2, "top")):
        alone = live.client.post("/extract", json=body([{}], [GRADIENT], objective={"class": klass})).json()
        assert alone["receipts"][GRADIENT]["fingerprint"] == receipt["fingerprints"][row]


def test_interventions(live: Live, chain: Any) -> None:
    """Changes of an input come after those of the request, and touch no other."""
    zero = {"layer": LAYER, "op": "zero"}
    own = [{}, {"interventions": [{**zero, "channels": [1, 2]}]}, {"interventions": [{**zero, "channels": [-1]}]}, {}]
    everywhere = [{**zero, "channels": [0]}]
    reply = post(live, own, [HEAD, {"layer": LAYER, "pool": "mean"}], interventions=everywhere)
    found, last = arrays_of(reply)[HEAD], arrays_of(reply)[LAYER].shape[1] - 1
    for row, channels in enumerate(([0], [0, 1, 2], [0, last], [0])):
        np.testing.assert_allclose(found[row], head(chain, ROWS[row], channels), rtol=1e-4, atol=1e-5)
    assert reply.json()["interventions"] == [[f"{LAYER}#0:output"]]
    receipt = reply.json()["receipts"][HEAD]["fingerprints"]
    assert receipt[0] == receipt[3] != receipt[1] != receipt[2]


def test_an_input_again(live: Live) -> None:
    """One that names another is that input once more, with options of its own."""
    changes = [[{"layer": LAYER, "op": "zero", "channels": [channel]}] for channel in range(3)]
    own: list[Json] = [{}, *({"interventions": change} for change in changes)]
    for sent in (tensor(ROWS[0]), image(picture(3))):
        again: list[Json] = [sent, *[{"input": 0}] * len(changes)]
        found, expected = (
            live.client.post("/extract", json={**body((), [HEAD]), "inputs": [a | b for a, b in pairs]}).json()
            for pairs in (zip(again, own, strict=True), zip([sent] * len(own), own, strict=True))
        )
        assert found["features"] == expected["features"]
        assert found["receipts"] == expected["receipts"]


def test_skipped_inputs(live: Live, chain: Any) -> None:
    """Options stay with their inputs where others are left out."""
    sent = body([{"class": 3}, {"class": 5}, {"class": 7}], [GRADIENT], on_error="skip")
    sent["inputs"][0] = {"image": "bm8gcGljdHVyZQ==", "class": 3}
    reply = live.client.post("/extract", json=sent)
    assert reply.json()["receipts"][GRADIENT]["classes"] == [5, 7]
    np.testing.assert_allclose(arrays_of(reply)[GRADIENT][0], slope(chain, ROWS[1], 5), rtol=1e-3, atol=1e-6)


CHANGE: Json = {"layer": LAYER, "op": "zero"}
REFUSED: dict[str, tuple[str, Json, str, str]] = {
    "no such input": ("/extract", {"input": 1}, "/inputs/1", "names input 1"),
    "class twice": ("/extract", {"class": 1, "objective": {"class": 1}}, "/inputs/1", "give one"),
    "no such layer": (
        "/extract",
        {"interventions": [CHANGE, {**CHANGE, "layer": "block9"}]},
        "/inputs/1/interventions/1",
        "block9",
    ),
    "changes of a map": ("/explain", {"interventions": [CHANGE]}, "/inputs/1/interventions", "leave them out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(live: Live, name: str) -> None:
    """A fault tells the input and the entry."""
    path, own, pointer, said = REFUSED[name]
    sent = body([{"class": 1}, own, {}], [GRADIENT], objective={"class": 0})
    if "input" in own:
        sent["inputs"][1] = own
    if path == "/explain":
        sent = {"method": "grad_cam", "inputs": sent["inputs"]}
    (fault,) = problem(live.client.post(path, json=sent), 422)["errors"]
    assert fault["pointer"] == pointer
    assert said in f"{fault['detail']} {fault.get('hint', '')}"
