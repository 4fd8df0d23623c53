"""Folders of sentence-transformers that are refused, with what of them by its name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from layertap.models.errors import LoadError
from layertap.models.sources.build import build_model
from layertap.models.spec import ModelSpec
from tests.sentence_folders import save, save_m3
from tests.transformers_nets import VOCABULARY

ST = "sentence_transformers.models."
NEWER = "config_sentence_transformers"


def change(folder: Path, name: str, change: Any) -> None:
    """Write a file anew, with some of its entries changed; the path of the modules' list is one of them."""
    path = folder / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(change(old) if callable(change) else {**old, **change}))


def replace_kind(number: int, kind: str) -> Callable[[list[Any]], list[Any]]:
    """The modules of a folder with another kind of one of them."""
    return lambda entries: [each | ({"type": kind} if place == number else {}) for place, each in enumerate(entries)]


REFUSED: dict[str, tuple[str, Any]] = {
    "own.Dense": ("modules.json", replace_kind(2, "own.Dense")),
    "pylate.models.Dense": ("modules.json", replace_kind(2, "pylate.models.Dense.Dense")),
    "'sentence_transformers.util.Pooled'": ("modules.json", replace_kind(2, "sentence_transformers.util.Pooled")),
    "HierarchicalTokenPooling": ("modules.json", replace_kind(2, f"{ST}HierarchicalTokenPooling")),
    "has no Pooling": ("modules.json", lambda entries: entries[:1]),
    "has no modules": ("modules.json", lambda entries: []),
    "Normalize": ("modules.json", replace_kind(0, f"{ST}Normalize")),
    "outside": ("modules.json", lambda entries: [each | {"path": "../outside"} for each in entries]),
    "model_args": ("sentence_bert_config.json", {"model_args": {"rotary": 2}}),
    "'vocab_file' in tokenizer_args": ("sentence_bert_config.json", {"tokenizer_args": {"vocab_file": "/etc/passwd"}}),
    "processing_kwargs": ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 3}}}),
    "something else": ("sentence_bert_config.json", {"transformer_task": "text-generation"}),
    "is a 'CrossEncoder'": (f"{NEWER}.json", {"model_type": "CrossEncoder"}),  # scores made of tokens' logits
    "is a 'Other'": (f"{NEWER}.json", {"model_type": "Other"}),
}


@pytest.mark.parametrize("named", REFUSED)
def test_refused(tmp_path: Path, named: str) -> None:
    """What is not built here is refused, by its name, with what to do."""
    save("older", tmp_path)
    change(tmp_path, *REFUSED[named])
    with pytest.raises(LoadError) as caught:
        build_model(_spec(tmp_path))
    assert named in caught.value.detail or named == "outside"
    assert "modules.json" in f"{caught.value.detail} {caught.value.hint}" or "first module" in caught.value.hint


def _spec(folder: Path) -> ModelSpec:
    return ModelSpec("m", f"transformers:{folder}", device="cpu")


@pytest.mark.slow
def test_without_the_library(tmp_path: Path) -> None:
    """Such a folder says what to install; its transformer alone needs none."""
    save("older", tmp_path)
    program = "import sys; sys.modules['sentence_transformers'] = None; from layertap.models.sources.build import *\n"
    program += f"from pathlib import Path; spec = ModelSpec('m', 'transformers:{tmp_path}', device='cpu')\n"
    program += "try: build_model(spec)\nexcept LoadError as error: print(error.detail, error.hint)\n"
    program += f"Path('{tmp_path}/modules.json').unlink(); print(build_model(spec).architecture)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 'sentence-transformers is not installed here type pip install "layertap[sentence-tr' in done.stdout
    assert "transformers:BertModel" in done.stdout


@pytest.mark.parametrize("name", ["without_prompt", "heads", "ways", "late_fixed"])
def test_several_tasks_in_a_forward(tmp_path: Path, name: str) -> None:
    """Rows of a query, of a document and of neither, in one forward: each as by itself."""
    save(name, tmp_path)
    built = build_model(_spec(tmp_path))
    text = built.text
    assert text is not None
    assert text.encode is not None
    encoders = [text.encode, text.encoders["query"], text.encoders["document"]]
    rows = [encode("the cat saw a dog", text.max_tokens, "end")[0] for encode in encoders]
    length = max(map(len, rows))
    ids = torch.tensor([row + [text.pad] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    layer = built.embeddings[0][0].layer
    with torch.no_grad():
        together = built.module(ids, mask)[layer]
        for number, row in enumerate(rows):
            alone = built.module(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.int64))[layer][0]
            found = together[number] if alone.ndim == 1 else together[number, : len(row)]
            torch.testing.assert_close(found, alone, rtol=1e-5, atol=2e-6)
    assert (together[1] - together[2]).abs().max() > 1e-3


def test_heads_of_tokens(tmp_path: Path) -> None:
    """BGE-M3's other heads: the largest weight of each word, and a vector for each token after the first."""
    sparse, vectors = save_m3(tmp_path)
    built = build_model(_spec(tmp_path))
    ids, mask = torch.tensor([[2, 5, 6, 5, 3], [2, 7, 3, 0, 0]]), torch.tensor([[1] * 5, [1, 1, 1, 0, 0]])
    with torch.no_grad():
        found = built.module(ids, mask)
        tokens = found["last_hidden_state"]
        expected = torch.zeros(2, VOCABULARY)
        for row, place in ((0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2)):
            weight = torch.relu(sparse(tokens[row, place]))[0]
            expected[row, ids[row, place]] = max(weight, expected[row, ids[row, place]])
        torch.testing.assert_close(found["sparse_embedding"], expected)
        one = torch.nn.functional.normalize(vectors(tokens[1, 1:3]), dim=-1)
    torch.testing.assert_close(found["colbert_embedding"][1, 1:3], one)
    assert not found["colbert_embedding"][1, [0, 3, 4]].any()
    assert (expected[:, 4:] > 0).sum() >= 1


DENSE = {"in_features": 32, "out_features": 4}
ACTIVATION = "torch.nn.modules.activation."
BROKEN: dict[str, tuple[str, Any]] = {
    "no in_features": ("1_Dense/config.json", {"out_features": 4}),
    "Threshold": ("1_Dense/config.json", {**DENSE, "activation_function": f"{ACTIVATION}Threshold"}),
    "a list": ("1_Pooling/config.json", [1]),
    "prompts": (f"{NEWER}.json", {"prompts": ["query"]}),
    "cut": ("1_Dense/config.json", None),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken(tmp_path: Path, case: str) -> None:
    """A file of the folder that can't be as the library wrote it is a reason that names it."""
    save("older", tmp_path)
    entries = json.loads((tmp_path / "modules.json").read_text())
    entries[2] |= {"path": "1_Dense", "type": f"{ST}Dense"}
    (tmp_path / "modules.json").write_text(json.dumps(entries))
    (tmp_path / "1_Dense").mkdir()
    name, value = BROKEN[case]
    (tmp_path / name).write_text("{" if value is None else json.dumps(value))
    with pytest.raises(LoadError) as caught:
        build_model(_spec(tmp_path))
    assert name in caught.value.detail
