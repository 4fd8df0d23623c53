"""Optimised inputs against torch.optim and autograd on copies of the models; what is refused, events, pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy

from layertap.models.spec import InputSpec, ModelSpec
from layertap_client import Client
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import copy_digits, forward, random_images
from tests.service.queue_harness import hold_queue
from tests.service.support import Array, Json, arrays_of, configured, encode, image, net, problem, same, tensor
from tests.transformers_nets import saved

IMAGES = random_images(2, seed=3)
INPUTS = [tensor(each) for each in IMAGES]
CHANNEL: Json = {"kind": "layer", "layer": "block2", "channel": 3}
BASE: Json = {"steps": 4, "learning_rate": 0.05, "inputs": INPUTS, "objective": CHANNEL, "encoding": "base64"}
EVENTS = {"accept": "text/event-stream"}
Value = Callable[[Any, Tensor], Tensor]  # of the module and a batch; a number for each row


@dataclass(frozen=True)
class Nets:
    live: Live
    digits: Any

    def optimise(self, **body: Any) -> dict[str, Array]:
        return arrays_of(self.live.client.post("/optimise", json=BASE | body))


@pytest.fixture(scope="module")
def nets(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nets]:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    saved("gpt2", folder)
    gpt2 = ModelSpec("gpt2", f"transformers:{folder}", device="cpu")
    resnet = ModelSpec("resnet", "python:tests.nets:resnet", inputs=(InputSpec("x", (3, 32, 32)),), preprocess="none")
    rows = [net(name, "Gated", InputSpec("x", (4,), name)) for name in ("float16", "float64")]
    series = InputSpec("x", (5, 4), batch_axis=1)
    time_first = net("time_first", "make", series, module="tests.own_models.batch_nets", args={"name": "time_first"})
    with serve(configured(gpt2, resnet, net("rows", "Gated"), *rows, time_first, load="startup")) as live:
        yield Nets(live, copy_digits(live))


def channel(module: Any, x: Tensor) -> Tensor:
    return forward(module, x, "block2")[:, 3].mean((1, 2))


def climb(
    module: Any,
    starts: Array,
    value: Value,
    make: Callable[..., torch.optim.Optimizer],
    *,
    steps: int = 4,
    rate: float = 0.05,
    adjust: Callable[[Tensor, Tensor], Tensor] = lambda slope, x: slope,
    project: Callable[[Tensor, Tensor], Tensor] = lambda x, start: x,
    penalty: Callable[[Tensor], Tensor] = lambda x: torch.zeros(()),
    shifts: Callable[[int], tuple[int, int]] = lambda step: (0, 0),
    sign: float = -1.0,
) -> dict[str, Array]:
    """A loop as people write it: one optimiser of torch for each row."""
    rows, curves = [], []
    for start in torch.from_numpy(starts)[:, None]:
        x = start.clone().requires_grad_()
        optimizer, curve = make([x], lr=rate), []
        for step in range(steps + 1):
            optimizer.zero_grad()
            measured = value(module, x.roll(shifts(step) if step < steps else (0, 0), (2, 3))).sum()
            curve.append(measured.item())
            if step < steps:
                (sign * measured + penalty(x)).backward()
                assert x.grad is not None
                x.grad = adjust(x.grad, x)
                optimizer.step()
                x.data = project(x.data, start)
        rows.append(x.detach()[0].numpy())
        curves.append(curve)
    return {"input": np.stack(rows), "objective": np.array(curves, np.float32)}


def vary(x: Tensor) -> Tensor:
    return 0.001 * ((x[..., 1:, :] - x[..., :-1, :]).abs().sum() + (x[..., 1:] - x[..., :-1]).abs().sum())


def draw_shift(step: int) -> tuple[int, int]:
    down, right = np.random.default_rng([7, step]).integers(-3, 4, 2)
    return int(down), int(right)


SGD, ADAM = torch.optim.SGD, torch.optim.Adam
# What is asked for, the objective of a batch, and the loop's own options.
RULES: dict[str, tuple[Json, Value, Any, Json]] = {
    "sgd": ({"learning_rate": 2.0}, channel, SGD, {"rate": 2.0}),
    "adam, many steps": ({"rule": "adam", "steps": 12}, channel, ADAM, {"steps": 12}),
    "one step of DeepDream": (
        {"rule": "scaled", "steps": 1, "objective": {"kind": "norm", "layer": "block3"}},
        lambda module, x: forward(module, x, "block3").flatten(1).norm(dim=1),
        SGD,
        {"steps": 1, "adjust": lambda slope, x: slope / slope.abs().mean()},
    ),
    "descent to a target": (
        {"rule": "adam", "minimise": True, "objective": {"kind": "mse", "target": [0.5] * 10}},
        lambda module, x: (module(x) - 0.5).square().mean(1),
        ADAM,
        {"sign": 1.0},
    ),
    "projected sign steps": (
        {"rule": "sign", "epsilon": 0.08, "clamp": [-1, 1], "objective": {"kind": "cross_entropy", "class": 3}},
        lambda module, x: cross_entropy(module(x), torch.tensor([3]).expand(len(x)), reduction="none"),
        SGD,
        {
            "adjust": lambda slope, x: slope.sign(),
            "project": lambda x, start: x.clamp(start - 0.08, start + 0.08).clamp(-1, 1),
        },
    ),
    "jitter and penalties": (
        {"rule": "adam", "jitter": 3, "seed": 7, "total_variation": 0.001, "l2": 0.01},
        channel,
        ADAM,
        {"shifts": draw_shift, "penalty": lambda x: vary(x) + 0.01 * x.square().sum()},
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_equals_torch(nets: Nets, name: str) -> None:
    """The inputs after some steps, and the objective at each."""
    body, value, make, options = RULES[name]
    found, wanted = nets.optimise(**body), climb(nets.digits, IMAGES, value, make, **options)
    assert list(found) == ["input", "objective"]
    assert np.abs(found["input"] - IMAGES).max() > 1e-3
    for key, array in wanted.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-5, err_msg=key)


def test_pixels(nets: Nets) -> None:
    """Projected sign steps on a picture's pixels from 0 to 1, for one class each; as arrays, and as PNG."""
    spec = nets.live.client.get("/models/digits").json()["preprocess"]
    mean, std = (torch.tensor(spec[name]).view(-1, 1, 1) for name in ("mean", "std"))
    pixels = np.random.default_rng(4).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    starts = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    sent = [image(encode(each)) | {"class": number + 1} for number, each in enumerate(pixels)]
    asked = {
        "rule": "sign",
        "pixels": True,
        "epsilon": 0.05,
        "learning_rate": 0.02,
        "objective": {"kind": "probability"},
    }
    found = nets.optimise(**asked, minimise=True, inputs=sent)
    for row, start in enumerate(starts):
        wanted = climb(
            nets.digits,
            start[None].numpy(),
            lambda module, x, row=row: module((x - mean) / std).softmax(1)[:, row + 1],
            SGD,
            rate=0.02,
            adjust=lambda slope, x: slope.sign(),
            project=lambda x, first: x.clamp(first - 0.05, first + 0.05).clamp(0, 1),
            sign=1.0,
        )
        back = found["input"][row] * std.numpy() + mean.numpy()
        np.testing.assert_allclose(back, wanted["input"][0], atol=1e-5)
        np.testing.assert_allclose(found["objective"][row], wanted["objective"][0], rtol=1e-4, atol=1e-6)
        alone = BASE | asked | {"minimise": True, "inputs": sent[row : row + 1]}
        reply = nets.live.client.post("/optimise?format=png", json=alone)
        assert reply.headers["content-type"] == "image/png"
        drawn = np.asarray(Image.open(BytesIO(reply.content))).transpose(2, 0, 1)
        np.testing.assert_allclose(drawn, 255 * wanted["input"][0], atol=0.51)


def test_first_class_is_kept(nets: Nets) -> None:
    """Of the input that was sent, even if later steps make another one the highest; inputs may have several shapes."""
    larger = np.random.default_rng(5).normal(size=(3, 40, 36)).astype(np.float32)
    asked = {"rule": "sign", "minimise": True, "learning_rate": 0.05, "steps": 6, "objective": {"kind": "logit"}}
    reply = nets.live.client.post("/optimise", json=BASE | asked | {"inputs": [INPUTS[0], tensor(larger)]})
    found = arrays_of(reply)
    for row, start in enumerate((IMAGES[0], larger)):
        top = int(nets.digits(torch.from_numpy(start)[None]).argmax())
        value = lambda module, x, top=top: module(x)[:, top]  # noqa: E731
        options = {"steps": 6, "adjust": lambda slope, x: slope.sign(), "sign": 1.0}
        wanted = climb(nets.digits, start[None], value, SGD, **options)
        np.testing.assert_allclose(found[f"input.input{row}"], wanted["input"], atol=1e-5)
        np.testing.assert_allclose(found["objective"][row], wanted["objective"][0], rtol=1e-4, atol=1e-5)
        assert int(nets.digits(torch.from_numpy(found[f"input.input{row}"])).argmax()) != top
        assert reply.json()["receipts"]["objective"]["classes"][row] == top


def test_same_bits(nets: Nets) -> None:
    """A request that shares no forwards gives the same bits each time, and for each input those that it gives alone."""
    asked: Json = {"rule": "adam", "jitter": 2, "steps": 8, "isolated": True}
    first, again = (nets.optimise(**asked) for _ in range(2))
    assert same(first, again)
    for row, one in enumerate(INPUTS):
        assert same({key: array[row : row + 1] for key, array in first.items()}, nets.optimise(**asked, inputs=[one]))
    other = nets.live.client.post("/optimise", json=BASE | asked | {"seed": 1})
    plain = nets.live.client.post("/optimise", json=BASE | asked)
    assert plain.json()["fingerprint"] != other.json()["fingerprint"]
    assert not same(arrays_of(plain), arrays_of(other))


def test_interventions(nets: Nets) -> None:
    """The objective of a changed forward, at each step."""
    zero = {"layer": "block1", "op": "zero", "channels": [0, 2]}

    def value(module: Any, x: Tensor) -> Tensor:
        kept = torch.ones(16)
        kept[[0, 2]] = 0
        return forward(module, forward(module, x, "block1") * kept[:, None, None], "block2", "block1")[:, 3].mean(
            (1, 2)
        )

    found, wanted = nets.optimise(interventions=[zero]), climb(nets.digits, IMAGES, value, SGD)
    for key, array in wanted.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-5, err_msg=key)


def test_inversion(nets: Nets) -> None:
    """The input behind a layer's values: an intervention makes the norm of its output the distance; by the client."""
    wanted = forward(nets.digits, torch.from_numpy(IMAGES[:1]), "block2").detach()
    with Client(nets.live.url) as client:
        found = client.optimise(
            [np.zeros((3, 32, 32), np.float32)],
            6,
            0.05,
            rule="adam",
            minimise=True,
            interventions=[{"layer": "block2", "op": "add", "tensor": -wanted[0].numpy()}],
            objective={"kind": "norm", "layer": "block2"},
        )
    distance = lambda module, x: (forward(module, x, "block2") - wanted).flatten(1).norm(dim=1)  # noqa: E731
    expected = climb(nets.digits, np.zeros((1, 3, 32, 32), np.float32), distance, ADAM, steps=6, sign=1.0)
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-5, err_msg=key)


def test_bad_inputs_are_left_out(nets: Nets) -> None:
    """As of an extraction, and each input may have its own class."""
    sent = [{"image": "AAAA"}, INPUTS[0] | {"class": 4}, INPUTS[1] | {"class": 5}]
    reply = nets.live.client.post("/optimise", json=BASE | {"objective": {}, "on_error": "skip", "inputs": sent})
    assert reply.headers["x-layertap-skipped"] == "0"
    found = arrays_of(reply)["objective"]
    scores = nets.digits(torch.from_numpy(IMAGES)).detach()
    np.testing.assert_allclose(found[:, 0], [scores[0, 4], scores[1, 5]], rtol=1e-5)
    assert (found[:, -1] > found[:, 0]).all()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes(nets: Nets, dtype: str) -> None:
    """Steps and replies are float32, whatever a model's input is."""
    x = np.linspace(-1, 1, 4).astype(dtype)
    body = {"model": dtype, "learning_rate": 0.5, "objective": {"kind": "sum"}, "inputs": [tensor(x)]}
    found = nets.optimise(**body)
    assert found["input"].dtype == np.float32
    assert found["objective"][0, -1] > found["objective"][0, 0]


def test_in_worker_processes(nets: Nets, serve: Serve) -> None:
    """The same inputs come of a model in another process."""
    asked = {
        "rule": "adam",
        "pixels": True,
        "isolated": True,
        "inputs": [image(encode(np.zeros((32, 32, 3), np.uint8)))],
    }
    with serve(workers=1) as live:
        found = arrays_of(live.client.post("/optimise", json=BASE | asked))
    for key, array in nets.optimise(**asked).items():
        np.testing.assert_allclose(found[key], array, rtol=1e-5, atol=1e-5, err_msg=key)


def test_events(nets: Nets) -> None:
    """Progress, then the reply; between the steps others are answered, and what is refused is a plain problem."""
    body = BASE | {"steps": 60, "isolated": True, "inputs": INPUTS[:1]}
    events: list[tuple[str, Json]] = []
    with nets.live.client.stream("POST", "/optimise", json=body, headers=EVENTS) as reply:
        lines = filter(None, reply.iter_lines())
        for name, data in zip(lines, lines, strict=True):
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
            if len(events) == 1:
                assert arrays_of(nets.live.client.post("/extract", json={"layers": ["head"], "inputs": INPUTS}))
    *progress, last = events
    assert progress[1][1]["done"] < 61
    assert progress[-1] == ("progress", {"done": 61, "total": 61})
    assert last[0] == "result"
    assert same(arrays_of(httpx.Response(200, json=last[1])), arrays_of(nets.live.client.post("/optimise", json=body)))
    refused = nets.live.client.post("/optimise", json=body | {"objective": {"class": 70}}, headers=EVENTS)
    assert problem(refused, 422)["errors"][0]["pointer"] == "/objective"


def test_event_of_a_deadline(nets: Nets) -> None:
    """A deadline that passes between steps ends in an event."""
    body = BASE | {"model": "rows", "objective": {"kind": "sum"}, "inputs": [tensor(np.zeros(4, np.float32))]}
    with hold_queue(nets.live, "rows"):
        reply = nets.live.client.post("/optimise", json=body, headers=EVENTS | {"x-request-timeout": "0.4"})
    name, data = reply.text.strip().split("\n")[-2:]
    assert name == "event: error"
    assert "X-Request-Timeout of 0.4 s" in json.loads(data.removeprefix("data: "))["detail"]


REFUSED: dict[str, tuple[Json, int, str]] = {
    "texts": ({"model": "gpt2", "objective": {"kind": "norm"}, "inputs": [{"tokens": [3, 4]}]}, 422, "ids of texts"),
    "pixels of a model without": ({"model": "resnet", "pixels": True, "objective": {}}, 422, "leave 'pixels' out"),
    "a PNG of such": ({"model": "resnet", "objective": {}, "inputs": INPUTS[:1], "format": "png"}, 406, "mean and std"),
    "a PNG of two": ({"format": "png"}, 406, "one picture"),
    "jitter of numbers": (
        {"model": "rows", "jitter": 1, "objective": {"kind": "sum"}, "inputs": [tensor(np.zeros(4, np.float32))]},
        422,
        "for pictures",
    ),
    "a clamp the wrong way": ({"clamp": [1, 0]}, 422, "the least first"),
    "a mean over inputs": ({"objective": {"kind": "cross_entropy", "over": "inputs"}}, 422, "leave 'over' out"),
    "a source that changes": (
        {"inputs": [INPUTS[0], {"input": 0, "interventions": [{"layer": "head", "op": "add", "from": {"input": 0}}]}]},
        422,
        "would change with each step",
    ),
    "rows on another axis": (
        {"model": "time_first", "objective": {"kind": "sum"}, "inputs": [tensor(np.zeros((5, 4), np.float32))]},
        422,
        "first axis",
    ),
    "sparse rows": ({"encoding": "sparse"}, 422, "/encoding"),
    "tiles of no sheet": ({"tiles": 4}, 422, "/tiles"),
    "a prompt of no text": ({"prompt": "query"}, 422, "/prompt"),
    "too many steps": ({"steps": 513}, 422, "512"),
    "too many inputs for the steps": ({"steps": 512, "inputs": INPUTS * 20}, 413, "fewer 'steps'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(nets: Nets, name: str) -> None:
    """Before any forward, with what to do instead."""
    fields, status, said = REFUSED[name]
    reply = nets.live.client.post(
        "/optimise",
        json={key: each for key, each in (BASE | fields).items() if key != "format"},
        params={"format": fields.get("format", "json")},
    )
    assert said in json.dumps(problem(reply, status))
