"""Padding counts nowhere: whatever is asked of a text is what the library gives for it alone and unpadded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, npy, problem, raw, tensor
from tests.transformers_nets import VOCABULARY, saved

MODELS = ("gpt2", "bert", "classifier", "answering", "convolving", "mixing")
LENGTHS = (5, 3, 8, 13)  # in buckets of 8, 8, 8 and 16 tokens
TEXTS = [
    torch.randint(4, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in LENGTHS
]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Server:
    """A server of text models, and the same models offline."""

    live: Live
    modules: dict[str, Any]

    def post(self, model: str, texts: list[list[int]], layers: list[Any], **fields: Any) -> Any:
        body = {"model": model, "inputs": [{"tokens": each} for each in texts], "layers": layers, **fields}
        return self.live.client.post("/extract", json={"encoding": "base64", **body})

    def of(self, model: str, texts: list[list[int]], *layers: Any, **fields: Any) -> Array:
        """The only result of a good request."""
        (found,) = arrays_of(self.post(model, texts, list(layers), **fields)).values()
        return found


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    # Read again: some buffers are not saved.
    modules = {name: type(saved(name, folder / name)).from_pretrained(folder / name).eval() for name in MODELS}
    specs = (ModelSpec(name, f"transformers:{folder / name}", device="cpu") for name in MODELS)
    with serve(configured(*specs)) as live:
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

    handle = module.get_submodule(layer).register_forward_hook(hook)
    ids = torch.tensor([tokens])
    output = module(input_ids=ids, attention_mask=torch.ones_like(ids))
    handle.remove()
    return Offline(kept[0], output)


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
    "classifier": "bert.encoder.layer.0",
    "answering": "bert.encoder.layer.0",
    "convolving": "embeddings",
    "mixing": "layers.0",
}


def scores(output: Any) -> Tensor:
    """Of a model's output what objectives look at."""
    for name in ("logits", "start_logits", "last_hidden_state"):
        if name in output:
            found: Tensor = output[name]
            return found
    raise AssertionError(list(output))


OBJECTIVES: dict[str, tuple[str, Json, Callable[[Tensor], Tensor]]] = {
    "sum": ("gpt2", {"kind": "sum"}, lambda out: out.sum()),
    "mean": ("gpt2", {"kind": "mean"}, lambda out: out.mean()),
    "sum of bert": ("bert", {"kind": "sum"}, lambda out: out.sum()),
    "mean of folded tokens' model": ("mixing", {"kind": "mean"}, lambda out: out.mean()),
    "mean of convolved tokens": ("convolving", {"kind": "mean"}, lambda out: out.mean()),
    "a token's class": ("gpt2", {"kind": "logit", "class": 7, "position": -1}, lambda out: out[0, -1, 7]),
    "an early token's best": ("gpt2", {"kind": "probability", "position": 1}, lambda out: out[0, 1].softmax(0).max()),
    "entropy of the last but one": (
        "gpt2",
        {"kind": "cross_entropy", "class": 3, "position": -2},
        lambda out: functional.cross_entropy(out[0, -2:-1], torch.tensor([3])),
    ),
    "mean of the last token": ("bert", {"kind": "mean", "position": -1}, lambda out: out[0, -1].mean()),
    "classes": ("classifier", {"kind": "cross_entropy", "class": 1}, lambda out: -out.log_softmax(1)[0, 1]),
    "a position": ("answering", {"kind": "logit", "class": 2}, lambda out: out[0, 2]),
    "the best position": ("answering", {"kind": "logit", "class": "top"}, lambda out: out.max()),
    "its probability": ("answering", {"kind": "probability", "class": "top"}, lambda out: out.softmax(1).max()),
    "entropy of positions": (
        "answering",
        {"kind": "cross_entropy", "class": 1},
        lambda out: functional.cross_entropy(out, torch.tensor([1])),
    ),
    "divergence of positions": ("answering", {"kind": "kl_div", "class": 0}, lambda out: -out.log_softmax(1)[0, 0]),
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


CAPTURES: dict[str, tuple[str, Json, Change]] = {
    "as it is": ("gpt2", {}, lambda value: value),
    "flat": ("bert", {"pool": "flatten"}, lambda value: value.flatten()),
    "flat, of length 1": (
        "bert",
        {"pool": "flatten", "normalize": True},
        lambda value: functional.normalize(value.flatten(), dim=0),
    ),
    "channels": ("gpt2", {"channels": [3, 1]}, lambda value: value[:, [3, 1]]),
    "tokens": ("gpt2", {"tokens": [2, 0]}, lambda value: value[[2, 0]]),
    "tokens, pooled": ("gpt2", {"tokens": [2, 0], "pool": "mean"}, lambda value: value[[2, 0]].mean(0)),
    "mean": ("gpt2", {"pool": "mean"}, lambda value: value.mean(0)),
    "mean of all": ("bert", {"pool": "mean_all"}, lambda value: value.mean(0)),
    "max": ("convolving", {"pool": "max"}, lambda value: value.amax(0)),
    "gem": ("mixing", {"pool": "gem"}, lambda value: (value.clamp(min=1e-6) ** 3).mean(0) ** (1 / 3)),
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


def test_scale(server: Server) -> None:
    """The scale of int8 is that of the text's own values."""
    layer = {"layer": BLOCK["bert"], "dtype": "int8"}
    for tokens in TEXTS:
        entry = server.post("bert", [tokens], [layer]).json()["features"][BLOCK["bert"]]
        wanted = offline(server.modules["bert"], tokens, BLOCK["bert"]).value
        assert entry["shape"] == list(wanted.shape)
        np.testing.assert_allclose(entry["scale"], [float(wanted.detach().abs().max()) / 127], rtol=1e-4)


@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_attention(server: Server, model: str) -> None:
    """Attention and its gradient are of the text's own tokens; statistics of it too."""
    layer = {"bert": "encoder.layer.1.attention.self", "gpt2": "transformer.h.1.attn"}[model]
    objective = {"kind": "layer", "layer": {"bert": "encoder.layer.1", "gpt2": "transformer.h.1"}[model]}
    for stats in (None, ["mean", "max", "zeros"]):
        for site in ("attention", "attention_grad"):
            asked = {"layer": layer, "site": site, **({"stats": stats} if stats else {})}
            fields = {"objective": objective} if site == "attention_grad" else {}
            beside = server.of(model, TEXTS, asked, **fields)
            for row, tokens in enumerate(TEXTS):
                # A tensor of ids keeps its length, so that nothing is padded.
                body = {"model": model, "inputs": [tensor(np.array(tokens))], "layers": [asked], **fields}
                (alone,) = arrays_of(server.live.client.post("/extract", json=body)).values()
                found = beside[row]
                if stats is None:
                    length = len(tokens)
                    assert alone.shape == (1, 4, length, length)
                    assert not found[:, length:].any()
                    assert not found[:, :, length:].any()
                    found = found[:, :length, :length]
                close(found, torch.from_numpy(alone[0]))
                close(server.of(model, [tokens], asked, **fields)[0], torch.from_numpy(alone[0]))


def drawn(seed: int) -> Change:
    """Noise by seed, in the shape of the text."""
    return lambda value: value + 0.5 * torch.randn(value.shape[1:], generator=torch.Generator().manual_seed(seed))


VECTOR = np.random.default_rng(0).standard_normal(32).astype(np.float32)
EDITS: dict[str, tuple[Json, Callable[[int], Change]]] = {
    "zero": ({"op": "zero", "tokens": [1]}, lambda row: lambda value: value.index_fill(1, torch.tensor([1]), 0)),
    "zero from the end": (
        {"op": "zero", "tokens": [-2, -1]},
        lambda row: lambda value: torch.cat([value[:, :-2], torch.zeros_like(value[:, -2:])], 1),
    ),
    "channel from the end": (
        {"op": "zero", "channels": [-1]},
        lambda row: lambda value: value * (torch.arange(value.shape[2]) < value.shape[2] - 1),
    ),
    "scale": ({"op": "scale", "by": 2.0}, lambda row: lambda value: value * 2),
    "add": ({"op": "add", "value": 1.0}, lambda row: lambda value: value + 1),
    "clamp": ({"op": "clamp", "min": 0.1}, lambda row: lambda value: value.clamp(min=0.1)),
    "replace": ({"op": "replace", "value": 0.3}, lambda row: lambda value: torch.full_like(value, 0.3)),
    "noise": ({"op": "noise", "std": 0.5, "seed": 7}, lambda row: drawn(7 + row)),
    "steer": ({"op": "add", **tensor(VECTOR)}, lambda row: lambda value: value + torch.from_numpy(VECTOR)),
    "scale channels": (
        {"op": "scale", **tensor(VECTOR[None])},
        lambda row: lambda value: value * torch.from_numpy(VECTOR),
    ),
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


@pytest.mark.parametrize(
    "how", [{"op": "clamp", "min": 0.01}, {"op": "add", "value": 0.1}, {"op": "noise", "std": 1.0}]
)
@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_changed_gradients(server: Server, model: str, how: Json) -> None:
    """A gradient changed on its way is changed at the text's own tokens: nothing flows back from what pads it."""
    later = {"bert": "encoder.layer.1", "gpt2": "transformer.h.1"}[model]
    asked = {"objective": {"kind": "sum"}, "interventions": [{"layer": later, "site": "grad_output", **how}]}
    at = f"{BLOCK[model]}:grad_output"
    for tokens in TEXTS[:2]:
        body = {"model": model, "inputs": [tensor(np.array(tokens))], "layers": [at], **asked}
        (alone,) = arrays_of(server.live.client.post("/extract", json=body)).values()
        close(server.of(model, [tokens], at, **asked), torch.from_numpy(alone))
        close(own(server.of(model, [tokens, TEXTS[3]], at, **asked), 0, len(tokens)), torch.from_numpy(alone[0]))


def test_functions(server: Server) -> None:
    """What a function returns for a text has its own tokens and no others: a sum, as the next layer takes it."""
    block = server.modules["gpt2"].transformer.h[0]
    wanted: list[Tensor] = []
    handle = block.ln_2.register_forward_pre_hook(lambda part, args: wanted.append(args[0].detach().clone()[0]))
    for tokens in TEXTS:
        server.modules["gpt2"](input_ids=torch.tensor([tokens]))
    handle.remove()
    beside = server.of("gpt2", TEXTS, "transformer.h.0/add#0")
    means = server.of("gpt2", TEXTS, "transformer.h.0/add#0", pool="mean")
    for row, (tokens, value) in enumerate(zip(TEXTS, wanted, strict=True)):
        close(own(beside, row, len(tokens)), value)
        close(means[row], value.mean(0))


def test_beside_other_requests(server: Server) -> None:
    """Texts of other requests share forwards and change nothing."""
    at = f"{BLOCK['gpt2']}:grad_output"

    def gradient(place: int) -> Array:
        return server.of("gpt2", [TEXTS[place % 4]], at, objective={"kind": "mean"})

    alone = [gradient(place) for place in range(4)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(gradient, range(32)))
    for place, value in enumerate(found):
        close(value, torch.from_numpy(alone[place % 4]))


def test_shapes(server: Server) -> None:
    """Receipts and dry runs tell of a text's own length."""
    for texts in ([TEXTS[0]], TEXTS):
        shape = [len(texts), max(map(len, texts)), 32]
        body = {"model": "gpt2", "inputs": [{"tokens": each} for each in texts], "layers": [BLOCK["gpt2"]]}
        receipt = server.live.client.post("/extract", json=body).json()["receipts"][BLOCK["gpt2"]]
        dry = server.live.client.post("/extract?dry_run=true", json=body).json()["features"][BLOCK["gpt2"]]
        assert receipt["captured"] == dry["shape"] == shape
        assert dry["bytes"] == 4 * int(np.prod(shape))


def refused(server: Server, model: str, texts: list[list[int]], layers: list[Any], **fields: Any) -> str:
    found = problem(server.post(model, texts, layers, **fields), 422)
    return f"{found['detail']} / {found['errors'][0].get('hint', '')}"


def test_no_position_of_padding(server: Server) -> None:
    """A position that a text does not have can't be named."""
    assert "between -5 and 4" in refused(server, "gpt2", [TEXTS[0]], [{"layer": BLOCK["gpt2"], "tokens": [5]}])
    assert "between -3 and 2" in refused(server, "gpt2", TEXTS, [{"layer": BLOCK["gpt2"], "tokens": [3]}])
    asked = [f"{BLOCK['answering']}:grad_output"]
    assert "use 0 to 4" in refused(server, "answering", [TEXTS[0]], asked, objective={"kind": "logit", "class": 5})
    edit = {"layer": BLOCK["gpt2"], "op": "zero", "tokens": [5]}
    assert "between -5 and 4" in refused(server, "gpt2", [TEXTS[0]], [".[logits]"], interventions=[edit])


def test_both_ends(server: Server) -> None:
    """Tokens counted from both ends may meet in a text of some length: one of a known length is counted out."""
    edit = {"layer": BLOCK["gpt2"], "op": "zero", "tokens": [0, -1]}
    assert server.post("gpt2", [TEXTS[0]], [".[logits]"], interventions=[edit]).status_code == 200
    assert "both ends" in refused(server, "gpt2", TEXTS, [".[logits]"], interventions=[edit])
    edit["tokens"] = [4, -1]
    assert "names an index twice" in refused(server, "gpt2", [TEXTS[0]], [".[logits]"], interventions=[edit])


def test_position_of_an_objective(server: Server) -> None:
    """It is one of each text's own tokens, and the classes that were highest there are told."""
    at = f"{BLOCK['gpt2']}:grad_output"

    def post(position: object, **more: Any) -> Any:
        return server.post("gpt2", TEXTS, [at], objective={"kind": "logit", "position": position, **more})

    found = post(-1).json()["receipts"][at]["classes"]
    outputs = [offline(server.modules["gpt2"], tokens, BLOCK["gpt2"]).output for tokens in TEXTS]
    assert found == [int(output.logits[0, -1].argmax()) for output in outputs]
    asked: Json = {"kind": "logit", "class": 1}
    assert '"position": -1' in refused(server, "gpt2", TEXTS, [at], objective=asked)
    for position, said in (
        (3, "between -3 and 2"),
        (-4, "between -3 and 2"),
        ([0, 0], "rows and columns"),
    ):
        assert said in refused(server, "gpt2", TEXTS, [at], objective={**asked, "position": position})
    for position in ([], [0, 0, 0], "0", 2**31, True, [0.5]):
        reply = post(position)
        assert problem(reply, 422)["errors"][0]["pointer"] == "/objective/position"


def test_last_position_of_a_long_text(server: Server) -> None:
    """One that it has can, though the model was surveyed with shorter texts."""
    tokens = [4 + place % 9 for place in range(40)]
    wanted = offline(server.modules["gpt2"], tokens, BLOCK["gpt2"]).value[0, [39]]
    close(server.of("gpt2", [tokens], {"layer": BLOCK["gpt2"], "tokens": [39]})[0], wanted)


def test_divergence_from_a_target(server: Server) -> None:
    """A distribution over positions has a number for each token of the text."""
    at, target = f"{BLOCK['answering']}:grad_output", [0.1, 0.2, 0.3, 0.4, 0.0]
    run = offline(server.modules["answering"], TEXTS[0], BLOCK["answering"])
    score = functional.kl_div(scores(run.output).log_softmax(1), torch.tensor([target]), reduction="sum")
    (wanted,) = torch.autograd.grad(score, run.value)
    objective = {"kind": "kl_div", "target": target}
    close(server.of("answering", [TEXTS[0]], at, objective=objective), wanted)
    assert "send [3]" in refused(server, "answering", [TEXTS[1]], [at], objective=objective)
    assert "texts of one length" in refused(server, "answering", TEXTS, [at], objective=objective)


@pytest.mark.parametrize("op", ["replace", "add"])
@pytest.mark.parametrize("model", ["bert", "gpt2", "convolving"])
def test_whole_tensors(server: Server, model: str, op: str) -> None:
    """A tensor for a text has the text's own length, whatever the length of a batch is."""
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


def test_whole_tensors_of_another_length(server: Server) -> None:
    """The shape that is asked for is the one that is taken; texts of several lengths have no such shape."""
    asked: Json = {"layers": [".[logits]"]}
    for length in (8, 32, 7, 41):
        edit = {"layer": BLOCK["gpt2"], "op": "replace", **tensor(np.ones((length, 32), np.float32))}
        told = refused(server, "gpt2", [TEXTS[0]], **asked, interventions=[edit])
        assert "send [5, 32]" in told if length < 41 else "send [T, 32], where T is how many tokens" in told
    edit = {"layer": BLOCK["gpt2"], "op": "replace", **tensor(np.ones((5, 32), np.float32))}
    assert server.post("gpt2", [TEXTS[0]], **asked, interventions=[edit]).status_code == 200
    assert "these have 3 to 13 tokens" in refused(server, "gpt2", TEXTS, **asked, interventions=[edit])
    narrowed = {**edit, "tokens": [0, 2], **tensor(np.ones((2, 32), np.float32))}
    assert server.post("gpt2", TEXTS, **asked, interventions=[narrowed]).status_code == 200


RESUMED = {
    "gpt2": ("transformer.h.1", ".[logits]"),
    "bert": ("encoder.layer.0", "encoder.layer.1.attention.self.query"),
    "classifier": ("bert.encoder.layer.1", ".[logits]"),
}


@pytest.mark.parametrize("form", ["npy", "safetensors"])
@pytest.mark.parametrize("model", ["gpt2", "bert", "classifier"])
def test_resumed(server: Server, model: str, form: str) -> None:
    """What was captured of a text, sent back as it is, gives what the whole forward gives."""
    layer, output = RESUMED[model]
    for tokens in TEXTS:
        whole = server.post(model, [tokens], [output])
        first = server.live.client.post(
            "/extract",
            json={"model": model, "inputs": [{"tokens": tokens}], "layers": [layer]},
            params={"format": form},
        )
        again = server.live.client.post(
            "/extract",
            content=first.content,
            headers={"content-type": first.headers["content-type"]},
            params={"model": model, "resume": layer, "layers": output, "encoding": "base64"},
        )
        (found,) = arrays_of(again).values()
        (wanted,) = arrays_of(whole).values()
        close(found, torch.from_numpy(wanted))
        assert again.json()["receipts"][output]["captured"] == whole.json()["receipts"][output]["captured"]


@pytest.mark.parametrize("how", [{}, {"pool": "mean"}, {"stats": ["mean", "l2"]}])
def test_several_texts_resumed(server: Server, how: Json) -> None:
    """Texts of several lengths as tensors of their own lengths, or all of them with their mask."""
    layer, output = "transformer.h.1", {"layer": "transformer.ln_f", **how}
    wanted = server.of("gpt2", TEXTS, output)
    whole = server.of("gpt2", TEXTS, layer)
    apart = [tensor(whole[row, : len(tokens)]) for row, tokens in enumerate(TEXTS)]
    body = {"model": "gpt2", "inputs": apart, "resume": layer, "layers": [output], "encoding": "base64"}
    (found,) = arrays_of(server.live.client.post("/extract", json=body)).values()
    close(found, torch.from_numpy(wanted))
    layers = [layer, {"layer": ".[attention_mask]:input", "as": "attention_mask"}]
    asked = {"model": "gpt2", "inputs": [{"tokens": each} for each in TEXTS], "layers": layers}
    first = server.live.client.post("/extract", json=asked, params={"format": "safetensors"})
    if "stats" not in how:
        query = {"model": "gpt2", "resume": layer, "layers": "transformer.ln_f", "format": "npz", **how}
        reply = server.live.client.post("/extract", **raw(first.content, "application/x-safetensors", **query))
        (found,) = arrays_of(reply).values()
        close(found, torch.from_numpy(wanted))


def test_padding_without_a_mask(server: Server) -> None:
    """A text that was captured beside longer ones is not taken for as long as these."""
    layer = "transformer.h.1"
    whole = server.of("gpt2", TEXTS, layer)
    query = {"model": "gpt2", "resume": layer, "layers": "transformer.ln_f"}
    found = problem(server.live.client.post("/extract", **raw(npy(whole), "application/x-npy", **query)), 422)
    assert "last position is 0" in found["detail"]
    assert "'attention_mask'" in found["errors"][0]["hint"]


def test_resumed_by_another_length(server: Server) -> None:
    """Any length that a text may have is taken, and no other."""
    layer, output = "transformer.h.1", "transformer.ln_f"
    for length, status in ((1, 200), (8, 200), (9, 200), (40, 200), (41, 422)):
        values = np.random.default_rng(length).standard_normal((length, 32)).astype(np.float32)
        body = {"model": "gpt2", "inputs": [tensor(values)], "resume": layer, "layers": [output], "encoding": "base64"}
        reply = server.live.client.post("/extract", json=body)
        if status == 422:
            assert "axis 0 from 1 to 40" in problem(reply, 422)["errors"][0]["hint"]
            continue
        with torch.no_grad():
            wanted = server.modules["gpt2"].transformer.ln_f(torch.from_numpy(values)[None])
        close(arrays_of(reply)[output], wanted)
        dry = server.live.client.post("/extract?dry_run=true", json=body).json()
        assert dry["features"][output]["shape"] == [1, length, 32]


def test_gradient_of_a_resumed_text(server: Server) -> None:
    """Objectives count no padding there either."""
    layer = "transformer.h.1"
    whole = server.of("gpt2", TEXTS, layer)
    at = "transformer.ln_f:grad_output"
    fields = {"objective": {"kind": "mean"}}
    wanted = server.of("gpt2", TEXTS, at, **fields)
    apart = [tensor(whole[row, : len(tokens)]) for row, tokens in enumerate(TEXTS)]
    body = {"model": "gpt2", "inputs": apart, "resume": layer, "layers": [at], "encoding": "base64", **fields}
    close(arrays_of(server.live.client.post("/extract", json=body))[at], torch.from_numpy(wanted))


def test_sizes(serve: Serve, tmp_path: Path) -> None:
    """A reply's size is that of the texts' own tokens, with which the limit is compared."""
    saved("gpt2", tmp_path / "gpt2")
    spec = ModelSpec("gpt2", f"transformers:{tmp_path / 'gpt2'}", device="cpu")
    with serve(configured(spec), max_reply_bytes=3000) as live:
        for tokens, status in (([5] * 13, 200), ([5] * 24, 413)):
            body = {"model": "gpt2", "inputs": [{"tokens": tokens}], "layers": [BLOCK["gpt2"]]}
            for params in ({"format": "npz"}, {"format": "npz", "dry_run": "true"}):
                assert live.client.post("/extract", json=body, params=params).status_code == status
