"""A ColBERT that PyLate saved gives PyLate's vectors of queries and documents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from layertap.models.spec import ModelSpec
from tests.server import serving
from tests.service.support import arrays_of, configured
from tests.transformers_nets import saved, tokenizer

pytestmark = [pytest.mark.hard, pytest.mark.timeout(900)]
TEXTS = ["a cat sat on the mat", "the dog saw the cat", "a red dog"]
SAVE = """
import sys
import numpy, torch
from pylate import models
folder, *texts = sys.argv[1:]
torch.manual_seed(0)
sizes = {"embedding_size": 8, "query_length": 12, "document_length": 16}
models.ColBERT(folder + "/bert", device="cpu", **sizes).save_pretrained(folder + "/colbert")
model = models.ColBERT(folder + "/colbert", device="cpu")
for name in ("query", "document"):
    numpy.savez(f"{folder}/{name}.npz", *(model.encode(text, is_query=name == "query") for text in texts))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ColBERT, saved by PyLate in an environment of its own, and its vectors."""
    folder, environment = tmp_path_factory.mktemp("pylate"), tmp_path_factory.mktemp("environment")
    saved("bert", folder / "bert")
    tokenizer(folder / "bert", mask_token="cat")
    uv, python = Path(sys.executable).parent / "uv", environment / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    words = ("--quiet", "--python", python, "--require-hashes", "-r", Path(__file__).parent / "pylate.txt")
    subprocess.run([uv, "pip", "install", *words], check=True)
    subprocess.run([python, "-c", SAVE, folder, *TEXTS], check=True)
    return folder


@pytest.mark.parametrize("prompt", ["query", "document"])
def test_vectors(folder: Path, prompt: str) -> None:
    """Each text's vectors, without those of tokens that do not count."""
    body = {"model": "colbert", "prompt": prompt, "inputs": [{"text": text} for text in TEXTS]}
    spec = ModelSpec("colbert", f"transformers:{folder / 'colbert'}", device="cpu")
    with serving(configured(spec)) as live:
        (found,) = arrays_of(live.client.post("/extract", json=body)).values()
    for each, expected in zip(found, np.load(folder / f"{prompt}.npz").values(), strict=True):
        np.testing.assert_allclose(each[np.abs(each).sum(-1) > 0], expected, atol=1e-5)
