"""The tokenizer of a transformers directory, as a function that threads may share."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from layertap.models.inputs.text import Encode
from layertap.models.sources.build import wrap_build_errors
from layertap.models.sources.sentence_head import SentenceFolder
from layertap.models.spec import Truncate

SIDES: dict[str, Truncate] = {"left": "start", "right": "end"}
FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")


@dataclass(frozen=True)
class Tokenizer:
    """What a directory says of texts.

    ``encode`` and ``is_fast`` as those of TextSpec; ``side`` is the one at which the library cuts. ``fill`` has
    ``encode`` fill up texts of fewer tokens; None where the model is given a mask.
    """

    encode: Encode
    pad: int | None
    max_tokens: int
    digest: str
    side: Truncate
    fill: Encode | None = None
    is_fast: bool = True


def load_tokenizer(
    library: Any, folder: Path, shown: str, options: dict[str, Any], sentence: SentenceFolder | None = None
) -> Tokenizer | None:
    """The tokenizer in a directory; None where there is none, or it gives types of tokens; LoadError for a broken one.

    Of a sentence-transformers folder texts are in small letters where that says so, and its own limit holds.
    """
    if not any((folder / name).is_file() for name in FILES):
        return None
    with wrap_build_errors(f"the tokenizer of {shown}"):
        whole = library.AutoTokenizer.from_pretrained(str(folder), **options)
        if any(whole("a").get("token_type_ids", ())) or (sentence is not None and not whole.is_fast):
            return None  # no model is given types of tokens here; ids can be sent
        limit = (sentence.max_tokens if sentence else None) or int(whole.model_max_length)
        if not whole.is_fast:
            settings = {name: value for name, value in whole.init_kwargs.items() if str(folder) not in str(value)}
            described = type(whole).__name__, sorted(settings.items()), whole.get_vocab()
            digest = hashlib.sha256(repr(described).encode()).hexdigest()
            encode = partial(_encode_slowly, whole, Lock())
            return Tokenizer(encode, whole.pad_token_id, limit, digest, SIDES[whole.truncation_side], is_fast=False)
        # Its own copy: the library's wrapper sets truncation and padding at each call, which threads can't share.
        own = type(whole.backend_tokenizer).from_str(whole.backend_tokenizer.to_str())
        own.no_truncation()
        own.no_padding()
        if sentence is not None and sentence.lowercase:
            _lower(own)
        return Tokenizer(
            encode=partial(_encode, own),
            pad=whole.pad_token_id,
            max_tokens=limit,
            digest=hashlib.sha256(own.to_str().encode()).hexdigest(),
            side=SIDES[whole.truncation_side],
            fill=None
            if "attention_mask" in whole.model_input_names
            else partial(_encode_and_fill, own, whole.padding_side, whole.pad_token_id or 0),
        )


def _encode(own: Any, text: str, limit: int, truncate: Truncate) -> tuple[list[int], int]:
    encoding = own.encode(text, add_special_tokens=False)
    kept = limit - own.num_special_tokens_to_add(False)
    excess = 0 if truncate == "none" else max(len(encoding.ids) - kept, 0)
    if excess:
        encoding.truncate(kept, direction="left" if truncate == "start" else "right")
    return own.post_process(encoding).ids, excess


def _encode_and_fill(own: Any, side: str, pad: int, text: str, limit: int, truncate: Truncate) -> tuple[list[int], int]:
    ids, excess = _encode(own, text, limit, truncate)
    pads = [pad] * (limit - len(ids))
    return (pads + ids if side == "left" else ids + pads), excess


def _encode_slowly(whole: Any, lock: Lock, text: str, limit: int, truncate: Truncate) -> tuple[list[int], int]:
    with lock:  # one in Python may keep something from call to call
        ids: list[int] = whole(text)["input_ids"]
        excess = len(ids) - limit
        if excess <= 0 or truncate == "none":
            return ids, 0
        whole.truncation_side = "left" if truncate == "start" else "right"
        return whole(text, truncation=True, max_length=limit)["input_ids"], excess


def _lower(tokenizer: Any) -> None:
    """Put small letters before all else that a tokenizer does to a text, unless it does so already."""
    normalizers = importlib.import_module("tokenizers.normalizers")
    own = tokenizer.normalizer
    steps = [] if own is None else list(own) if isinstance(own, normalizers.Sequence) else [own]
    if not any(isinstance(step, normalizers.Lowercase) for step in steps):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])
