"""Heads wherever channels hold them side by side, and paths from one head to another, against plain hooks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.load_server import ROOT
from tests.service.support import Array, Json, arrays_of, configured, problem
from tests.transformers_nets import VOCABULARY, WORDS, saved, tokenizer

CLEAN = torch.randint(4, VOCABULARY, (7,), generator=torch.Generator().manual_seed(1)).tolist()
CORRUPT = [*reversed(CLEAN)]
WIDTH = 8  # channels of a head
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Served:
    """A server of two language models and a classifier of texts, and these offline."""

    live: Live
    modules: dict[str, Any]
    pairs: Any  # the classifier's tokenizer

    def post(self, model: str, inputs: list[Json], path: str = "/extract", **fields: Any) -> Any:
        body = {"model": model, "encoding": "base64", "inputs": inputs, **fields}
        return self.live.client.post(path, json=body)

    def extract(self, model: str, inputs: list[Json], layers: Any, **fields: Any) -> Array:
        (found,) = arrays_of(self.post(model, inputs, layers=[layers], **fields)).values()
        return found


@pytest.fixture(scope="module")
def served(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    names = ("gpt2", "llama", "classifier")
    modules = {name: type(saved(name, folder / name)).from_pretrained(folder / name).eval() for name in names}
    tokenizer(folder / "gpt2", specials=False)
    pairs = tokenizer(folder / "classifier")
    specs = [ModelSpec(name, f"transformers:{folder / name}", device="cpu") for name in modules]
    with serve(configured(*specs)) as live:
        yield Served(live, modules, pairs)


@dataclass(frozen=True)
class Place:
    """Where heads stand side by side: by a selector, and for a plain hook a module, and of its output which part."""

    model: str
    selector: str
    module: str
    heads: int
    is_input: bool = False
    start: int = 0  # the first channel

    def hook(self, module: Any, change: Change) -> Any:
        """A hook that changes the channels of the heads, (1, tokens, heads, channels of one)."""
        stop = self.start + self.heads * WIDTH

        def edit(value: Tensor) -> Tensor:
            value = value.clone()
            part = value[..., self.start : stop]
            value[..., self.start : stop] = change(part.unflatten(-1, (self.heads, WIDTH))).flatten(-2)
            return value

        part = module.get_submodule(self.module)
        if self.is_input:
            return part.register_forward_pre_hook(lambda _, args: (edit(args[0]), *args[1:]))
        return part.register_forward_hook(lambda _, args, output: edit(output))


ATTENTION = "transformer.h.1.attn"
SELF = "model.layers.1.self_attn"
PLACES = {
    "beside each other": Place("gpt2", f"{ATTENTION}.c_proj:input", f"{ATTENTION}.c_proj", 4, is_input=True),
    "of the function": Place(
        "gpt2", f"{ATTENTION}/scaled_dot_product_attention#0", f"{ATTENTION}.c_proj", 4, is_input=True
    ),
    "one of three parts": Place("gpt2", f"{ATTENTION}/split#0[1]", f"{ATTENTION}.c_attn", 4, start=32),
    "queries": Place("llama", f"{SELF}.q_proj", f"{SELF}.q_proj", 4),
    "grouped keys": Place("llama", f"{SELF}.k_proj", f"{SELF}.k_proj", 2),
    "grouped values": Place("llama", f"{SELF}.v_proj", f"{SELF}.v_proj", 2),
    "a projection's input": Place("llama", f"{SELF}.o_proj:input", f"{SELF}.o_proj", 4, is_input=True),
}


def run(module: Any, tokens: list[int], *hooks: tuple[Place, Change]) -> Array:
    """The last token's scores of a run with some changes."""
    with torch.no_grad(), ExitStack() as stack:
        for place, change in hooks:
            stack.enter_context(place.hook(module, change))
        found: Array = module(input_ids=torch.tensor([tokens])).logits[0, -1].numpy()
    return found


def take(module: Any, tokens: list[int], place: Place, *hooks: tuple[Place, Change]) -> Tensor:
    """The heads at a place, (1, tokens, heads, channels of one)."""
    kept: list[Tensor] = []

    def keep(value: Tensor) -> Tensor:
        kept.append(value.clone())
        return value

    run(module, tokens, *hooks, (place, keep))
    return kept[0]


def put(source: Tensor, head: int | None = None) -> Change:
    """Replaces a head, or all of them, by another run's."""

    def change(value: Tensor) -> Tensor:
        value = value.clone()
        index = (..., slice(None) if head is None else head, slice(None))
        value[index] = source[index]
        return value

    return change


@pytest.mark.parametrize("name", PLACES)
def test_heads(served: Served, name: str) -> None:
    """Single heads captured, replaced by another run's, and one after the other in a sweep; and what is listed."""
    place = PLACES[name]
    module, last = served.modules[place.model], place.heads - 1
    clean = take(module, CLEAN, place)
    found = served.extract(place.model, [{"tokens": CLEAN}], {"layer": place.selector, "heads": [-1]})
    of_function = "/scaled" in place.selector  # (1, heads, tokens, channels)
    expected = clean[:, :, last:].transpose(1, 2) if of_function else clean[:, :, last:]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    edit = {"layer": place.selector, "op": "replace", "heads": [0], "from": {"input": 0}}
    scores = {"layer": "lm_head", "tokens": [-1]}
    inputs: list[Json] = [{"tokens": CLEAN}, {"tokens": CORRUPT, "interventions": [edit]}]
    patched = served.extract(place.model, inputs, scores)[1, 0]
    np.testing.assert_allclose(patched, run(module, CORRUPT, (place, put(clean, 0))), atol=1e-5)
    swept = {"layers": [{"layer": place.selector, "as": "h"}], "op": "replace", "from": {"input": 0}, "each": "head"}
    metric = {"kind": "logit", "class": 5, "position": -1}
    inputs = [{"tokens": CLEAN}, {"tokens": CORRUPT}]
    effects = arrays_of(served.post(place.model, inputs, "/sweep", **swept, objective=metric))["h"]
    by_hand = [run(module, CORRUPT, (place, put(clean, head)))[5] for head in range(place.heads)]
    np.testing.assert_allclose(effects[1], by_hand, atol=1e-5)


LAYERS = 2
SENDER, RECEIVER = 1, 2  # heads of the first and of the second layer


def of_layer(name: str, layer: int) -> Place:
    """The place of ``PLACES`` in another layer."""
    place = PLACES[name]
    selector, module = (each.replace(".1.", f".{layer}.") for each in (place.selector, place.module))
    return Place(place.model, selector, module, place.heads, place.is_input, place.start)


def patch_path(
    module: Any, clean: list[int], corrupt: list[int], heads: list[Place], receiver: tuple[Place, int]
) -> Array:
    """The last token's scores of a run in which one head reads another's output of a corrupt run, in two runs."""
    outputs = [(place, put(take(module, clean, place))) for place in heads]
    sender = heads[0], put(take(module, corrupt, heads[0]), SENDER)
    place, head = receiver
    return run(module, clean, (place, put(take(module, clean, place, *outputs, sender), head)))


@pytest.mark.parametrize(
    ("model", "outputs", "receiver", "head"),
    [
        ("gpt2", "beside each other", "one of three parts", RECEIVER),
        ("llama", "a projection's input", "queries", RECEIVER),
        ("llama", "a projection's input", "grouped keys", RECEIVER // 2),
    ],
)
def test_path(served: Served, model: str, outputs: str, receiver: str, head: int) -> None:
    """The path from a head's output to what another head reads, in one request: no other head sees the change."""
    module = served.modules[model]
    heads = [of_layer(outputs, layer) for layer in range(LAYERS)]
    at = PLACES[receiver]
    expected = patch_path(module, CLEAN, CORRUPT, heads, (at, head))
    assert np.abs(expected - run(module, CLEAN)).max() > 1e-3
    every = heads[1].selector.replace(".1.", ".*.")
    freeze = {"layer": every, "op": "replace", "from": {"input": 0}}
    send = {"layer": heads[0].selector, "heads": [SENDER], "op": "replace", "from": {"input": 1}}
    receive = {"layer": at.selector, "heads": [head], "op": "replace", "from": {"input": 2}}
    inputs: list[Json] = [
        {"tokens": CLEAN},
        {"tokens": CORRUPT},
        {"input": 0, "interventions": [freeze, send]},
        {"input": 0, "interventions": [receive]},
    ]
    found = served.extract(model, inputs, {"layer": "lm_head", "tokens": [-1]})
    np.testing.assert_allclose(found[3, 0], expected, atol=1e-5)


def test_path_of_the_page(served: Served) -> None:
    """The request of the how-to page patches the path that it names."""
    page = (ROOT / "docs" / "how-to" / "interventions.md").read_text()
    body = json.loads(page.split("## Patch a path\n")[1].split("```json\n")[1].split("```")[0])
    texts = [[WORDS.index(word) for word in body["inputs"][row]["text"].split()] for row in range(2)]
    heads = [of_layer("beside each other", layer) for layer in range(LAYERS)]
    queries = replace(PLACES["one of three parts"], start=0)
    expected = patch_path(served.modules["gpt2"], *texts, heads, (queries, RECEIVER))
    found = arrays_of(served.live.client.post("/extract", json={**body, "encoding": "base64"}))[".[logits]"]
    np.testing.assert_allclose(found[3, 0], expected, atol=1e-5)
    assert np.abs(found[3] - found[0]).max() > 1e-5


def test_listed_heads(served: Served) -> None:
    """Layers say how many heads each place has; where nothing shows them they are refused."""
    layers = served.live.client.get("/models/llama/layers").json()["layers"]
    listed = {
        f"{layer['name']}:{side}": each[0]["heads"]
        for layer in layers
        for side, each in (("input", layer["inputs"]), ("output", layer["outputs"]))
        if each and "heads" in each[0]
    }
    own = {"q_proj:output": 4, "k_proj:output": 2, "v_proj:output": 2, "o_proj:input": 4}
    assert listed == {
        f"model.layers.{layer}.self_attn.{name}": count for layer in range(2) for name, count in own.items()
    }
    assert "32 NTC, 4 heads" in served.live.client.get("/models/llama/layers?format=text").text
    entry = {"layer": f"{ATTENTION}.c_attn", "heads": [0]}
    fault = problem(served.post("gpt2", [{"tokens": CLEAN}], layers=[entry]), 422)["errors"][0]
    assert "no axis for 'heads'" in fault["detail"]


def test_statistics_of_heads(served: Served) -> None:
    """Statistics of each head, a pool of one, and a verified answer."""
    place, tokens = PLACES["grouped keys"], [{"tokens": CLEAN}]
    keys = take(served.modules["llama"], CLEAN, place)
    found = served.extract("llama", tokens, {"layer": place.selector, "stats": ["l2"], "by": "head"})
    np.testing.assert_allclose(found[0, :, 0], keys[0].transpose(0, 1).flatten(1).norm(dim=1), rtol=1e-5)
    pooled = served.extract("llama", tokens, {"layer": place.selector, "heads": [1], "pool": "mean"}, verify=True)
    np.testing.assert_allclose(pooled[0], keys[0, :, 1].mean(0), atol=1e-5)


def test_edits_of_pairs(served: Served) -> None:
    """Each of two pairs has edits of its own, whose tokens count through both of its texts."""
    layer, rows = "bert.encoder.layer.0.output", [("a cat sat", "the dog saw a mat", 5), ("a dog", "the red mat", -1)]
    inputs: list[Json] = []
    for text, other, token in rows:
        edit = {"layer": layer, "op": "scale", "by": 3, "tokens": [token]}
        inputs.append({"text": text, "text_pair": other, "interventions": [edit]})
    found = served.extract("classifier", inputs, ".[logits]")
    for row, (text, other, token) in zip(found, rows, strict=True):

        def scale(part: Any, args: Any, output: Tensor, token: int = token) -> Tensor:
            output = output.clone()
            output[:, token] *= 3
            return output

        module = served.modules["classifier"]
        with torch.no_grad(), module.get_submodule(layer).register_forward_hook(scale):
            expected = module(**served.pairs(text, other, return_tensors="pt")).logits[0]
        np.testing.assert_allclose(row, expected, atol=1e-5)
