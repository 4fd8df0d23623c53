"""Parts of attention and interventions there over HTTP, against models with attention written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from layertap.models.spec import InputSpec, ModelSpec
from tests.models.hooks.test_attention import Change, heads_of, multi_head, softmax, unchanged
from tests.nets import vit
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, problem, tensor
from tests.transformers_nets import VOCABULARY, saved

TEXTS = [
    torch.randint(4, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 3, 8, 13)  # in buckets of 8, 8, 8 and 16 tokens
]
PICTURES = np.random.default_rng(2).normal(size=(4, 3, 32, 32)).astype(np.float32)

ARRAYS = {"vit": PICTURES}  # of models that take no texts


def bert(module: Any, x: Tensor, change: Change) -> tuple[Tensor, Tensor]:
    """The attention of BERT, of a text without padding."""
    query, key, value = (heads_of(part(x), 4) for part in (module.query, module.key, module.value))
    weights = change(softmax(query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])))
    return weights, (weights @ value).transpose(1, 2).flatten(2)


def gpt2(module: Any, x: Tensor, change: Change) -> tuple[Tensor, Tensor]:
    """The attention of GPT-2, which looks at no later token."""
    projected = x @ module.c_attn.weight + module.c_attn.bias
    query, key, value = (heads_of(part, 4) for part in projected.chunk(3, -1))
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = change(softmax(scores.masked_fill(later, -torch.inf)))
    joined = (weights @ value).transpose(1, 2).flatten(2)
    return weights, joined @ module.c_proj.weight + module.c_proj.bias


@dataclass(frozen=True)
class Case:
    """A model: its layers with attention, their attention by hand, its output, its inputs as a request has them."""

    layers: tuple[str, str]
    hand: Callable[[Any, Tensor, Change], tuple[Tensor, Tensor]]
    output: str
    inputs: list[Json]


def texts() -> list[Json]:
    return [{"tokens": each} for each in TEXTS]


SELF = "encoder.layers.encoder_layer_{}.self_attention"
CASES = {
    "gpt2": Case(("transformer.h.0.attn", "transformer.h.1.attn"), gpt2, ".[logits]", texts()),
    "bert": Case(
        ("encoder.layer.0.attention.self", "encoder.layer.1.attention.self"), bert, ".[last_hidden_state]", texts()
    ),
    "vit": Case((SELF.format(0), SELF.format(1)), multi_head, ".", [tensor(each) for each in PICTURES]),
}
CHANGES: dict[str, tuple[Json, Change]] = {
    "zero": ({"op": "zero", "heads": [1]}, lambda w: w * (torch.arange(w.shape[1]) != 1)[:, None, None]),
    "scale": (
        {"op": "scale", "by": 0.5, "queries": [2, 0]},
        lambda w: w * torch.ones(w.shape[2]).index_fill(0, torch.tensor([0, 2]), 0.5)[:, None],
    ),
    "a key": ({"op": "zero", "keys": [0]}, lambda w: w * (torch.arange(w.shape[3]) != 0)),
    "replace": (
        {"op": "replace", "heads": [0], "queries": [1], "keys": [0, 1], **tensor(np.array([[[0.9, 0.3]]], np.float32))},
        lambda w: put(w, 0, 1, torch.tensor([0.9, 0.3])),
    ),
}


def put(weights: Tensor, head: int, query: int, values: Tensor) -> Tensor:
    """The weights with others for the first keys of one query."""
    mask = torch.zeros(weights.shape[1:])
    mask[head, query, : len(values)] = 1
    other = torch.zeros(weights.shape[1:])
    other[head, query, : len(values)] = values
    return weights * (1 - mask) + other


@dataclass(frozen=True)
class Server:
    """A server, and its models offline."""

    live: Live
    modules: dict[str, Any]

    def post(self, model: str, layers: list[Any], rows: list[int] | None = None, **fields: Any) -> Any:
        inputs = [CASES[model].inputs[row] for row in rows or range(4)]
        body = {"model": model, "inputs": inputs, "layers": layers, "encoding": "base64", **fields}
        return self.live.client.post("/extract", json=body)

    def of(self, model: str, layer: Any, rows: list[int] | None = None, **fields: Any) -> Array:
        (found,) = arrays_of(self.post(model, [layer], rows, **fields)).values()
        return found

    def run(self, model: str, row: int) -> Any:
        """One row through a model alone and unpadded."""
        if model in ARRAYS:
            return self.modules[model](torch.from_numpy(ARRAYS[model][row])[None])
        out = self.modules[model](input_ids=torch.tensor([TEXTS[row]]))
        return out[CASES[model].output[2:-1]]

    @contextmanager
    def changed(self, model: str, change: Change) -> Iterator[list[Tensor]]:
        """The model with its attention by hand, that of the first layer changed; the weights are kept."""
        case, kept = CASES[model], list[Tensor]()

        def hook(part: nn.Module, args: Any, kwargs: Any, out: Any, how: Change) -> Any:
            source = args[0] if args else kwargs["hidden_states"]
            weights, value = case.hand(part, source, how)
            kept.append(weights)
            return (value, *out[1:])

        handles = [
            self.modules[model]
            .get_submodule(layer)
            .register_forward_hook(
                lambda part, args, kwargs, out, how=how: hook(part, args, kwargs, out, how), with_kwargs=True
            )
            for layer, how in zip(case.layers, (change, unchanged), strict=True)
        ]
        yield kept
        for handle in handles:
            handle.remove()


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    modules: dict[str, Any] = {name: saved(name, folder / name).requires_grad_() for name in ("gpt2", "bert")}
    modules |= {"vit": vit()}
    specs = [ModelSpec(name, f"transformers:{folder / name}", device="cpu") for name in ("gpt2", "bert")]
    for name, source, spec in (("vit", "tests.nets:vit", InputSpec("x", (3, 32, 32))),):
        save_model(modules[name].eval(), str(folder / f"{name}.safetensors"))
        weights = str(folder / f"{name}.safetensors")
        specs.append(ModelSpec(name, f"python:{source}", device="cpu", weights=weights, inputs=(spec,)))
    with serve(configured(*specs)) as live:
        yield Server(live, modules)


def check(found: Array, expected: Tensor) -> None:
    """Equal where a text has positions, 0 at those of longer ones."""
    wanted = expected.detach().numpy()
    inside = tuple(map(slice, wanted.shape))
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(found[inside] / scale, wanted / scale, rtol=1e-3, atol=1e-4)
    outside = found.copy()
    outside[inside] = 0
    assert not outside.any()


@pytest.mark.parametrize(
    ("model", "what"), [*(("gpt2", what) for what in CHANGES), *((model, "a key") for model in CASES)]
)
def test_changes(server: Server, model: str, what: str) -> None:
    """The model goes on with the changed weights, each row as if it were alone; a capture there shows them."""
    (how, change), case = CHANGES[what], CASES[model]
    asked = {"interventions": [{"layer": f"{case.layers[0]}:attention", **how}]}
    layers = [case.output, f"{case.layers[0]}:attention", {"layer": f"{case.layers[1]}:attention", "heads": [-1]}]
    reply = server.post(model, layers, **asked)
    output, first, second = arrays_of(reply).values()
    plain = server.of(model, case.output)
    assert np.abs(output - plain).max() > 1e-4
    assert reply.json()["interventions"] == [[f"{case.layers[0]}#0:attention"]]
    receipts = reply.json()["receipts"]
    assert receipts[f"{case.layers[0]}:attention"]["how"] == "unfused"
    for row in range(4):
        with server.changed(model, change) as kept:
            expected = server.run(model, row)[0]
        check(output[row], expected)
        check(server.of(model, case.output, [row], **asked)[0], expected)
        check(first[row], kept[0][0])
        check(second[row], kept[1][0][-1:])


@pytest.mark.parametrize("model", CASES)
def test_gradients(server: Server, model: str) -> None:
    """Gradients of attention, changed and not, are those of the changed model."""
    (how, change), case = CHANGES["scale"], CASES[model]
    asked = {
        "interventions": [{"layer": case.layers[0], "site": "attention", **how}],
        "objective": {"kind": "sum"},
    }
    layers = [f"{layer}:attention_grad" for layer in case.layers]
    found = list(arrays_of(server.post(model, layers, **asked)).values())
    for row in range(4):
        with server.changed(model, change) as kept:
            score = server.run(model, row).sum()
        for values, gradient in zip(found, torch.autograd.grad(score, kept), strict=True):
            assert gradient.abs().max() > 1e-6
            check(values[row], gradient[0])


PARTS: dict[str, tuple[Json, tuple[Any, Any, Any]]] = {
    "heads": ({"heads": [0, -1]}, ([0, 3], slice(None), slice(None))),
    "the last query": ({"heads": [2], "queries": [-1]}, ([2], [-1], slice(None))),
    "keys": ({"queries": [-1, 1], "keys": [0, -2]}, (slice(None), [-1, 1], [0, -2])),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_parts(server: Server, model: str, name: str) -> None:
    """Of each text its own heads, queries and keys, alone and beside longer ones; of gradients too."""
    asked, (heads, queries, keys) = PARTS[name]
    layer = {"layer": CASES[model].layers[1], "site": "attention", **asked}
    grad = {**layer, "site": "attention_grad"}
    beside, grads = server.of(model, layer), server.of(model, grad, objective={"kind": "sum"})
    for row in range(4):
        with server.changed(model, unchanged) as kept:
            (gradient,) = torch.autograd.grad(server.run(model, row).sum(), kept[1])
        weights, slopes = (each[0, heads][:, queries][:, :, keys] for each in (kept[1], gradient))
        assert weights.std() > 1e-3
        alone = server.of(model, layer, [row])[0]
        assert alone.shape == weights.shape
        check(alone, weights)
        check(beside[row], weights)
        check(grads[row], slopes)


def test_what_a_reply_says_of_parts(server: Server) -> None:
    """The receipt has the indices, the fingerprint depends on them, and only what is asked for counts as bytes."""
    layer = {"layer": CASES["bert"].layers[1], "site": "attention"}
    prints = set()
    for asked in ({}, {"heads": [0]}, {"heads": [0, -1]}, {"queries": [0]}, {"keys": [0]}):
        reply = server.post("bert", [layer | asked], [0]).json()
        (receipt,) = reply["receipts"].values()
        assert {name: receipt[name] for name in ("heads", "queries", "keys") if name in receipt} == asked
        prints.add(reply["fingerprint"])
    assert len(prints) == 5
    body = {"model": "bert", "inputs": CASES["bert"].inputs[:1]}
    body["layers"] = [{**layer, "heads": [1], "queries": [0], "dtype": "float16"}]
    (promised,) = server.live.client.post("/extract?dry_run=true", json=body).json()["features"].values()
    assert (promised["shape"], promised["bytes"]) == ([1, 1, 1, 5], 10)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"heads": [4]}, "'heads' of 'encoder.layer.1.attention.self' must be between -4 and 3"),
        ({"tokens": [0]}, "has no axis for 'tokens'"),
        ({"heads": [0], "pool": "mean"}, "has no channels"),
    ],
)
def test_refused_parts(server: Server, asked: Json, says: str) -> None:
    """What the shortest text does not have, or what is no part of attention, is refused before any forward."""
    layer = {"layer": CASES["bert"].layers[1], "site": "attention", **asked}
    assert says in problem(server.post("bert", [layer]), 422)["detail"]


def test_beside_other_requests(server: Server) -> None:
    """Whoever asks at the same time for outputs, attention or another head's ablation gets what it gets alone."""
    case = CASES["bert"]
    heads = [[{"layer": f"{case.layers[0]}:attention", "op": "zero", "heads": [head]}] for head in range(4)]
    asked: list[tuple[Any, Json]] = [(case.output, {}), (f"{case.layers[0]}:attention", {})]
    asked += [(case.output, {"interventions": each}) for each in heads]
    alone = [server.of("bert", layer, **fields) for layer, fields in asked]
    assert len({each.tobytes() for each in alone}) == len(asked)
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda each: server.of("bert", each[0], **each[1]), asked * 8))
    for place, value in enumerate(found):
        np.testing.assert_allclose(value, alone[place % len(asked)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": [4]}, "'heads' of 'encoder.layer.0.attention.self'"),
        ({"queries": [3]}, "'queries' of 'encoder.layer.0.attention.self'"),
        ({"tokens": [0]}, "has no axis for 'tokens'"),
        ({"layer": "encoder.layer.0.output", "heads": [0]}, "computes no attention weights of its own"),
        ({"site": "attention_grad", "heads": [0]}, "is not possible"),
    ],
)
def test_refused(server: Server, change: Json, says: str) -> None:
    """What the shortest text's attention does not have is refused before any forward."""
    entry = {"layer": "encoder.layer.0.attention.self", "site": "attention", "op": "zero", **change}
    assert says in problem(server.post("bert", ["encoder.layer.1"], interventions=[entry]), 422)["detail"]
