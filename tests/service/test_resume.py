"""``resume`` over HTTP: what one request captured is the body of another, and only the rest runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from layertap.models.spec import InputSpec, ModelSpec
from tests.server import Live
from tests.service.conftest import Serve, server_of
from tests.service.support import (
    Array,
    arrays_of,
    configured,
    copy_module,
    image,
    net,
    npy,
    picture,
    problem,
    raw,
    tensor,
)
from tests.transformers_nets import saved

INPUTS = [image(picture(seed)) for seed in range(3)]
REST = ["block2", "block3", "head"]


def extract(live: Live, **body: Any) -> Any:
    return live.client.post("/extract", json=body)


@pytest.fixture
def whole(live: Live) -> dict[str, Array]:
    """Every layer of whole forwards."""
    return arrays_of(extract(live, inputs=INPUTS, layers=["block1", *REST], encoding="base64"))


def check(found: dict[str, Array], whole: dict[str, Array], rows: slice = slice(None)) -> None:
    assert list(found) == REST
    for key, value in found.items():
        np.testing.assert_allclose(value, whole[key][rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["npy", "safetensors"])
def test_reply_is_the_next_body(live: Live, whole: dict[str, Array], form: str) -> None:
    """The bytes of one reply, sent back as they are."""
    first = live.client.post("/extract", json={"inputs": INPUTS, "layers": ["block1"]}, params={"format": form})
    kind = first.headers["content-type"]
    reply = live.client.post(
        "/extract", **raw(first.content, kind, resume="block1", layers=",".join(REST), encoding="base64")
    )
    check(arrays_of(reply), whole)
    assert {receipt["resumed"] for receipt in reply.json()["receipts"].values()} == {"block1"}


def bad(live: Live, whole: dict[str, Array], **body: Any) -> str:
    given = {"inputs": [tensor(whole["block1"][0])], "layers": ["head"], "resume": "block1", **body}
    found = problem(extract(live, **given), 422)
    return f"{found['detail']} / {found['errors'][0].get('hint', '')} / {found['errors'][0].get('pointer', '')}"


def test_refused(live: Live, whole: dict[str, Array]) -> None:
    """Each with what to send instead; the server goes on as before."""
    shape, block1, block2 = list(whole["block1"].shape[1:]), whole["block1"][0], whole["block2"][0]
    assert "did you mean 'block1'" in bad(live, whole, resume="blok1")
    assert "nothing runs after" in bad(live, whole, resume=".")
    assert "does not name the output" in bad(live, whole, resume="block1:input")
    alone = "does not follow from the output of 'block2' alone"
    assert alone in bad(live, whole, resume="block2", layers=["block1"], inputs=[tensor(block2)])
    assert f"send shape {shape}" in bad(live, whole, inputs=[tensor(block1[:, :-1])])
    assert "takes tensors, not pictures" in bad(live, whole, inputs=INPUTS[:1])
    assert "NaN or infinite" in bad(live, whole, inputs=[tensor(block1 * np.float32("nan"))])
    explained = live.client.post("/explain", json={"method": "saliency", "resume": "block1"})
    assert "'resume'" in problem(explained, 422)["detail"]


class Frames(nn.Module):
    """Rows of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)).relu()).cumsum(1)


class Described(nn.Module):
    """A picture with numbers about it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.joined = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(5, 8), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, picture: Tensor, numbers: Tensor) -> Tensor:
        return self.joined(self.conv(picture) + self.linear(numbers)[:, :, None, None]).relu().amax((2, 3))


class Segments(nn.Module):
    """Scores for each pixel: pictures of several sizes have maps of one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 4, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(self.second(self.first(x)), size=x.shape[2:])


NETS = (
    ModelSpec("resnet18", "torchvision:resnet18", "random:0", device="cpu", inputs=(InputSpec("x", (3, 64, 64)),)),
    ModelSpec(
        "vit",
        "timm:vit_tiny_patch16_224",
        "random:0",
        device="cpu",
        args={"img_size": 32, "depth": 2, "dynamic_img_size": True},
    ),
    net("frames", "Frames", InputSpec("x", (10, 6), longest=50), module=__name__),
    net("described", "Described", InputSpec("picture", (3, 32, 32)), InputSpec("numbers", (5,)), module=__name__),
    net("segments", "Segments", InputSpec("x", (3, 32, 32)), module=__name__),
)
sized = server_of(*NETS)


@pytest.fixture(scope="module")
def gpt2(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Any]]:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    module = saved("gpt2", folder)
    with serve(configured(ModelSpec("gpt2", f"transformers:{folder}", device="cpu"))) as live:
        yield live, module


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def replaced(module: nn.Module, layer: str, inputs: Sequence[Tensor], value: Array | None = None) -> Any:
    """What a layer returns, or the model if a hook on the layer returns another value."""
    found = []

    def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        found.append(output)
        return torch.from_numpy(value) if value is not None else None

    with module.get_submodule(layer).register_forward_hook(hook), torch.no_grad():
        output = module(*inputs)
    return found[0].numpy() if value is None else getattr(output, "logits", output).numpy()


def resume(live: Live, model: str, start: Any, *rows: Array, **body: Any) -> Any:
    given = {"model": model, "layers": ["."], "resume": start, "encoding": "base64", **body}
    return extract(live, inputs=[tensor(row) for row in rows], **given)


SIZES = [
    *[("resnet18", layer, ((3, *side),)) for layer in ("layer2", "conv1") for side in ((96, 64), (70, 50), (64, 64))],
    *[("resnet18", "avgpool", ((3, 80, 64),)), ("vit", "blocks.0", ((3, 48, 32),)), ("vit", "norm", ((3, 64, 64),))],
    *[("frames", "first", ((length, 6),)) for length in (1, 10, 37, 50)],
    ("described", "joined", ((3, 40, 20), (5,))),
    *[("segments", "first", ((3, *side),)) for side in ((40, 20), (39, 20), (32, 32), (31, 32))],
]


@pytest.mark.parametrize(("model", "layer", "shapes"), SIZES)
def test_sizes(sized: Live, model: str, layer: str, shapes: Any) -> None:
    """Any size goes on, as with a hook that returns the sent output in a forward of an input of that size."""
    sized.client.post("/extract", json={"model": model, "layers": ["."]}, params={"dry_run": "true"})  # loads it
    module = copy_module(sized, model)
    inputs = [torch.from_numpy(noise(1, *shape)) for shape in shapes]
    sent = replaced(module, layer, inputs) * 0.5 + 0.1
    wanted = replaced(module, layer, inputs, sent)
    names = [spec["name"] for spec in sized.client.get(f"/models/{model}").json()["inputs"]]
    shape = shapes[0] if len(shapes) == 1 else dict(zip(names, shapes, strict=True))
    reply = resume(sized, model, {"layer": layer, "shape": shape}, sent[0])
    assert reply.status_code == 200, reply.text
    np.testing.assert_allclose(arrays_of(reply)["."], wanted, rtol=1e-4, atol=1e-5)
    receipt = reply.json()["receipts"]["."]
    assert (receipt["resumed"], receipt["input_shapes"]) == (layer, [list(shape) for shape in shapes])
    again = resume(sized, model, {"layer": layer, "shape": dict(zip(names, shapes, strict=True))}, sent[0], sent[0])
    np.testing.assert_allclose(arrays_of(again)["."], np.concatenate([wanted, wanted]), rtol=1e-4, atol=1e-5)
    assert again.json()["receipts"]["."]["fingerprint"] == receipt["fingerprint"]


@pytest.mark.parametrize("workers", [0, 1])
def test_known_sizes(serve: Serve, workers: int) -> None:
    """An input without a shape has the only known one that fits; of several, the refusal says which there are."""
    with serve(configured(*NETS[-3:]), workers=workers) as live:

        def capture(model: str, layer: str, *shapes: tuple[int, ...]) -> tuple[Any, list[Array], list[Array]]:
            inputs = [tensor(noise(*shape, seed=seed)) for seed, shape in enumerate(shapes)]
            body = {"model": model, "layers": [layer, "."], "encoding": "base64"}
            reply = extract(live, inputs=inputs, **body)
            assert reply.status_code == 200, reply.text
            arrays = arrays_of(reply)
            several = len(shapes) > 1
            pick = [[arrays[f"{key}.input{n}" if several else key] for n in range(len(shapes))] for key in (layer, ".")]
            return reply, pick[0], pick[1]

        first, second = (3, 40, 20), (3, 64, 48)
        _, sent, wanted = capture("segments", "first", first, second)
        reply = resume(live, "segments", "first", *[each[0] for each in sent])
        for place, each in enumerate(wanted):
            np.testing.assert_allclose(arrays_of(reply)[f"..input{place}"], each, rtol=1e-4, atol=1e-5)
        shapes = [each["input_shapes"] for each in reply.json()["receipts"].values()]
        assert shapes == [[list(first)], [list(second)]]
        named = resume(live, "segments", {"layer": "first", "shape": first}, sent[0][0])
        alone = resume(live, "segments", "first", sent[0][0])
        assert named.content == alone.content
        own = resume(live, "segments", "first", noise(8, 8, 8)).json()["fingerprint"]
        assert len({own, *(each["fingerprint"] for each in reply.json()["receipts"].values())}) == 3

        capture("segments", "first", (3, 39, 20))  # has maps of the same size
        found = problem(resume(live, "segments", "first", sent[0][0]), 422)
        assert "for inputs of [3, 40, 20] and of [3, 39, 20]" in found["detail"]
        assert '"resume": {"layer": "first", "shape": [3, 39, 20]}' in found["hint"]
        start = json.loads(found["hint"].partition('"resume": ')[2].partition("; ")[0])
        assert arrays_of(resume(live, "segments", start, sent[0][0]))["."].shape == (1, 2, 39, 20)
        skipped = resume(live, "segments", "first", sent[0][0], sent[1][0], on_error="skip")
        assert [each["input"] for each in skipped.json()["errors"]] == [0]
        np.testing.assert_allclose(arrays_of(skipped)["."], wanted[1], rtol=1e-4, atol=1e-5)

        _, sent, wanted = capture("frames", "first", (7, 6))
        np.testing.assert_allclose(arrays_of(resume(live, "frames", "first", sent[0][0]))["."], wanted[0], atol=1e-5)


def test_refused_sizes(sized: Live) -> None:
    """A size that nobody has sent, and shapes that are none of the model's, each with what to send instead."""

    def refuse(model: str, start: Any, row: Array, status: int = 422) -> str:
        found = problem(resume(sized, model, start, row), status)
        return f"{found['detail']} / {found['hint']} / {found['errors'][0].get('pointer', '')}"

    row = noise(8, 21, 17)
    unknown = refuse("segments", "first", row)
    assert "'first' returns [8, 8, 8] for an input of [3, 32, 32], not [8, 21, 17]" in unknown
    assert '"resume": {"layer": "first", "shape": [3, 32, 32]}; or send shape [8, 8, 8]' in unknown
    other = refuse("segments", {"layer": "first", "shape": [3, 40, 20]}, row)
    assert "'first' returns [8, 10, 5] for an input of [3, 40, 20], not [8, 21, 17]" in other
    assert "does not fit input 'first'" in refuse("segments", "first", row[0])
    for shape in ([4, 84, 68], [84, 68], [3, 84, 0], [2**31 - 1] * 8, [], {"y": [3, 84, 68]}):
        assert refuse("segments", {"layer": "first", "shape": shape}, row).endswith("/resume/shape")
    for shape in ([-3, 84, 68], [3, 84.5, 68], "3x84x68", [2**31], [1] * 9):
        assert refuse("segments", {"layer": "first", "shape": shape}, row).endswith("/resume/shape")
    assert "name the arrays" in refuse("described", {"layer": "joined", "shape": [3, 40, 20]}, noise(4, 20, 10))
    assert "no array" in refuse("described", {"layer": "joined", "shape": {"picture": [3, 40, 20]}}, noise(4, 20, 10))
    assert "pixels" in refuse("segments", {"layer": "first", "shape": [3, 2**20, 2**20]}, row, 413)
    assert refuse("frames", {"layer": "first", "shape": [51, 6]}, noise(51, 8)).endswith("/resume/shape")
    assert "from 0 to 50" in refuse("frames", {"layer": "first", "shape": [51, 6]}, noise(51, 8))


@pytest.mark.parametrize("length", [3, 8, 11, 16])
def test_lengths_of_texts(gpt2: tuple[Live, Any], length: int) -> None:
    """A text of any length goes on, whatever shape is given with the layer."""
    live, module = gpt2
    ids = torch.arange(length)[None] % 40
    sent = replaced(module, "transformer.ln_f", [ids]) * 0.5 + 0.1
    wanted = replaced(module, "transformer.ln_f", [ids], sent)
    for start in ("transformer.ln_f", {"layer": "transformer.ln_f", "shape": [length]}):
        reply = resume(live, "gpt2", start, sent[0], layers=["lm_head"])
        assert reply.status_code == 200, reply.text
        np.testing.assert_allclose(arrays_of(reply)["lm_head"], wanted, rtol=1e-4, atol=1e-5)


def test_sizes_in_a_query(sized: Live) -> None:
    """The object is a parameter of the query too, and of a dry run, which needs no input."""
    start = json.dumps({"layer": "first", "shape": [3, 24, 36]})
    row = noise(2, 8, 6, 9)
    query = {"model": "segments", "resume": start, "layers": "."}
    reply = sized.client.post("/extract", **raw(npy(row), "application/x-npy", **query, encoding="base64"))
    assert arrays_of(reply)["."].shape == (2, 2, 24, 36)
    dry = sized.client.post("/extract", params={**query, "dry_run": "true"})
    assert dry.json()["features"]["."]["shape"] == [1, 2, 24, 36]
