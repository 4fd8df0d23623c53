"""Parts of attention and interventions there over HTTP, against a BERT whose attention is written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from layertap.models.spec import ModelSpec
from tests.models.hooks.test_attention import Change, heads_of, softmax, unchanged
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, problem, tensor
from tests.transformers_nets import VOCABULARY, saved

TEXTS = [
    torch.randint(4, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 3, 8, 13)  # in buckets of 8, 8, 8 and 16 tokens
]
FIRST, SECOND = "encoder.layer.0.attention.self", "encoder.layer.1.attention.self"
OUTPUT = ".[last_hidden_state]"


def put(weights: Tensor) -> Tensor:
    """The weights with others for the first keys of one query of a head."""
    changed = weights.clone()
    changed[:, 0, 1, :2] = torch.tensor([0.9, 0.3])
    return changed


CHANGES: dict[str, tuple[Json, Change]] = {
    "zero": ({"op": "zero", "heads": [1]}, lambda w: w * (torch.arange(w.shape[1]) != 1)[:, None, None]),
    "scale": (
        {"op": "scale", "by": 0.5, "queries": [2, 0]},
        lambda w: w * torch.ones(w.shape[2]).index_fill(0, torch.tensor([0, 2]), 0.5)[:, None],
    ),
    "a key": ({"op": "zero", "keys": [0]}, lambda w: w * (torch.arange(w.shape[3]) != 0)),
    "replace": (
        {"op": "replace", "heads": [0], "queries": [1], "keys": [0, 1], **tensor(np.array([[[0.9, 0.3]]], np.float32))},
        put,
    ),
}


@dataclass(frozen=True)
class Server:
    """A server, and its model offline."""

    live: Live
    module: Any

    def post(self, layers: list[Any], rows: list[int] | None = None, **fields: Any) -> Any:
        inputs = [{"tokens": TEXTS[row]} for row in rows or range(4)]
        body = {"model": "bert", "inputs": inputs, "layers": layers, "encoding": "base64", **fields}
        return self.live.client.post("/extract", json=body)

    def of(self, layer: Any, rows: list[int] | None = None, **fields: Any) -> Array:
        (found,) = arrays_of(self.post([layer], rows, **fields)).values()
        return found

    def run(self, row: int) -> Tensor:
        """One text through the model alone and unpadded."""
        return self.module(input_ids=torch.tensor([TEXTS[row]])).last_hidden_state

    @contextmanager
    def changed(self, change: Change) -> Iterator[list[Tensor]]:
        """The model with its attention by hand, that of the first layer changed; the weights are kept."""
        kept = list[Tensor]()

        def hook(part: Any, args: Any, kwargs: Any, out: Any, how: Change) -> Any:
            x = args[0] if args else kwargs["hidden_states"]
            query, key, value = (heads_of(each(x), 4) for each in (part.query, part.key, part.value))
            kept.append(how(softmax(query @ key.transpose(2, 3) / math.sqrt(query.shape[-1]))))
            return ((kept[-1] @ value).transpose(1, 2).flatten(2), *out[1:])

        with ExitStack() as stack:
            for layer, how in ((FIRST, change), (SECOND, unchanged)):
                part: nn.Module = self.module.get_submodule(layer)
                stack.enter_context(
                    part.register_forward_hook(lambda *args, how=how: hook(*args, how), with_kwargs=True)
                )
            yield kept


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("bert")
    module = saved("bert", folder).requires_grad_()
    with serve(configured(ModelSpec("bert", f"transformers:{folder}", device="cpu"))) as live:
        yield Server(live, module)


def check(found: Array, expected: Tensor) -> None:
    """Equal where a text has positions, 0 at those of longer ones."""
    wanted = expected.detach().numpy()
    inside = tuple(map(slice, wanted.shape))
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(found[inside] / scale, wanted / scale, rtol=1e-3, atol=1e-4)
    outside = found.copy()
    outside[inside] = 0
    assert not outside.any()


@pytest.mark.parametrize("what", CHANGES)
def test_changes(server: Server, what: str) -> None:
    """The model goes on with the changed weights, each row as if it were alone; a capture there shows them."""
    how, change = CHANGES[what]
    asked = {"interventions": [{"layer": f"{FIRST}:attention", **how}]}
    layers = [OUTPUT, f"{FIRST}:attention", {"layer": f"{SECOND}:attention", "heads": [-1]}]
    reply = server.post(layers, **asked)
    output, first, second = arrays_of(reply).values()
    assert np.abs(output - server.of(OUTPUT)).max() > 1e-4
    assert reply.json()["interventions"] == [[f"{FIRST}#0:attention"]]
    assert reply.json()["receipts"][f"{FIRST}:attention"]["how"] == "unfused"
    for row in range(4):
        with server.changed(change) as kept:
            expected = server.run(row)[0]
        check(output[row], expected)
        check(first[row], kept[0][0])
        check(second[row], kept[1][0][-1:])
    check(server.of(OUTPUT, [3], **asked)[0], expected)


def test_gradients(server: Server) -> None:
    """Gradients of attention, changed and not, are those of the changed model."""
    how, change = CHANGES["scale"]
    asked = {"interventions": [{"layer": FIRST, "site": "attention", **how}], "objective": {"kind": "sum"}}
    layers = [f"{layer}:attention_grad" for layer in (FIRST, SECOND)]
    found = list(arrays_of(server.post(layers, **asked)).values())
    for row in range(4):
        with server.changed(change) as kept:
            score = server.run(row).sum()
        for values, gradient in zip(found, torch.autograd.grad(score, kept), strict=True):
            assert gradient.abs().max() > 1e-6
            check(values[row], gradient[0])


PARTS: dict[str, tuple[Json, tuple[Any, Any, Any]]] = {
    "the last query": ({"heads": [2], "queries": [-1]}, ([2], [-1], slice(None))),
    "keys": ({"queries": [-1, 1], "keys": [0, -2]}, (slice(None), [-1, 1], [0, -2])),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts(server: Server, name: str) -> None:
    """Of each text its own heads, queries and keys, alone and beside longer ones; of gradients too."""
    asked, (heads, queries, keys) = PARTS[name]
    layer = {"layer": SECOND, "site": "attention", **asked}
    beside = server.of(layer)
    grads = server.of({**layer, "site": "attention_grad"}, objective={"kind": "sum"})
    for row in range(4):
        with server.changed(unchanged) as kept:
            (gradient,) = torch.autograd.grad(server.run(row).sum(), kept[1])
        weights, slopes = (each[0, heads][:, queries][:, :, keys] for each in (kept[1], gradient))
        alone = server.of(layer, [row])[0]
        assert alone.shape == weights.shape
        check(alone, weights)
        check(beside[row], weights)
        check(grads[row], slopes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"queries": [3]}, "'queries' of 'encoder.layer.0.attention.self'"),
        ({"site": "attention_grad", "heads": [0]}, "is not possible"),
    ],
)
def test_refused(server: Server, change: Json, says: str) -> None:
    """What the shortest text's attention does not have is refused before any forward."""
    entry = {"layer": FIRST, "site": "attention", "op": "zero", **change}
    assert says in problem(server.post(["encoder.layer.1"], interventions=[entry]), 422)["detail"]


def test_entropy(server: Server) -> None:
    """Of each head, the mean entropy of queries over keys, however their weights add up."""
    weights = server.of(f"{SECOND}:attention", [2]).astype(np.float64)
    expected = -(weights * np.log(weights)).sum(-1).mean(-1)

    def ask(**entry: Any) -> Any:
        changes = entry.pop("interventions", [])
        layer = {"layer": SECOND, "site": "attention", "stats": ["entropy"], **entry}
        return server.post([layer], [2], interventions=changes)

    def entropy(**entry: Any) -> Array:
        (found,) = arrays_of(ask(**entry)).values()
        return found[..., 0]

    np.testing.assert_allclose(entropy(by="head"), expected, rtol=1e-5)
    np.testing.assert_allclose(entropy(), expected.mean(1), rtol=1e-5)
    some = Categorical(probs=torch.from_numpy(weights[..., [0, 3]])).entropy().mean(-1)
    np.testing.assert_allclose(entropy(keys=[0, 3], by="head"), some, rtol=1e-5)
    zero = {"layer": SECOND, "site": "attention", "op": "zero", "heads": [1]}
    assert np.isnan(entropy(interventions=[zero], by="head")[:, 1]).all()
    assert "no axis for 'by': channels" in problem(ask(by="channel"), 422)["detail"]
