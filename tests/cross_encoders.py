"""Folders of cross-encoders, tiny and seeded: some as CrossEncoder of sentence-transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from sentence_transformers import CrossEncoder
from tokenizers import processors
from torch import nn

from tests.oracle import seeded
from tests.transformers_nets import CLS, DISTIL, SEP, TEXT, tokenizer

LIMIT = 12
QUERY = "the red dog"
DOCUMENTS = (
    "a cat sat on the mat",
    "the dog saw a red cat and the mat and a dog and the cat sat on a red mat",
    "",
    "a dog",
    "[SEP] the mat",
)
LONG = "the cat and the dog and a red mat and the cat saw a dog"
SPECIALS = [("[CLS]", CLS), ("[SEP]", SEP)]
WITH_TYPES = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=SPECIALS
)
OF_ROBERTA = processors.RobertaProcessing(("[SEP]", SEP), ("[CLS]", CLS), trim_offsets=False, add_prefix_space=False)
TYPED = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}

# The classifier, its tokenizer's post-processor and options, and what CrossEncoder is told; None: it saves nothing.
KINDS: dict[str, tuple[Callable[[], Any], Any, dict[str, Any], dict[str, Any] | None]] = {
    "bert": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, num_labels=1)),
        WITH_TYPES,
        {"model_max_length": LIMIT, **TYPED},
        None,
    ),
    "classes": (
        lambda: transformers.ElectraForSequenceClassification(
            transformers.ElectraConfig(**TEXT, embedding_size=16, num_labels=3)
        ),
        WITH_TYPES,
        {"model_max_length": LIMIT, "truncation_side": "left", **TYPED},
        {},
    ),
    "roberta": (
        lambda: transformers.XLMRobertaForSequenceClassification(
            transformers.XLMRobertaConfig(**TEXT | {"type_vocab_size": 1}, pad_token_id=0, num_labels=1)
        ),
        OF_ROBERTA,
        {},
        {"max_length": LIMIT, "activation_fn": nn.Identity()},
    ),
    "distilbert": (
        lambda: transformers.DistilBertForSequenceClassification(transformers.DistilBertConfig(**DISTIL, num_labels=1)),
        WITH_TYPES,
        {},
        {"max_length": LIMIT + 1},
    ),
    "deberta": (
        lambda: transformers.DebertaV2ForSequenceClassification(
            transformers.DebertaV2Config(**TEXT | {"type_vocab_size": 0}, relative_attention=True, num_labels=1)
        ),
        WITH_TYPES,
        TYPED,
        {"max_length": LIMIT, "activation_fn": nn.Tanh()},
    ),
    "prompted": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, num_labels=1)),
        WITH_TYPES,
        TYPED,
        {"max_length": LIMIT, "prompts": {"query": "a cat saw "}, "default_prompt_name": "query"},
    ),
}
# What older releases wrote into config.json, as their only note.
OLDER: dict[str, dict[str, Any]] = {
    "release_3": {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    "release_4": {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh", "version": "4.0.1"}},
}
KINDS |= dict.fromkeys(OLDER, KINDS["bert"])


def save(name: str, folder: Path) -> CrossEncoder:
    """Write a folder, and load it by the library."""
    make, processor, options, saved = KINDS[name]
    seeded(make(), 0).eval().save_pretrained(folder)
    whole = tokenizer(folder, **options)
    whole.backend_tokenizer.post_processor = processor
    whole.save_pretrained(folder)
    if name in OLDER:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | OLDER[name]))
    if saved is not None:
        CrossEncoder(str(folder), device="cpu", **saved).save(str(folder))
    return CrossEncoder(str(folder), device="cpu", local_files_only=True)
