"""Padding, and what a mask leaves out, counts nowhere: a text is what the library gives for it alone and unpadded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from layertap.models.spec import ModelSpec
from tests.oracle import record
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, problem, tensor, tensors
from tests.transformers_nets import VOCABULARY, saved

MODELS = ("gpt2", "bert", "answering")
LENGTHS = (5, 3, 8, 13)  # in buckets of 8, 8, 8 and 16 tokens
TEXTS = [
    torch.randint(4, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in LENGTHS
]
FRONT = 3  # tokens of padding before a text
MAY_BEGIN_WITH_PADDING = ("gpt2", "answering")
Change = Callable[[Tensor], Tensor]
Text = list[int] | Json  # tokens, or an entry of ``inputs``


@dataclass(frozen=True)
class Server:
    """A server of text models, and the same models offline."""

    live: Live
    modules: dict[str, Any]

    def post(self, model: str, texts: Sequence[Text], layers: list[Any], **fields: Any) -> Any:
        inputs = [each if isinstance(each, dict) else {"tokens": each} for each in texts]
        body = {"model": model, "inputs": inputs, "layers": layers, **fields}
        return self.live.client.post("/extract", json={"encoding": "base64", **body})

    def of(self, model: str, texts: Sequence[Text], *layers: Any, **fields: Any) -> Array:
        """The only result of a good request."""
        (found,) = arrays_of(self.post(model, texts, list(layers), **fields)).values()
        return found


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    # Read again: some buffers are not saved.
    modules = {name: type(saved(name, folder / name)).from_pretrained(folder / name).eval() for name in MODELS}
    specs = (ModelSpec(name, f"transformers:{folder / name}", device="cpu", load="lazy") for name in MODELS)
    with serve(configured(*specs), deadline_s=120, check_shared=200) as live:
        yield Server(live, modules)


@dataclass(frozen=True)
class Offline:
    """One text through a model alone and unpadded: what left a layer, changed if so asked, and the model's output."""

    value: Tensor
    output: Any


def offline(module: Any, tokens: list[int], layer: str, change: Change = lambda value: value) -> Offline:
    """A hook with an immediate copy, and with a graph from there on."""
    kept: list[Tensor] = []

    def hook(part: Any, args: Any, output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        kept.append(change(value.detach().clone()).detach().requires_grad_())
        handed = kept[0].clone()
        return (handed, *output[1:]) if isinstance(output, tuple) else handed

    ids = torch.tensor([tokens])
    with module.get_submodule(layer).register_forward_hook(hook):
        output = module(input_ids=ids, attention_mask=torch.ones_like(ids))
    return Offline(kept[0], output)


def in_front(tokens: list[int]) -> Json:
    """A text behind padding."""
    return tensors(input_ids=[0] * FRONT + tokens, attention_mask=[0] * FRONT + [1] * len(tokens))


def behind(found: Array) -> Array:
    """The only text's part of a result, where padding stands before it: 0 up to there."""
    assert not found[0, :FRONT].any()
    return found[0, FRONT:]


def own(found: Array, row: int, length: int) -> Array:
    """A text's part of a result for several: positions beyond it are there for longer ones, and 0."""
    assert not found[row, length:].any()
    return found[row, :length]


def close(found: Array, wanted: Tensor) -> None:
    expected = wanted.detach().numpy()
    assert found.shape == expected.shape
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * scale)


BLOCK = {
    "gpt2": "transformer.h.0",
    "bert": "encoder.layer.0",
    "answering": "bert.encoder.layer.0",
}


def scores(output: Any) -> Tensor:
    """Of a model's output what objectives look at."""
    for name in ("logits", "start_logits", "last_hidden_state"):
        if name in output:
            return output[name]
    raise AssertionError(list(output))


OBJECTIVES: dict[str, tuple[str, Json, Callable[[Tensor], Tensor]]] = {
    "mean": ("gpt2", {"kind": "mean"}, lambda out: out.mean()),
    "a token's class": ("gpt2", {"kind": "logit", "class": 7, "position": -1}, lambda out: out[0, -1, 7]),
    "entropy of the last but one": (
        "gpt2",
        {"kind": "cross_entropy", "class": 3, "position": -2},
        lambda out: functional.cross_entropy(out[0, -2:-1], torch.tensor([3])),
    ),
    "a position": ("answering", {"kind": "logit", "class": 2}, lambda out: out[0, 2]),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives(server: Server, name: str) -> None:
    """The gradient of each text is that of the text alone and unpadded, in any company."""
    model, objective, score = OBJECTIVES[name]
    layer = BLOCK[model]
    wanted = []
    for tokens in TEXTS:
        run = offline(server.modules[model], tokens, layer)
        wanted.append(torch.autograd.grad(score(scores(run.output)), run.value)[0][0])
    at = f"{layer}:grad_output"
    beside = server.of(model, TEXTS, at, objective=objective)
    assert beside.shape[:2] == (len(TEXTS), max(LENGTHS))
    for row, (tokens, gradient) in enumerate(zip(TEXTS, wanted, strict=True)):
        close(server.of(model, [tokens], at, objective=objective)[0], gradient)
        close(own(beside, row, len(tokens)), gradient)
        if model in MAY_BEGIN_WITH_PADDING:
            close(behind(server.of(model, [in_front(tokens)], at, objective=objective)), gradient)


@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_weights(server: Server, model: str) -> None:
    """Each text's gradients of weights are those of the text alone; of those that nothing depends on there are none."""
    module, objective = server.modules[model], {"kind": "norm"}
    reply = server.post(model, TEXTS, ["*:grad_weight"], objective=objective)
    left_out = " ".join(reply.json().get("warnings", ()))
    assert ("pooler.dense[weight]' has no gradient" in left_out) == (model == "bert")
    found, receipts = arrays_of(reply), reply.json()["receipts"]
    named = {key: (each["layer"], each["path"][1:-1]) for key, each in receipts.items()}
    parameters = {key: module.get_submodule(layer).get_parameter(name) for key, (layer, name) in named.items()}
    assert len(parameters) >= len([*module.named_parameters()]) - 2
    for row, tokens in enumerate(TEXTS):
        ids = torch.tensor([tokens])
        output = scores(module(input_ids=ids, attention_mask=torch.ones_like(ids)))
        gradients = torch.autograd.grad(output.norm(), [*parameters.values()])
        largest = max(float(each.abs().max()) for each in gradients)
        for key, gradient in zip(parameters, gradients, strict=True):
            np.testing.assert_allclose(found[key][row], gradient.numpy(), rtol=1e-3, atol=1e-5 * largest)


CAPTURES: dict[str, tuple[str, Json, Change]] = {
    "flat": ("bert", {"pool": "flatten"}, lambda value: value.flatten()),
    "tokens, pooled": ("gpt2", {"tokens": [2, 0], "pool": "mean"}, lambda value: value[[2, 0]].mean(0)),
    "mean": ("gpt2", {"pool": "mean"}, lambda value: value.mean(0)),
    "gem": ("gpt2", {"pool": "gem"}, lambda value: (value.clamp(min=1e-6) ** 3).mean(0) ** (1 / 3)),
    "statistics": (
        "gpt2",
        {"stats": ["mean", "std", "min", "max", "l2"]},
        lambda value: torch.stack([value.mean(), value.std(correction=0), value.min(), value.max(), value.norm()]),
    ),
}


@pytest.mark.parametrize("name", CAPTURES)
def test_captures(server: Server, name: str) -> None:
    """What is captured of a text, pooled or not, has its own tokens and no others, in any company."""
    model, how, made = CAPTURES[name]
    layer: Json = {"layer": BLOCK[model], **how}
    beside = server.of(model, TEXTS, layer)
    for row, tokens in enumerate(TEXTS):
        wanted = made(offline(server.modules[model], tokens, BLOCK[model]).value[0])
        close(server.of(model, [tokens], layer)[0], wanted)
        if how.get("pool") == "flatten":
            assert not beside[row, wanted.numel() :].any()
            close(beside[row, : wanted.numel()], wanted)
        elif beside.shape[1] == max(LENGTHS):
            close(own(beside, row, len(tokens)), wanted)
        else:
            close(beside[row], wanted)
            if model in MAY_BEGIN_WITH_PADDING:
                close(server.of(model, [in_front(tokens)], layer)[0], wanted)


def drawn(seed: int) -> Change:
    """Noise by seed, in the shape of the text."""
    return lambda value: value + 0.5 * torch.randn(value.shape[1:], generator=torch.Generator().manual_seed(seed))


EDITS: dict[str, tuple[Json, Callable[[int], Change]]] = {
    "zero from the end": (
        {"op": "zero", "tokens": [-2, -1]},
        lambda row: lambda value: torch.cat([value[:, :-2], torch.zeros_like(value[:, -2:])], 1),
    ),
    "replace": ({"op": "replace", "value": 0.3}, lambda row: lambda value: torch.full_like(value, 0.3)),
    "noise": ({"op": "noise", "std": 0.5, "seed": 7}, lambda row: drawn(7 + row)),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_interventions(server: Server, model: str, name: str) -> None:
    """What is changed of a text is changed as if it were alone and unpadded; noise is the same in any company."""
    how, change = EDITS[name]
    output = {"bert": ".[last_hidden_state]", "gpt2": ".[logits]"}[model]
    asked = {"interventions": [{"layer": BLOCK[model], **how}]}
    beside = server.of(model, TEXTS, output, **asked)
    for row, tokens in enumerate(TEXTS):
        wanted = scores(offline(server.modules[model], tokens, BLOCK[model], change(row)).output)[0]
        close(own(beside, row, len(tokens)), wanted)
        wanted = scores(offline(server.modules[model], tokens, BLOCK[model], change(0)).output)[0]
        close(server.of(model, [tokens], output, **asked)[0], wanted)
        if model in MAY_BEGIN_WITH_PADDING:
            close(behind(server.of(model, [in_front(tokens)], output, **asked)), wanted)


def test_mask_with_gaps(server: Server) -> None:
    """Tokens are counted among those that a mask keeps, in a plan that is kept as well; the others are 0."""
    ids, mask = [4, 5, 6, 7, 8, 9, 4, 5], [1, 0, 1, 1, 0, 1, 0, 0]
    kept, layer = [place for place, real in enumerate(mask) if real], {"layer": BLOCK["bert"]}
    whole, text = (tensors(input_ids=ids, attention_mask=each) for each in ([1] * 8, mask))
    arguments = {"input_ids": torch.tensor([ids]), "attention_mask": torch.tensor([mask])}
    seen = record(server.modules["bert"], **arguments)[BLOCK["bert"], 0, (), "output"][0]
    found = server.of("bert", [text], layer)
    close(found[0, kept], seen[kept])
    assert not np.delete(found[0], kept, axis=0).any()
    close(server.of("bert", [text, whole], layer | {"pool": "mean"})[0], seen[kept].mean(0))
    close(server.of("bert", [text], layer | {"tokens": [2, 0]})[0], seen[[3, 0]])
    taken = layer | {"tokens": [4]}
    assert server.post("bert", [whole], [taken]).status_code == 200
    assert "between -4 and 3" in refused(server, "bert", [whole, text], [taken])
    edit = {**taken, "op": "zero"}
    assert "between -4 and 3" in refused(server, "bert", [text], [".[last_hidden_state]"], interventions=[edit])
    at, objective = f"{BLOCK['answering']}:grad_output", {"kind": "logit", "class": 4}
    assert "use 0 to 3" in refused(server, "answering", [text], [at], objective=objective)


def refused(server: Server, model: str, texts: Sequence[Text], layers: list[Any], **fields: Any) -> str:
    found = problem(server.post(model, texts, layers, **fields), 422)
    return f"{found['detail']} / {found['errors'][0].get('hint', '')}"


def test_positions(server: Server) -> None:
    """A position is one of each text's own tokens, never of padding; receipts have the classes that were highest."""
    at = f"{BLOCK['gpt2']}:grad_output"
    reply = server.post("gpt2", TEXTS, [at], objective={"kind": "logit", "position": -1})
    outputs = [offline(server.modules["gpt2"], tokens, BLOCK["gpt2"]).output for tokens in TEXTS]
    assert reply.json()["receipts"][at]["classes"] == [int(output.logits[0, -1].argmax()) for output in outputs]
    token = {"layer": BLOCK["gpt2"], "tokens": [5]}
    assert "between -5 and 4" in refused(server, "gpt2", TEXTS[:1], [token])
    assert "between -3 and 2" in refused(server, "gpt2", TEXTS, [token | {"tokens": [3]}])
    asked: Json = {"kind": "logit", "class": 1}
    assert '"position": -1' in refused(server, "gpt2", TEXTS, [at], objective=asked)
    for position, said in ((3, "between -3 and 2"), (-4, "between -3 and 2"), ([0, 0], "rows and columns")):
        assert said in refused(server, "gpt2", TEXTS, [at], objective={**asked, "position": position})


@pytest.mark.parametrize(("model", "op"), [("bert", "replace"), ("gpt2", "add")])
def test_whole_tensors(server: Server, model: str, op: str) -> None:
    """A tensor for a text has the text's own length, whatever the length of a batch is; another length is refused."""
    output = ".[logits]" if model == "gpt2" else ".[last_hidden_state]"
    for tokens in TEXTS:
        values = np.random.default_rng(len(tokens)).standard_normal((len(tokens), 32)).astype(np.float32)

        def change(value: Tensor, values: Array = values) -> Tensor:
            return torch.from_numpy(values)[None] + (value if op == "add" else 0)

        wanted = scores(offline(server.modules[model], tokens, BLOCK[model], change).output)
        edit = {"layer": BLOCK[model], "op": op, **tensor(values)}
        close(server.of(model, [tokens], output, interventions=[edit]), wanted)
        beside = server.of(model, [tokens, tokens[::-1]], output, interventions=[edit])
        close(beside[:1], wanted)
    told = refused(server, model, [TEXTS[1]], [output], interventions=[edit])
    assert "send [3, 32]" in told
    assert "these have 3 to 13 tokens" in refused(server, model, TEXTS, [output], interventions=[edit])


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[::-1], 4 * TEXTS], ids=["short first", "long first", "many"])
def test_same_for_all_rows(server: Server, texts: list[list[int]]) -> None:
    """A tensor that no row has of its own is that of the longest text, and tells nobody that rows cross."""
    found = server.of("bert", texts, "embeddings.position_embeddings")
    weight = server.modules["bert"].embeddings.position_embeddings.weight
    np.testing.assert_array_equal(found.reshape(-1, found.shape[-1]), weight[: max(LENGTHS)].detach().numpy())
    assert "crossing_rows" not in server.live.client.get("/models/bert").json()
