"""Texts and tokens over HTTP, against forwards of the transformers library with the same padding."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from layertap.models.model_catalogs import MAX_CATALOGS
from layertap.models.spec import ModelSpec
from layertap.service.logs import JsonFormatter
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import Array, Json, arrays_of, configured, npy, problem, raw, safetensors_of, tensor
from tests.transformers_nets import CLS, POSITIONS, SEP, VOCABULARY, WORDS, net, saved, tokenizer

HIDDEN = ".[last_hidden_state]"
SENTENCES = ("a cat", "the cat sat on the mat and the dog saw the cat", "a red dog", "", "a bird " * 12)
LIMIT = 16 * POSITIONS


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
    tokenizer(folder / "endless", cls_token=None, sep_token=None, pad_token=None)
    _without_specials(folder / "endless" / "tokenizer.json")
    saved("clip", folder / "both")
    for name in ("convolving", "mixing"):
        saved(name, folder / name)
        tokenizer(folder / name)
    specs = (ModelSpec(name, f"transformers:{folder / name}", device="cpu") for name in MODELS)
    with serve(configured(*specs)) as live:
        yield Texts(live, module, folder / "bert")


MODELS = ("bert", "bare", "endless", "both", "convolving", "mixing")


def _without_specials(file: Path) -> None:
    """A tokenizer that puts nothing around a text."""
    own = Tokenizer.from_file(str(file))
    own.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    own.save(str(file))


def ids_of(sentence: str) -> list[int]:
    """Tokens of a sentence of known words, by hand."""
    known = {word: place for place, word in enumerate(WORDS)}
    return [CLS, *(known.get(word, 1) for word in sentence.lower().split()), SEP]


def offline(module: Any, ids: list[list[int]], size: int | None = None) -> Array:
    """The library's answer, each row padded to ``size``, or to nothing."""
    size = size or len(ids[0])
    rows = torch.tensor([row + [0] * (size - len(row)) for row in ids])
    mask = torch.tensor([[1] * len(row) + [0] * (size - len(row)) for row in ids])
    with torch.no_grad():
        found: Array = module(input_ids=rows, attention_mask=mask).last_hidden_state.numpy()
    return found


@pytest.mark.parametrize("sentence", SENTENCES)
def test_one_text(texts: Texts, sentence: str) -> None:
    """A text, its tokens, and the text as a raw body give what the library gives for the same tokens unpadded."""
    ids = ids_of(sentence)
    expected = offline(texts.module, [ids])
    np.testing.assert_allclose(texts.of({"text": sentence}), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(texts.of({"tokens": ids}), texts.of({"text": sentence}))
    request = raw(sentence.encode(), "text/plain; charset=UTF-8", model="bert", layers=HIDDEN, format="npz")
    (found,) = arrays_of(texts.live.client.post("/extract", **request)).values()
    np.testing.assert_array_equal(found, texts.of({"text": sentence}))


def test_token_counts(texts: Texts) -> None:
    """The receipt tells how many tokens of a result are a text's own; that of a vector has none."""
    inputs = [{"text": sentence} for sentence in SENTENCES[:3]]
    body = {"model": "bert", "layers": [HIDDEN, ".[pooler_output]"], "inputs": inputs}
    receipts = texts.live.client.post("/extract", json=body).json()["receipts"]
    assert receipts[HIDDEN]["token_counts"] == [len(ids_of(sentence)) for sentence in SENTENCES[:3]]
    assert "token_counts" not in receipts[".[pooler_output]"]


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
    again = texts.live.client.post("/extract", json={**body, "inputs": inputs[:1]})
    assert "truncated" not in again.json()["receipts"][HIDDEN]
    by_input = [inputs[0], {"text": LONG, "interventions": [{"layer": "pooler", "op": "zero"}]}]  # a job for each
    apart = texts.live.client.post("/extract", json={**body, "layers": ["pooler"], "inputs": by_input})
    assert apart.json()["receipts"]["pooler"]["truncated"] == [0, len(whole) - POSITIONS]
    assert apart.headers["x-layertap-warnings"] == reply.headers["x-layertap-warnings"]


def test_last_tokens(texts: Texts) -> None:
    """The last token of each text is its own, however long its neighbours are: by pool, and counted from the end."""
    sentences = SENTENCES[:3]
    inputs = [{"text": sentence} for sentence in sentences]
    last = texts.of(*inputs, pool="last")
    counted = texts.of(*inputs, layers=[{"layer": HIDDEN, "tokens": [-1, 0, -2], "channels": [-1, 3]}])
    assert (last.shape, counted.shape) == ((3, 32), (3, 3, 2))
    for row, sentence in enumerate(sentences):
        expected = offline(texts.module, [ids_of(sentence)])[0]
        np.testing.assert_allclose(last[row], expected[-1], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(counted[row], expected[[-1, 0, -2]][:, [-1, 3]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ({"layer": HIDDEN, "tokens": [-5]}, "between -4 and 3"),
        ({"layer": HIDDEN, "tokens": [-1, 3]}, "twice"),
        ({"layer": HIDDEN, "channels": [-33]}, "between -32 and 31"),
        ({"layer": ".[pooler_output]", "pool": "last"}, "has no tokens"),
    ],
)
def test_no_such_tokens(texts: Texts, layer: Json, says: str) -> None:
    """Tokens that the shortest text has not, or twice, are refused before a forward."""
    reply = texts.post({"text": "a cat"}, {"text": "the cat sat on the mat"}, layers=[layer])
    assert says in problem(reply, 422)["detail"]


def test_several_texts(texts: Texts) -> None:
    """All texts of a request have the length of the longest one; what lies behind a shorter one is 0."""
    sentences = SENTENCES[:3]
    found = texts.of(*({"text": sentence} for sentence in sentences))
    assert found.shape == (3, 14, 32)
    for row, sentence in enumerate(sentences):
        expected = offline(texts.module, [ids_of(sentence)])[0]
        np.testing.assert_allclose(found[row, : len(expected)], expected, rtol=1e-4, atol=1e-5)
        assert not found[row, len(expected) :].any()


def test_lengths_are_few(texts: Texts) -> None:
    """Texts of all lengths make no more catalogues than there are buckets."""
    for words in range(POSITIONS - 1):
        assert texts.post({"text": "a " * words}).status_code == 200
    model = texts.live.engine.manager.registry.get_entry("bert").model
    assert model is not None
    known = [
        size for size in range(1, POSITIONS + 1) if model.catalogs.get_catalog(tuple((size,) for _ in model.inputs))
    ]
    assert known == [8, 16, 32, POSITIONS]
    assert len(known) < MAX_CATALOGS


def test_refused_length_costs_no_forward(serve: Serve, tmp_path: Path) -> None:
    """A reply that would be too large for a text of its length is refused before anything runs with that length."""
    saved("bert", tmp_path / "bert")
    spec = ModelSpec("bert", f"transformers:{tmp_path / 'bert'}", device="cpu")
    with serve(configured(spec), max_reply_bytes=(POSITIONS - 4) * 32 * 4) as live:
        model = live.engine.manager.registry.get_entry("bert").model
        assert model is not None
        for tokens, status in ((POSITIONS, 413), (POSITIONS - 7, 200), (8, 200)):
            body = {"model": "bert", "layers": [HIDDEN], "inputs": [{"tokens": [CLS] * tokens}]}
            reply = live.client.post("/extract?format=npz", json=body)
            assert reply.status_code == status, reply.text
            size = next(size for size in (8, 16, 32, POSITIONS) if size >= tokens)
            known = model.catalogs.get_catalog(tuple((size,) for _ in model.inputs))
            assert (known is None) == (status == 413)


def test_at_the_same_time(texts: Texts) -> None:
    """Requests of several lengths at the same time each get their own values."""
    expected = {
        sentence: offline(texts.module, [ids_of(sentence)])[0] for sentence in (*SENTENCES, "cat dog", "the red mat")
    }
    wrong: list[str] = []

    def work(sentence: str) -> None:
        for _ in range(5):
            (row,) = texts.of({"text": sentence})
            wanted = expected[sentence]
            if not np.allclose(row[: len(wanted)], wanted, rtol=1e-4, atol=1e-5):
                wrong.append(sentence)

    threads = [threading.Thread(target=work, args=(sentence,)) for sentence in expected for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors(texts: Texts) -> None:
    """Arrays keep their length: tokens alone, a batch of them, tokens and mask by name."""
    ids = np.array([ids_of("a cat sat"), ids_of("the red dog")])
    expected = offline(texts.module, ids.tolist())
    assert expected.shape == (2, 5, 32)
    np.testing.assert_allclose(texts.of(*(tensor(row) for row in ids)), expected, rtol=1e-4, atol=1e-5)
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    for content, media_type, wanted in (
        (npy(ids), "application/x-npy", expected),
        (safetensors_of(input_ids=ids), "application/x-safetensors", expected),
        (safetensors_of(input_ids=ids, attention_mask=mask), "application/x-safetensors", None),
    ):
        request = raw(content, media_type, model="bert", layers=HIDDEN, format="npz")
        (found,) = arrays_of(texts.live.client.post("/extract", **request)).values()
        if wanted is None:
            short = offline(texts.module, [ids[1, :3].tolist()])
            np.testing.assert_allclose(found[1, :3], short[0], rtol=1e-4, atol=1e-5)
            wanted = expected[:1]
        np.testing.assert_allclose(found[: len(wanted)], wanted, rtol=1e-4, atol=1e-5)


def test_skipped(texts: Texts) -> None:
    """A bad text is left out, and the others are no longer for it."""
    reply = texts.post({"text": "a cat"}, {"text": "a " * 100}, {"tokens": [VOCABULARY]}, on_error="skip")
    found = arrays_of(reply)
    np.testing.assert_array_equal(found[HIDDEN], texts.of({"text": "a cat"}))
    assert reply.headers["x-layertap-skipped"] == "1,2"
    body = texts.live.client.post(
        "/extract",
        json={
            "model": "bert",
            "layers": [HIDDEN],
            "on_error": "skip",
            "inputs": [{"text": "a " * 100}, {"text": "a cat"}, {"tokens": [VOCABULARY]}],
        },
    ).json()
    assert (body["rows"], [error["input"] for error in body["errors"]]) == (1, [0, 2])


def test_without_mask_or_class_token(texts: Texts) -> None:
    """A model without special tokens takes a text as it is; the receipt tells the shape."""
    module = net("gpt2")
    ids = [WORDS.index(word) for word in ("the", "cat", "sat")]
    with torch.no_grad():
        expected = module(input_ids=torch.tensor([ids])).logits.numpy()
    found = texts.of({"text": "the cat sat"}, model="endless", layers=[".[logits]"])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_dry_run(texts: Texts) -> None:
    """A dry run of a text says the shape of its own length; one without inputs that of the configured length."""
    body = {"model": "bert", "layers": [HIDDEN], "inputs": [{"text": "a cat"}]}
    shapes = [
        texts.live.client.post("/extract?dry_run=true", json=sent).json()["features"][HIDDEN]["shape"]
        for sent in (body, body | {"inputs": []})
    ]
    assert shapes == [[1, 4, 32], [1, 32, 32]]


def test_gradient_and_attention(texts: Texts) -> None:
    """Attention of a text, and a gradient at the embeddings, are there for its own tokens."""
    found = texts.of({"text": "a cat"}, layers=["encoder.layer.0.attention.self:attention"])
    assert found.shape == (1, 4, 4, 4)
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)
    objective = {"kind": "layer", "layer": "pooler", "channel": 3}
    gradient = texts.of({"text": "a cat"}, layers=["embeddings:grad_output"], objective=objective)
    assert gradient.shape == (1, 4, 32)
    assert (np.abs(gradient).max(-1) > 0).all()


def test_models_say_how_they_take_text(texts: Texts) -> None:
    """GET /models tells limits and whether there is a tokenizer, and of the source no directory."""
    body = {model["name"]: model for model in texts.live.client.get("/models").json()["models"]}
    assert body["bert"]["source"] == "transformers:bert"
    said = {"max_tokens": POSITIONS, "vocabulary": VOCABULARY, "mask": "attention_mask"}
    assert body["bert"]["text"] == said | {"takes": ["text", "tokens"]}
    assert body["bare"]["text"] == said | {"takes": ["tokens"], "max_tokens": POSITIONS - 2}
    assert body["both"]["text"] == body["bert"]["text"] | {"takes": ["tokens"]}
    assert "text" not in body["digits"]
    assert {"name": "input_ids", "shape": [32], "dtype": "int64", "longest": POSITIONS} in body["bert"]["inputs"]


REFUSED: dict[str, tuple[Json, str, str]] = {
    "too long": ({"text": "a " * POSITIONS}, "bert", f"{POSITIONS + 2} tokens, the limit is {POSITIONS}"),
    "too many tokens": ({"tokens": [4] * 41}, "bert", "41 tokens, the limit is 40"),
    "too many characters": ({"text": "a" * (LIMIT + 1)}, "bert", f"{LIMIT + 1} characters, the limit is {LIMIT}"),
    "no token": ({"text": ""}, "endless", "not empty"),
    "nothing but space": ({"text": " \n"}, "endless", "not empty"),
    "no tokenizer": ({"text": "a cat"}, "bare", '{"tokens": ['),
    "outside of the vocabulary": ({"tokens": [CLS, VOCABULARY]}, "bert", f"from 0 to {VOCABULARY - 1}"),
    "a picture": ({"image": "AAAA"}, "bert", '{"text": "a cat"}'),
    "a picture without a tokenizer": ({"image": "AAAA"}, "bare", '{"tokens": ['),
    "a text for both": ({"text": "a cat"}, "both", '{"tokens": ['),
    "a picture for both": ({"image": "AAAA"}, "both", "send pixel_values"),
    "a tensor too long": (tensor(np.zeros(41, np.int64)), "bert", "from 1 to 40"),
    "an empty tensor": (tensor(np.zeros(0, np.int64)), "bert", "from 1 to 40"),
    "a tensor of floats": (tensor(np.zeros(8, np.float32)), "bert", "int64"),
    "negative ids": (tensor(np.full(8, -1)), "bert", f"from 0 to {VOCABULARY - 1}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(texts: Texts, case: str) -> None:
    """What a model does not take is refused with what to send instead, and the next request is answered."""
    item, model, says = REFUSED[case]

    found = problem(texts.post(item, model=model, layers=["."]), 422)

    assert says in found["detail"] + found["errors"][0].get("hint", "")
    assert found["errors"][0]["input"] == 0
    assert texts.post({"text": "a cat"}).status_code == 200


@pytest.mark.parametrize(
    ("mask", "says"), [([1, 1, 1], "lengths"), ([0, 0, 0, 0], "no token"), ([1, 1, 2, 1], "from 0 to 1")]
)
def test_masks(texts: Texts, mask: list[int], says: str) -> None:
    """A mask that does not belong to its tokens is refused."""
    content = safetensors_of(input_ids=np.array(ids_of("a cat")), attention_mask=np.array(mask))
    found = problem(
        texts.live.client.post("/extract", **raw(content, "application/x-safetensors", model="bert", layers=HIDDEN)),
        422,
    )
    assert says in found["detail"] + found["errors"][0].get("hint", "")


@pytest.mark.parametrize("content", ["a\0cat", "\ufeffa cat", "\U0001f984 cat", "käse \u202e", "[CLS] [SEP]"])
def test_odd_characters(texts: Texts, content: str) -> None:
    """Characters that no word has are unknown words, and nothing worse."""
    assert np.isfinite(texts.of({"text": content})).all()


def test_lone_surrogates(texts: Texts) -> None:
    """What is no UTF-8 is no JSON."""
    body = '{"model": "bert", "layers": ["."], "inputs": [{"text": "\\ud800"}]}'
    problem(texts.live.client.post("/extract", content=body, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize("method", ["grad_cam", "saliency", "attention_rollout", "gradient_rollout"])
def test_no_maps_of_texts(texts: Texts, method: str) -> None:
    """Explanations are maps of pictures, which a model of texts has none of."""
    body = {"model": "bert", "method": method, "inputs": [{"text": "a cat"}]}
    found = problem(texts.live.client.post("/explain", json=body), 422)
    assert "takes text" in found["detail"]
    assert "attention" in found["errors"][0]["hint"]


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


def test_resumed_from_a_layer(texts: Texts) -> None:
    """A forward that goes on from a layer takes that layer's output, and gives what follows from it without a mask."""
    layers, given = ["encoder.layer.1.attention.self.query"], np.random.default_rng(0).standard_normal((32, 32))
    found = texts.of(tensor(given.astype(np.float32)), layers=layers, resume="encoder.layer.0")
    query = texts.module.encoder.layer[1].attention.self.query
    expected = query(torch.tensor(given, dtype=torch.float32)[None]).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    for item in ({"text": "a cat"}, {"tokens": [CLS, SEP]}):
        refused = texts.post(item, layers=layers, resume="encoder.layer.0")
        assert "takes no text" in problem(refused, 422)["detail"]


@pytest.mark.parametrize("pool", ["mean", "mean_all", "max", "gem", "stats"])
def test_pools_leave_padding_out(texts: Texts, pool: str) -> None:
    """A text is pooled as it would be alone, without padding; all of its tokens count, [CLS] and [SEP] too."""
    sentences = [SENTENCES[place] for place in (1, 0, 2)]
    how: Json = {"stats": ["mean", "max"]} if pool == "stats" else {"pool": pool}
    layer = {"layer": ".", "path": "[last_hidden_state]", **how}
    found = texts.of(*({"text": each} for each in sentences), layers=[layer])
    for row, sentence in enumerate(sentences):
        alone = offline(texts.module, [ids_of(sentence)])[0].astype(np.float64)
        np.testing.assert_allclose(found[row], POOLED[pool](alone), rtol=1e-3, atol=1e-4)


POOLED = {
    "mean": lambda tokens: tokens.mean(0),
    "mean_all": lambda tokens: tokens.mean(0),
    "max": lambda tokens: tokens.max(0),
    "gem": lambda tokens: (tokens.clip(1e-6) ** 3).mean(0) ** (1 / 3),
    "stats": lambda tokens: np.array([tokens.mean(), tokens.max()]),
}


def test_pooled_beside_others(texts: Texts) -> None:
    """Texts of other requests, of other lengths, change nothing of a pooled row."""
    bodies = [[{"text": sentence}] for sentence in SENTENCES if sentence] * 4
    alone = [texts.of(*inputs, pool="mean", isolated=True) for inputs in bodies[:4]]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda inputs: texts.of(*inputs, pool="mean"), bodies))
    for place, value in enumerate(found):
        np.testing.assert_allclose(value, alone[place % 4], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "layer"),
    [
        ("bert", {"layer": "encoder.layer.1.attention.self", "site": "attention", "stats": ["zeros", "mean"]}),
        ("convolving", {"layer": "encoder.layers.1.attention.query", "pool": "mean"}),
        ("convolving", {"layer": "encoder.layers.1.attention.query", "stats": ["max", "std"]}),
        ("mixing", {"layer": "layers.1.mlp.gate", "path": "[0]", "pool": "mean"}),
        ("mixing", {"layer": "layers.1.mlp.gate", "path": "[0]", "stats": True}),
    ],
)
def test_pools_leave_padding_out_wherever_tokens_are(texts: Texts, model: str, layer: Json) -> None:
    """In attention, behind channels, or folded into the rows: a text gives what it gives unpadded."""
    short, long = ({"text": SENTENCES[place]} for place in (0, 1))
    alone = texts.of(tensor(np.array(ids_of(SENTENCES[0]))), model=model, layers=[layer])
    found = texts.of(short, long, model=model, layers=[layer])
    np.testing.assert_allclose(found[:1], alone, rtol=1e-3, atol=1e-4)


def test_tensors_by_name(texts: Texts) -> None:
    """Ids with a mask of the caller's, or without one, by name as in a safetensors body."""
    ids = np.array(ids_of("a red dog"))
    mask = np.array([1, 1, 1, 1, 0])

    def named(**arrays: Array) -> Json:
        return {"tensors": {name: tensor(array)["tensor"] for name, array in arrays.items()}}

    body = safetensors_of(input_ids=ids, attention_mask=mask)
    request = raw(body, "application/x-safetensors", model="bert", layers=HIDDEN, format="npz")
    (wanted,) = arrays_of(texts.live.client.post("/extract", **request)).values()
    np.testing.assert_array_equal(texts.of(named(input_ids=ids, attention_mask=mask)), wanted)
    np.testing.assert_array_equal(texts.of(named(input_ids=ids)), texts.of(tensor(ids)))
    found = problem(texts.post(named(input_id=ids, attention_mask=mask)), 422)
    assert "did you mean 'input_ids'" in found["errors"][0]["hint"]


def test_padding_does_not_count_against_the_limit(serve: Serve, tmp_path: Path) -> None:
    """A tensor of which its mask leaves most out gives few values, the second time too, when its shape is known."""
    saved("bert", tmp_path / "bert")
    ids, mask = np.ones(POSITIONS, np.int64), np.arange(POSITIONS) < 3
    body = safetensors_of(input_ids=ids, attention_mask=mask.astype(np.int64))
    request = raw(body, "application/x-safetensors", model="bert", layers=HIDDEN, format="npz")
    with serve(
        configured(ModelSpec("bert", f"transformers:{tmp_path / 'bert'}", device="cpu")), max_reply_bytes=5000
    ) as live:
        for _ in range(2):
            assert arrays_of(live.client.post("/extract", **request))[HIDDEN].shape == (1, 3, 32)
        full = raw(
            safetensors_of(input_ids=ids), "application/x-safetensors", model="bert", layers=HIDDEN, format="npz"
        )
        assert f"{POSITIONS * 32 * 4} bytes" in problem(live.client.post("/extract", **full), 413)["detail"]


def test_fingerprints(texts: Texts) -> None:
    """Tokens that the caller made have another than a text; without a tokenizer nothing else can be sent."""

    def told(*inputs: Json, **fields: Any) -> tuple[str, set[str | None]]:
        reply = texts.live.client.post(
            "/extract", json={"model": "bert", "layers": [HIDDEN], "inputs": inputs} | fields
        )
        receipts = reply.json()["receipts"].values()
        return reply.json()["fingerprint"], {receipt.get("preprocessed") for receipt in receipts}

    ids = ids_of("a cat")
    text, other = told({"text": "a cat"}), told({"text": "a bird " * 12})
    assert text == other
    assert text[1] == {None}
    tokens, row = told({"tokens": ids}), told(tensor(np.array(ids)))
    assert tokens == row == told(tensor(np.array(ids * 3)))
    assert tokens[1] == {"caller"}
    mixed = told({"text": "a cat"}, {"tokens": ids})
    assert mixed[1] == {"mixed"}
    assert len({text[0], tokens[0], mixed[0]}) == 3
    dry = texts.live.client.post("/extract?dry_run=true", json={"model": "bare", "layers": [HIDDEN]}).json()
    for given in ({"tokens": ids}, tensor(np.array(ids)), {"tokens": ids * 2}):
        assert told(given, model="bare") == (dry["fingerprint"], {None})


def test_ids_of_several_lengths(texts: Texts) -> None:
    """Tensors of ids keep their lengths, beside each other and beside texts: each is answered as it would be alone."""
    ids = [ids_of(sentence) for sentence in SENTENCES[:3]]
    inputs = [tensor(np.array(ids[0])), {"text": SENTENCES[1]}, tensor(np.array(ids[2])), {"tokens": ids[0]}]
    expected = [offline(texts.module, [ids[place]]) for place in (0, 1, 2, 0)]
    pooled = texts.of(*inputs, pool="mean")
    np.testing.assert_allclose(pooled, [each[0].mean(0) for each in expected], rtol=1e-4, atol=1e-5)
    apart = arrays_of(texts.post(*inputs))
    for place, each in enumerate(expected):
        np.testing.assert_allclose(apart[f"{HIDDEN}.input{place}"], each, rtol=1e-4, atol=1e-5)
    body = {"model": "bert", "layers": [{"layer": HIDDEN, "pool": "last"}], "inputs": inputs}
    (receipt,) = texts.live.client.post("/extract", json=body).json()["receipts"].values()
    assert receipt["captured"] == [1, None, 32]
    assert receipt["token_counts"] == [len(ids[place]) for place in (0, 1, 2, 0)]
