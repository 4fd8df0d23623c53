"""Texts and tokens over HTTP, against forwards of the transformers library with the same padding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from layertap.models.run.model_info import MAX_CATALOGS
from layertap.models.spec import ModelSpec
from layertap.service.logs import JsonFormatter
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, npy, problem, raw, safetensors_of, tensor, tensors
from tests.transformers_nets import CLS, POSITIONS, SEP, VOCABULARY, WORDS, saved, tokenizer

HIDDEN = ".[last_hidden_state]"
SENTENCES = ("a cat", "the cat sat on the mat and the dog saw the cat", "a red dog", "", "a bird " * 12)


@dataclass(frozen=True)
class Texts:
    """A server of text models, and one of them offline."""

    live: Live
    module: Any
    folder: Path

    def post(self, *inputs: Json, **fields: Any) -> Any:
        body = {"model": "bert", "layers": [HIDDEN], "encoding": "base64", "inputs": list(inputs), **fields}
        return self.live.client.post("/extract", json=body, headers={"accept": "application/x-npz"})

    def of(self, *inputs: Json, **fields: Any) -> Array:
        """The only result of a good request."""
        (found,) = arrays_of(self.post(*inputs, **fields)).values()
        return found


@pytest.fixture(scope="module")
def texts(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Texts]:
    folder = tmp_path_factory.mktemp("models")
    module = saved("bert", folder / "bert")
    tokenizer(folder / "bert")
    saved("roberta", folder / "bare")
    saved("gpt2", folder / "endless")
    tokenizer(folder / "endless", specials=False)
    specs = [ModelSpec(name, f"transformers:{folder / name}", device="cpu") for name in ("bert", "bare", "endless")]
    specs[2] = replace(specs[2], load="lazy")
    with serve(configured(*specs)) as live:
        yield Texts(live, module, folder / "bert")


def ids_of(sentence: str) -> list[int]:
    """Tokens of a sentence of known words, by hand."""
    known = {word: place for place, word in enumerate(WORDS)}
    return [CLS, *(known.get(word, 1) for word in sentence.lower().split()), SEP]


def offline(module: Any, ids: list[list[int]]) -> Array:
    """The library's answer for rows of one length."""
    rows = torch.tensor(ids)
    with torch.no_grad():
        found: Array = module(input_ids=rows, attention_mask=torch.ones_like(rows)).last_hidden_state.numpy()
    return found


def test_one_text(texts: Texts) -> None:
    """A text, its tokens, and the text as a raw body give what the library gives for the same tokens unpadded."""
    for sentence in SENTENCES:
        ids = ids_of(sentence)
        found = texts.of({"text": sentence})
        np.testing.assert_allclose(found, offline(texts.module, [ids]), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(texts.of({"tokens": ids}), found)
        request = raw(sentence.encode(), "text/plain; charset=UTF-8", model="bert", layers=HIDDEN, format="npz")
        (sent,) = arrays_of(texts.live.client.post("/extract", **request)).values()
        np.testing.assert_array_equal(sent, found)


LONG = " ".join(WORDS[5:] * POSITIONS)


@pytest.mark.parametrize(("truncate", "side"), [("start", "left"), ("end", "right")])
def test_truncate(texts: Texts, truncate: str, side: str) -> None:
    """A text that is too long is cut at the side asked for, as the library cuts it; receipts count what is left out."""
    library = AutoTokenizer.from_pretrained(texts.folder, truncation_side=side)
    whole, cut = library(LONG).input_ids, library(LONG, truncation=True, max_length=POSITIONS).input_ids
    inputs = [{"text": "a cat"}, {"text": LONG}]
    np.testing.assert_allclose(
        texts.of(*inputs, truncate=truncate)[1:], offline(texts.module, [cut]), rtol=1e-4, atol=1e-5
    )
    body = {"model": "bert", "layers": [HIDDEN], "inputs": inputs, "truncate": truncate}
    reply = texts.live.client.post("/extract", json=body)
    assert reply.json()["receipts"][HIDDEN]["truncated"] == [0, len(whole) - POSITIONS]
    assert reply.headers["x-layertap-warnings"] == f"1 of 2 texts truncated, by up to {len(whole) - POSITIONS} tokens"
    problem(texts.post(*inputs, truncate="none"), 422)


def test_lengths_are_few(texts: Texts) -> None:
    """Texts of all lengths make no more catalogs than there are buckets."""
    for words in range(POSITIONS - 1):
        assert texts.post({"text": "a " * words}).status_code == 200
    model = texts.live.engine.manager.registry.get_entry("bert").model
    assert model is not None
    known = [
        size for size in range(1, POSITIONS + 1) if model.catalogs.get_catalog(tuple((size,) for _ in model.inputs))
    ]
    assert known == [8, 16, 32, POSITIONS]
    assert len(known) < MAX_CATALOGS


@pytest.mark.parametrize("index", [-5, -1, 2])
def test_changes_count_from_a_text_s_own_end(texts: Texts, index: int) -> None:
    """A forward may be shorter than the length that texts were planned for."""
    ids = ids_of("the cat sat on the mat and the dog")  # 11 tokens, planned for 16, in a forward of 12
    block = texts.module.encoder.layer[0]

    def zero(part: Any, given: Any, output: Any) -> Any:
        value = (output[0] if isinstance(output, tuple) else output).clone()
        value[:, index] = 0
        return (value, *output[1:]) if isinstance(output, tuple) else value

    with block.register_forward_hook(zero):
        expected = offline(texts.module, [ids])
    change = {"layer": "encoder.layer.0", "op": "zero", "tokens": [index]}
    np.testing.assert_allclose(texts.of({"tokens": ids}, interventions=[change]), expected, atol=1e-5)
    with_others = [{"tokens": ids}, {"text": "a red dog and a cat"}, {"tokens": [*ids, *ids[1:]]}]
    np.testing.assert_allclose(texts.of(*with_others, interventions=[change])[:1, : len(ids)], expected, atol=1e-5)


@pytest.mark.parametrize("length", [2, 3])
def test_padding_of_short_tensors_counts_nowhere(texts: Texts, length: int) -> None:
    """Means of a text of one token in a tensor of two or three are those of the token."""
    layer = [{"layer": "encoder.layer.1", "pool": "mean"}]
    ids, mask = np.full((1, length), CLS), np.zeros((1, length), np.int64)
    mask[0, 0] = 1
    rows = tensors(input_ids=ids[0], attention_mask=mask[0])
    np.testing.assert_allclose(texts.of(rows, layers=layer), texts.of({"tokens": [CLS]}, layers=layer), atol=1e-5)


def test_tensors(texts: Texts) -> None:
    """Arrays keep their length: tokens alone, a batch of them, tokens and mask by name."""
    ids = np.array([ids_of("a cat sat"), ids_of("the red dog")])
    expected = offline(texts.module, ids.tolist())
    assert expected.shape == (2, 5, 32)
    np.testing.assert_allclose(texts.of(*(tensor(row) for row in ids)), expected, rtol=1e-4, atol=1e-5)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    short = offline(texts.module, [ids[1, :3].tolist()])[0]
    for content, media_type, second in (
        (npy(ids), "application/x-npy", expected[1]),
        (safetensors_of(input_ids=ids), "application/x-safetensors", expected[1]),
        (safetensors_of(input_ids=ids, attention_mask=mask), "application/x-safetensors", short),
    ):
        request = raw(content, media_type, model="bert", layers=HIDDEN, format="npz")
        (found,) = arrays_of(texts.live.client.post("/extract", **request)).values()
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[1, : len(second)], second, rtol=1e-4, atol=1e-5)


def test_parts(texts: Texts) -> None:
    """Parts of text are what the same texts in JSON are, with a request part or a query, and beside tokens."""
    body: Json = {"model": "bert", "layers": [HIDDEN]}
    ids, sentences = np.array([2, 5, 6, 3]), SENTENCES[:2]
    inputs = [*({"text": each} for each in sentences), tensor(ids)]
    wanted = texts.live.client.post("/extract", json={**body, "inputs": inputs}).json()
    parts: list[Any] = [*(("texts", each.encode()) for each in sentences), ("tensors", npy(ids))]
    request = ("request", (None, json.dumps(body), "application/json"))
    assert texts.live.client.post("/extract", files=[request, *parts]).json() == wanted
    assert texts.live.client.post("/extract", files=parts, params={"model": "bert", "layers": HIDDEN}).json() == wanted


def test_models_say_how_they_take_text(texts: Texts) -> None:
    """GET /models tells limits and whether there is a tokenizer, and of the source no directory."""
    body = {model["name"]: model for model in texts.live.client.get("/models").json()["models"]}
    assert body["bert"]["source"] == "transformers:bert"
    said = {"max_tokens": POSITIONS, "vocabulary": VOCABULARY, "mask": "attention_mask"}
    assert body["bert"]["text"] == said | {"takes": ["text", "text_pair", "tokens"]}
    assert body["bare"]["text"] == said | {"takes": ["tokens"], "max_tokens": POSITIONS - 2}
    assert "text" not in body["digits"]
    assert {"name": "input_ids", "shape": [32], "dtype": "int64", "longest": POSITIONS} in body["bert"]["inputs"]


REFUSED: dict[str, tuple[Json, str, str]] = {
    "a mask of another length": (tensors(input_ids=[4, 5], attention_mask=[1, 1, 1]), "bert", "lengths"),
    "a mask of nothing": (tensors(input_ids=[4, 5], attention_mask=[0, 0]), "bert", "no token"),
    "no mask": (tensors(input_ids=[4, 5], attention_mask=[1, 2]), "bert", "from 0 to"),
    "too long": ({"text": "a " * POSITIONS}, "bert", f"{POSITIONS + 2} tokens, the limit is {POSITIONS}"),
    "no token": ({"text": ""}, "endless", "not empty"),
    "no tokenizer": ({"text": "a cat"}, "bare", '{"tokens": ['),
    "outside of the vocabulary": ({"tokens": [CLS, VOCABULARY]}, "bert", f"from 0 to {VOCABULARY - 1}"),
    "a picture": ({"image": "AAAA"}, "bert", '{"text": "a cat"}'),
    "a tensor too long": (tensor(np.zeros(41, np.int64)), "bert", "from 1 to 40"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case == "no token" else case for case in REFUSED]
)
def test_refusals(texts: Texts, case: str) -> None:
    """What a model does not take is refused with what to send instead, and the next request is answered."""
    item, model, says = REFUSED[case]
    found = problem(texts.post(item, model=model, layers=["."]), 422)
    assert says in found["detail"] + found["errors"][0].get("hint", "")
    assert found["errors"][0]["input"] == 0
    assert texts.post({"text": "a cat"}).status_code == 200


def test_no_directory_is_shown(texts: Texts, serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that is not there, or is broken, fails without its place in a reply or in a log."""
    saved("bert", tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"nonsense")
    specs = [
        ModelSpec(name, f"transformers:{tmp_path / name}", device="cpu", load="lazy") for name in ("nowhere", "broken")
    ]
    with serve(configured(*specs)) as live:
        for spec in specs:
            body = {"model": spec.name, "layers": ["."], "inputs": [{"text": "a cat"}]}
            reply = live.client.post("/extract", json=body)
            said = problem(reply, 503, seconds="retry-after" in reply.headers)["detail"]
            listed = live.client.get(f"/models/{spec.name}").text
            assert f"transformers:{spec.name}" in listed
            assert "failed" in listed
            assert str(tmp_path) not in said + listed
    logged = "\n".join(JsonFormatter().format(record) for record in caplog.records)
    assert logged.count("could not be loaded") == 2
    assert str(tmp_path) not in logged
