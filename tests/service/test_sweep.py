"""Sweeps against plain torch hooks in a loop: what is tried where, what is measured, what is refused, events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from layertap.models.catalog.catalog import Costs
from layertap.models.spec import InputSpec, ModelSpec
from layertap_client import Client
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import copy_digits, random_images
from tests.service.queue_harness import hold_queue
from tests.service.support import Array, Json, arrays_of, configured, copy_module, net, problem, tensor
from tests.transformers_nets import VOCABULARY, saved

IMAGES = random_images(2, seed=3)
INPUTS = [tensor(image) for image in IMAGES]
CLEAN = torch.randint(4, VOCABULARY, (5,), generator=torch.Generator().manual_seed(1)).tolist()
CORRUPT = [*CLEAN[:2], (CLEAN[2] + 1) % VOCABULARY, *CLEAN[3:]]
BLOCKS = [f"transformer.h.{number}" for number in range(2)]
Edit = Callable[[Tensor], None]  # in place, of a layer's output (1, …)
Measure = Callable[[Tensor, Tensor], Tensor]  # of edited and unedited scores


@dataclass(frozen=True)
class Nets:
    live: Live
    digits: Any
    gpt2: Any
    windows: Any

    def sweep(self, **body: Any) -> dict[str, Array]:
        return arrays_of(self.live.client.post("/sweep", json={"encoding": "base64", **body}))


@pytest.fixture(scope="module")
def nets(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nets]:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    module = saved("gpt2", folder)
    gpt2 = ModelSpec("gpt2", f"transformers:{folder}", device="cpu")
    windows = net("windows", "Windows", InputSpec("x", (4, 6)), module="tests.nets")
    with serve(configured(gpt2, windows, net("held", "Gated"), load="startup")) as live:
        yield Nets(live, copy_digits(live), module, copy_module(live, "windows"))


def run(module: Any, inputs: Tensor, layer: str = "", edit: Edit = lambda value: None) -> Tensor:
    """The model's output with a layer's output edited by a plain hook."""

    def change(part: Any, args: Any, output: Any) -> Any:
        value = (output[0] if isinstance(output, tuple) else output).clone()
        edit(value)
        return (value, *output[1:]) if isinstance(output, tuple) else value

    handle = module.get_submodule(layer).register_forward_hook(change) if layer else None
    with torch.no_grad():
        output = module(inputs)
    if handle is not None:
        handle.remove()
    return output if isinstance(output, Tensor) else output.logits


def set_at(index: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> Edit:
    def edit(value: Tensor) -> None:
        value[index] = change(value[index])

    return edit


KINDS: dict[str, tuple[Json, Measure]] = {
    "a logit": ({"kind": "logit", "class": 3}, lambda edited, _: edited[0, 3]),
    "the unedited top class": ({"kind": "probability"}, lambda edited, before: edited.softmax(1)[0, before.argmax()]),
    "a logit difference": ({"terms": [[1, 3], [-1, 7]]}, lambda edited, _: edited[0, 3] - edited[0, 7]),
    "cross entropy": ({"kind": "cross_entropy", "class": 2}, lambda x, _: cross_entropy(x, torch.tensor([2]))),
    "KL to the unedited": (
        {"kind": "kl_div", "target": "unedited"},
        lambda edited, before: kl_div(edited.log_softmax(1), before.softmax(1), reduction="sum"),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_metrics(nets: Nets, kind: str) -> None:
    """Every channel of a layer set to zero; each metric, and that of the unedited inputs."""
    objective, measure = KINDS[kind]
    found = nets.sweep(layers=["block3"], op="zero", each="channel", objective=objective, inputs=INPUTS)
    assert list(found) == ["metric", "block3"]
    for row, image in enumerate(IMAGES):
        sent = torch.from_numpy(image)[None]
        before = run(nets.digits, sent)
        expected = [
            measure(run(nets.digits, sent, "block3", set_at((0, channel), torch.zeros_like)), before)
            for channel in range(found["block3"].shape[1])
        ]
        np.testing.assert_allclose(found["block3"][row], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found["metric"][row], measure(before, before), rtol=1e-4, atol=1e-5)


VECTOR = np.linspace(-1, 1, 16, dtype=np.float32)
EDITS: dict[str, tuple[Json, list[Edit]]] = {
    "values of a layer": (
        {"op": "scale", "values": [0, 0.5, 2]},
        [set_at((slice(None),), lambda part, by=by: part * by) for by in (0, 0.5, 2)],
    ),
    "values of some channels": (
        {"op": "add", "values": [1, -1], "each": "channel", "layers": [{"layer": "block1", "channels": [5, -1]}]},
        [set_at((0, c), lambda part, by=by: part + by) for c in (5, -1) for by in (1, -1)],
    ),
    "a tensor, channel by channel": (
        {"op": "replace", "each": "channel", "tensor": {**tensor(VECTOR.reshape(16, 1, 1))["tensor"]}},
        [set_at((0, c), lambda part, c=c: torch.full_like(part, float(VECTOR[c]))) for c in range(16)],
    ),
    "a clamp of a region": (
        {"op": "clamp", "max": 0.1, "region": [0, 0, 8, 8]},
        [set_at((0, slice(None), slice(8), slice(8)), lambda part: part.clamp(max=0.1))],
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits(nets: Nets, name: str) -> None:
    """Each operation on what it narrows, index by index and value by value, as one hook after the other."""
    fields, edits = EDITS[name]
    found = nets.sweep(
        **{"layers": ["block1"], "inputs": INPUTS[:1], "objective": {"kind": "logit", "class": 3}, **fields}
    )
    sent = torch.from_numpy(IMAGES[:1])
    expected = [run(nets.digits, sent, "block1", edit)[0, 3] for edit in edits]
    np.testing.assert_allclose(found["block1"].ravel(), expected, rtol=1e-4, atol=1e-5)


PATCHING: Json = {
    "model": "gpt2",
    "layers": ["transformer.h.?"],
    "op": "replace",
    "from": {"input": 0},
    "each": "token",
    "objective": {"kind": "logit", "class": 5, "position": -1},
    "inputs": [{"tokens": CLEAN}, {"tokens": CORRUPT}],
}


def test_patching(nets: Nets) -> None:
    """Layer by position: what a clean run has there put into a corrupt one; the clean one stays what it is."""
    found = nets.sweep(**PATCHING)
    for layer in BLOCKS:
        kept: list[Tensor] = []
        run(nets.gpt2, torch.tensor([CLEAN]), layer, lambda value, kept=kept: kept.append(value.clone()))
        key = next(key for key in found if key.startswith(layer))
        expected = [
            run(nets.gpt2, torch.tensor([CORRUPT]), layer, set_at((0, token), lambda _, own=kept[0][0, token]: own))
            for token in range(len(CLEAN))
        ]
        np.testing.assert_allclose(found[key][1], [scores[0, -1, 5] for scores in expected], atol=1e-4)
        np.testing.assert_array_equal(found[key][0], found["metric"][0])


def test_heads_and_tokens(nets: Nets) -> None:
    """Attention of each head, and of each head at each query, set to zero: as requests with one intervention each."""
    layer, objective = f"{BLOCKS[1]}.attn:attention", {"kind": "logit", "class": 5, "position": -1}
    body = {"model": "gpt2", "inputs": [{"tokens": CLEAN}], "layers": [layer], "op": "zero", "objective": objective}
    heads, both = nets.sweep(**body, each="head"), nets.sweep(**body, each=["query", "head"])
    assert (heads[layer].shape, both[layer].shape) == ((1, 4), (1, 5, 4))
    width = nets.gpt2.config.n_embd // 4
    for head in range(4):

        def silence(part: Any, args: tuple[Tensor, ...], head: int = head) -> tuple[Tensor, ...]:
            value = args[0].clone()
            value[..., width * head : width * (head + 1)] = 0
            return (value, *args[1:])

        with nets.gpt2.get_submodule(f"{BLOCKS[1]}.attn.c_proj").register_forward_pre_hook(silence):
            expected = run(nets.gpt2, torch.tensor([CLEAN]))[0, -1, 5]
        # Of the last block only the last query counts.
        np.testing.assert_allclose([heads[layer][0, head], both[layer][0, -1, head]], [expected] * 2, atol=1e-4)
    np.testing.assert_allclose(both[layer][0, 0], both["metric"][0], atol=1e-5)


def test_windows_of_layers(nets: Nets) -> None:
    """A channel of two adjacent blocks changed at once, under the name of the first, or by `as`."""
    places: Json = [{"layer": f"block{number}", "channels": [number, 0]} for number in (1, 2)]
    places.append({"layer": "block3", "channels": [3, 0], "as": "last"})
    body: Json = {"op": "scale", "values": [0, 2], "each": "channel", "window": 2, "objective": {"class": 3}}
    found = nets.sweep(layers=places, inputs=INPUTS[:1], **body)
    assert list(found) == ["metric", "block1", "block2"]
    sent = torch.from_numpy(IMAGES[:1])
    for first in (1, 2):
        for index, channels in enumerate([(first, first + 1), (0, 0)]):
            for value, by in enumerate((0.0, 2.0)):

                def scale(part: Any, args: Any, output: Tensor, channel: int = 0, by: float = by) -> Tensor:
                    kept = torch.ones_like(output)
                    kept[:, channel] = by
                    return output * kept

                pairs = zip((first, first + 1), channels, strict=True)
                hooks = [
                    nets.digits.get_submodule(f"block{number}").register_forward_hook(partial(scale, channel=channel))
                    for number, channel in pairs
                ]
                expected = run(nets.digits, sent)[0, 3]
                for hook in hooks:
                    hook.remove()
                np.testing.assert_allclose(found[f"block{first}"][0, index, value], expected, rtol=1e-5, atol=1e-5)
    named = nets.sweep(layers=places[2:], inputs=INPUTS[:1], **{**body, "window": 1})
    assert list(named) == ["metric", "last"]
    several = nets.sweep(layers=[{"layer": "block?", "as": "all"}], inputs=INPUTS[:1], op="zero")
    assert list(several) == ["metric", *(f"all.block{number}" for number in (1, 2, 3))]


def test_rows_that_are_folded(nets: Nets) -> None:
    """A channel of a layer that sees a row's windows side by side is changed in all of them, also by a sent tensor."""
    rows = np.random.default_rng(0).standard_normal((2, 4, 6)).astype(np.float32)
    own = np.random.default_rng(1).standard_normal((2, 2, 6)).astype(np.float32)
    for fields in ({"op": "zero"}, {"op": "replace", "tensor": tensor(own)["tensor"]}):
        body = {"model": "windows", "layers": ["inner"], "each": "channel", "objective": {"kind": "norm"}, **fields}
        found = nets.sweep(**body, inputs=[tensor(row) for row in rows])["inner"]
        for row, effects in zip(rows, found, strict=True):
            for channel, effect in enumerate(effects):
                value = torch.from_numpy(own)[..., channel] if "tensor" in fields else torch.zeros(2, 2)
                edit = set_at((..., channel), lambda part, value=value: value)
                expected = run(nets.windows, torch.from_numpy(row)[None], "inner", edit).norm()
                np.testing.assert_allclose(effect, expected, rtol=1e-5)


ATTRIBUTED: dict[str, tuple[Json, Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "tokens of another run": (
        {"op": "replace", "from": {"input": 0}, "each": "token"},
        lambda x, clean: clean - x,
        (2,),
    ),
    "channels of some tokens": (
        {"op": "zero", "each": "channel", "layers": [{"layer": "transformer.h.?", "tokens": [1, -1]}]},
        lambda x, _: torch.stack([-x[:, at] if at in (1, 4) else 0 * x[:, at] for at in range(5)], 1),
        (1,),
    ),
    "values": ({"op": "scale", "values": [0, 3], "each": []}, lambda x, _: torch.stack([-x, 2 * x], -1), (1, 2)),
}


@pytest.mark.parametrize("name", ATTRIBUTED)
def test_attribution(nets: Nets, name: str) -> None:
    """The gradient of the unedited run times what each edit adds, in the place of running it."""
    fields, add, summed = ATTRIBUTED[name]
    body: Json = {**PATCHING, "from": None, **fields, "attribution": True, "top": 3}
    reply = nets.live.client.post("/sweep", json={**body, "encoding": "base64"})
    found, kept = arrays_of(reply), dict[str, list[Tensor]]()

    def keep(part: Any, args: Any, output: Any, layer: str) -> None:
        value = output[0] if isinstance(output, tuple) else output
        if value.requires_grad:
            value.retain_grad()
        kept.setdefault(layer, []).append(value)

    hooks = [nets.gpt2.get_submodule(each).register_forward_hook(partial(keep, layer=each)) for each in BLOCKS]
    metrics = []
    for tokens in (CLEAN, CORRUPT):
        embedded = nets.gpt2.transformer.wte(torch.tensor([tokens])).detach().requires_grad_()
        metric = nets.gpt2(inputs_embeds=embedded).logits[0, -1, 5]
        metric.backward()
        metrics.append(float(metric.detach()))
    for hook in hooks:
        hook.remove()
    np.testing.assert_allclose(found["metric"], metrics, rtol=1e-5)
    for layer, (clean, corrupt) in kept.items():
        added = add(corrupt.detach(), clean.detach())
        gradient = corrupt.grad if added.ndim == 3 else corrupt.grad[..., None]
        expected = metrics[1] + (gradient * added).sum(summed)
        np.testing.assert_allclose(found[layer][1], expected[0], rtol=1e-5, atol=1e-5)
    assert (
        reply.json()["receipts"][BLOCKS[0]]["fingerprint"]
        != nets.live.client.post("/sweep", json={**body, "attribution": False}).json()["receipts"][BLOCKS[0]][
            "fingerprint"
        ]
    )


def test_attribution_of_heads(nets: Nets) -> None:
    """Small edits of heads and of attention are as large as estimated."""
    layers = [f"{BLOCKS[1]}.attn.c_proj:input", f"{BLOCKS[0]}.attn:attention"]
    body: Json = {"model": "gpt2", "layers": layers, "op": "scale", "by": 1.001, "each": "head"}
    body |= {"objective": {"kind": "logit", "class": 5, "position": -1}, "inputs": [{"tokens": CLEAN}]}
    exact, estimated = (nets.sweep(**body, attribution=each) for each in (False, True))
    for layer in layers:
        effects = [(each[layer] - each["metric"])[0] for each in (exact, estimated)]
        np.testing.assert_allclose(*effects, atol=5e-6)


def test_texts_of_two_lengths(nets: Nets) -> None:
    """Each text has an entry for each of its own tokens, and what it gives alone."""
    body = {"model": "gpt2", "layers": [BLOCKS[0]], "op": "zero", "each": "token", "objective": {"kind": "norm"}}
    texts = [{"tokens": CLEAN}, {"tokens": CLEAN[:3]}]
    found = nets.sweep(**body, inputs=texts)
    for number, text in enumerate(texts):
        (alone,) = (array for key, array in nets.sweep(**body, inputs=[text]).items() if key != "metric")
        (own,) = (array for key, array in found.items() if key.endswith(f".input{number}"))
        assert own.shape == (1, len(text["tokens"]))
        np.testing.assert_allclose(own, alone, rtol=1e-4)


def test_top_effects(nets: Nets) -> None:
    """The largest differences of all layers, by size, with where they are; the same in a file's metadata."""
    body = {"layers": ["block?"], "op": "scale", "values": [0, 2], "each": "channel", "top": 4, "inputs": INPUTS}
    reply = nets.live.client.post("/sweep", json={**body, "encoding": "base64"})
    found, named = arrays_of(reply), reply.json()["top_effects"]
    metric = found.pop("metric")
    for row in range(2):
        effects = np.concatenate([array[row].ravel() - metric[row] for array in found.values()])
        sizes = np.sort(np.abs(effects))[::-1][:4]
        np.testing.assert_allclose([abs(each["effect"]) for each in named[row]], sizes, atol=1e-5)
        for each in named[row]:
            own = found[each["key"]][row][tuple(each["index"])] - metric[row]
            assert each["effect"] == pytest.approx(own, abs=1e-5)
    receipt = reply.json()["receipts"]["block1"]
    assert (receipt["metric"], receipt["axes"]) == ("logit", ["channel", "value"])
    with Client(nets.live.url) as client:
        result = client.sweep([*IMAGES], ["block?"], op="scale", values=[0, 2], each="channel", top=4)
    np.testing.assert_allclose(result["block2"], found["block2"], rtol=1e-5)
    assert [[each["key"] for each in row] for row in result.top_effects] == [[e["key"] for e in row] for row in named]


def test_events(nets: Nets) -> None:
    """Progress until all is done, then the reply; what is refused is a plain problem; what fails later an event."""
    body = {"layers": ["block1", "block2"], "op": "zero", "each": "channel", "inputs": INPUTS, "encoding": "base64"}
    plain = nets.live.client.post("/sweep", json=body)
    headers = {"accept": "text/event-stream"}
    reply = nets.live.client.post("/sweep", json=body, headers=headers)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = [dict(line.split(": ", 1) for line in event.split("\n")) for event in reply.text.strip().split("\n\n")]
    *progress, last = [(each["event"], json.loads(each["data"])) for each in events]
    assert progress[-1] == ("progress", {"done": 96, "total": 96})
    assert last[0] == "result"
    found, expected = arrays_of(httpx.Response(200, json=last[1])), arrays_of(plain)
    assert list(found) == list(expected)
    for name in found:  # the two may be batched otherwise, which changes last bits
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)
    assert last[1]["fingerprint"] == plain.json()["fingerprint"]
    refused = nets.live.client.post("/sweep", json={**body, "layers": ["nope"]}, headers=headers)
    assert problem(refused, 422)["errors"][0]["pointer"] == "/layers/0"


ONE: Json = {"layers": ["block1"], "op": "zero", "inputs": INPUTS[:1]}
REFUSED: dict[str, tuple[Json, str, str]] = {
    "no such layer": ({"layers": ["blok1"]}, "/layers/0", "block1"),
    "no such axis": ({"each": "head"}, "/layers/0", "channel"),
    "a gradient": ({"layers": ["block1:grad_output"]}, "/layers/0", "not gradients"),
    "a layer behind the metric": (
        {"layers": ["block3"], "objective": {"kind": "mean", "layer": "block1"}},
        "/layers/0",
        "runs later",
    ),
    "values without a number": ({"values": [1]}, "/values", "scale"),
    "a value twice": ({"op": "scale", "values": [1, 1]}, "/values", "once"),
    "a window of too many": ({"window": 2}, "/window", "name 1 places"),
    "a window of several sizes": ({"window": 2, "each": "channel", "layers": ["block?"]}, "/window", "sizes"),
    "a gradient of 0": ({"attribution": True, "objective": {"target": "unedited"}}, "/attribution", "unedited"),
    "an estimate of noise": ({"attribution": True, "op": "noise", "std": 1}, "/attribution", "noise"),
    "values and a number": ({"op": "scale", "by": 1, "values": [1]}, "/values", "'by'"),
    "no other input": ({"op": "replace", "from": {"input": 0}}, "/from/input", "beside"),
    "values from another input": ({**PATCHING, "values": [1]}, "/values", "'from'"),
    "no such token": ({**PATCHING, "objective": {"class": 5, "position": 7}}, "/objective", "between -5 and 4"),
    "unedited for an input": ({"inputs": [{**INPUTS[0], "objective": {"target": "unedited"}}]}, "", ""),
    "a layer twice, edited otherwise": (
        {"each": "channel", "layers": ["block1", {"layer": "block1", "channels": [1]}]},
        "/layers/1",
        "once",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(nets: Nets, name: str) -> None:
    """A fault says where, and what to type instead."""
    fields, pointer, said = REFUSED[name]
    fault = problem(nets.live.client.post("/sweep", json={**ONE, **fields}), 422)["errors"][0]
    assert fault["pointer"].startswith(pointer)
    assert said in f"{fault['detail']} {fault.get('hint', '')}"


def test_limits(nets: Nets, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over a limit or past its deadline is refused, with what would fit, before any forward."""
    body = {**ONE, "each": "channel", "inputs": INPUTS}
    with serve(max_changed_inputs=20) as live:
        found = problem(live.client.post("/sweep", json=body), 413)
        assert "32 changed inputs, the limit is 20" in found["detail"]
        assert "at most 1 inputs" in found["hint"]
        assert "'channels'" in found["hint"]
    many = {**body, "op": "scale", "values": list(range(256))}
    model = nets.live.engine.manager.registry.get_entry("digits").model
    assert model is not None
    monkeypatch.setattr(model.catalogs, "configured", replace(model.catalog, costs=Costs(base=0.0, per_row=1.0)))
    assert "changed inputs" in problem(nets.live.client.post("/sweep", json=many), 429, seconds=True)["detail"]
    assert problem(nets.live.client.post("/sweep?format=png", json=body), 406)["hint"]


def test_effects_that_are_no_numbers(nets: Nets) -> None:
    """An edit that makes the metric NaN or infinite is no effect of 0: it is left out, and a warning counts it."""
    body = {"layers": ["block1"], "op": "scale", "values": [2, 3e38], "top": 4, "inputs": INPUTS}
    reply = nets.live.client.post("/sweep", json={**body, "encoding": "base64"})
    assert not np.isfinite(arrays_of(reply)["block1"][:, 1]).any()
    assert [[each["index"] for each in row] for row in reply.json()["top_effects"]] == [[[0]], [[0]]]
    assert any("top_effects leaves out 2 edits" in each for each in reply.json()["warnings"])


def test_event_of_a_deadline(nets: Nets) -> None:
    """A deadline that passes while edits run ends in an event with the hint of a plain reply."""
    body = {"model": "held", "layers": ["linear"], "op": "zero", "inputs": [tensor(np.zeros(4, np.float32))]}
    headers = {"accept": "text/event-stream", "x-request-timeout": "0.4"}
    with hold_queue(nets.live, "held"):
        reply = nets.live.client.post("/sweep", json=body, headers=headers)
    name, data = reply.text.strip().split("\n")[-2:]
    assert name == "event: error"
    found = json.loads(data.removeprefix("data: "))
    assert "X-Request-Timeout of 0.4 s" in found["detail"]
    assert "allow more time" in found["hint"]
