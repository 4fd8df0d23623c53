"""Tensors that an input takes of another: activation patching in one request, against hooks by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layertap.models.spec import ModelSpec
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.digits_reference import random_images
from tests.service.load_server import ROOT
from tests.service.support import Array, Json, arrays_of, configured, problem, tensor
from tests.transformers_nets import VOCABULARY, WORDS, saved, tokenizer

CLEAN = torch.randint(4, VOCABULARY, (7,), generator=torch.Generator().manual_seed(1)).tolist()
CORRUPT = [*CLEAN[:3], (CLEAN[3] + 1) % VOCABULARY, *CLEAN[4:]]
SHORT = CLEAN[:4]
LAYERS, HEADS, WIDTH = 2, 4, 8
PAGE = (ROOT / "docs" / "how-to" / "interventions.md").read_text()
SCORES = {"layer": ".[logits]", "tokens": [-1]}
Patch = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Served:
    """A server of a small language model, and the model offline."""

    live: Live
    module: Any

    def post(self, inputs: list[Json], **fields: Any) -> Any:
        body = {"model": "gpt2", "layers": [SCORES], "encoding": "base64", "inputs": inputs, **fields}
        return self.live.client.post("/extract", json=body)

    def scores(self, inputs: list[Json], **fields: Any) -> Array:
        (found,) = arrays_of(self.post(inputs, **fields)).values()
        return found[:, 0]


@pytest.fixture(scope="module")
def served(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    module = type(saved("gpt2", folder / "gpt2")).from_pretrained(folder / "gpt2").eval()
    tokenizer(folder / "gpt2", specials=False)
    with serve(configured(ModelSpec("gpt2", f"transformers:{folder / 'gpt2'}", device="cpu"))) as live:
        yield Served(live, module)


def place(layer: int) -> str:
    return f"transformer.h.{layer}.attn.c_proj"


def patch(source: int | Json, layer: int, head: int, **more: Any) -> Json:
    source = {"input": source} if isinstance(source, int) else source
    channels = list(range(WIDTH * head, WIDTH * (head + 1)))
    entry = {"layer": place(layer), "site": "input", "op": "replace", "channels": channels, "from": source, **more}
    return {"interventions": [entry]}


def patched(module: Any, tokens: list[int], name: str, change: Patch) -> Array:
    """The last token's scores where what comes to a layer is changed."""

    def put(part: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (change(args[0].clone()), *args[1:])

    with torch.no_grad(), module.get_submodule(name).register_forward_pre_hook(put):
        found: Array = module(input_ids=torch.tensor([tokens])).logits[0, -1].numpy()
    return found


def taken(module: Any, tokens: list[int], name: str) -> Tensor:
    """What comes to a layer."""
    kept: list[Tensor] = []
    patched(module, tokens, name, lambda value: kept.append(value.clone()) or value)  # type: ignore[func-returns-value]
    return kept[0]


def copied(source: Tensor, *index: Any) -> Patch:
    """Puts what another run had at a place there."""

    def change(value: Tensor) -> Tensor:
        value[index] = source[index]
        return value

    return change


def head_of(number: int) -> slice:
    return slice(WIDTH * number, WIDTH * (number + 1))


def run_script(served: Served, title: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The words of each line that the script of a section of the how-to page prints."""
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.split(f"## {title}\n")[1].split("\n## ")[0], re.DOTALL)
    script = script.replace("http://127.0.0.1:8000", served.live.url)
    script = script.replace("httpx.post(", "httpx.post(timeout=60, url=")  # five seconds are few on busy cores
    exec(compile(script, "page", "exec"), {})
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_printed_script(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The script of the how-to page, which patches every head in one request, prints what hooks by hand give."""
    printed = run_script(served, "Patch activations", capsys)
    clean, corrupt = (
        [WORDS.index(word) for word in text.split()] for text in ("the cat sat on the mat", "the dog sat on the mat")
    )
    before = patched(served.module, corrupt, place(0), lambda value: value)[9]
    assert len(printed) == LAYERS * HEADS
    for _, layer, _, head, moved in printed:
        change = copied(taken(served.module, clean, place(int(layer))), ..., head_of(int(head)))
        expected = patched(served.module, corrupt, place(int(layer)), change)[9] - before
        assert float(moved) == pytest.approx(expected, abs=2e-4)


def test_printed_lens(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The script that reads each block through the head prints what the final norm and the head make of it."""
    printed = run_script(served, "Read each block through the head", capsys)
    tokens = torch.tensor([[WORDS.index(word) for word in ("the", "cat", "sat", "on", "the", "mat")]])
    with torch.no_grad():
        *states, normed = served.module(input_ids=tokens, output_hidden_states=True).hidden_states[1:]
        states = [served.module.transformer.ln_f(state) for state in states]
        best = [served.module.lm_head(state)[0, -1].argmax() for state in (*states, normed)]
    assert printed == [[f"transformer.h.{layer}", str(int(each))] for layer, each in enumerate(best)]


def test_tokens_of_texts_of_two_lengths(served: Served) -> None:
    """Single tokens are taken from a text of another length, each counted by its own."""
    inputs: list[Json] = [{"tokens": SHORT}, {"tokens": CLEAN, **patch(0, 1, 2, tokens=[1, -1])}]
    found = served.scores(inputs)
    change = copied(taken(served.module, SHORT, place(1)), 0, [1, -1], head_of(2))
    np.testing.assert_allclose(found[1], patched(served.module, CLEAN, place(1), change), atol=1e-4)
    reply = served.post([{"tokens": SHORT}, {"tokens": CLEAN, **patch(0, 1, 2)}])
    fault = problem(reply, 422)["errors"][0]
    assert "texts of one length" in fault["hint"]
    assert fault["pointer"] == "/inputs/1/interventions"


def test_another_layer_and_sums(served: Served) -> None:
    """What is taken may be of another layer, and be added."""
    source = {"input": 0, "layer": f"{place(0)}:input"}
    found = served.scores([{"tokens": CLEAN}, {"tokens": CORRUPT, **patch(source, 1, 0, op="add", channels=None)}])
    clean = taken(served.module, CLEAN, place(0))
    expected = patched(served.module, CORRUPT, place(1), lambda value: value + clean)
    np.testing.assert_allclose(found[1], expected, atol=1e-4)


def test_chains(served: Served) -> None:
    """An input whose own run takes of a third may be taken from: whatever order they are sent in."""
    zero = [{"layer": place(0), "site": "input", "op": "zero"}]
    inputs: list[Json] = [
        {"tokens": CORRUPT, **patch(1, 1, 3)},
        {"tokens": CLEAN, **patch(2, 0, 1)},
        {"tokens": CORRUPT, "interventions": zero},
    ]
    reply = served.post(inputs)
    (found,) = arrays_of(reply).values()

    def silence(part: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (copied(torch.zeros_like(args[0]), ..., head_of(1))(args[0].clone()), *args[1:])

    with served.module.get_submodule(place(0)).register_forward_pre_hook(silence):
        change = copied(taken(served.module, CLEAN, place(1)), ..., head_of(3))
    np.testing.assert_allclose(found[0, 0], patched(served.module, CORRUPT, place(1), change), atol=1e-4)
    (receipt,) = reply.json()["receipts"].values()
    assert len(set(receipt["fingerprints"])) == 3
    inputs[2] = {"tokens": CORRUPT}  # what it takes was made otherwise
    (other,) = served.post(inputs).json()["receipts"].values()
    assert other["fingerprints"][0] != receipt["fingerprints"][0]


def test_gradients(served: Served) -> None:
    """A gradient of a patched run is that of the run with the tensor sent."""
    objective = {"kind": "logit", "class": 5, "position": -1}
    at = {"layers": ["transformer.h.0:grad_output"], "objective": objective}
    (found,) = arrays_of(served.post([{"tokens": CLEAN}, {"tokens": CORRUPT, **patch(0, 1, 1)}], **at)).values()
    clean = taken(served.module, CLEAN, place(1))[0, :, head_of(1)]
    sent = patch(0, 1, 1, **tensor(clean.numpy()))
    del sent["interventions"][0]["from"]
    (expected,) = arrays_of(served.post([{"tokens": CORRUPT, **sent}], **at)).values()
    np.testing.assert_allclose(found[1:], expected, rtol=1e-3, atol=1e-7)


WIDER: Json = {"input": 0, "layer": "transformer.h.0.mlp.c_fc"}
REFUSED: dict[str, tuple[list[Json], str, str]] = {
    "no such input": ([{}, patch(2, 0, 0)], "/inputs/1/interventions/0", "another"),
    "each other": ([patch(1, 0, 0), patch(0, 0, 0)], "/inputs/0/interventions", "itself, in the end"),
    "another shape": ([{}, patch(WIDER, 0, 0, channels=None)], "/inputs/1/interventions/0", "128"),
    "many layers": ([{}, patch({"input": 0, "layer": "*.c_fc"}, 0, 0)], "/inputs/1/interventions/0", "name one"),
    "with zero": ([{}, patch(0, 0, 0, op="zero")], "/inputs/1/interventions/0", "takes no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(served: Served, name: str) -> None:
    """A fault tells the input and the entry, and nothing runs."""
    own, pointer, said = REFUSED[name]
    (fault,) = problem(served.post([{"tokens": CLEAN, **each} for each in own]), 422)["errors"]
    assert fault["pointer"] == pointer
    assert said in f"{fault['detail']} {fault.get('hint', '')}"


def test_inputs_of_several_shapes(live: Live) -> None:
    """What has one shape for both is taken; what has not is refused in the words of the request, before any forward."""
    images = [tensor(np.ones((3, *size), np.float32)) for size in ((32, 32), (40, 32))]

    def post(layer: str) -> Any:
        edit = {"layer": layer, "op": "replace", "from": {"input": 0}}
        body = {"model": "digits", "layers": ["head"], "inputs": [images[0], {**images[1], "interventions": [edit]}]}
        return live.client.post("/extract", json={**body, "encoding": "base64"})

    (found,) = arrays_of(post("pool")).values()
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    (fault,) = problem(post("block1"), 422)["errors"]
    assert (fault["pointer"], fault["input"]) == ("/inputs/1/interventions", 1)
    assert "[16, 32, 32], and [16, 40, 32]" in fault["detail"]
    assert "same shape" in fault["hint"]


def test_bytes_that_are_taken_are_counted(live: Live, serve: Serve) -> None:
    """Copies for many inputs are part of what a request holds: refused before any forward where they are too many."""
    row = tensor(random_images(1, seed=0)[0])
    edit = {"layer": "block1", "op": "add", "from": {"input": 0}}
    inputs = [row, *({**row, "interventions": [edit]} for _ in range(63))]
    body = {"model": "digits", "layers": ["head"], "inputs": inputs}
    assert live.client.post("/extract", json=body).status_code == 200
    with serve(max_queue_bytes=4_000_000) as small:
        assert small.client.post("/extract", json={**body, "inputs": [row] * 64}).status_code == 200
        assert "bytes" in problem(small.client.post("/extract", json=body), 413)["detail"]


def test_left_out(served: Served) -> None:
    """An input whose source is left out can't be answered."""
    inputs = [{"tokens": CLEAN}, {"image": "AAAA"}, {"tokens": CORRUPT, **patch(1, 0, 0)}]
    reply = served.post(inputs, on_error="skip")
    assert "left out" in problem(reply, 422)["detail"]
