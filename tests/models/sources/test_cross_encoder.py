"""Folders that CrossEncoder saved and that are refused, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from layertap.models.errors import LoadError
from layertap.models.spec import ModelSpec
from tests.cross_encoders import save
from tests.loading import load_model

CHANGED: dict[str, tuple[str, dict[str, Any], str]] = {
    "lowercasing": ("sentence_bert_config.json", {"do_lower_case": True}, "'do_lower_case'"),
    "options": ("sentence_bert_config.json", {"processing_kwargs": {"text": {}}}, "'processing_kwargs'"),
    "no activation": ("config_sentence_transformers.json", {"activation_fn": "torch.nn.Sigmund"}, "'torch.nn.Sigmund'"),
    "arguments": ("config_sentence_transformers.json", {"activation_fn": "torch.nn.Threshold"}, "'torch.nn.Threshold'"),
    "a path": ("config_sentence_transformers.json", {"activation_fn": "torch.os.getcwd"}, "'torch.os.getcwd'"),
    "broken": ("config_sentence_transformers.json", {"prompts": 3, "activation_fn": None}, "can't be used"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that is served as it is."""
    folder = tmp_path_factory.mktemp("model")
    save("distilbert", folder)
    return folder


@pytest.mark.parametrize("case", CHANGED)
def test_refused(folder: Path, case: str) -> None:
    name, changed, words = CHANGED[case]
    file = folder / name
    before = file.read_text()
    file.write_text(json.dumps(json.loads(before) | changed))
    try:
        with pytest.raises(LoadError) as raised:
            load_model(ModelSpec("m", f"transformers:{folder}", device="cpu"))
    finally:
        file.write_text(before)
    assert words in raised.value.detail
