"""Masks that leave out tokens in front of a text or inside of it: what counts is what they keep."""

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
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, problem, tensor
from tests.transformers_nets import VOCABULARY, saved, tokenizer

MASKS = {
    "in front": [0, 0, 0, 0, 1, 1, 1, 1],
    "inside": [1, 0, 1, 1, 0, 1, 0, 0],
    "everywhere": [0, 1, 1, 0, 1, 0, 0, 0],
    "behind": [1, 1, 1, 1, 1, 0, 0, 0],
}
BLOCK = "bert.encoder.layer.0"
GRADIENT = f"{BLOCK}:grad_output"
SCORES = ".[start_logits]"
TRIALS = [(name,) for name in MASKS] + [("in front", "inside"), ("everywhere", "in front", "behind")]
Change = Callable[[Tensor], Tensor]


def ids_of(name: str) -> Tensor:
    """The tokens of a text with one of the masks."""
    return torch.randint(4, VOCABULARY, (8,), generator=torch.Generator().manual_seed(len(name)))


def kept(name: str) -> list[int]:
    """The positions that a mask keeps."""
    return [place for place, real in enumerate(MASKS[name]) if real]


@dataclass(frozen=True)
class Server:
    """A server of a model that scores the tokens of a text, and that model offline."""

    live: Live
    module: Any

    def post(self, names: Sequence[str], layers: Any, **fields: Any) -> Any:
        arrays = [{"input_ids": ids_of(name).numpy(), "attention_mask": np.array(MASKS[name])} for name in names]
        inputs = [{"tensors": {key: tensor(each)["tensor"] for key, each in row.items()}} for row in arrays]
        body = {"model": "answering", "inputs": inputs, "layers": [layers], "encoding": "base64", **fields}
        return self.live.client.post("/extract", json=body)

    def of(self, names: Sequence[str], layers: Any, **fields: Any) -> Array:
        """The only result of a good request."""
        (found,) = arrays_of(self.post(names, layers, **fields)).values()
        return found

    def refused(self, names: Sequence[str], layers: Any, **fields: Any) -> str:
        """What a refusal says."""
        found = problem(self.post(names, layers, **fields), 422)
        return f"{found['detail']} / {found['errors'][0].get('hint', '')}"

    def offline(self, name: str, change: Change = lambda value: value) -> tuple[Tensor, Tensor]:
        """A text through the model alone: what left the layer, changed where it counts, and the scores that count."""
        values: list[Tensor] = []

        def hook(part: Any, args: Any, output: Any) -> Any:
            whole = (output[0] if isinstance(output, tuple) else output).detach().clone()
            whole[:, kept(name)] = change(whole[:, kept(name)])
            values.append(whole.requires_grad_())
            return (values[0].clone(), *output[1:]) if isinstance(output, tuple) else values[0].clone()

        handle = self.module.get_submodule(BLOCK).register_forward_hook(hook)
        positions = (torch.arange(8) - MASKS[name].index(1)).clamp(min=0)[None]
        output = self.module(
            input_ids=ids_of(name)[None], attention_mask=torch.tensor([MASKS[name]]), position_ids=positions
        )
        handle.remove()
        return values[0], output.start_logits[:, kept(name)]


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models") / "answering"
    module = type(saved("answering", folder)).from_pretrained(folder).eval()
    tokenizer(folder)  # one that begins with a class token
    with serve(configured(ModelSpec("answering", f"transformers:{folder}", device="cpu"))) as live:
        yield Server(live, module)


def close(found: Array, wanted: Tensor) -> None:
    expected = wanted.detach().numpy()
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


OBJECTIVES: dict[str, tuple[Json, Callable[[Tensor], Tensor]]] = {
    "a token": ({"kind": "logit", "class": 2}, lambda scores: scores[0, 2]),
    "its probability": ({"kind": "probability", "class": 2}, lambda scores: scores.softmax(1)[0, 2]),
    "the best": ({"kind": "logit", "class": "top"}, lambda scores: scores.max()),
    "entropy": ({"kind": "cross_entropy", "class": 0}, lambda scores: -scores.log_softmax(1)[0, 0]),
    "divergence": ({"kind": "kl_div", "class": 1}, lambda scores: -scores.log_softmax(1)[0, 1]),
    "mean": ({"kind": "mean"}, lambda scores: scores.mean()),
}


@pytest.mark.parametrize("names", TRIALS, ids=" and ".join)
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_objectives(server: Server, names: Sequence[str], kind: str) -> None:
    """A class of a token counts the tokens that the mask keeps."""
    objective, score = OBJECTIVES[kind]
    found = server.of(names, GRADIENT, objective=objective)
    for row, name in enumerate(names):
        value, scores = server.offline(name)
        (wanted,) = torch.autograd.grad(score(scores), value)
        close(found[row, kept(name)], wanted[0, kept(name)])


@pytest.mark.parametrize("name", MASKS)
def test_target(server: Server, name: str) -> None:
    """A distribution over tokens has a number for each that counts."""
    count = len(kept(name))
    target = [1.0 / count] * count
    value, scores = server.offline(name)
    score = functional.kl_div(scores.log_softmax(1), torch.tensor([target]), reduction="sum")
    (wanted,) = torch.autograd.grad(score, value)
    objective = {"kind": "kl_div", "target": target}
    close(server.of([name], GRADIENT, objective=objective)[0, kept(name)], wanted[0, kept(name)])
    for length in {max(kept(name)) + 1, len(MASKS[name])} - {count}:
        objective = {"kind": "kl_div", "target": [1.0 / length] * length}
        assert f"send [{count}]" in server.refused([name], GRADIENT, objective=objective)


@pytest.mark.parametrize("names", TRIALS, ids=" and ".join)
def test_no_class_of_padding(server: Server, names: Sequence[str]) -> None:
    """No class is that of a token which is left out, in any text of the request."""
    fewest = min(len(kept(name)) for name in names)
    for place in range(fewest, len(MASKS[names[0]])):
        told = server.refused(names, GRADIENT, objective={"kind": "logit", "class": place})
        assert f"use 0 to {fewest - 1}" in told


def drawn(row: int, value: Tensor) -> Tensor:
    return value + 0.5 * torch.randn(value.shape[1:], generator=torch.Generator().manual_seed(7 + row))


EDITS: dict[str, tuple[Json, Callable[[int, Tensor], Tensor]]] = {
    "zero": ({"op": "zero", "tokens": [0]}, lambda row, value: value.index_fill(1, torch.tensor([0]), 0)),
    "scale": ({"op": "scale", "by": 2.0, "tokens": [2, 0]}, lambda row, value: value * doubled(value.shape[1])),
    "all": ({"op": "add", "value": 1.0}, lambda row, value: value + 1),
    "noise": ({"op": "noise", "std": 0.5, "seed": 7}, drawn),
}


def doubled(tokens: int) -> Tensor:
    return torch.tensor([2.0 if place in (0, 2) else 1.0 for place in range(tokens)])[:, None]


@pytest.mark.parametrize("names", TRIALS, ids=" and ".join)
@pytest.mark.parametrize("kind", EDITS)
def test_interventions(server: Server, names: Sequence[str], kind: str) -> None:
    """What is changed are tokens that the mask keeps, counted from the first of them."""
    how, change = EDITS[kind]
    found = server.of(names, SCORES, interventions=[{"layer": BLOCK, **how}])
    for row, name in enumerate(names):
        _, scores = server.offline(name, lambda value, row=row: change(row, value))  # type: ignore[misc]
        close(found[row, kept(name)], scores[0])


@pytest.mark.parametrize("name", MASKS)
def test_whole_tensors(server: Server, name: str) -> None:
    """A tensor for a text has a row for each token that counts."""
    count = len(kept(name))
    values = np.random.default_rng(0).standard_normal((count, 32)).astype(np.float32)
    edit = {"layer": BLOCK, "op": "replace", **tensor(values)}
    _, scores = server.offline(name, lambda value: torch.from_numpy(values)[None])
    close(server.of([name], SCORES, interventions=[edit])[0, kept(name)], scores[0])
    for length in {max(kept(name)) + 1, len(MASKS[name])} - {count}:
        edit = {"layer": BLOCK, "op": "replace", **tensor(np.ones((length, 32), np.float32))}
        assert f"send [{count}, 32]" in server.refused([name], SCORES, interventions=[edit])


@pytest.mark.parametrize("names", TRIALS, ids=" and ".join)
def test_no_token_of_padding(server: Server, names: Sequence[str]) -> None:
    """No token can be changed or taken that is left out, in any text of the request."""
    fewest = min(len(kept(name)) for name in names)
    for place in range(fewest, len(MASKS[names[0]])):
        edit = {"layer": BLOCK, "op": "zero", "tokens": [place]}
        assert f"between {-fewest} and {fewest - 1}" in server.refused(names, SCORES, interventions=[edit])
        said = f"between {-fewest} and {fewest - 1}"
        assert said in server.refused(names, {"layer": BLOCK, "tokens": [place]})


CAPTURES: dict[str, tuple[Json, Change]] = {
    "class token": ({"pool": "cls"}, lambda value: value[0]),
    "tokens": ({"tokens": [2, 0]}, lambda value: value[[2, 0]]),
    "tokens, pooled": ({"tokens": [2, 0], "pool": "mean"}, lambda value: value[[2, 0]].mean(0)),
    "statistics of tokens": ({"tokens": [2, 0], "stats": ["max"]}, lambda value: value[[2, 0]].amax()[None]),
    "mean": ({"pool": "mean"}, lambda value: value.mean(0)),
    "mean of all": ({"pool": "mean_all"}, lambda value: value.mean(0)),
}


@pytest.mark.parametrize("names", TRIALS, ids=" and ".join)
@pytest.mark.parametrize("kind", CAPTURES)
def test_captures(server: Server, names: Sequence[str], kind: str) -> None:
    """Tokens are counted from the first that the mask keeps, for what is taken as for what is changed."""
    how, made = CAPTURES[kind]
    found = server.of(names, {"layer": BLOCK, **how})
    for row, name in enumerate(names):
        value, _ = server.offline(name)
        close(found[row], made(value[0, kept(name)]))


@pytest.mark.parametrize("names", TRIALS, ids=" and ".join)
def test_positions(server: Server, names: Sequence[str]) -> None:
    """What is taken as it is keeps its positions up to the last that counts, 0 where one does not."""
    found = server.of(names, BLOCK)
    assert found.shape[1] == max(max(kept(name)) for name in names) + 1
    for row, name in enumerate(names):
        value, _ = server.offline(name)
        close(found[row, kept(name)], value[0, kept(name)])
        assert not np.delete(found[row], kept(name), axis=0).any()


def test_plans_that_are_kept(server: Server) -> None:
    """A plan for texts that end at the same place is not taken for a mask that keeps fewer."""
    for names in (["in front"], ["everywhere", "in front"], ["in front"]):
        fewest = min(len(kept(name)) for name in names)
        found = server.of(names, GRADIENT, objective={"kind": "logit", "class": fewest - 1})
        assert found.shape[1] == 8
        assert "out of range" in server.refused(names, GRADIENT, objective={"kind": "logit", "class": fewest})


def test_tensors_for_all_texts(server: Server) -> None:
    """What is the same for all texts has the tokens that any of them keeps; it takes a tensor where they are one's."""
    layer = "bert.embeddings.position_embeddings"
    zeros = {"layer": layer, "op": "replace", **tensor(np.zeros((1, 4, 32), np.float32))}
    wanted = server.of(["in front"], SCORES, interventions=[{"layer": layer, "op": "zero"}])
    close(server.of(["in front"], SCORES, interventions=[zeros]), torch.from_numpy(wanted))
    assert "different positions" in server.refused(["in front", "inside"], SCORES, interventions=[zeros])


def test_positions_of_one_text(server: Server) -> None:
    """Beside a text that begins with padding each has positions of its own: what is else that of all is refused."""
    layer = "bert.embeddings.position_embeddings"
    assert layer in server.refused(["in front", "inside"], layer)
    wanted = server.module.get_submodule(layer)(torch.tensor([[0, 0, 0, 0, 0, 1, 2, 3]]))
    close(server.of(["in front"], layer)[:, 4:], wanted[:, 4:])


def test_padding_in_front(server: Server) -> None:
    """A text with padding in front is what it is without, and leaves its neighbour in the request alone."""
    tokens = ids_of("in front")[kept("in front")]
    wanted = server.module(input_ids=tokens[None], attention_mask=torch.ones(1, 4)).start_logits
    found = server.of(["in front", "inside"], SCORES)
    close(found[0, 4:], wanted[0])
    close(found[1, kept("inside")], server.offline("inside")[1][0])


@pytest.mark.parametrize("names", TRIALS, ids=" and ".join)
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_tokens_as_channels(server: Server, names: Sequence[str], pool: str) -> None:
    """Where a tensor has a number for each token and no other axis, a pool keeps them at their positions."""
    found = server.of(names, {"layer": SCORES, "pool": pool})
    assert found.shape == (len(names), max(max(kept(name)) for name in names) + 1)
    for row, name in enumerate(names):
        close(found[row, kept(name)], server.offline(name)[1][0])
        assert not np.delete(found[row], kept(name)).any()
