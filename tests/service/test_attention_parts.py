"""Attention of chosen heads, queries and keys over HTTP, against what the library itself returns for each text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, problem
from tests.transformers_nets import VOCABULARY, saved

TEXTS = [
    torch.randint(4, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 3, 8, 13)  # in buckets of 8, 8, 8 and 16 tokens
]
LAYERS = {"bert": "encoder.layer.1.attention.self", "gpt2": "transformer.h.1.attn"}
OUTPUTS = {"bert": "last_hidden_state", "gpt2": "logits"}
PARTS: dict[str, tuple[Json, tuple[Any, Any, Any]]] = {
    "heads": ({"heads": [0, -1]}, ([0, 3], slice(None), slice(None))),
    "the last query": ({"heads": [2], "queries": [-1]}, ([2], [-1], slice(None))),
    "keys": ({"queries": [-1, 1], "keys": [0, -2]}, (slice(None), [-1, 1], [0, -2])),
}


@dataclass(frozen=True)
class Server:
    """A server of text models, and the same models offline."""

    live: Live
    modules: dict[str, Any]

    def post(self, model: str, texts: list[list[int]], layer: Json, **fields: Any) -> Any:
        layer = {"layer": LAYERS[model], "site": "attention", **layer}
        body = {"model": model, "inputs": [{"tokens": each} for each in texts], "layers": [layer], **fields}
        return self.live.client.post("/extract", json={"encoding": "base64", **body})

    def of(self, model: str, texts: list[list[int]], layer: Json, **fields: Any) -> Array:
        """The only result of a good request."""
        (found,) = arrays_of(self.post(model, texts, layer, **fields)).values()
        return found

    def offline(self, model: str, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """One text alone: the weights that the library returns (heads, queries, keys), their gradient for the sum."""
        out = self.modules[model](input_ids=torch.tensor([tokens]), output_attentions=True)
        weights = out.attentions[1]
        (gradient,) = torch.autograd.grad(out[OUTPUTS[model]].sum(), weights)
        return weights[0].detach(), gradient[0]


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    modules = {
        name: type(saved(name, folder / name)).from_pretrained(folder / name, attn_implementation="eager").eval()
        for name in LAYERS
    }
    specs = (ModelSpec(name, f"transformers:{folder / name}", device="cpu") for name in LAYERS)
    with serve(configured(*specs)) as live:
        yield Server(live, modules)


def take(weights: Tensor, part: tuple[Any, Any, Any]) -> Array:
    """Some heads, queries and keys."""
    heads, queries, keys = part
    return weights[heads][:, queries][:, :, keys].numpy()


def check(found: Array, expected: Array) -> None:
    """Equal where a text has positions, 0 at those of longer ones."""
    inside = tuple(map(slice, expected.shape))
    np.testing.assert_allclose(found[inside], expected, rtol=1e-3, atol=1e-6)
    outside = found.copy()
    outside[inside] = 0
    assert not outside.any()


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("model", LAYERS)
def test_parts(server: Server, model: str, name: str) -> None:
    """Of each text its own heads, queries and keys, alone and beside longer ones; of gradients too."""
    asked, part = PARTS[name]
    grad = asked | {"site": "attention_grad"}
    beside = server.of(model, TEXTS, asked)
    grads = server.of(model, TEXTS, grad, objective={"kind": "sum"})
    for row, tokens in enumerate(TEXTS):
        weights, gradient = server.offline(model, tokens)
        assert weights.std() > 1e-3
        alone = server.of(model, [tokens], asked)[0]
        assert alone.shape == take(weights, part).shape
        check(alone, take(weights, part))
        check(beside[row], take(weights, part))
        scale = float(gradient.abs().max())
        check(grads[row] / scale, take(gradient, part) / scale)


def test_what_a_reply_says(server: Server) -> None:
    """The receipt has the indices, the fingerprint depends on them, and only what is asked for counts as bytes."""
    whole = server.post("bert", TEXTS[:1], {}).json()
    (receipt,) = whole["receipts"].values()
    assert receipt["how"] in ("observed", "recomputed")
    assert not {"heads", "queries", "keys"} & set(receipt)
    prints = {whole["fingerprint"]}
    for asked in ({"heads": [0]}, {"heads": [0, -1]}, {"queries": [0]}, {"keys": [0]}):
        reply = server.post("bert", TEXTS[:1], asked).json()
        (receipt,) = reply["receipts"].values()
        assert {name: receipt.get(name) for name in asked} == asked
        assert receipt["layout"] == "NAQK"
        prints.add(reply["fingerprint"])
    assert len(prints) == 5
    body = {"model": "bert", "inputs": [{"tokens": TEXTS[0]}]}
    layer = {"layer": LAYERS["bert"], "site": "attention", "heads": [1], "queries": [0], "dtype": "float16"}
    (promised,) = (
        server.live.client.post("/extract?dry_run=true", json=body | {"layers": [layer]}).json()["features"].values()
    )
    assert (promised["shape"], promised["bytes"]) == ([1, 1, 1, 5], 10)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"heads": [4]}, "'heads' of 'encoder.layer.1.attention.self' must be between -4 and 3"),
        ({"tokens": [0]}, "has no axis for 'tokens'"),
        ({"heads": [0], "pool": "mean"}, "has no channels"),
        ({"stats": ["mean"], "by": "channel"}, "has no channels"),
    ],
)
def test_refused(server: Server, asked: Json, says: str) -> None:
    """What the shortest text does not have, twice, or what is no part of attention, before any forward."""
    assert says in problem(server.post("bert", TEXTS, asked), 422)["detail"]
