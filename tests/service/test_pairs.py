"""Pairs of texts, served: what CrossEncoder of sentence-transformers makes of them, and layers of these forwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder

from layertap.models.spec import ModelSpec
from tests.cross_encoders import DOCUMENTS, KINDS, LONG, QUERY, TYPED, save
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, problem, tensor
from tests.transformers_nets import CLS, SEP, TEXT, saved, tokenizer

PAIRS = [(QUERY, each) for each in DOCUMENTS] + [(LONG, QUERY), (LONG, LONG), ("", "")]
LOGITS = ".[logits]"


@dataclass(frozen=True)
class Served:
    """A server of cross-encoders, and the library's own."""

    live: Live
    folder: Path
    loaded: dict[str, CrossEncoder]

    def load(self, name: str) -> CrossEncoder:
        if name not in self.loaded:
            self.loaded[name] = save(name, self.folder / name)
        return self.loaded[name]

    def post(self, model: str, *inputs: Json, **fields: Any) -> Any:
        body = {"model": model, "layers": [LOGITS], "inputs": list(inputs), **fields}
        return self.live.client.post("/extract", json=body)

    def extract(self, model: str, *inputs: Json, **fields: Any) -> Array:
        (found,) = arrays_of(self.post(model, *inputs, **fields)).values()
        return found


@pytest.fixture(scope="module")
def served(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pairs")
    saved("gpt2", folder / "gpt2")
    tokenizer(folder / "gpt2", **TYPED)
    config = transformers.BertConfig(**TEXT | {"type_vocab_size": 1}, num_labels=1)
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "one_type")
    tokenizer(folder / "one_type", **TYPED)
    names = (*KINDS, "gpt2", "one_type")
    specs = [ModelSpec(name, f"transformers:{folder / name}", device="cpu", load="lazy") for name in names]
    with serve(configured(*specs), deadline_s=120) as live:
        yield Served(live, folder, {})


def pair(first: str, second: str) -> Json:
    return {"text": first, "text_pair": second}


def logits(model: CrossEncoder, *pairs: tuple[str, str]) -> Array:
    found = model.predict(list(pairs), activation_fn=torch.nn.Identity())
    return np.asarray(found).reshape(len(pairs), -1)


@pytest.mark.parametrize("name", KINDS)
def test_as_the_library(served: Served, name: str) -> None:
    """Logits and scores of short, long and empty pairs in one request, and of each alone."""
    library = served.load(name)
    expected, inputs = logits(library, *PAIRS), [pair(*each) for each in PAIRS]
    np.testing.assert_allclose(served.extract(name, *inputs), expected, atol=1e-5)
    np.testing.assert_allclose(served.extract(name, inputs[1]), expected[1:2], atol=1e-5)
    if name != "bert":  # no CrossEncoder has saved it
        scores = served.extract(name, *inputs, layers=["scores"])
        np.testing.assert_allclose(scores.reshape(-1), library.predict(PAIRS).reshape(-1), atol=1e-5)
    if expected.shape[1] == 1:
        query, documents = "a cat", [document for _, document in PAIRS]
        body = {"model": name, "query": query, "documents": documents, "raw_scores": True}
        ranks = served.live.client.post("/rerank", json=body).json()["results"]
        found = [each["relevance_score"] for each in sorted(ranks, key=lambda each: each["index"])]
        ranked = logits(library, *((query, document) for document in documents))
        np.testing.assert_allclose(found, ranked[:, 0], atol=1e-5)


def test_beside_single_texts(served: Served) -> None:
    """A text, a pair, and ids with types of their own share a request, and each is what it is alone."""
    library = served.load("bert")
    inputs = [
        {"text": "a cat"},
        pair(QUERY, "a dog"),
        {"tokens": [CLS, 4, SEP, 5, SEP], "token_type_ids": [0, 0, 0, 1, 1]},
    ]
    encoded = [
        library.tokenizer("a cat", return_tensors="pt"),
        library.tokenizer(QUERY, "a dog", return_tensors="pt"),
        library.tokenizer("a", "cat", return_tensors="pt"),
    ]
    with torch.no_grad():
        expected = np.concatenate([library.model(**each).logits.numpy() for each in encoded])
    np.testing.assert_allclose(served.extract("bert", *inputs), expected, atol=1e-5)
    assert not np.allclose(served.extract("bert", {"tokens": inputs[2]["tokens"]}), expected[2:], atol=1e-3)
    hidden = "bert.encoder.layer.0"
    with torch.no_grad():
        states = library.model(**encoded[1], output_hidden_states=True).hidden_states[1].numpy()
    np.testing.assert_allclose(served.extract("bert", inputs[1], layers=[hidden]), states, atol=1e-5)


def test_tensors_with_types(served: Served) -> None:
    """Types may come with tensors and their mask, and are 0 where they do not; ids that look like a pair are named."""
    library = served.load("bert")
    encoded = library.tokenizer([(QUERY, "a dog"), (QUERY, "dog")], padding=True, return_tensors="np")
    rows = [{name: tensor(each[row])["tensor"] for name, each in encoded.items()} for row in range(2)]
    expected = logits(library, (QUERY, "a dog"), (QUERY, "dog"))
    np.testing.assert_allclose(served.extract("bert", *({"tensors": row} for row in rows)), expected, atol=1e-5)
    unmasked = {name: each for name, each in rows[0].items() if name != "attention_mask"}
    np.testing.assert_allclose(served.extract("bert", {"tensors": unmasked}), expected[:1], atol=1e-5)
    bare = {"tensors": {"input_ids": rows[0]["input_ids"]}}
    reply = served.post("bert", bare).json()
    assert any("token types" in each for each in reply["warnings"]), reply
    assert "warnings" not in served.post("bert", {"tensors": rows[0]}).json()
    asked = served.live.client.get("/models/bert").json()
    assert [each["name"] for each in asked["inputs"]] == ["input_ids", "attention_mask", "token_type_ids"]
    assert asked["text"]["takes"] == ["text", "text_pair", "tokens"]


REFUSED: dict[str, tuple[str, Json, str]] = {
    "no first text": ("bert", {"text_pair": "a dog"}, "exactly one of"),
    "of tokens": ("bert", {"tokens": [4], "text_pair": "a dog"}, "there is no first"),
    "too few types": ("bert", {"tokens": [4, 5], "token_type_ids": [0]}, "an entry for each of 'tokens'"),
    "types of a text": ("bert", {"text": "a", "token_type_ids": [0]}, "an entry for each of 'tokens'"),
    "unknown type": ("bert", {"tokens": [4, 5], "token_type_ids": [0, 2]}, "holds 2"),
    "no types": ("roberta", {"tokens": [4, 5], "token_type_ids": [0, 0]}, "takes no token types"),
    "types without a table": ("gpt2", pair("a", "dog"), "takes no pairs"),
    "a table of one type": ("one_type", pair("a", "dog"), "takes no pairs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(served: Served, case: str) -> None:
    model, item, detail = REFUSED[case]
    if model in KINDS:
        served.load(model)
    error = problem(served.post(model, item, layers=["."]), 422)
    assert any(detail in each["detail"] for each in error["errors"]), error


def test_not_cut(served: Served) -> None:
    """A pair that is too long is refused where its caller says so."""
    served.load("bert")
    error = problem(served.post("bert", pair(LONG, LONG), truncate="none"), 422)
    assert "the limit is 12" in error["detail"], error
    reply = served.post("bert", pair(LONG, LONG)).json()
    assert any("truncated" in each for each in reply["warnings"]), reply
