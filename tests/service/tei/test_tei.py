"""Reranking as CrossEncoder ranks, and the routes of text-embeddings-inference, in the forms that clients expect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from sentence_transformers import CrossEncoder, SentenceTransformer

from layertap.models.spec import EmbeddingSpec, ModelSpec
from layertap.service.config.configuration import Configuration
from tests import sentence_folders
from tests.cross_encoders import DOCUMENTS, LONG, QUERY, save
from tests.oracle import seeded
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import configured
from tests.transformers_nets import TEXT, tokenizer

TEXTS = ["a cat sat on the mat", "the DOG", "a red dog and a cat saw the cat on the mat and the dog sat"]


@dataclass(frozen=True)
class Served:
    """A server whose aliases say which models answer for text-embeddings-inference, and the library's own."""

    live: Live
    reranker: CrossEncoder
    embedder: SentenceTransformer
    sparse: Any
    seen: list[torch.Tensor]  # values of its sparse layer

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.live.client.post(path, json=body)

    def ask(self, path: str, **body: Any) -> Any:
        reply = self.post(path, **body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def refused(self, path: str, status: int, **body: Any) -> str:
        reply = self.post(path, **body)
        assert reply.status_code == status, reply.text
        error = reply.json()
        assert error.keys() == {"error", "error_type"}
        return str(error["error"])


@pytest.fixture(scope="module")
def served(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tei")
    rerankers = {name: save(name, folder / name) for name in ("bert", "classes")}
    sentence_folders.save("named_prompts", folder / "sentences")
    sentence_folders.save("late", folder / "late")
    specs = [
        ModelSpec(name, f"transformers:{folder / name}", device="cpu", load="lazy", dimensions=dimensions)
        for name, dimensions in (("bert", ()), ("classes", ()), ("sentences", (8,)), ("late", ()))
    ]
    sparse = transformers.BertModel(transformers.BertConfig(**TEXT, hidden_act="relu"), add_pooling_layer=False)
    sparse = seeded(sparse, 0).eval()
    layer = sparse.encoder.layer[1].intermediate
    layer.dense.bias.data -= layer.dense.weight.data.norm(dim=1) * 3
    sparse.save_pretrained(folder / "sparse")
    tokenizer(folder / "sparse")
    seen: list[torch.Tensor] = []
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    embedding = EmbeddingSpec("encoder.layer.1.intermediate", pool="max")
    specs.append(
        ModelSpec("sparse", f"transformers:{folder / 'sparse'}", device="cpu", load="lazy", embedding=embedding)
    )
    chosen = configured(*specs)
    aliases = {"rerank": "bert", "embed": "sentences", "embed_sparse": "sparse"}
    embedder = SentenceTransformer(str(folder / "sentences"), device="cpu", local_files_only=True)
    configuration = Configuration(chosen.models, chosen.default, chosen.folder, aliases, chosen.allowed)
    with serve(configuration, max_inputs=4, deadline_s=60) as live:
        yield Served(live, rerankers["bert"], embedder, sparse, seen)


def rank(served: Served, *, raw: bool = False) -> list[tuple[int, float]]:
    """Documents by the library, best first, each with its score."""
    activation = torch.nn.Identity() if raw else torch.nn.Sigmoid()
    ranked = served.reranker.rank(QUERY, list(DOCUMENTS), activation_fn=activation)
    return [(int(each["corpus_id"]), float(each["score"])) for each in ranked]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_rerank(served: Served, path: str) -> None:
    """Documents as texts and as objects, more than a request has inputs: the order and scores of the library."""
    expected = rank(served)
    documents = [{"text": each} if index % 2 else each for index, each in enumerate(DOCUMENTS)]
    body = {"model": "bert", "query": QUERY, "documents": documents, "return_documents": True}
    reply = served.ask(path, **body)
    found = [(each["index"], each["relevance_score"]) for each in reply["results"]]
    assert [index for index, _ in found] == [index for index, _ in expected]
    np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], atol=1e-5)
    assert [each["document"] for each in reply["results"]] == [{"text": DOCUMENTS[index]} for index, _ in expected]
    pairs = served.reranker.tokenizer([(QUERY, each) for each in DOCUMENTS], truncation=True)
    tokens = sum(map(len, pairs["input_ids"]))
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (reply["model"], reply["object"], bool(reply["id"])) == ("bert", "rerank", True)
    best = served.ask(path, query=QUERY, documents=list(DOCUMENTS), top_n=2, raw_scores=True)["results"]
    raw = rank(served, raw=True)[:2]
    assert [each.keys() for each in best] == [{"index", "relevance_score"}] * 2
    np.testing.assert_allclose([each["relevance_score"] for each in best], [score for _, score in raw], atol=1e-5)


def test_rerank_as_tei(served: Served) -> None:
    """With ``texts`` the reply is a bare list; cut unless that is forbidden."""
    body = {"query": QUERY, "texts": list(DOCUMENTS)}
    expected = rank(served)
    found = served.ask("/rerank", **body)
    assert [each["index"] for each in found] == [index for index, _ in expected]
    np.testing.assert_allclose([each["score"] for each in found], [score for _, score in expected], atol=1e-5)
    assert [each.keys() for each in found] == [{"index", "score"}] * len(DOCUMENTS)
    whole = served.ask("/rerank", **body, return_text=True, raw_scores=True, truncate=True)
    assert [each["text"] for each in whole] == [DOCUMENTS[index] for index, _ in expected]
    np.testing.assert_allclose([each["score"] for each in whole], [s for _, s in rank(served, raw=True)], atol=1e-5)
    left = served.ask("/rerank", query=QUERY, texts=[LONG], truncate=True, truncation_direction="Left")
    served.reranker.tokenizer.truncation_side = "left"
    (score,) = served.reranker.predict([(QUERY, LONG)])
    served.reranker.tokenizer.truncation_side = "right"
    assert left[0]["score"] == pytest.approx(float(score), abs=1e-5)
    assert "the limit is 12" in served.refused("/rerank", 422, query=QUERY, texts=["a", LONG], truncate=False)


def test_embed(served: Served) -> None:
    """The client of the hub gets the library's vectors, with a prompt, and shorter ones."""
    client = InferenceClient(f"{served.live.url}/embed")
    expected = served.embedder.encode(TEXTS)
    np.testing.assert_allclose(client.feature_extraction(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(client.feature_extraction(TEXTS[0]), expected[:1], atol=1e-5)
    found = client.feature_extraction(TEXTS, prompt_name="query", normalize=True, truncate=True)
    np.testing.assert_allclose(found, served.embedder.encode(TEXTS, prompt_name="query"), atol=1e-5)
    shorter = served.embedder.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)
    np.testing.assert_allclose(served.ask("/embed", inputs=TEXTS, dimensions=8), shorter, atol=1e-5)
    plain = served.ask("/embed", inputs=TEXTS, dimensions=8, normalize=False)
    np.testing.assert_allclose(plain, expected[:, :8], atol=1e-5)
    with pytest.raises(HfHubHTTPError, match="no prompt"):
        client.feature_extraction(TEXTS, prompt_name="passage")
    assert "the limit is" in served.refused("/embed", 422, inputs=TEXTS, truncate=False)


def test_sparse(served: Served) -> None:
    """Indices and values of what is not 0; a model whose vectors are full is named."""
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            served.sparse(**served.embedder.tokenizer(text, return_tensors="pt"))
        expected.append(served.seen[-1].amax(1)[0].numpy())
    found = served.ask("/embed_sparse", inputs=TEXTS)
    assert [[each["index"] for each in row] for row in found] == [np.flatnonzero(row).tolist() for row in expected]
    values = [each["value"] for row in found for each in row]
    np.testing.assert_allclose(values, np.concatenate([row[row != 0] for row in expected]), atol=1e-5)
    assert "is not sparse" in served.refused("/embed_sparse", 422, model="sentences", inputs=TEXTS)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no query": ({"documents": ["a"]}, 422, "/query"),
    "no documents": ({"query": "a", "documents": []}, 422, "/documents"),
    "three classes": ({"model": "classes", "query": "a", "documents": ["b"]}, 422, "does not give one score"),
    "pictures": ({"model": "digits", "query": "a", "documents": ["b"]}, 422, "does not give one score"),
    "an unknown model": ({"model": "bart", "query": "a", "documents": ["b"]}, 404, "'bart'"),
    "too many": ({"query": "a", "documents": ["b"] * 2049}, 422, "/documents"),
    "none of it": ({"query": "a", "documents": ["b"], "top_n": 0}, 422, "/top_n"),
    "too long": ({"query": "a", "texts": ["b", "a " * 2**20]}, 422, "characters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(served: Served, case: str) -> None:
    """What can't be done is an error of the route's form, and of OpenAI's below /v1."""
    body, status, words = REFUSED[case]
    assert words in served.refused("/rerank", status, **body) or words.startswith("/")
    reply = served.post("/v1/rerank", **body)
    assert reply.status_code == (400 if status == 422 else status)
    error = reply.json()["error"]
    assert words in error["message"] or words == f"/{error['param']}", error


@pytest.mark.parametrize(
    ("path", "fields", "status"), [("/embed", {"normalize": False}, 422), ("/embed_sparse", {}, 406)]
)
def test_several_vectors(served: Served, path: str, fields: dict[str, Any], status: int) -> None:
    """A vector for each token has no form here, however many of them are padding."""
    assert served.refused(path, status, model="late", inputs=["a cat", *TEXTS], **fields)


def test_ignored(served: Served) -> None:
    """Fields of other servers are passed over, and named."""
    reply = served.post("/rerank", query="a", documents=["b"], max_chunks_per_doc=3)
    assert "max_chunks_per_doc" in reply.headers["x-layertap-warnings"]


def test_full_queue(served: Served) -> None:
    """Reranking is admitted as all else is."""
    with served.live.engine.admission.admit(math.inf) as ticket:
        ticket.reserve_bytes(served.live.engine.settings.max_queue_bytes)
        reply = served.post("/rerank", query="a", documents=["b"])
    assert reply.status_code == 429
    assert int(reply.headers["retry-after"]) >= 1


def test_keys(serve: Serve, tmp_path: Path) -> None:
    with serve(configured(), api_keys="secret-key") as live:
        for path in ("/rerank", "/v1/rerank", "/embed", "/embed_sparse"):
            assert live.client.post(path, json={}).status_code == 401
