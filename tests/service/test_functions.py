"""Functions inside a forward, over HTTP: listed for those who ask, had by selectors, equal to plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from layertap.models.spec import ModelSpec
from tests.function_nets import GatedMixer
from tests.server import Live
from tests.service.conftest import Serve, server_of
from tests.service.digits_reference import copy_digits, random_images
from tests.service.queue_harness import extract_request, gated_module, hold_queue, post, random_rows
from tests.service.support import ROW, Array, Json, arrays_of, configured, npy, problem, raw, tensor

IMAGES = random_images(3, 5)
GATED = ModelSpec("mixer", "python:tests.function_nets:GatedMixer", weights="random:0", device="cpu", inputs=(ROW,))


mixers = server_of(GATED)


def extract(live: Live, *layers: Any, images: Array = IMAGES, **body: Any) -> Any:
    """The reply about images through digits, sent as tensors."""
    inputs = [tensor(image) for image in images]
    return live.client.post("/extract", json={"layers": layers, "inputs": inputs, "encoding": "base64", **body})


def close(found: dict[str, Array], wanted: Mapping[str, Array | torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5, err_msg=key)


def test_listed(mixers: Live) -> None:
    """With ``functions`` each layer has those that it calls itself, with shapes; without, nothing tells of them."""
    path = "/models/digits/layers"
    plain = mixers.client.get(path).json()
    listed = mixers.client.get(path, params={"functions": "true"}).json()
    block = {"shape": [1, 32, 16, 16], "dtype": "float32", "layout": "NCHW"}
    by_name = {layer["name"]: layer for layer in listed["layers"]}
    functions = {layer["name"]: layer.pop("functions") for layer in listed["layers"]}
    (end,), (begin,) = by_name["block2.bn2"]["outputs"], by_name["block2.relu"]["inputs"][1:]
    assert end["order"] < functions["block2"][0].pop("order") < begin["order"]
    assert functions.pop("block2") == [
        {
            "call": 0,
            "name": "add#0",
            "outputs": [{"path": "", **block}],
            "inputs": [{"path": "[0]", **block}, {"path": "[1]", **block}],
        }
    ]
    assert [each["name"] for each in functions.pop("block3")] == ["add#0"]
    assert not any(functions.values())
    assert listed == plain == mixers.client.get(path, params={"functions": "false"}).json()
    added = mixers.client.get(path, headers={"accept": "text/plain"}, params={"functions": "true"}).text.splitlines()
    assert [line.split()[0] for line in added if "/add#0" in line] == ["block2/add#0", "block3/add#0"]


def test_values(mixers: Live) -> None:
    """What a function took and returned, though an in-place ReLU writes to it later; in every form and format."""
    wanted = compute_block2(mixers, IMAGES)
    close(arrays_of(extract(mixers, *wanted)), wanted)
    objects = [
        {"layer": "block2/add#0", "as": "sum"},
        {"layer": "block2/add", "site": "input", "path": "[1]", "call": 0, "as": "right"},
    ]
    found = arrays_of(extract(mixers, *objects))
    close(found, {"sum": wanted["block2/add#0"], "right": wanted["block2/add#0[1]:input"]})
    query = {"layers": "block2/add#0,block2/add#0[0]:input", "format": "safetensors"}
    found = arrays_of(mixers.client.post("/extract", **raw(npy(IMAGES), "application/x-npy", **query)))
    close(found, {key: wanted[key] for key in query["layers"].split(",")})
    of_type = {"layer": "*/add#-1", "type": "Residual", "as": "sums"}
    assert list(arrays_of(extract(mixers, of_type))) == ["sums.block2/add#0", "sums.block3/add#0"]
    matches = arrays_of(extract(mixers, "*/add:input"))
    assert list(matches) == [f"block{block}/add#0[{place}]:input" for block in (2, 3) for place in (0, 1)]


def test_receipts_and_fingerprints(mixers: Live) -> None:
    """A receipt names the function; no two places have one fingerprint, and layers keep theirs."""
    before = extract(mixers, "block2").json()["receipts"]["block2"]
    keys = ["block2/add#0", "block2/add#0[0]:input", "block2/add#0[1]:input", "block3/add#0", "block2", "block2:input"]
    receipts = extract(mixers, *keys).json()["receipts"]
    assert receipts["block2"] == before
    receipt = receipts["block2/add#0[1]:input"]
    assert [receipt[name] for name in ("layer", "function", "site", "path")] == ["block2", "add#0", "input", "[1]"]
    assert len({each["fingerprint"] for each in receipts.values()}) == len(keys)
    probes = mixers.client.get("/models/digits/probe", params={"layers": "block2/add#0", "pool": "mean"})
    assert probes.status_code == 200, probes.text


def test_one_batch(mixers: Live) -> None:
    """One forward for a request with functions and one without; each gets what it gets alone."""
    module = gated_module(mixers, "mixer")
    assert isinstance(module, GatedMixer)
    mixers.client.get("/models/mixer/layers?functions=true")  # surveyed before the model is held up
    batches = [random_rows(2, seed) for seed in range(4)]
    layers = ["linear", "./add#0,./mul#0", "linear,.", "./cat#0[1]:input"]
    with hold_queue(mixers, "mixer") as queue:
        module.modes.clear()
        pairs = zip(batches, layers, strict=True)
        replies = [queue.enqueue(extract_request(batch, "mixer", names), 2) for batch, names in pairs]
    found = [arrays_of(reply.result()) for reply in replies]
    assert module.forwards == [8]
    assert module.modes == [1]
    with torch.no_grad():
        linear = [module.linear(torch.from_numpy(batch)).numpy() for batch in batches]
    close(found[0], {"linear": linear[0]})
    close(found[1], {"./add#0": linear[1] + 1, "./mul#0": (linear[1] + 1) * 3})
    whole = (linear[2] + 1) * 3
    close(found[2], {"linear": linear[2], ".": np.concatenate([whole, np.tanh(whole)], 1)})
    close(found[3], {"./cat#0[1]:input": np.tanh((linear[3] + 1) * 3)})


def test_no_survey_where_nobody_asks(serve: Serve) -> None:
    """Functions are surveyed once, when they are first asked for: loading and other requests do not."""
    with serve(configured(GATED)) as live:
        module = gated_module(live, "mixer")
        assert isinstance(module, GatedMixer)
        arrays_of(post(live, extract_request(random_rows(2), "mixer", ".")))
        live.client.get("/models/mixer/layers")
        module.modes.clear()  # what reads numbers is looked for when a model is loaded, in such a mode too
        arrays_of(post(live, extract_request(random_rows(2), "mixer", ".")))
        assert set(module.modes) == {0}
        live.client.get("/models/mixer/layers?functions=true")
        surveyed = module.modes.count(1)
        assert surveyed
        for _ in range(2):
            live.client.get("/models/mixer/layers?functions=true")
            arrays_of(post(live, extract_request(random_rows(2), "mixer", "./add#0,.")))
        arrays_of(post(live, extract_request(random_rows(2), "mixer", "linear,.")))
        assert module.modes.count(1) == surveyed + 2  # two requests


REFUSED: dict[str, tuple[Json, str, str]] = {
    "unknown": ({"layers": ["block2/matmul#0"]}, "layer 'block2' calls no such function", "functions here: add#0"),
    "layer": ({"layers": ["blok2/add#0"]}, "there is no layer 'blok2'", "block2"),
    "glob": ({"layers": ["*/softmax"]}, "none of which calls such a function", "functions=true"),
    "objective": (
        {"layers": ["block3/add#0:grad_output"], "objective": {"kind": "layer", "layer": "block2/add#0"}},
        "the objective does not depend on 'block3/add#0', which runs later",
        "a layer before it",
    ),
    "all of a layer": ({"layers": ["block2/*"]}, "the pattern 'block2/*' matches no layer", "'block2/add'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(mixers: Live, case: str) -> None:
    """What can't be had is refused with what to write instead."""
    body, detail, hint = REFUSED[case]
    (fault,) = problem(post_body(mixers, body), 422)["errors"]
    assert detail in fault["detail"]
    assert hint in fault.get("hint", "")


def post_body(live: Live, body: Json) -> Any:
    return live.client.post("/extract", json={"inputs": [tensor(IMAGES[0])], **body})


CHANGE = {"layer": "block2/add#0", "op": "scale", "by": 0.5, "channels": [1, 3]}


def compute_block2(live: Live, images: Array) -> dict[str, torch.Tensor]:
    """What digits' second block adds, and the sum, in plain torch."""
    module = copy_digits(live)
    block = module.block2
    with torch.no_grad():
        x = module.block1(torch.from_numpy(images))
        left, right = block.bn2(block.conv2(block.bn1(block.conv1(x)).relu())), block.downsample(x)
    return {"block2/add#0": left + right, "block2/add#0[0]:input": left, "block2/add#0[1]:input": right}


def run_block2(live: Live, images: Array, factor: float = 1.0) -> tuple[torch.Tensor, ...]:
    """In plain torch: the scores of digits with channels of its second block's sum scaled, that sum, its gradient."""
    module, total = copy_digits(live), compute_block2(live, images)["block2/add#0"]
    total[:, [1, 3]] *= factor
    with torch.enable_grad():
        scores = module.head(module.block3(total.requires_grad_().relu()).mean((2, 3)))
        (gradient,) = torch.autograd.grad(scores[:, 3].sum(), total)
    return scores.detach(), total.detach(), gradient


def test_changes_and_gradients(mixers: Live) -> None:
    """A function is changed, also for one input of several, differentiated, put back, patched, explained."""
    wanted, *_ = run_block2(mixers, IMAGES, 0.5)
    plain, total, gradient = run_block2(mixers, IMAGES)
    close(arrays_of(extract(mixers, "head", interventions=[CHANGE])), {"head": wanted.numpy()})
    inputs = [tensor(IMAGES[0]), {**tensor(IMAGES[1]), "interventions": [CHANGE]}, tensor(IMAGES[2])]
    mixed = torch.stack([plain[0], wanted[1], plain[2]])
    close(arrays_of(post_body(mixers, {"layers": ["head"], "inputs": inputs})), {"head": mixed.numpy()})
    found = arrays_of(extract(mixers, "block2/add#0:grad_output", objective={"class": 3}))
    close(found, {"block2/add#0:grad_output": gradient.numpy()})
    assert extract(mixers, "block2/add#0", "block3", verify=True).json()["verified"]
    patch = {"layer": "block2/add#0", "op": "replace", "from": {"input": 0}}
    inputs = [tensor(IMAGES[0]), {**tensor(IMAGES[1]), "interventions": [patch]}]
    (first, patched) = arrays_of(post_body(mixers, {"layers": ["head"], "inputs": inputs}))["head"]
    np.testing.assert_allclose(first, patched, rtol=1e-5, atol=1e-6)
    sent = [tensor(each) for each in total.numpy()]
    found = arrays_of(post_body(mixers, {"layers": ["head"], "resume": "block2/add#0", "inputs": sent}))
    close(found, {"head": plain.numpy()})
    body = {"method": "grad_cam", "layer": "block2/add#0", "objective": {"class": 3}, "encoding": "base64"}
    inputs = [tensor(image) for image in IMAGES]
    found = arrays_of(mixers.client.post("/explain", json={**body, "inputs": inputs}))["grad_cam"]
    wanted = (total * gradient.mean((2, 3), keepdim=True)).sum(1).relu()
    np.testing.assert_allclose(found / found.max(), wanted / wanted.max(), rtol=1e-3, atol=1e-4)


def test_an_input_that_others_read(mixers: Live) -> None:
    """A change at an input that a function reads too is warned of, with what to change for both."""
    change = {"layer": "block2.conv1:input", "op": "zero"}
    reply = extract(mixers, "head", interventions=[change]).json()
    assert reply["warnings"] == [
        "others read these inputs too, without the change: 'block2.conv1:input' (for all of them change 'block1.2')"
    ]
    assert "warnings" not in extract(mixers, "head", interventions=[{**change, "layer": "block2:input"}]).json()
