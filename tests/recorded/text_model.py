"""A tiny BERT as a directory of the transformers library: a configuration and a tokenizer, without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "dog", "sat", "on", "the", "mat", "and", "saw", "red")
CLS, SEP = 2, 3
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "num_labels": 3,
    "id2label": {"0": "x", "1": "y", "2": "z"},
    "vocab_size": 20,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}


def _special(name: str) -> dict[str, Any]:
    return {
        "id": WORDS.index(name),
        "content": name,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _token(name: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": name, "type_id": 0}}


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [_special(name) for name in WORDS[:4]],
    "normalizer": {"type": "Lowercase"},
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [_token("[CLS]"), {"Sequence": {"id": "A", "type_id": 0}}, _token("[SEP]")],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": [place], "tokens": [name]} for name, place in (("[CLS]", CLS), ("[SEP]", SEP))
        },
    },
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {word: place for place, word in enumerate(WORDS)}, "unk_token": "[UNK]"},
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 40,
    **{f"{name.lower()}_token": f"[{name}]" for name in ("CLS", "SEP", "PAD", "UNK")},
}


def write_text_model(folder: Path) -> None:
    """Write the directory."""
    folder.mkdir()
    for name, content in (
        ("config.json", CONFIG),
        ("tokenizer.json", TOKENIZER),
        ("tokenizer_config.json", TOKENIZER_CONFIG),
    ):
        (folder / name).write_text(json.dumps(content), "utf-8")
