"""Inputs that want something of their own: an objective, a class, changes; each as if it had been sent alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import copy_digits, forward, random_images
from tests.service.support import Array, Json, arrays_of, image, picture, problem, tensor

LAYER, HEAD = "block2", "head"
GRADIENT = f"{LAYER}:grad_output"
ROWS = random_images(4, seed=11)


@pytest.fixture(scope="module")
def chain(live: Live) -> Any:
    """The embedded model offline."""
    return copy_digits(live)


@pytest.fixture(scope="module")
def served(serve: Serve) -> Iterator[Live]:
    """The embedded model."""
    with serve() as live:
        yield live


def body(options: Sequence[Json], layers: Sequence[Any], **fields: Any) -> Json:
    inputs = [{**tensor(row), **each} for row, each in zip(ROWS, options, strict=False)]
    return {"inputs": inputs, "layers": list(layers), "encoding": "base64", **fields}


def post(live: Live, options: Sequence[Json], layers: Sequence[Any], **fields: Any) -> Any:
    return live.client.post("/extract", json=body(options, layers, **fields))


def gradient(module: Any, row: Array, klass: int) -> Array:
    """A class's score differentiated at the layer, by autograd on the chain."""
    start = forward(module, torch.from_numpy(row[None]), LAYER).detach().requires_grad_()
    names = [name for name, _ in module.named_children()]
    out = start
    for name in names[names.index(LAYER) + 1 :]:
        out = module.get_submodule(name)(out)
    (found,) = torch.autograd.grad(out[:, klass].sum(), start)
    value: Array = found.numpy()
    return value


def head(module: Any, row: Array, channels: Sequence[int]) -> Array:
    """The scores where channels of the layer are 0."""
    out = forward(module, torch.from_numpy(row[None]), LAYER)
    out[:, list(channels)] = 0
    names = [name for name, _ in module.named_children()]
    for name in names[names.index(LAYER) + 1 :]:
        out = module.get_submodule(name)(out)
    found: Array = out.detach().numpy()
    return found


def test_classes(served: Live, chain: Any) -> None:
    """Each input's gradient is of its own class; the receipt tells all of them, and a fingerprint for each."""
    reply = post(served, [{"class": 3}, {}, {"class": "top"}, {"class": 7}], [GRADIENT], objective={"class": 0})
    found = arrays_of(reply)[GRADIENT]
    receipt = reply.json()["receipts"][GRADIENT]
    top = int(forward(chain, torch.from_numpy(ROWS[2:3])).argmax())
    assert receipt["classes"] == [3, 0, top, 7]
    for row, klass in enumerate(receipt["classes"]):
        np.testing.assert_allclose(found[row], gradient(chain, ROWS[row], klass)[0], rtol=1e-3, atol=1e-6)
    for row, klass in ((0, 3), (1, 0), (2, "top"), (3, 7)):
        alone = served.client.post("/extract", json=body([{}], [GRADIENT], objective={"class": klass})).json()
        assert alone["receipts"][GRADIENT]["fingerprint"] == receipt["fingerprints"][row]


def test_objectives_and_targets(served: Live, chain: Any) -> None:
    """An objective of its own, or a target in place of the request's."""
    target = [0.1] * 10
    own = [{"objective": {"kind": "logit", "class": 2}}, {"target": target}]
    found = arrays_of(post(served, own, [GRADIENT], objective={"kind": "kl_div", "class": 1}))[GRADIENT]
    np.testing.assert_allclose(found[0], gradient(chain, ROWS[0], 2)[0], rtol=1e-3, atol=1e-6)
    alone = {**body([{}], [GRADIENT], objective={"kind": "kl_div", "target": target}), "inputs": [tensor(ROWS[1])]}
    expected = arrays_of(served.client.post("/extract", json=alone))[GRADIENT]
    np.testing.assert_allclose(found[1:], expected, rtol=1e-4, atol=1e-7)


def test_interventions(served: Live, chain: Any) -> None:
    """Changes of an input come after those of the request, and touch no other."""
    zero = {"layer": LAYER, "op": "zero"}
    own = [{}, {"interventions": [{**zero, "channels": [1, 2]}]}, {"interventions": [{**zero, "channels": [-1]}]}, {}]
    everywhere = [{**zero, "channels": [0]}]
    reply = post(served, own, [HEAD, {"layer": LAYER, "pool": "mean"}], interventions=everywhere)
    found, last = arrays_of(reply)[HEAD], arrays_of(reply)[LAYER].shape[1] - 1
    for row, channels in enumerate(([0], [0, 1, 2], [0, last], [0])):
        np.testing.assert_allclose(found[row], head(chain, ROWS[row], channels)[0], rtol=1e-4, atol=1e-5)
    assert reply.json()["interventions"] == [[f"{LAYER}#0:output"]]
    receipt = reply.json()["receipts"][HEAD]["fingerprints"]
    assert receipt[0] == receipt[3] != receipt[1] != receipt[2]


def test_noise(served: Live) -> None:
    """Noise goes by a row's number in the request, whatever other inputs want."""
    noise = [{"layer": LAYER, "op": "noise", "std": 0.5, "seed": 3}]
    plain = arrays_of(post(served, [{}] * 4, [HEAD], interventions=noise))[HEAD]
    own = [{}, {}, {"interventions": [{"layer": LAYER, "op": "zero"}]}, {}]
    found = arrays_of(post(served, own, [HEAD], interventions=noise))[HEAD]
    np.testing.assert_allclose(found[[0, 1, 3]], plain[[0, 1, 3]], rtol=1e-4, atol=1e-5)
    assert np.abs(found[2] - plain[2]).max() > 1e-3


def test_an_input_again(served: Live) -> None:
    """One that names another is that input once more, with options of its own."""
    changes = [[{"layer": LAYER, "op": "zero", "channels": [channel]}] for channel in range(5)]
    own: list[Json] = [{}, *({"interventions": change} for change in changes)]
    for sent in (tensor(ROWS[0]), image(picture(3))):
        again: list[Json] = [sent, *[{"input": 0}] * len(changes)]
        found, expected = (
            served.client.post("/extract", json={**body((), [HEAD]), "inputs": [a | b for a, b in pairs]}).json()
            for pairs in (zip(again, own, strict=True), zip([sent] * len(own), own, strict=True))
        )
        assert found["features"] == expected["features"]
        assert found["receipts"] == expected["receipts"]


@pytest.mark.parametrize("number", [1, 3])
def test_no_such_input(served: Live, number: int) -> None:
    """What is named must be sent itself: not this one, no other that names one, none beyond the last."""
    inputs = [tensor(ROWS[0]), {"input": number}, {"input": 0}]
    found = problem(served.client.post("/extract", json={**body((), [HEAD]), "inputs": inputs}), 422)
    assert [(fault["pointer"], fault["input"]) for fault in found["errors"]] == [("/inputs/1", 1)]
    assert f"names input {number}" in found["detail"]


def test_skipped_inputs(served: Live, chain: Any) -> None:
    """Options stay with their inputs where others are left out."""
    sent = body([{"class": 3}, {"class": 5}, {"class": 7}], [GRADIENT], on_error="skip")
    sent["inputs"][0] = {"image": "bm8gcGljdHVyZQ==", "class": 3}
    reply = served.client.post("/extract", json=sent)
    assert reply.json()["receipts"][GRADIENT]["classes"] == [5, 7]
    np.testing.assert_allclose(arrays_of(reply)[GRADIENT][0], gradient(chain, ROWS[1], 5)[0], rtol=1e-3, atol=1e-6)


CHANGE: Json = {"layer": LAYER, "op": "zero"}
REFUSED: dict[str, tuple[str, Json, str, str]] = {
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
def test_refused(served: Live, name: str) -> None:
    """A fault tells the input and the entry."""
    path, own, pointer, said = REFUSED[name]
    sent = body([{"class": 1}, own, {}], [GRADIENT], objective={"class": 0})
    if path == "/explain":
        sent = {"method": "grad_cam", "inputs": sent["inputs"]}
    (fault,) = problem(served.client.post(path, json=sent), 422)["errors"]
    assert fault["pointer"] == pointer
    assert said in f"{fault['detail']} {fault.get('hint', '')}"


def test_not_verified(served: Live) -> None:
    """Nothing is called verified where an input is changed; a class of its own does no harm."""
    reply = post(served, [{}, {"interventions": [CHANGE]}], [HEAD], verify=True)
    assert problem(reply, 422)["errors"][0]["input"] == 1
    plain = post(served, [{}, {"interventions": []}], [HEAD], verify=True)
    assert plain.headers["X-Layertap-Verified"] == "true"
