"""Folders of sentence-transformers, served: by every route the vectors that the library itself gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from layertap.models.spec import ModelSpec
from tests.marks import slow_but
from tests.sentence_folders import LIMIT, OLDER, SEVERAL, SPARSE, VECTORS, get_library, save
from tests.server import Live
from tests.service.bulk.conftest import read
from tests.service.cli.commands import Command
from tests.service.conftest import Serve
from tests.service.support import Array, arrays_of, configured, encode, image, problem, tensors

SENTENCES = ["a cat sat on the mat", "the DOG", "", "a red dog and a cat saw the cat on the mat and the dog sat"]
LATE = (*SEVERAL, "pylate")
ALL = (*VECTORS, *SPARSE, *LATE, *OLDER)
QUICK = ("prompts", "without_prompt", "chat", "static", "recurrent", "ways", "late_least", "pylate")


@dataclass(frozen=True)
class Folders:
    """A server of all folders, which the library loads itself."""

    live: Live
    folder: Path
    libraries: dict[str, Any] = field(default_factory=dict)

    def get_library(self, name: str) -> Any:
        """The library's model; its folder is written for its first test."""
        if name not in self.libraries:
            save(name, self.folder / name)
            kind = get_library(name)
            self.libraries[name] = kind(str(self.folder / name), device="cpu", local_files_only=True)
        return self.libraries[name]

    def encode(self, name: str, prompt: str | None = None, **options: object) -> list[Array]:
        """Each text by itself: of some models the library's vectors depend on the batch."""
        library = self.get_library(name)
        encode = getattr(library, f"encode_{prompt}" if prompt else "encode")
        found = [encode(text, **options) for text in SENTENCES]
        return [np.asarray(each.to_dense() if hasattr(each, "to_dense") else each) for each in found]

    def extract(self, name: str, **fields: object) -> list[Array]:
        """What the server gives for each text, without tokens that do not count."""
        self.get_library(name)
        body = {"model": name, "inputs": [{"text": text} for text in SENTENCES], **fields}
        (found,) = arrays_of(self.live.client.post("/extract", json=body)).values()
        return [each[np.abs(each).sum(-1) > 0] for each in found] if name in LATE else list(found)

    def embed(self, model: str, **fields: object) -> Array:
        """The vectors of the other dialect, for texts that have some in every model."""
        body = {"model": model, "input": SENTENCES[::3], **fields}
        reply = self.live.client.post("/v1/embeddings", json=body)
        assert reply.status_code == 200, reply.text
        return np.array([each["embedding"] for each in reply.json()["data"]])


@pytest.fixture(scope="module")
def folders(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    folder = tmp_path_factory.mktemp("sentence")
    specs = [ModelSpec(name, f"transformers:{folder / name}", device="cpu", load="lazy") for name in ALL]
    with serve(configured(*specs), deadline_s=120, max_loaded_models=len(ALL)) as live:
        yield Folders(live, folder)


def close(found: list[Array], expected: list[Array]) -> None:
    """Each text has its vector, or its vectors."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("name", slow_but(QUICK, ALL))
def test_as_the_library(folders: Folders, name: str) -> None:
    """Short, long and empty texts, beside each other: what ``encode``, and those of queries and documents, give."""
    for prompt in (None, "query", "document"):
        close(folders.extract(name, **{"prompt": prompt} if prompt else {}), folders.encode(name, prompt))
    body = folders.live.client.get(f"/models/{name}").json()
    assert body["embedding"] == ("token_embeddings" if name in LATE else "sentence_embedding")
    assert "modules.json" in body["embedding_choice"]["reason"]


@pytest.mark.parametrize("name", slow_but(["prompts"], [*VECTORS, *OLDER]))
def test_other_dialect(folders: Folders, name: str) -> None:
    """In the dialect of OpenAI vectors have length 1."""
    expected = folders.encode(name, normalize_embeddings=True)
    np.testing.assert_allclose(folders.embed(name), np.stack(expected[::3]), atol=2e-6)


@pytest.mark.parametrize("name", ["clip", "clip_as_saved_now"])
def test_picture(folders: Folders, name: str) -> None:
    """A picture's vector is in the space of the texts' vectors."""
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    expected = folders.get_library(name).encode(Image.fromarray(pixels))
    body = {"model": name, "inputs": [image(encode(pixels))]}
    (found,) = arrays_of(folders.live.client.post("/extract", json=body)).values()
    np.testing.assert_allclose(found[0], expected, atol=2e-6)


def run_bulk(folders: Folders, command: Command, out: Path, model: str, *words: str) -> Any:
    source = out.parent / "texts.jsonl"
    lines = [json.dumps({"text": text} if text else {"id": "no text"}) for text in SENTENCES]
    source.write_text("\n".join([*lines, ""]), encoding="utf-8")
    folders.get_library(model)
    done = command(
        "bulk", source, "--column", "text", "--out", out, "--model", model, "--url", folders.live.url, *words
    )
    assert done.status == 0, done.notes
    return read(out) if out.is_file() else None


@pytest.mark.parametrize("name", ["several", "late_least"])
def test_bulk(folders: Folders, command: Command, tmp_path: Path, name: str) -> None:
    """A vector for each text, or a list of vectors as Qdrant and LanceDB take them; none for a line without a text."""
    table = run_bulk(folders, command, tmp_path / "out.parquet", name)
    rows = table["token_embeddings" if name in LATE else "sentence_embedding"]
    assert rows[2] is None
    found, expected = ([each[number] for number in (0, 1, 3)] for each in (rows, folders.encode(name)))
    arrays = map(np.array, found)
    close([each[np.abs(each).sum(-1) > 0] for each in arrays] if name in LATE else list(arrays), expected)


def test_ids_of_the_tokenizer_alone(folders: Folders) -> None:
    """The model takes ids that say more than a token; a client's must be tokens."""
    folders.extract("late")
    vocabulary = folders.live.client.get("/models/late").json()["text"]["vocabulary"]
    for sent in ({"tokens": [2, vocabulary]}, tensors(input_ids=np.array([2, vocabulary]))):
        refused = folders.live.client.post("/extract", json={"model": "late", "inputs": [sent]})
        assert "which is not among its values" in problem(refused, 422)["detail"]


def test_bulk_of_tokens(folders: Folders, command: Command, tmp_path: Path) -> None:
    """A layer's tokens in a file of arrays, each text's behind those before it, without padding."""
    run_bulk(folders, command, tmp_path / "out", "several", "--layers", "encoder.layer.0", "--format", "safetensors")
    arrays = {key: each for path in (tmp_path / "out").glob("*.safetensors") for key, each in load_file(path).items()}
    library = folders.get_library("several")[0].auto_model
    starts = arrays["encoder.layer.0.starts"]
    for place, text in enumerate((SENTENCES[0], SENTENCES[1], SENTENCES[3])):
        given = folders.get_library("several").preprocess([text])
        given = {name: given[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            expected = library(**given, output_hidden_states=True).hidden_states[1][0]
        found = arrays["encoder.layer.0"][starts[place] : starts[place + 1]]
        np.testing.assert_allclose(found, expected.numpy(), atol=2e-6)


def test_bulk_of_sparse_vectors(folders: Folders, command: Command, tmp_path: Path) -> None:
    """Indices and values of what is not 0."""
    table = run_bulk(folders, command, tmp_path / "out.parquet", "splade", "--format", "sparse")
    found = table["sentence_embedding"]
    assert found[2] is None
    expected = folders.encode("splade")
    for number in (0, 1, 3):
        assert found[number]["indices"] == expected[number].nonzero()[0].tolist()
        np.testing.assert_allclose(found[number]["values"], expected[number][found[number]["indices"]], atol=2e-6)


def test_prompts(folders: Folders) -> None:
    """A prompt is put in front by its name; another than the default is another fingerprint."""
    close(folders.extract("prompts", prompt="document"), folders.encode("prompts", prompt_name="document"))
    np.testing.assert_allclose(folders.embed("prompts", prompt="query"), folders.embed("prompts"), atol=1e-6)
    text = {"model": "prompts", "inputs": [{"text": "a cat"}]}

    def ask(**fields: str) -> httpx.Response:
        return folders.live.client.post("/extract", json={**text, **fields})

    prints = [ask(**fields).headers["x-layertap-fingerprint"] for fields in ({}, {"prompt": "query"})]
    assert prints[0] == prints[1] != ask(prompt="document").headers["x-layertap-fingerprint"]
    refused = problem(ask(prompt="sources"), 422)
    assert (refused["errors"][0]["pointer"], refused["errors"][0]["hint"]) == (
        "/prompt",
        "name one of 'query', 'document'",
    )


def test_a_vector_for_each_token(folders: Folders) -> None:
    """Several vectors are not given as a single one."""
    folders.get_library("late_least")
    reply = folders.live.client.post("/v1/embeddings", json={"model": "late_least", "input": SENTENCES})
    assert (reply.status_code, "a vector for each token" in reply.text) == (400, True)


def test_cut(folders: Folders) -> None:
    """A text that was cut is named in a warning, a shorter one is not; with ``truncate`` none it is refused."""
    folders.get_library("prompts")
    for text, warned in ((SENTENCES[3], True), ("a cat", False)):
        body = {"model": "prompts", "inputs": [{"text": text}]}
        reply = folders.live.client.post("/extract", json=body)
        assert ("1 of 1 texts truncated" in reply.headers.get("x-layertap-warnings", "")) == warned
    body = {"model": "prompts", "input": SENTENCES[3], "truncate": "NONE"}  # as NVIDIA's clients write it
    assert f"the limit is {LIMIT}" in folders.live.client.post("/v1/embeddings", json=body).json()["error"]["message"]
