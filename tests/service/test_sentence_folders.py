"""Folders of sentence-transformers, served: by every route the vectors that the library itself gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from layertap.models.spec import ModelSpec
from tests.sentence_folders import LAYOUTS, LIMIT, OLDER, save
from tests.server import Live
from tests.service.bulk.conftest import read
from tests.service.cli.commands import Command
from tests.service.conftest import Serve
from tests.service.support import Array, arrays_of, configured, problem

SENTENCES = ["a cat sat on the mat", "the DOG", "", "a red dog and a cat saw the cat on the mat and the dog sat"]
ALL = (*LAYOUTS, *OLDER)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ALL if name != "prompts"]


@dataclass(frozen=True)
class Folders:
    """A server of all layouts, and the folders that the library loads itself."""

    live: Live
    folder: Path

    def prepare(self, name: str) -> None:
        """Write a folder, for its first test."""
        if not (self.folder / name).exists():
            save(name, self.folder / name)

    def encode(self, name: str, **options: object) -> Array:
        library = SentenceTransformer(str(self.folder / name), device="cpu", local_files_only=True)
        return library.encode(SENTENCES, **options)  # type: ignore[call-overload]

    def extract(self, name: str, **fields: object) -> Array:
        body = {"model": name, "inputs": [{"text": text} for text in SENTENCES], **fields}
        (found,) = arrays_of(self.live.client.post("/extract", json=body)).values()
        return found

    def embed(self, model: str, **fields: object) -> Array:
        reply = self.live.client.post("/v1/embeddings", json={"model": model, "input": SENTENCES, **fields})
        assert reply.status_code == 200, reply.text
        return np.array([each["embedding"] for each in reply.json()["data"]])


@pytest.fixture(scope="module")
def folders(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    folder = tmp_path_factory.mktemp("sentence")
    specs = [ModelSpec(name, f"transformers:{folder / name}", device="cpu", load="lazy") for name in ALL]
    with serve(configured(*specs), deadline_s=120) as live:
        yield Folders(live, folder)


@pytest.mark.parametrize("name", ["prompts", *SLOW])
def test_as_the_library(folders: Folders, command: Command, tmp_path: Path, name: str) -> None:
    """Short, long and empty texts, beside each other: what ``encode`` gives, and of length 1 in the other dialect."""
    folders.prepare(name)
    expected = folders.encode(name)
    np.testing.assert_allclose(folders.extract(name), expected, atol=1e-5)
    np.testing.assert_allclose(folders.embed(name), folders.encode(name, normalize_embeddings=True), atol=1e-5)
    if name == "several":
        lines = [json.dumps({"id": f"d{number}", "text": text}) for number, text in enumerate(SENTENCES)]
        source, out = tmp_path / "texts.jsonl", tmp_path / "out.parquet"
        source.write_text("\n".join([*lines, '{"id": "d4"}', ""]), encoding="utf-8")
        words = ("--column", "text", "--out", out, "--model", name, "--url", folders.live.url)
        done = command("bulk", source, *words)
        assert (done.status, "4: has no picture or text" in done.notes) == (0, True), done.notes
        np.testing.assert_allclose(np.array(read(out)["sentence_embedding"][:4]), expected, atol=1e-5)
    body = folders.live.client.get(f"/models/{name}").json()
    assert (body["embedding"], body["text"]["max_tokens"]) == ("sentence_embedding", LIMIT)
    assert "modules.json" in body["embedding_choice"]["reason"]


def test_prompts(folders: Folders) -> None:
    """A prompt is put in front by its name; another than the default is another fingerprint."""
    folders.prepare("prompts")
    np.testing.assert_allclose(
        folders.extract("prompts", prompt="document"), folders.encode("prompts", prompt_name="document"), atol=1e-5
    )
    np.testing.assert_allclose(folders.embed("prompts", prompt="query"), folders.embed("prompts"), atol=1e-6)
    text = {"model": "prompts", "inputs": [{"text": "a cat"}]}

    def ask(**fields: str) -> httpx.Response:
        return folders.live.client.post("/extract", json={**text, **fields})

    prints = [ask(**fields).headers["x-layertap-fingerprint"] for fields in ({}, {"prompt": "query"})]
    assert prints[0] == prints[1] != ask(prompt="document").headers["x-layertap-fingerprint"]
    refused = problem(ask(prompt="sources"), 422)
    assert (refused["errors"][0]["pointer"], refused["errors"][0]["hint"]) == (
        "/prompt",
        "name one of 'document', 'query'",
    )


def test_cut(folders: Folders) -> None:
    """A text that was cut is named in a warning, a shorter one is not; with ``truncate`` none it is refused."""
    folders.prepare("prompts")
    for text, warned in ((SENTENCES[3], True), ("a cat", False)):
        body = {"model": "prompts", "inputs": [{"text": text}]}
        reply = folders.live.client.post("/extract", json=body)
        assert ("1 of 1 texts truncated" in reply.headers.get("x-layertap-warnings", "")) == warned
    body = {"model": "prompts", "input": SENTENCES[3], "truncate": "NONE"}  # as NVIDIA's clients write it
    assert f"the limit is {LIMIT}" in folders.live.client.post("/v1/embeddings", json=body).json()["error"]["message"]
