"""What stands behind a transformer in a sentence-transformers folder, against the library; what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers.sentence_transformer import modules

from layertap.models.errors import LoadError
from layertap.models.sources.build import build_model
from layertap.models.sources.sentence_head import MODES, Pooling, read_sentence_folder
from layertap.models.spec import ModelSpec
from tests.sentence_folders import save

MASKS = {"right": [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], "left": [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]]}


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("modes", [*((mode,) for mode in MODES), ("max", "cls")], ids="+".join)
def test_pooling(modes: tuple[str, ...], padding: str) -> None:
    """Every mode gives what the library's module gives, wherever a text is padded."""
    tokens, mask = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)), torch.tensor(MASKS[padding])
    features: dict[str, Any] = {"token_embeddings": tokens, "attention_mask": mask}
    expected = modules.Pooling(8, modes)(features)["sentence_embedding"]
    torch.testing.assert_close(Pooling(modes)(tokens, mask), expected, rtol=1e-6, atol=1e-6)


def write(folder: Path, kinds: list[str], **files: Any) -> Path:
    """A folder of modules of these kinds; ``files`` are further ones of it, without their suffix."""
    entries = [{"idx": number, "name": "", "path": "", "type": kind} for number, kind in enumerate(kinds)]
    for name, value in {"modules": entries, "config": {}, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


ST = "sentence_transformers.models."
GOOD = [f"{ST}Transformer", f"{ST}Pooling"]
NEWER = "config_sentence_transformers"
REFUSED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "CLIPModel": ([f"{ST}CLIPModel"], {}),
    "WordEmbeddings": ([f"{ST}WordEmbeddings", f"{ST}Pooling"], {}),
    "own.Dense": ([*GOOD, "own.Dense"], {}),
    "Normalize' as number 1": ([GOOD[0], f"{ST}Normalize"], {}),
    "has no Pooling": ([GOOD[0]], {}),
    "model_args": (GOOD, {"sentence_bert_config": {"model_args": {"rotary": 2}}}),
    "something else": (GOOD, {"sentence_bert_config": {"transformer_task": "fill-mask"}}),
    "is a 'CrossEncoder'": (GOOD, {NEWER: {"model_type": "CrossEncoder"}}),  # scores made of tokens' logits
    "without its prompt": (
        GOOD,
        {"config": {"include_prompt": False}, NEWER: {"prompts": {"q": "q: "}, "default_prompt_name": "q"}},
    ),
}


@pytest.mark.parametrize("named", REFUSED)
def test_refused(tmp_path: Path, named: str) -> None:
    """What is not built here is refused, by its name, with what to do."""
    kinds, files = REFUSED[named]
    with pytest.raises(LoadError, match=named) as caught:
        read_sentence_folder(write(tmp_path, kinds, **files), "'folder'")
    assert "modules.json" in caught.value.hint


def _spec(folder: Path) -> ModelSpec:
    return ModelSpec("m", f"transformers:{folder}", device="cpu")


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
