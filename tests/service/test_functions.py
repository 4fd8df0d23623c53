"""Functions inside a forward, over HTTP: listed for those who ask, had by selectors, equal to plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from layertap.models.spec import InputSpec, ModelSpec
from tests.function_nets import GatedMixer
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import copy_digits, random_images
from tests.service.queue_harness import extract_request, gated_module, hold_queue, post, random_rows
from tests.service.support import ROW, Array, Json, arrays_of, configured, npy, problem, raw, same, tensor

IMAGES = random_images(3, 5)
GATED = ModelSpec("mixer", "python:tests.function_nets:GatedMixer", weights="random:0", device="cpu", inputs=(ROW,))
OUTER = ModelSpec(
    "outer", "python:tests.function_nets:Outer", weights="random:0", device="cpu", inputs=(InputSpec("x", (4,)),)
)


@pytest.fixture(scope="module")
def mixers(serve: Serve) -> Iterator[Live]:
    """A server of a model that can be held up and calls functions, and of digits."""
    with serve(configured(GATED, OUTER)) as live:
        yield live


def extract(live: Live, *layers: Any, images: Array = IMAGES, **body: Any) -> Any:
    """The reply about images through digits, sent as tensors."""
    inputs = [tensor(image) for image in images]
    return live.client.post("/extract", json={"layers": layers, "inputs": inputs, "encoding": "base64", **body})


def compute_block2(live: Live, images: Array) -> dict[str, Array]:
    """What digits' second block adds, and the sum, in plain torch."""
    module = copy_digits(live)
    block = module.block2
    with torch.no_grad():
        x = module.block1(torch.from_numpy(images))
        left = block.bn2(block.conv2(block.bn1(block.conv1(x)).clamp(min=0)))
        right = block.downsample(x)
        values = {"block2/add#0": left + right, "block2/add#0[0]:input": left, "block2/add#0[1]:input": right}
    return {key: value.numpy() for key, value in values.items()}


def close(found: dict[str, Array], wanted: dict[str, Array]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-5, err_msg=key)


def test_listed(mixers: Live) -> None:
    """With ``functions`` each layer has those that it calls itself, with shapes; without, nothing tells of them."""
    path = "/models/digits/layers"
    plain = mixers.client.get(path).json()
    listed = mixers.client.get(path, params={"functions": "true"}).json()
    block = {"shape": [1, 32, 16, 16], "dtype": "float32", "layout": "NCHW"}
    functions = {layer["name"]: layer.pop("functions") for layer in listed["layers"]}
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
    narrowed = mixers.client.get(path, params={"functions": "true", "match": "block?"}).json()["layers"]
    assert [len(layer["functions"]) for layer in narrowed] == [0, 1, 1]
    assert problem(mixers.client.get(path, params={"functions": "perhaps"}), 422)


def test_listed_as_a_tree(mixers: Live) -> None:
    """On a terminal functions stand beneath the layer that calls them."""
    path, text = "/models/digits/layers", {"accept": "text/plain"}
    plain = mixers.client.get(path, headers=text).text.splitlines()
    listed = mixers.client.get(path, headers=text, params={"functions": "true"}).text.splitlines()
    added = [line for line in listed if "/add#0" in line]
    assert [line.split() for line in added] == [
        ["block2/add#0", "1×32×16×16", "NCHW"],
        ["block3/add#0", "1×64×8×8", "NCHW"],
    ]
    assert [line.split() for line in listed if line not in added] == [line.split() for line in plain]
    assert "block2" in listed[listed.index(added[0]) - 1]


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
    for name in ("npz", "safetensors"):
        query = {"layers": "block2/add#0,block2/add#0[0]:input", "format": name}
        found = arrays_of(mixers.client.post("/extract", **raw(npy(IMAGES), "application/x-npy", **query)))
        close(found, {key: wanted[key] for key in query["layers"].split(",")})
    of_type = {"layer": "*/add#-1", "type": "Residual", "as": "sums"}
    assert list(arrays_of(extract(mixers, of_type))) == ["sums.block2/add#0", "sums.block3/add#0"]
    matches = arrays_of(extract(mixers, "*/add:input"))
    assert list(matches) == [f"block{block}/add#0[{place}]:input" for block in (2, 3) for place in (0, 1)]


def test_pools(mixers: Live) -> None:
    """Functions are pooled, normalised and counted as layers are."""
    value = torch.from_numpy(compute_block2(mixers, IMAGES)["block2/add#0"])
    pooled = functional.normalize(value.mean((2, 3)), dim=1).numpy()
    close(arrays_of(extract(mixers, "block2/add#0", pool="mean", normalize=True)), {"block2/add#0": pooled})
    flat = value[:, [3, 1]].flatten(1).numpy()
    layer = {"layer": "block2/add#0", "channels": [3, 1], "pool": "flatten"}
    close(arrays_of(extract(mixers, layer)), {"block2/add#0": flat})
    stats = {"layer": "block2/add#0", "stats": ["mean", "max"]}
    columns = torch.stack([value.mean((1, 2, 3)), value.amax((1, 2, 3))], 1).numpy()
    close(arrays_of(extract(mixers, stats)), {"block2/add#0": columns})


def test_receipts_and_fingerprints(mixers: Live) -> None:
    """A receipt names the function; no two places have one fingerprint, and layers keep theirs."""
    before = extract(mixers, "block2").json()["receipts"]["block2"]
    keys = ["block2/add#0", "block2/add#0[0]:input", "block2/add#0[1]:input", "block3/add#0", "block2", "block2:input"]
    receipts = extract(mixers, *keys).json()["receipts"]
    assert receipts["block2"] == before
    receipt = receipts["block2/add#0[1]:input"]
    assert {name: receipt[name] for name in ("layer", "call", "module", "function", "site", "path", "captured")} == {
        "layer": "block2",
        "call": 0,
        "module": "Residual",
        "function": "add#0",
        "site": "input",
        "path": "[1]",
        "captured": [3, 32, 16, 16],
    }
    assert "path" not in receipts["block2/add#0"]
    assert receipts["block2/add#0"]["site"] == "output"
    assert len({each["fingerprint"] for each in receipts.values()}) == len(keys)
    again = extract(mixers, {"layer": "block2/add#0", "as": "a"}, images=IMAGES[:1]).json()["receipts"]["a"]
    assert again["fingerprint"] == receipts["block2/add#0"]["fingerprint"]
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


def test_no_cost_where_nobody_asks(mixers: Live) -> None:
    """Forwards of requests for layers alone run without a function mode, also after others asked for functions."""
    module = gated_module(mixers, "mixer")
    assert isinstance(module, GatedMixer)
    arrays_of(post(mixers, extract_request(random_rows(1), "mixer", "./mul#0")))
    for layers in ("linear", ".", "linear:input,.", "*"):
        module.modes.clear()
        arrays_of(post(mixers, extract_request(random_rows(2), "mixer", f"{layers},.")))
        assert module.modes == [0]


def test_no_survey_where_nobody_asks(serve: Serve) -> None:
    """Functions are surveyed once, when they are first asked for: loading and other requests do not."""
    with serve(configured(GATED)) as live:
        module = gated_module(live, "mixer")
        assert isinstance(module, GatedMixer)
        arrays_of(post(live, extract_request(random_rows(2), "mixer", ".")))
        live.client.get("/models/mixer/layers")
        assert set(module.modes) == {0}
        for _ in range(2):
            live.client.get("/models/mixer/layers?functions=true")
            arrays_of(post(live, extract_request(random_rows(2), "mixer", "./add#0,.")))
        assert module.modes.count(1) == 4  # a row alone, three rows, two requests


def test_another_shape(mixers: Live) -> None:
    """Functions for images of a size that the model is not configured for."""
    images = np.random.default_rng(1).normal(size=(2, 3, 40, 24)).astype(np.float32)
    wanted = compute_block2(mixers, images)
    close(arrays_of(extract(mixers, *wanted, "block2/add#0", images=images)), wanted)


REFUSED: dict[str, tuple[Json, str, str]] = {
    "unknown": ({"layers": ["block2/matmul#0"]}, "layer 'block2' calls no such function", "functions here: add#0"),
    "number": ({"layers": ["block2/add#1"]}, "layer 'block2' calls no such function", "functions here: add#0"),
    "no number": ({"layers": ["block2/add#one"]}, "'one' is no call number", "write '#0'"),
    "none": ({"layers": ["pool/add#0"]}, "layer 'pool' calls no functions of its own", "layers?functions=true"),
    "layer": ({"layers": ["blok2/add#0"]}, "there is no layer 'blok2'", "block2"),
    "path": ({"layers": ["block2/add#0[7]"]}, "has nothing at '[7]'", "leave the path out"),
    "attribute": ({"layers": ["block2/__init__#0"]}, "calls no such function", "functions here: add#0"),
    "expression": ({"layers": ["block2/(a+)+$"]}, "there is no layer 'block2/(a+)+$'", ""),
    "glob": ({"layers": ["*/softmax"]}, "none of which calls such a function", "functions=true"),
    "attention": ({"layers": ["block2/add#0:attention"]}, "the site 'attention' is one of layers", "use 'output'"),
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


def test_refused_where_forwards_begin_inside(mixers: Live) -> None:
    """A forward that goes on from a layer offers no functions, before others asked for them and after."""
    features = np.zeros((16, 32, 32), np.float32)
    body = {"resume": "block1", "inputs": [tensor(features)], "layers": ["block2/add#0"]}
    for _ in range(2):
        (fault,) = problem(mixers.client.post("/extract", json=body), 422)["errors"]
        assert "none can be had here" in fault["detail"]
        extract(mixers, "block2/add#0")


def test_gradients_beside_functions(mixers: Live) -> None:
    """A function's value beside a gradient of the same forward: both as they are alone."""
    objective = {"kind": "logit", "class": 3}
    both = arrays_of(extract(mixers, "block2/add#0", "block2:grad_output", objective=objective))
    close({"block2/add#0": both["block2/add#0"]}, {"block2/add#0": compute_block2(mixers, IMAGES)["block2/add#0"]})
    assert same(
        {"g": both["block2:grad_output"]},
        {"g": arrays_of(extract(mixers, "block2:grad_output", objective=objective))["block2:grad_output"]},
    )


def test_changes_before_functions(mixers: Live) -> None:
    """A function sees what an intervention made of a layer before it."""
    change = {"layer": "block2.bn2", "op": "zero"}
    found = arrays_of(extract(mixers, "block2/add#0", interventions=[change]))
    close(found, {"block2/add#0": compute_block2(mixers, IMAGES)["block2/add#0[1]:input"]})


def test_workers(serve: Serve, mixers: Live) -> None:
    """In worker processes functions are listed and had as in the server's own."""
    wanted = compute_block2(mixers, IMAGES)
    with serve(configured(), workers=2) as live:
        listed = [each.client.get("/models/digits/layers?functions=true").json()["layers"] for each in (live, mixers)]
        assert [layer["functions"] for layer in listed[0]] == [layer["functions"] for layer in listed[1]]
        for _ in range(4):
            close(arrays_of(extract(live, *wanted)), wanted)
            close(
                arrays_of(extract(live, "block2/add#0", "pool", isolated=True, images=IMAGES[:1])),
                {
                    "block2/add#0": wanted["block2/add#0"][:1],
                    "pool": arrays_of(extract(mixers, "pool", images=IMAGES[:1]))["pool"],
                },
            )
        assert live.client.get("/models/digits").json()["hooks"] == 0


CHANGE = {"layer": "block2/add#0", "op": "scale", "by": 0.5, "channels": [1, 3]}


def run_block2(live: Live, images: Array, factor: float = 1.0) -> tuple[torch.Tensor, ...]:
    """In plain torch: the scores of digits with channels of its second block's sum scaled, that sum, its gradient."""
    module = copy_digits(live)
    block = module.block2
    with torch.no_grad():
        x = module.block1(torch.from_numpy(images))
        total = block.bn2(block.conv2(block.bn1(block.conv1(x)).relu())) + block.downsample(x)
        total[:, [1, 3]] *= factor
    with torch.enable_grad():
        scores = module.head(module.block3(total.requires_grad_().relu()).mean((2, 3)))
        (gradient,) = torch.autograd.grad(scores[:, 3].sum(), total)
    return scores.detach(), total.detach(), gradient


def test_changes_and_gradients(mixers: Live) -> None:
    """A function is changed, also for one input of several, differentiated, put back and taken from another input."""
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


def test_a_function_as_the_layer_of_a_map(mixers: Live) -> None:
    """Grad-CAM of a block's sum: the weights are means of gradients there."""
    _, total, gradient = run_block2(mixers, IMAGES)
    wanted = (total * gradient.mean((2, 3), keepdim=True)).sum(1).relu().numpy()
    inputs = [tensor(image) for image in IMAGES]
    body = {"method": "grad_cam", "layer": "block2/add#0", "objective": {"class": 3}, "inputs": inputs}
    found = arrays_of(mixers.client.post("/explain", json={**body, "encoding": "base64"}))["grad_cam"]
    np.testing.assert_allclose(found / found.max(), wanted / wanted.max(), rtol=1e-3, atol=1e-4)


def test_a_function_as_the_embedding(serve: Serve) -> None:
    """A model's embedding may be what a function gives."""
    with serve(configured(replace(OUTER, embedding="mixer/relu#0")), workers=1) as live:
        x = np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32)
        body = {"inputs": [tensor(row) for row in x], "model": "outer", "encoding": "base64"}
        of_default = arrays_of(live.client.post("/extract", json=body))
        named = arrays_of(live.client.post("/extract", json={**body, "layers": ["mixer/relu#0", "mixer"]}))
    assert of_default.keys() == {"mixer/relu#0"}
    close(of_default, {"mixer/relu#0": named["mixer/relu#0"]})


def test_an_input_that_others_read(mixers: Live) -> None:
    """A change at an input that a function reads too is warned of, with what to change for both."""
    change = {"layer": "block2.conv1:input", "op": "zero"}
    reply = extract(mixers, "head", interventions=[change]).json()
    assert reply["warnings"] == [
        "others read these inputs too, without the change: 'block2.conv1:input' (for all of them change 'block1.2')"
    ]
    assert "warnings" not in extract(mixers, "head", interventions=[{**change, "layer": "block2:input"}]).json()
