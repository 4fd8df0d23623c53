"""Clients that are too large for the tests' own environment give the vectors of the native route."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layertap.models.spec import ModelSpec
from tests.cross_encoders import save
from tests.server import Live
from tests.service.conftest import Serve
from tests.service.support import arrays_of, configured
from tests.transformers_nets import saved, tokenizer

pytestmark = [pytest.mark.hard, pytest.mark.timeout(900)]
TEXTS = ["a cat sat on the mat", "the dog saw the cat"]
ASK = {
    "litellm": """
from litellm import embedding
reply = embedding(model="openai/bert", input=TEXTS, api_base=URL + "/v1", api_key="any")
print(json.dumps([each["embedding"] for each in reply.data]))
""",
    "llama-index": """
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
model = OpenAILikeEmbedding(model_name="bert", api_base=URL + "/v1", api_key="any")
print(json.dumps([model.get_text_embedding(TEXTS[0]), model.get_query_embedding(TEXTS[1])]))
""",
    "kserve": """
import asyncio, numpy
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

async def ask():
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_ready(URL) and await client.is_server_live(URL)
    assert await client.is_model_ready(URL, "bert")
    found = []
    for binary in (False, True):
        texts = InferInput("text", [len(TEXTS), 1], "BYTES")
        texts.set_data_from_numpy(numpy.array([[text.encode()] for text in TEXTS], object), binary_data=binary)
        reply = await client.infer(URL, InferRequest("bert", [texts]), model_name="bert")
        found.append(reply.outputs[0].as_numpy())
    assert (found[0] == found[1]).all()
    return found[0] / numpy.linalg.norm(found[0], axis=1, keepdims=True)

print(json.dumps(asyncio.run(ask()).tolist()))
""",
}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment of the clients."""
    folder = tmp_path_factory.mktemp("clients")
    uv, lock = Path(sys.executable).parent / "uv", Path(__file__).parent / "requirements.txt"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    words = ("--quiet", "--python", folder / "bin" / "python", "--require-hashes", "-r", lock)
    subprocess.run([uv, "pip", "install", *words], check=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def live(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of a model of texts."""
    folder = tmp_path_factory.mktemp("models") / "bert"
    saved("bert", folder)
    tokenizer(folder)
    save("bert", folder.parent / "reranker")
    specs = [ModelSpec(name, f"transformers:{folder.parent / name}", device="cpu") for name in ("bert", "reranker")]
    with serve(configured(*specs)) as live:
        yield live


def run(live: Live, python: Path, code: str) -> Any:
    """What code prints last, as JSON."""
    code = f"import json\nURL, TEXTS = {live.url!r}, {TEXTS!r}\n{code}"
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network for prices
    done = subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("library", ASK)
def test_vectors(live: Live, python: Path, library: str) -> None:
    """The library's vectors are those of ``POST /extract``."""
    body = {"model": "bert", "normalize": True, "inputs": [{"text": text} for text in TEXTS]}
    (expected,) = arrays_of(live.client.post("/extract", json=body)).values()
    np.testing.assert_allclose(run(live, python, ASK[library]), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("provider", "path"), [("infinity", ""), ("hosted_vllm", ""), ("cohere", "/v1/rerank"), ("jina_ai", "/v1/rerank")]
)
def test_ranks(live: Live, python: Path, provider: str, path: str) -> None:
    """As a client of four servers reads the order and the scores; infinity's documents would be plain texts."""
    code = f"""
from litellm import rerank
asked = dict(query=TEXTS[0], documents=TEXTS, top_n=2, api_base=URL + {path!r}, api_key="any")
asked["return_documents"] = {provider != "infinity"}
reply = rerank(model="{provider}/reranker", **asked)
print(json.dumps([[each["index"], each["relevance_score"]] for each in reply.results]))
"""
    body = {"model": "reranker", "query": TEXTS[0], "documents": TEXTS, "top_n": 2}
    expected = live.client.post("/rerank", json=body).json()["results"]
    assert run(live, python, code) == [[each["index"], each["relevance_score"]] for each in expected]
