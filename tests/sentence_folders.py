"""Folders that sentence-transformers saves, of tiny seeded models; older layouts are written as its releases did."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from torch import nn

from tests.oracle import seeded
from tests.transformers_nets import DISTIL, TEXT, tokenizer

LIMIT = 12
PROMPTS = {"query": "the red dog : ", "document": ""}
SMALL = {key: value for key, value in TEXT.items() if key != "max_position_embeddings"}
T5 = {"vocab_size": 20, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


def _bert(**options: Any) -> Any:
    return transformers.BertModel(transformers.BertConfig(**TEXT | options))


ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": _bert,
    "bert_without_pooler": lambda: transformers.BertModel(transformers.BertConfig(**TEXT), add_pooling_layer=False),
    "mpnet": lambda: transformers.MPNetModel(transformers.MPNetConfig(**TEXT)),
    "xlm_roberta": lambda: transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**TEXT, pad_token_id=0)),
    "distilbert": lambda: transformers.DistilBertModel(transformers.DistilBertConfig(**DISTIL)),
    "qwen2": lambda: transformers.Qwen2Model(transformers.Qwen2Config(**TEXT, num_key_value_heads=2)),
    "t5": lambda: transformers.T5EncoderModel(transformers.T5Config(**T5)),
    "modernbert": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(**TEXT, pad_token_id=0, cls_token_id=2, sep_token_id=3)
    ),
}


def _dense(width: int, out: int, activation: nn.Module | None, **options: Any) -> Any:
    return modules.Dense(width, out, activation_function=activation, **options)


def _pooled(modes: str | Sequence[str]) -> Any:
    return modules.Pooling(32, tuple(modes) if not isinstance(modes, str) else modes)


# The encoder, what stands behind it, and what SentenceTransformer is told besides.
LAYOUTS: dict[str, tuple[str, Callable[[], list[Any]], dict[str, Any]]] = {
    "mean": ("bert", lambda: [_pooled("mean"), modules.Normalize()], {}),
    "cls": ("distilbert", lambda: [_pooled("cls")], {}),
    "max": ("modernbert", lambda: [_pooled("max")], {}),
    "sqrt": ("xlm_roberta", lambda: [_pooled("mean_sqrt_len_tokens")], {}),
    "weighted": ("mpnet", lambda: [_pooled("weightedmean"), modules.Normalize()], {}),
    "last": ("qwen2", lambda: [_pooled("lasttoken"), modules.Normalize()], {}),
    "several": (
        "bert",
        lambda: [
            _pooled(("cls", "mean", "lasttoken")),
            _dense(96, 24, nn.GELU()),
            _dense(24, 8, None, bias=False),
            modules.Normalize(),
        ],
        {"truncate_dim": 6},
    ),
    "dense": (
        "t5",
        lambda: [_pooled("mean"), _dense(32, 16, nn.Tanh()), _dense(16, 16, nn.ReLU(), use_residual=True)],
        {},
    ),
    "prompts": ("bert", lambda: [_pooled("mean")], {"prompts": PROMPTS, "default_prompt_name": "query"}),
    "named_prompts": ("bert", lambda: [_pooled("mean"), modules.Normalize()], {"prompts": PROMPTS}),
}
OLDER = ("older", "oldest")


def save(name: str, folder: Path) -> None:
    """Write the folder of a layout."""
    if name in OLDER:
        return _save_older(folder, nested=name == "oldest")
    kind, make, options = LAYOUTS[name]
    _save_encoder(kind, folder / "encoder")
    torch.manual_seed(0)
    transformer = modules.Transformer(str(folder / "encoder"), max_seq_length=LIMIT, do_lower_case=name == "prompts")
    SentenceTransformer(modules=[transformer, *make()], device="cpu", **options).save(str(folder))
    return None


def _save_encoder(kind: str, folder: Path, **options: Any) -> None:
    seeded(ENCODERS[kind](), 0).eval().save_pretrained(folder)
    tokenizer(folder, **options)


def _save_older(folder: Path, *, nested: bool) -> None:
    """As releases 2 to 4 wrote it, and where nested as release 0 did: the transformer in a folder of its own."""
    place = "0_Transformer" if nested else ""
    _save_encoder("bert" if nested else "bert_without_pooler", folder / place)
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    entries = [
        {"idx": number, "name": str(number), "path": path or place, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(parts)
    ]
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": not nested}
    (folder / "1_Pooling").mkdir()
    for path, value in {
        "modules.json": entries,
        "1_Pooling/config.json": {**pooling, "pooling_mode_max_tokens": False},
        f"{place or '.'}/sentence_bert_config.json": {"max_seq_length": LIMIT, "do_lower_case": False},
    }.items():
        (folder / path).write_text(json.dumps(value))
