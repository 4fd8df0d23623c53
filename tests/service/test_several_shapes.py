"""Inputs of several shapes in one request: each gets what it would alone, in one array where these are alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import functional as tvf

from layertap.models.spec import InputSpec, PreprocessSpec
from tests.conftest import net_spec
from tests.oracle import record
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.gated_server import gated_module, wait_until
from tests.service.queue_harness import ONE_FORWARD, batch_net, queued_rows
from tests.service.support import (
    Array,
    Json,
    arrays_of,
    configured,
    image,
    metadata,
    net,
    problem,
    same,
    tensor,
)

SIDES = ((16, 16), (12, 20), (16, 16), (9, 7), (12, 20))  # of inputs; the model is configured for the first
MEANS, STDS = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
SPECS = (
    net_spec("Chain", inputs=(InputSpec("image", (3, 16, 16)),)),
    replace(
        net_spec("Chain", inputs=(InputSpec("image", (3, 16, 16)),)),
        name="pictures",
        preprocess=PreprocessSpec(resize=12, crop=None, mean=MEANS, std=STDS),
    ),
    net_spec("resnet", load="lazy"),
    net_spec("vit", load="lazy"),
    net("same", "Same", InputSpec("x", (3, 6, 6)), load="lazy"),
    net("meeting", "ChannelMeans", InputSpec("x", (3, 6, 6)), load="lazy"),
)
FORMATS = ("json", "npz", "safetensors")


def rows(sides: Sequence[tuple[int, int]] = SIDES) -> list[Array]:
    """A tensor of each height and width, all of other numbers."""
    return [
        np.random.default_rng(place).standard_normal((3, *side)).astype(np.float32) for place, side in enumerate(sides)
    ]


ROWS = rows()


@pytest.fixture(scope="module")
def local(serve: Serve) -> Iterator[Live]:
    """A server whose models run in its own process, so that tests may look at them."""
    with serve(configured(*SPECS), workers=0) as live:
        yield live


@pytest.fixture(scope="module", params=[0, 2])
def either(request: pytest.FixtureRequest, local: Live, serve: Serve) -> Iterator[Live]:
    """That server, and one whose models run in workers."""
    if request.param == 0:
        yield local
        return
    with serve(configured(*SPECS), workers=request.param) as live:
        yield live


@pytest.fixture(scope="module")
def module(local: Live) -> nn.Module:
    """The model offline."""
    return load(local, "Chain")


@pytest.fixture(scope="module")
def resnet(local: Live) -> nn.Module:
    """Another, which can be differentiated."""
    return load(local, "resnet")


def load(live: Live, name: str) -> nn.Module:
    live.client.get(f"/models/{name}/layers").raise_for_status()
    model = live.engine.manager.registry.get_entry(name).model
    assert model is not None
    return model.module


def post(live: Live, inputs: Sequence[Json], *layers: Any, **fields: Any) -> httpx.Response:
    query = {name: fields.pop(name) for name in ("format", "dry_run") if name in fields}
    body = {"model": "Chain", "layers": list(layers), "inputs": list(inputs), **fields}
    if not layers:
        del body["layers"]
    return live.client.post("/extract", json=body, params=query)


def close(actual: Array, expected: Array | Tensor, rtol: float = 1e-4) -> None:
    np.testing.assert_allclose(actual, np.asarray(expected), rtol=rtol, atol=1e-5)


def offline(module: nn.Module, row: Array, layer: str, call: int = 0, site: str = "output") -> Array:
    """What a hook sees of one row alone."""
    return record(module, torch.from_numpy(row)[None])[layer, call, (), site].numpy()


@pytest.mark.parametrize("format_", FORMATS)
def test_alike(either: Live, module: nn.Module, format_: str) -> None:
    """What has one shape whatever the input's is one array, rows in the order of the inputs."""
    layers = [
        "head",
        {"layer": "conv", "pool": "mean", "normalize": True, "as": "v"},
        {"layer": "relu#0", "pool": "max"},
    ]
    reply = post(either, map(tensor, ROWS), *layers, format=format_, encoding="base64")
    arrays = arrays_of(reply)
    assert arrays.keys() == {"head", "v", "relu#0"}
    close(arrays["head"], np.concatenate([offline(module, row, "head") for row in ROWS]))
    means = np.stack([offline(module, row, "conv")[0].mean((1, 2)) for row in ROWS])
    close(arrays["v"], means / np.linalg.norm(means, axis=1, keepdims=True))
    close(arrays["relu#0"], np.stack([offline(module, row, "relu")[0].max((1, 2)) for row in ROWS]))


def test_embedding(either: Live, module: nn.Module) -> None:
    """A request without layers is one vector for each input."""
    (array,) = arrays_of(post(either, map(tensor, ROWS))).values()
    assert array.shape[0] == len(ROWS)
    again = [arrays_of(post(either, [tensor(row)])).values() for row in ROWS]
    close(array, np.concatenate([alone for (alone,) in again]))


@pytest.mark.parametrize("format_", FORMATS)
def test_apart(either: Live, module: nn.Module, format_: str) -> None:
    """What has another shape for another input has an entry for each, named by the input's place."""
    reply = post(either, map(tensor, ROWS), "conv", "head", "relu#1:input", format=format_)
    arrays = arrays_of(reply)
    names = [f"{key}.input{place}" for key in ("conv", "relu#1:input") for place in range(5)]
    assert arrays.keys() == {*names, "head"}
    for place, row in enumerate(ROWS):
        close(arrays[f"conv.input{place}"], offline(module, row, "conv"))
        close(arrays[f"relu#1:input.input{place}"], offline(module, row, "relu", 1, "input"))
    if format_ == "json":
        assert list(arrays) == [*names[:5], "head", *names[5:]]
        shapes = [entry["shape"] for name, entry in reply.json()["features"].items() if name.startswith("conv")]
        assert shapes == [[1, 8, *side] for side in SIDES]


def test_receipts(either: Live) -> None:
    """Receipts say of each input what they would alone; one of several says where these differ."""
    found = post(either, map(tensor, ROWS), "conv", {"layer": "conv", "pool": "mean", "as": "v"}).json()
    alone = [post(either, [tensor(row)], "conv", {"layer": "conv", "pool": "mean", "as": "v"}).json() for row in ROWS]
    joined, fingerprints = found["receipts"]["v"], [each["receipts"]["v"]["fingerprint"] for each in alone]
    assert joined["captured"] == [1, 8, None, None]
    assert joined["fingerprints"] == fingerprints
    assert joined["fingerprint"] not in fingerprints
    assert joined["preprocessed"] == "mixed"
    for place, each in enumerate(alone):
        assert found["receipts"][f"conv.input{place}"] == each["receipts"]["conv"]
    assert found["rows"] == len(ROWS)
    assert len(set(fingerprints)) == 3


def test_same_bits(either: Live) -> None:
    """Alone in its forward each input gives the bits that it gives in a request of its own."""
    layers = ["conv", "head"]
    arrays = arrays_of(post(either, map(tensor, ROWS), *layers, isolated=True, encoding="base64"))
    for place, row in enumerate(ROWS):
        alone = arrays_of(post(either, [tensor(row)], *layers, isolated=True, encoding="base64"))
        assert same({"conv": arrays[f"conv.input{place}"], "head": arrays["head"][place : place + 1]}, alone)


def test_one_shape_is_as_ever(either: Live) -> None:
    """Of inputs of one shape nothing is told apart, also where others of another shape are left out."""
    inputs = [tensor(ROWS[0]), tensor(ROWS[2])]
    plain = post(either, inputs, "conv", encoding="base64", isolated=True)
    bad = [tensor(np.full((3, 9, 7), np.nan, np.float32))]
    skipped = post(either, [inputs[0], *bad, inputs[1]], "conv", encoding="base64", isolated=True, on_error="skip")
    assert list(arrays_of(plain)) == ["conv"]
    assert same(arrays_of(plain), arrays_of(skipped))
    assert plain.json()["receipts"] == skipped.json()["receipts"]


def test_noise(either: Live, module: nn.Module) -> None:
    """A row's noise goes by its number in the request."""
    change = {"layer": "conv", "op": "noise", "std": 0.5, "seed": 3}
    arrays = arrays_of(post(either, map(tensor, ROWS), "conv", interventions=[change]))
    for place, row in enumerate(ROWS):
        plain = offline(module, row, "conv")
        noise = torch.randn(plain.shape, generator=torch.Generator().manual_seed(3 + place)).numpy()
        close(arrays[f"conv.input{place}"], plain + 0.5 * noise)


def test_changes(either: Live) -> None:
    """What is changed is told, and that an input has no such place, with the input."""
    change = {"layer": "relu", "op": "zero", "region": [0, 0, 9, 7]}
    reply = post(either, map(tensor, ROWS), "relu#0", interventions=[change], format="json")
    arrays = arrays_of(reply)
    assert all((arrays[f"relu#0.input{place}"][..., :9, :7] == 0).all() for place in range(5))
    assert reply.json()["interventions"] == [["relu#0:output", "relu#1:output"]]
    wide = {**change, "region": [0, 0, 12, 12]}
    for on_error in ("fail", "skip"):
        reply = post(either, map(tensor, ROWS), "relu#0", interventions=[wide], on_error=on_error)
        (error,) = problem(reply, 422)["errors"]
        assert (error["input"], error["pointer"]) == (3, "/interventions/0")


def test_gradients(either: Live, resnet: nn.Module) -> None:
    """Each input's gradient is that of its own objective, by plain autograd; classes go with the rows."""
    inputs = rows([(32, 40), (40, 32), (32, 40), (48, 48)])
    layers = [".:grad_input", "fc:grad_input"]
    reply = post(either, map(tensor, inputs), *layers, model="resnet", objective={"kind": "logit", "class": "top"})
    arrays, classes = arrays_of(reply), []
    for place, row in enumerate(inputs):
        gradient, scores = differentiate(resnet, row)
        classes.append(int(scores.argmax()))
        close(arrays[f".:grad_input.input{place}"], gradient, 1e-3)
        assert reply.json()["receipts"][f".:grad_input.input{place}"]["classes"] == classes[-1:]
        close(arrays["fc:grad_input"][place], resnet.fc.weight[classes[-1]].detach())  # type: ignore[union-attr, index]
    assert reply.json()["receipts"]["fc:grad_input"]["classes"] == classes


def differentiate(module: nn.Module, row: Array) -> tuple[Tensor, Tensor]:
    """The gradient of a row's highest score at the input, and its scores."""
    x = torch.from_numpy(row)[None].clone().requires_grad_()
    scores: Tensor = module(x)
    scores.max().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad, scores


def test_functions(either: Live, resnet: nn.Module) -> None:
    """What functions give within a forward is had of each shape as well."""
    inputs = rows([(32, 40), (40, 32), (32, 40)])
    layers = ["layer1.0/add#0", {"layer": "layer1.0/add#0", "pool": "mean", "as": "v"}]
    arrays = arrays_of(post(either, map(tensor, inputs), *layers, model="resnet"))
    for place, row in enumerate(inputs):
        summed = offline(resnet, row, "layer1.0.relu", 1, "input")
        close(arrays[f"layer1.0/add#0.input{place}"], summed, 1e-3)
        close(arrays["v"][place], summed[0].mean((1, 2)), 1e-3)


@pytest.mark.parametrize("by", [None, "channel"])
def test_statistics_over_inputs(either: Live, module: nn.Module, by: str | None) -> None:
    """Statistics of all inputs together count each of their values once, however many an input has."""
    names = ["mean", "std", "min", "max", "l2", "zeros", "nonfinite"]
    entry = {"layer": "relu#1", "stats": names, "over": "inputs", "as": "s", **({"by": by} if by else {})}
    (array,) = arrays_of(post(either, map(tensor, ROWS), entry)).values()
    values = np.concatenate([offline(module, row, "relu", 1)[0].reshape(8, -1) for row in ROWS], axis=1)
    values = (values if by else values.reshape(1, -1)).astype(np.float64)
    expected = np.stack(
        [
            values.mean(1),
            values.std(1),
            values.min(1),
            values.max(1),
            np.linalg.norm(values, axis=1),
            (values == 0).mean(1),
            np.zeros(len(values)),
        ],
        axis=1,
    )
    close(array, expected if by else expected[0])


def test_scales(either: Live, module: nn.Module) -> None:
    """int8 has its scales, joined or apart."""
    layers = [{"layer": "conv", "dtype": "int8"}, {"layer": "conv", "pool": "mean", "dtype": "int8", "as": "v"}]
    arrays = arrays_of(post(either, map(tensor, ROWS), *layers, format="npz"))
    assert arrays["v.scale"].shape == (5,)
    for place, row in enumerate(ROWS):
        plain = offline(module, row, "conv")
        scale = arrays[f"conv.input{place}.scale"]
        assert scale.shape == (1,)
        assert np.abs(arrays[f"conv.input{place}"] * scale[0] - plain).max() <= scale[0] * 0.51
        mean = plain.mean((2, 3))[0]
        assert np.abs(arrays["v"][place] * arrays["v.scale"][place] - mean).max() <= arrays["v.scale"][place] * 0.51


def test_dry_run(either: Live) -> None:
    """A dry run promises what the reply has."""
    inputs, layers = list(map(tensor, ROWS)), ["conv", {"layer": "conv", "stats": True, "as": "s"}, "head"]
    promised = post(either, inputs, *layers, dry_run="true").json()
    reply = post(either, inputs, *layers)
    features = reply.json()["features"]
    assert {name: entry["shape"] for name, entry in promised["features"].items()} == {
        name: entry["shape"] for name, entry in features.items()
    }
    assert list(promised["features"]) == list(features)
    arrays = arrays_of(reply)
    assert promised["bytes"] == sum(array.nbytes for array in arrays.values())
    assert {name: entry["bytes"] for name, entry in promised["features"].items()} == {
        name: array.nbytes for name, array in arrays.items()
    }
    assert (promised["rows"], promised["fingerprint"]) == (5, reply.json()["fingerprint"])


def test_verified(either: Live) -> None:
    """Each input's own forward is verified."""
    reply = post(either, map(tensor, ROWS), "conv", verify=True)
    assert reply.status_code == 200
    assert reply.headers["x-layertap-verified"] == "true"


def test_npy(either: Live) -> None:
    """A .npy file holds one result, so that entries apart are refused there; a joined one is fine."""
    assert "exactly one" in problem(post(either, map(tensor, ROWS), "conv", format="npy"), 406)["detail"]
    (array,) = arrays_of(post(either, map(tensor, ROWS), "head", format="npy")).values()
    assert array.shape == (5, 5)


def test_shapes_that_the_model_refuses(either: Live) -> None:
    """They fail the request, which names the input; or are left out, where that is asked for."""
    good = [tensor(row) for row in rows([(32, 32)] * 3)]
    bad = [tensor(row) for row in rows([(40, 32), (48, 48)])]
    inputs = [good[0], bad[0], good[1], bad[1], bad[0], good[2]]
    errors = problem(post(either, inputs, "heads", model="vit"), 422)["errors"]
    assert [error["input"] for error in errors] == [1]
    skipped = post(either, inputs, "heads", model="vit", on_error="skip", encoding="base64", isolated=True)
    assert skipped.headers["x-layertap-skipped"] == "1,3,4"
    plain = post(either, good, "heads", model="vit", encoding="base64", isolated=True)
    assert same(arrays_of(skipped), arrays_of(plain))
    assert skipped.json()["receipts"] == plain.json()["receipts"]
    errors = problem(post(either, bad, "heads", model="vit", on_error="skip"), 422)["errors"]
    assert [error["input"] for error in errors] == [0, 1]


def test_skipped_among_several(either: Live, module: nn.Module) -> None:
    """Entries keep the places that inputs have in the request."""
    inputs = [tensor(ROWS[0]), image(b"no picture"), tensor(ROWS[1]), tensor(np.full((3, 5, 5), np.inf, np.float32))]
    reply = post(either, inputs, "conv", on_error="skip", format="safetensors")
    assert arrays_of(reply).keys() == {"conv.input0", "conv.input2"}
    assert metadata(reply)["skipped"] == "1,3"
    assert json.loads(metadata(reply)["receipts"]).keys() == {"conv.input0", "conv.input2"}
    close(arrays_of(reply)["conv.input2"], offline(module, ROWS[1], "conv"))


def test_all_faults_are_told(either: Live) -> None:
    """Bad inputs are named together, whatever their shapes."""
    inputs = [tensor(np.full((3, *side), np.nan, np.float32)) for side in SIDES[:2]]
    errors = problem(post(either, [*inputs, tensor(ROWS[0])], "head"), 422)["errors"]
    assert [error["input"] for error in errors] == [0, 1]


def test_resumed(either: Live) -> None:
    """Outputs of a layer have the configured shape, as ever."""
    inputs = [tensor(np.zeros((8, *side), np.float32)) for side in SIDES[:2]]
    (error,) = problem(post(either, inputs, "head", resume="conv"), 422)["errors"]
    assert error["input"] == 1


def test_rows_that_affect_each_other(either: Live, local: Live) -> None:
    """Each runs alone; they can be no batch where their shapes differ."""
    inputs, offline_module = rows([(6, 6), (8, 6), (6, 6)]), load(local, "meeting")
    reply = post(either, map(tensor, inputs), {"layer": ".", "as": "means"}, model="meeting")
    arrays = arrays_of(reply)
    for place, row in enumerate(inputs):
        close(arrays[f"means.input{place}"], offline_module(torch.from_numpy(row)[None]).detach())
        assert reply.json()["receipts"][f"means.input{place}"]["rows_per_forward"] == 1
    found = problem(post(either, map(tensor, inputs), ".", model="meeting", isolated=True), 422)
    assert "several shapes" in found["detail"]


def test_no_probe(either: Live) -> None:
    """A probe is of one fingerprint."""
    found = problem(post(either, map(tensor, ROWS), "head", probe=True), 422)
    assert "one shape" in found["errors"][0]["hint"]


def test_pictures(either: Live, module: nn.Module) -> None:
    """Pictures that preprocessing leaves with several shapes, and tensors beside them."""
    sizes = [(24, 24), (40, 24), (24, 36), (80, 48)]
    pixels = [
        np.random.default_rng(seed).integers(0, 256, (high, wide, 3), np.uint8)
        for seed, (wide, high) in enumerate(sizes)
    ]
    inputs = [image(encode(each)) for each in pixels]
    reply = post(either, [*inputs, tensor(ROWS[1])], "conv", "head", model="pictures")
    arrays = arrays_of(reply)
    for place, each in enumerate(pixels):
        resized = tvf.resize(Image.fromarray(each), 12)
        row = tvf.normalize(tvf.to_tensor(resized), MEANS, STDS).numpy()
        close(arrays[f"conv.input{place}"], offline(module, row, "conv"), 1e-3)
        close(arrays["head"][place], offline(module, row, "head")[0], 1e-3)
    close(arrays["conv.input4"], offline(module, ROWS[1], "conv"))
    assert reply.json()["receipts"]["head"]["preprocessed"] == "mixed"


def test_pictures_alone(either: Live, module: nn.Module) -> None:
    """A picture of another shape than configured, alone or among its like."""
    pixels = np.random.default_rng(1).integers(0, 256, (24, 40, 3), np.uint8)
    row = tvf.normalize(tvf.to_tensor(tvf.resize(Image.fromarray(pixels), 12)), MEANS, STDS).numpy()
    for count in (1, 3):
        arrays = arrays_of(post(either, [image(encode(pixels))] * count, "conv", model="pictures"))
        close(arrays["conv"], np.repeat(offline(module, row, "conv"), count, 0), 1e-3)


def encode(pixels: Array) -> bytes:
    """A PNG."""
    stream = BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def test_maps(either: Live, resnet: nn.Module) -> None:
    """Explanations have a map for each input, in its own pixels."""
    inputs = rows([(32, 40), (40, 32), (32, 40)])
    body = {"model": "resnet", "method": "saliency", "inputs": list(map(tensor, inputs))}
    arrays = arrays_of(either.client.post("/explain", json=body))
    assert list(arrays) == [f"saliency.input{place}" for place in range(3)]
    for place, row in enumerate(inputs):
        close(arrays[f"saliency.input{place}"], differentiate(resnet, row)[0].abs().amax(1), 1e-3)


def test_maps_of_zeros(either: Live) -> None:
    """A warning names the rows whose maps are all zeros."""
    inputs = rows([(6, 6), (8, 6), (6, 6)])
    body = {"model": "same", "method": "saliency", "inputs": list(map(tensor, inputs))}
    (warning,) = either.client.post("/explain", json=body).json()["warnings"]
    assert warning.startswith("the maps of rows 0, 1, 2 are all zeros")


def test_timings(either: Live) -> None:
    """Each second counts once, though inputs ran side by side."""
    header = post(either, map(tensor, ROWS), "head").headers["server-timing"]
    spent = {part.split(";")[0]: float(part.partition("dur=")[2] or 0) for part in header.split(", ")}
    steps = ("decode", "queue", "forward", "copy", "encode")
    assert sum(spent[name] for name in steps) <= spent["total"] * 1.01 + 0.5


@pytest.mark.parametrize("limit", ["max_results", "max_reply_bytes", "max_queue_bytes"])
def test_limits(serve: Serve, limit: str) -> None:
    """Limits are of the whole request, and are kept before any forward."""
    sides = [(16, 16), (12, 20), (9, 7)]
    nbytes = sum(8 * high * wide * 4 for high, wide in sides)
    limits = {"max_results": 3, "max_reply_bytes": nbytes, "max_queue_bytes": nbytes * 3}
    inputs = [tensor(row) for row in rows(sides)]
    with serve(configured(SPECS[0]), **{limit: limits[limit]}) as live:
        assert len(arrays_of(post(live, inputs, "conv", format="npz"))) == 3
        more = [*inputs, tensor(rows([(9, 8)])[0])]
        many = {"max_queue_bytes": [*inputs * 3]}.get(limit, more)
        reply = post(live, many, "conv", format="npz")
        says = "the queue holds" if limit == "max_queue_bytes" else f"the limit is {limits[limit]}"
        assert says in problem(reply, 413)["detail"]
        assert "forward" not in reply.headers["server-timing"]


def test_names(either: Live) -> None:
    """An entry that would have another result's name is refused before any forward."""
    reply = post(either, map(tensor, ROWS), "conv", {"layer": "head", "as": "conv.input1"})
    assert "two results" in problem(reply, 422)["detail"]
    assert "forward" not in reply.headers["server-timing"]


def test_two_requests_in_one_batch(serve: Serve) -> None:
    """Inputs of one shape share a forward, those of two such requests too; each request gets its own."""
    shapes = ((2, 4, 4), (2, 6, 4), (2, 4, 4), (2, 6, 4), (2, 4, 4))
    spec = batch_net("gated", "Gated", InputSpec("x", shapes[0]))
    batches = [
        [np.random.default_rng(10 * each + place).random(shape, np.float32) for place, shape in enumerate(shapes)]
        for each in range(2)
    ]
    with serve(configured(spec), cpu_threads=2, workers=0) as live, ThreadPoolExecutor(3) as pool:
        assert post(live, map(tensor, batches[0]), "linear", model="gated").status_code == 200
        model = live.engine.manager.registry.get_entry("gated").model
        assert model is not None
        catalogs, module = model.catalogs, gated_module(live)
        for shape in set(shapes):
            catalog = catalogs.get_catalog((shape,))
            assert catalog is not None
            cheap = replace(catalog, costs=replace(ONE_FORWARD, row_bytes=catalog.costs.row_bytes))
            if shape == shapes[0]:
                catalogs.configured = cheap
            else:
                catalogs.put_catalog((shape,), cheap)
        module.gate.clear()
        module.entered.clear()
        held = pool.submit(post, live, [tensor(batches[0][0])], "linear", model="gated", isolated=True)
        assert module.entered.wait(60)
        module.forwards.clear()
        replies = []
        for number, batch in enumerate(batches, 1):
            replies.append(pool.submit(post, live, list(map(tensor, batch)), "linear", model="gated"))
            wait_until(lambda count=5 * number: queued_rows(live) == count)  # type: ignore[misc]
        module.gate.set()
        assert held.result().status_code == 200
        for batch, reply in zip(batches, replies, strict=True):
            arrays = arrays_of(reply.result())
            for place, row in enumerate(batch):
                close(arrays[f"linear.input{place}"], module.linear(torch.from_numpy(row)[None]).detach())
        assert sorted(module.forwards) == [4, 6]


def test_leaving(serve: Serve) -> None:
    """A request whose deadline passes leaves nothing behind, of none of its shapes."""
    spec = batch_net("gated", "Gated", InputSpec("x", (2, 4, 4)))
    inputs = [tensor(np.ones((2, high, 4), np.float32)) for high in (4, 6, 4, 6)]
    with serve(configured(spec), cpu_threads=2, workers=0) as live, ThreadPoolExecutor(1) as pool:
        assert post(live, inputs, "linear", model="gated").status_code == 200
        module = gated_module(live)
        module.gate.clear()
        module.entered.clear()
        held = pool.submit(post, live, inputs[:1], "linear", model="gated")
        assert module.entered.wait(60)
        body = {"model": "gated", "layers": ["linear"], "inputs": inputs}
        late = live.client.post("/extract", json=body, headers={"x-request-timeout": "0.2"})
        problem(late, 504, seconds=True)
        assert queued_rows(live) == 0
        module.gate.set()
        assert held.result().status_code == 200
        assert post(live, inputs, "linear", model="gated").status_code == 200
