"""Prompts of a folder, by the fields with which clients of other servers name them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from sentence_transformers import SentenceTransformer

from layertap.models.spec import ModelSpec
from tests.sentence_folders import save
from tests.service.conftest import Serve
from tests.service.support import configured

TEXTS = ["a cat sat on the mat", "the dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentence") / "named_prompts"
    save("named_prompts", folder)
    return folder


@pytest.fixture(scope="module")
def client(serve: Serve, folder: Path) -> Iterator[OpenAI]:
    with serve(configured(ModelSpec("encoder", f"transformers:{folder}", device="cpu"))) as live:
        yield OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


MEANT = {"query": ("query", "retrieval.query"), "document": ("document", "passage", "search_document")}
CHOSEN: list[tuple[dict[str, str], str]] = [
    ({"input_type": "query"}, "query"),
    ({"prompt_name": "query"}, "query"),
    ({"task": "query"}, "query"),
    ({"input_type": "passage"}, "document"),
    ({"input_type": "search_document"}, "document"),
    ({"task": "retrieval.query"}, "query"),
    ({"input_type": "search", "task": "query"}, "query"),
    ({"prompt": "document", "input_type": "query"}, "document"),
]


@pytest.mark.parametrize(("fields", "prompt"), CHOSEN)
def test_chosen(client: OpenAI, folder: Path, fields: dict[str, str], prompt: str) -> None:
    """They choose the prompt of that name, as often as they are sent; a prompt of our own field comes first."""
    library = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    expected = library.encode(TEXTS, prompt_name=prompt)
    used = {name for name, value in fields.items() if value in MEANT[prompt]}
    for _ in range(2):
        found = client.embeddings.with_raw_response.create(model="encoder", input=TEXTS, extra_body=fields)
        vectors = [each.embedding for each in found.parse().data]
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        named = found.headers.get("x-layertap-warnings", "")
        assert {name for name in fields if repr(name) in named} == fields.keys() - used


@pytest.mark.parametrize(
    "fields", [{"input_type": "clustering"}, {"task": 3}, {"prompt_name": None}, {"task": "x" * 5000}]
)
def test_of_no_prompt(client: OpenAI, folder: Path, fields: dict[str, Any]) -> None:
    """A name that the folder doesn't have changes nothing, and a warning names the field."""
    expected = SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(TEXTS)
    found = client.embeddings.with_raw_response.create(model="encoder", input=TEXTS, extra_body=fields)
    np.testing.assert_allclose([each.embedding for each in found.parse().data], expected, atol=1e-5)
    assert all(repr(name) in found.headers["x-layertap-warnings"] for name in fields)
