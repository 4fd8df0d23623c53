"""Texts and tokens made into rows: tokenized, checked against a model's limits, filled up to a length."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from layertap.models.errors import InputError
from layertap.models.inputs.model_inputs import ModelInputs
from layertap.models.inputs.text import TextSpec
from layertap.service.inputs.items import TextItem, TokensItem

CHARACTERS = 16  # of a text, for each token that a model takes: the time that a tokenizer takes is bounded
CUT_CHARACTERS = 2**20  # of a text that may be cut: a tokenizer reads all of it


def tokenize_item(item: TextItem | TokensItem, inputs: ModelInputs) -> dict[str, Tensor]:
    """One text as a row, as long as it is; InputError where the model does not take it."""
    text = inputs.text
    if text is None or not text.is_read:
        raise InputError(f"model {inputs.model} takes no text", hint=f"send {describe_inputs(inputs)}")
    tokens = _encode_text(item.text, text, inputs.model) if isinstance(item, TextItem) else item.tokens
    if len(tokens) > text.max_tokens:
        raise InputError(
            f"the text has {len(tokens)} tokens, the limit is {text.max_tokens}", hint="send it in several inputs"
        )
    ids = torch.tensor([tokens], dtype=torch.int64)
    return {text.ids: ids} if text.mask is None else {text.ids: ids, text.mask: torch.ones_like(ids)}


def pad_rows(rows: Mapping[str, Tensor], size: int, text: TextSpec) -> dict[str, Tensor]:
    """Rows with padding behind their tokens, which the mask leaves out."""
    pads, axes = {text.ids: text.pad if text.is_read else 0}, {text.ids: 1 + text.axis}

    def fill(name: str, value: Tensor) -> Tensor:
        axis = axes.get(name, 1)
        behind = (0, 0) * (value.ndim - axis - 1)  # of the axes after it, the last one first
        return functional.pad(value, (*behind, 0, size - value.shape[axis]), value=pads.get(name, 0))

    return {name: fill(name, value) for name, value in rows.items()}


def format_hint(text: TextSpec) -> str:
    """What to send to a model of texts."""
    return 'send {"text": "a cat"}' if text.encode else 'send token ids: {"tokens": [0, 5]}'


def describe_inputs(inputs: ModelInputs) -> str:
    """What a model takes, input by input."""
    pictures = "pictures, or " if inputs.preprocess is not None else ""
    return pictures + "; ".join(f"{spec.name} {spec.dtype} {list(spec.shape)}" for spec in inputs.specs)


def _encode_text(content: str, text: TextSpec, name: str) -> list[int]:
    if text.encode is None:
        raise InputError(f"model {name} has no tokenizer", hint=format_hint(text))
    most = max(CHARACTERS * text.max_tokens, CUT_CHARACTERS if text.cuts else 0)
    if len(content) > most:
        raise InputError(
            f"the text has {len(content)} characters, the limit is {most}", hint="send it in several inputs"
        )
    try:
        tokens = text.encode(content)
    except Exception as error:  # a tokenizer of a third party; lone surrogates, for one
        raise InputError(f"the text can't be tokenized ({type(error).__name__})") from error
    if not tokens:
        raise InputError("the text has no tokens", hint="send a text that is not empty")
    return tokens
